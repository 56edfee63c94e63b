"""Files that are no checkpoint, or a part of one, or one of two that contradict each other."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxzero import cli, interop, models

from . import tiny_checkpoint

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 49766\n"


def written_by(write) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def tar(buffer: io.BytesIO) -> None:
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model/data.pkl"))


def h5(buffer: io.BytesIO) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(buffer, "w") as file:
        file["x"] = np.ones(2)


def msgpack() -> bytes:
    from flax import serialization

    return serialization.msgpack_serialize({"params": {"x": np.ones(2)}})


KINDS = {
    "GGUF": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 2, 1) + bytes(99), "gguf_file=name"),
    "git-lfs": (lambda: LFS, "`git lfs pull`"),
    "HTML": (lambda: b"\n<!DOCTYPE html><html>Sign in</html>", "`hf download`"),
    "HDF5": (lambda: written_by(h5), "`h5py`"),
    "ONNX": (lambda: b"\x08\x08\x12\x07pytorch\x1a\x05" + bytes(99), "`onnx.load"),
    "msgpack": (msgpack, "`flax.serialization.msgpack_restore"),
    "npz": (lambda: written_by(lambda f: np.savez(f, x=np.ones(2))), "`np.load`"),
    ".npy": (lambda: written_by(lambda f: np.save(f, np.ones(2))), "`np.load`"),
    "gzip": (lambda: gzip.compress(bytes(99)), "Unpack it"),
    "tar": (lambda: written_by(tar), "Unpack it"),
    "bare pickle": (lambda: pickle.dumps({"x": np.ones(2)}), "can run any code"),
    "JSON": (lambda: b'{"model_type": "llama", "hidden_size": 4096}', "file of weights"),
    "empty": (lambda: b"", "Copy or download it again"),
    "nothing but zeros": (lambda: bytes(600), "Copy or download it again"),
}


# As safetensors, they begin with a small length of the header, or are archives: other errors.
_AS_LENGTHS = ("npz", "ONNX", "nothing but zeros")


@pytest.mark.parametrize(
    ("kind", "ending"),
    [(kind, ".pt") for kind in KINDS]
    + [(kind, ".safetensors") for kind in KINDS if kind not in _AS_LENGTHS],
)
def test_what_a_file_is_and_what_to_do(kind: str, ending: str, tmp_path: Path):
    make, step = KINDS[kind]
    path = tmp_path / f"m{ending}"
    path.write_bytes(make())
    with pytest.raises(ValueError, match=rf"m\{ending}' .*{kind}") as caught:
        interop.open_checkpoint(path)
    assert step in str(caught.value)


@pytest.mark.parametrize("second", [0x12, 0x3A, 0x42], ids=["producer", "graph", "operators"])
def test_fields_of_onnx_may_have_any_order(second: int, tmp_path: Path):
    """Behind the version, a protobuf may have the producer, the graph or the operators."""
    path = tmp_path / "m.pt"
    path.write_bytes(bytes([0x08, 9, second]) + bytes(99))
    with pytest.raises(ValueError, match=r"m\.pt' .*ONNX"):
        interop.open_checkpoint(path)


def test_a_directory_says_what_is_in_it(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(KINDS["GGUF"][0]())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no checkpoint that .* 'model\.gguf' in it is a GGUF"):
        interop.open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(LFS)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin' is a pointer of git-lfs"):
        interop.open_checkpoint(tmp_path)


def test_an_adapter_is_not_a_model(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for file in ("adapter_model.bin", "adapter_model.safetensors"):
        save_file({"a": np.ones(2, np.float32)}, tmp_path / file)
        with pytest.raises(ValueError, match=rf"adapter of PEFT.*merge_and_unload.*{file}"):
            interop.open_checkpoint(tmp_path)
        with pytest.raises(ValueError, match=r"no `config\.json`.*adapter of PEFT.*merge"):
            interop.load_decoder(tmp_path)
    assert list(interop.open_checkpoint(tmp_path / "adapter_model.safetensors")) == ["a"]


def test_the_id_of_a_model_on_a_hub():
    advice = r"`hf download meta-llama/Llama-3 --local-dir Llama-3`"
    with pytest.raises(ValueError, match=advice):
        interop.open_checkpoint("meta-llama/Llama-3")
    with pytest.raises(ValueError, match=advice):
        models.read_config("meta-llama/Llama-3")
    with pytest.raises(ValueError, match=r"directory\.$"):
        interop.open_checkpoint("nowhere")


class Names:
    """A model in one file of 7s and in parts of 1s, in one of the two forms."""

    def __init__(self, folder: Path, form: str):
        self.form, self.folder = form, folder
        whole = {"safetensors": "model.safetensors", "torch": "pytorch_model.bin"}[form]
        stem, ending = whole.split(".")
        self.whole, self.index = folder / whole, folder / f"{whole}.index.json"
        self.parts = [folder / f"{stem}-0000{n}-of-00002.{ending}" for n in (1, 2)]

    def write(self, path: Path, names: str, value: float) -> None:
        arrays = {name: np.full(4, value, np.float32) for name in names}
        if self.form == "safetensors":
            save_file(arrays, path)
        else:
            torch = pytest.importorskip("torch")
            torch.save({k: torch.from_numpy(x) for k, x in arrays.items()}, path)

    def write_both(self) -> None:
        self.write(self.whole, "ab", 7.0)
        for part, name in zip(self.parts, "ab", strict=True):
            self.write(part, name, 1.0)
        weights = {name: part.name for part, name in zip(self.parts, "ab", strict=True)}
        self.index.write_text(json.dumps({"weight_map": weights}))


def first(path: Path) -> float:
    return float(interop.open_checkpoint(path)["a"].read()[0])


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_an_index_that_was_left_behind(form: str, tmp_path: Path):
    names = Names(tmp_path, form)
    names.write_both()
    message = (
        rf"holds '{names.whole.name}', and '{names.index.name}', which names other files: "
        rf"'{names.parts[0].name}', .*transformers reads '{names.whole.name}'.*Give the path"
    )
    with pytest.raises(ValueError, match=message):
        interop.open_checkpoint(tmp_path)
    assert (first(names.whole), first(names.index)) == (7.0, 1.0)
    names.parts[0].unlink()
    with pytest.raises(ValueError, match=r"of which 1 are missing"):
        interop.open_checkpoint(tmp_path)
    names.index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", names.whole.name)}))
    assert first(tmp_path) == 7.0, "the index of the file itself"


def test_of_both_forms_safetensors_are_read_as_transformers_does(tmp_path: Path):
    Names(tmp_path, "torch").write_both()
    names = Names(tmp_path, "safetensors")
    names.write(names.whole, "ab", 3.0)
    assert first(tmp_path) == 3.0


@pytest.mark.ci  # for the import of transformers
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_transformers_reads_the_file_that_the_message_names(form: str, tmp_path: Path):
    pytest.importorskip("torch")
    utils = pytest.importorskip("transformers.modeling_utils")
    names = Names(tmp_path, form)
    names.write_both()
    files, _ = utils._get_resolved_checkpoint_files(
        tmp_path,
        variant=None,
        gguf_file=None,
        use_safetensors=None,
        user_agent=None,
        is_remote_code=False,
    )
    assert files == [str(names.whole)]


def test_an_encoder_is_loaded_from_the_file_that_is_named(tmp_path: Path):
    folder = tiny_checkpoint.write(tmp_path / "model")
    index = {"weight_map": {"x": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which names other files: 'gone"):
        interop.load_encoder(folder)
    loaded = interop.load_encoder(folder / "model.safetensors")
    params = jax.tree.map(lambda t: t.read(), loaded.params)
    interop.export_encoder(params, tmp_path / "out", source=folder / "model.safetensors")
    assert (tmp_path / "out" / "config.json").is_file()


def test_tied_weights_of_save_model(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_model

    model = torch.nn.ModuleDict(
        {"wte": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4, False)}
    )
    model["head"].weight = model["wte"].weight
    save_model(model, str(tmp_path / "m.safetensors"))
    checkpoint = interop.open_checkpoint(tmp_path / "m.safetensors")
    (other, kept), *_ = checkpoint.aliases.items()
    assert {other, kept} == {"wte.weight", "head.weight"}
    np.testing.assert_array_equal(checkpoint[other].read(), checkpoint[kept].read())
    shape = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in checkpoint.items()}
    tree = {"wte": {"embedding": shape["wte.weight"]}}
    rules = [interop.Rule("wte.embedding", name) for name in (other, kept)]
    for options in ({}, {"rules": rules[:1]}, {"rules": rules[1:]}):
        loaded = interop.load_into(tree, checkpoint, **options)
        np.testing.assert_array_equal(loaded["wte"]["embedding"].read(), checkpoint[kept].read())


class Config:
    pass


def test_records_are_patterns_also_on_the_command_line(tmp_path: Path, capsys):
    torch = pytest.importorskip("torch")
    path = tmp_path / "run.pt"
    torch.save({"model": {"a": torch.ones(2)}, "config": Config()}, path)
    with pytest.raises(ValueError, match=r"records=\['.*\.Config'\].*map_location='cpu'"):
        interop.open_checkpoint(path)
    pattern = f"{Config.__module__}.*"
    assert list(interop.open_checkpoint(path, records=[pattern])) == ["a"]
    assert cli.main(["inspect", str(path)]) == 2  # a mistake in the arguments
    assert "--records" in capsys.readouterr().err
    assert cli.main(["inspect", str(path), "--records", pattern]) == 0
    target = tmp_path / "out"
    assert cli.main(["convert", str(path), str(target), "--records", "no.such", pattern]) == 0
    assert list(interop.open_checkpoint(target)) == ["a"]


def test_extra_state_is_no_tensor(tmp_path: Path):
    torch = pytest.importorskip("torch")
    held = {"up.weight": torch.ones(3, 2), "up._extra_state": io.BytesIO(b"x")}
    torch.save(held, tmp_path / "m.pt")
    assert list(interop.open_checkpoint(tmp_path / "m.pt")) == ["up.weight"]
    held["up._extra_state"] = torch.zeros(5, dtype=torch.uint8)  # of newer versions
    torch.save(held, tmp_path / "m.pt")
    tree = {"up": {"kernel": jax.ShapeDtypeStruct((2, 3), np.float32)}}
    assert interop.load_into(tree, tmp_path / "m.pt")["up"]["kernel"].shape == (2, 3)
    torch.save({"up.weight": torch.ones(3, 2), "step": 3}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="'step' .* is not a tensor but a int"):
        interop.open_checkpoint(tmp_path / "m.pt")
