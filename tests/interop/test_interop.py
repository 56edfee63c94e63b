"""Checkpoints in and out: bit for bit, slice by slice, whole or not at all, and good errors."""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxzero as jz
from jaxzero import interop
from jaxzero.interop import FileTensor

from . import tiny_checkpoint

EMBEDDING = "embeddings.word_embeddings.weight"
UP = "encoder.layer.1.intermediate.dense.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("tiny"))


def read_all(params):
    return jax.tree.map(lambda tensor: tensor.read(), params)


def test_loaded_parameters_are_those_of_the_file(checkpoint: Path):
    params = interop.load_encoder(checkpoint).params
    loaded, held = nnx.to_pure_dict(params), tiny_checkpoint.tensors()
    np.testing.assert_array_equal(loaded["embeddings"]["word"]["embedding"].read(), held[EMBEDDING])
    np.testing.assert_array_equal(loaded["layers"][1]["up"]["kernel"].read(), held[UP].T)
    num_unused = 3  # the pooler's two, and position ids
    assert len(jax.tree.leaves(params)) == len(held) - num_unused


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("trained", [None, np.float32])
def test_round_trip_is_bit_exact(tmp_path: Path, dtype, trained):
    source = tiny_checkpoint.write(tmp_path / "source", tiny_checkpoint.tensors(dtype))
    params = read_all(interop.load_encoder(source, dtype=trained).params)
    back = None if trained is None else "source"
    export = interop.export_encoder(params, tmp_path / "export", source=source, dtype=back)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, export))
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.dtype == after[name].dtype and array.shape == after[name].shape
        assert array.tobytes() == after[name].tobytes(), name
    assert json.loads((export / "config.json").read_text())["torch_dtype"] == np.dtype(dtype).name
    for name in ("tokenizer.json", "tokenizer_config.json", "1_Pooling/config.json"):
        assert (export / name).read_bytes() == (source / name).read_bytes()


def test_export_in_another_dtype(checkpoint: Path, tmp_path: Path):
    params = read_all(interop.load_encoder(checkpoint).params)
    held = load_file(checkpoint / "model.safetensors")
    for dtype in (ml_dtypes.bfloat16, "float16"):
        export = interop.export_encoder(params, tmp_path / "export", source=checkpoint, dtype=dtype)
        written = load_file(export / "model.safetensors")
        assert json.loads((export / "config.json").read_text())["torch_dtype"] == np.dtype(dtype)
        assert written[UP].tobytes() == held[UP].astype(dtype).tobytes()
        assert written["embeddings.position_ids"].dtype == np.int64
    for wrong in ("sourc", "int32"):
        with pytest.raises(ValueError, match="`dtype` must be that of floating-point numbers"):
            interop.export_encoder(params, tmp_path / "x", source=checkpoint, dtype=wrong)


def test_export_loads_in_transformers(checkpoint: Path, tmp_path: Path):
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    params = read_all(interop.load_encoder(checkpoint).params)
    export = interop.export_encoder(params, tmp_path / "export", source=checkpoint)
    ids, mask = np.arange(12).reshape(2, 6), np.ones((2, 6), bool)
    np.testing.assert_array_equal(
        interop.embed_with_transformers(export, ids, mask),
        interop.embed_with_transformers(checkpoint, ids, mask),
    )


def test_export_replaces_an_older_one(checkpoint: Path, tmp_path: Path):
    params = read_all(interop.load_encoder(checkpoint).params)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "old.safetensors").write_text("")
    interop.export_encoder(params, tmp_path / "export", source=checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert not (tmp_path / "export" / "old.safetensors").exists()


@pytest.mark.parametrize("had_one", [False, True])
def test_failed_export_leaves_nothing_behind(checkpoint: Path, tmp_path: Path, had_one: bool):
    params = read_all(interop.load_encoder(checkpoint).params)
    if had_one:
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "vocab.txt").write_text("")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (checkpoint / "model.safetensors").stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
        with pytest.raises(OSError, match=f"File too large: '{tmp_path / 'export'}'"):
            interop.export_encoder(params, tmp_path / "export", source=checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert left == (["export", "export/vocab.txt"] if had_one else [])


@hypothesis.given(data=st.data(), transposed=st.booleans())
def test_slices_equal_those_of_numpy(checkpoint: Path, data, transposed: bool):
    tensor = interop.tensors_in(checkpoint)[UP]
    array = load_file(checkpoint / "model.safetensors")[UP]
    if transposed:
        tensor, array = tensor.transpose(), array.T
    slices = tuple(
        data.draw(st.slices(n).filter(lambda s: s.step in (None, 1))) for n in array.shape
    )
    np.testing.assert_array_equal(tensor[slices], array[slices])


def test_tensor_is_described_and_cast_without_reading(checkpoint: Path, monkeypatch):
    tensor = interop.tensors_in(checkpoint)[UP]
    monkeypatch.setattr(FileTensor, "_read_box", lambda *_: pytest.fail("read"))
    seen = tensor.transpose().astype(np.float16)
    assert (seen.shape, seen.dtype, seen.ndim, seen.size) == ((16, 40), np.float16, 2, 640)
    monkeypatch.undo()
    assert seen.read().dtype == np.float16


def test_scalars_and_empty_tensors(tmp_path: Path):
    save_file(
        {"s": np.array(3.0), "e": np.zeros((0, 3), np.float32)}, tmp_path / "model.safetensors"
    )
    held = interop.tensors_in(tmp_path)
    assert held["s"][()] == 3.0
    assert held["e"].read().shape == (0, 3)


@pytest.mark.parametrize("slices", [(slice(2),), (slice(0, 4, 2), slice(2)), ()])
def test_slices_that_are_refused(checkpoint: Path, slices):
    tensor = interop.tensors_in(checkpoint)[UP]
    with pytest.raises(
        ValueError, match=rf"`slices` of tensor '{UP}' in .* must be 2 slices with step 1"
    ):
        tensor[slices]


def test_files_are_read_once_and_devices_get_their_slices(
    checkpoint: Path, tmp_path: Path, monkeypatch
):
    sizes: dict[str, list[int]] = {}
    moved: list[int] = []
    read_box, make_array = FileTensor._read_box, jax.make_array_from_callback

    def counted(self, box):
        array = read_box(self, box)
        sizes.setdefault(self.name, []).append(array.size)
        return array

    def watched(shape, sharding, get):
        def slice_of(index):
            array = get(index)
            moved.append(array.size)
            return array

        return make_array(shape, sharding, slice_of)

    monkeypatch.setattr(FileTensor, "_read_box", counted)
    monkeypatch.setattr(jax, "make_array_from_callback", watched)
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = zero.shard(interop.load_encoder(checkpoint).params)
    for name, shape in tiny_checkpoint.shapes().items():
        if not name.startswith("pooler"):
            assert sum(sizes[name]) == np.prod(shape), f"{name}: parts read twice or not at all"
    shards = [array.addressable_shards for array in jax.tree.leaves(params)]
    assert sorted(moved) == sorted(shard.data.size for each in shards for shard in each)
    assert sum(moved) == sum(array.size for array in jax.tree.leaves(params))
    whole = zero.unshard(params)
    for given, held in zip(
        jax.tree.leaves(whole),
        jax.tree.leaves(interop.load_encoder(checkpoint).params),
        strict=True,
    ):
        np.testing.assert_array_equal(given, held.read())
    export = interop.export_encoder(params, tmp_path / "export", source=checkpoint)
    before, after = interop.tensors_in(checkpoint), interop.tensors_in(export)
    for name, held in before.items():
        np.testing.assert_array_equal(after[name].read(), held.read(), strict=True)


def test_a_checkpoint_in_several_files(checkpoint: Path, tmp_path: Path):
    held = tiny_checkpoint.tensors()
    parts = {
        name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(held)
    }
    for file in sorted(set(parts.values())):
        save_file({name: held[name] for name in held if parts[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert interop.tensors_in(tmp_path).keys() == held.keys()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks 'model-00002-of-00002\.safetensors'\. Give a dir"):
        interop.tensors_in(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({UP: None}, rf"lacks '{UP}'\. It must hold the tensors of a plain encoder.*AutoModel"),
        ({"cls.bias": np.zeros(1)}, r"holds unknown 'cls\.bias'\. .*drops heads and prefixes"),
        ({UP: None, "bert." + UP: np.zeros(1)}, rf"lacks '{UP}' and holds unknown 'bert\.{UP}'"),
        ({UP: np.zeros((41, 16))}, rf"'{UP}' in .* has shape \(41, 16\), .* asks for \(40, 16\)"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: dict, message: str):
    held = tiny_checkpoint.tensors() | change
    held = {name: array for name, array in held.items() if array is not None}
    tiny_checkpoint.write(tmp_path, held)
    with pytest.raises(ValueError, match=message):
        interop.load_encoder(tmp_path)


def test_wrong_model_type(tmp_path: Path):
    tiny_checkpoint.write(tmp_path, model_type="gpt2")
    with pytest.raises(
        ValueError, match=r"`model_type` in .* is 'gpt2'; encoders are read of the families bert, "
    ):
        interop.load_encoder(tmp_path)


def test_cut_off_and_missing_files(tmp_path: Path):
    with pytest.raises(ValueError, match=r"lacks 'model\.safetensors'.*`pytorch_model\.bin`"):
        interop.tensors_in(tmp_path)
    tiny_checkpoint.write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"is not a whole safetensors file: .*Copy or download"):
        interop.tensors_in(tmp_path)


def test_export_refuses_another_tree(checkpoint: Path, tmp_path: Path):
    params = read_all(interop.load_encoder(checkpoint).params)
    with pytest.raises(ValueError, match=r"`embeddings\..*` is in only one of the"):
        interop.export_encoder({"layers": params["layers"]}, tmp_path / "e", source=checkpoint)
    padded = jax.tree.map(lambda x: np.pad(x, [(0, 1)] * x.ndim), params)
    with pytest.raises(ValueError, match=r"have shape .* at `embeddings\..*the model has"):
        interop.export_encoder(padded, tmp_path / "e", source=checkpoint)
    with pytest.raises(ValueError, match="`directory` and `source` are both"):
        interop.export_encoder(params, checkpoint, source=checkpoint)
    assert not list(tmp_path.iterdir())


def test_refuses_to_be_a_top_level_package():
    spec = importlib.util.spec_from_file_location("interop", interop.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match="imported as 'interop'.*from jaxzero import interop"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_torch_is_not_imported():
    code = "import sys, jaxzero.interop, jaxzero.models; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
