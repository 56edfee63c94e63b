"""Which files of a directory `open_checkpoint` opens, by their names, and when it refuses `key`."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxzero import cli, interop

from .torch_files import pack, tensor_pickle


def fill(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        save_file({f"x{number}": np.full(2, number, np.float32)}, folder / name)


@pytest.mark.parametrize(
    ("names", "opened"),
    [
        (["diffusion_pytorch_model.safetensors"], 1),
        (["model-00001-of-00001.safetensors"], 1),
        (["w-00001-of-00002.safetensors", "w-00002-of-00002.safetensors"], 2),
        (["model.safetensors", "adapter_model.safetensors", "consolidated.safetensors"], 1),
    ],
)
def test_other_names_are_opened_where_there_is_no_choice(tmp_path: Path, names, opened: int):
    fill(tmp_path, *names)
    checkpoint = interop.open_checkpoint(tmp_path)
    assert list(checkpoint) == [f"x{number}" for number in range(opened)]
    assert all(checkpoint[f"x{n}"].read().tolist() == [n, n] for n in range(opened))


def test_an_index_of_another_name_is_used(tmp_path: Path):
    fill(tmp_path, "a.safetensors", "b.safetensors", "fp16.safetensors")
    index = {"weight_map": {"x0": "a.safetensors", "x1": "b.safetensors"}}
    (tmp_path / "diffusion.safetensors.index.json").write_text(json.dumps(index))
    assert list(interop.open_checkpoint(tmp_path)) == ["x0", "x1"]
    (tmp_path / "other.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="nor one index, and several files: 'a.safetensors', 'b"):
        interop.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.safetensors", "b.safetensors"], r"several files: 'a\.safe.*\. Name the file to open"),
        (["w-00001-of-00002.safetensors"], r"in 2 parts; missing, .* 'w-00002-of-00002\.safe"),
        (
            ["w-00001-of-00001.safetensors", "v-00001-of-00001.safetensors"],
            r"several files: 'v-00001-of-00001\.safetensors', 'w-00001-of-00001",
        ),
        (
            ["w-00001-of-00001.safetensors", "w-00002-of-00001.safetensors"],
            r"not one of them: 'w-00002-of-00001\.safetensors'",
        ),
    ],
)
def test_several_files_that_nothing_joins_are_refused(tmp_path: Path, names, message: str):
    fill(tmp_path, *names)
    with pytest.raises(ValueError, match=message):
        interop.open_checkpoint(tmp_path)


def test_an_index_that_lies(tmp_path: Path):
    index = tmp_path / "pytorch_model.bin.index.json"
    for content, message in [
        ('{"weight_map": {"w": "../m.bin"}}', "which is not a file beside it"),
        (
            '{"weight_map": {"w": "a.bin"}}',
            "lacks 'a.bin', which pytorch_model.bin.index.json names",
        ),
        ('{"weight_map": 3}', "is not an index"),
        ('{"weight_map": {}}', "has an empty `weight_map`"),
        ("{", "is not an index"),
    ]:
        index.write_text(content)
        with pytest.raises(ValueError, match=message):
            interop.open_checkpoint(tmp_path)
    pack(tmp_path / "a.bin", tensor_pickle(), {"0": bytes(16)})
    index.write_text(json.dumps({"weight_map": {"w": "a.bin"}}))
    assert list(interop.open_checkpoint(tmp_path)) == ["w"]
    index.write_text(json.dumps({"weight_map": {"w": "a.bin", "v": "a.bin"}}))
    with pytest.raises(ValueError, match="says that tensor 'v' is in a.bin, which does not hold"):
        interop.open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"v": "b.bin", "w": "a.bin"}}))
    pack(tmp_path / "b.bin", tensor_pickle().replace(b"w", b"v", 1), {"0": bytes(16)})
    assert sorted(interop.open_checkpoint(tmp_path)) == ["v", "w"]
    index.write_text(json.dumps({"weight_map": {"v": "b.bin"}}))
    pack(tmp_path / "b.bin", two_tensors(), {"0": bytes(16)})
    with pytest.raises(ValueError, match=r"b\.bin' holds tensor 'w', which pytorch_model"):
        interop.open_checkpoint(tmp_path)


def two_tensors() -> bytes:
    first, second = tensor_pickle()[2:-1], tensor_pickle().replace(b"w", b"v", 1)[3:-1]
    return b"\x80\x02" + first + second + b"."


def test_an_adapter_beside_the_model_is_not_the_model(tmp_path: Path):
    pack(tmp_path / "pytorch_model.bin", tensor_pickle(), {"0": bytes(16)})
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "adapter_model.safetensors")
    assert list(interop.open_checkpoint(tmp_path)) == ["w"]
    save_file({"b": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert list(interop.open_checkpoint(tmp_path)) == ["b"]


def test_state_dicts_that_are_unclear(tmp_path: Path):
    def nested(*keys: str) -> bytes:
        inner = tensor_pickle()[2:-1]
        items = b"".join(
            pickle.dumps(key, 2)[2:-1].replace(b"q\x00", b"") + inner + b"s" for key in keys
        )
        return b"\x80\x02}" + items + b"."

    storages = {"0": np.ones(4, np.float32).tobytes()}
    path = pack(tmp_path / "m.pt", nested("ema", "model"), storages)
    with pytest.raises(ValueError, match=r"several dicts of tensors: 'ema', 'model'.*`key=`"):
        interop.open_checkpoint(path)
    assert list(interop.open_checkpoint(path, key="ema")) == ["w"]
    with pytest.raises(ValueError, match=r"`key` must be one of 'ema', 'model'.*got 'x'"):
        interop.open_checkpoint(path, key="x")
    with pytest.raises(ValueError, match=r"m\.pt' \(torch\.save\) holds no optimizer state"):
        interop.open_checkpoint(path, key="ema").adam()


def test_a_key_is_refused_where_there_is_one_state_dict(tmp_path: Path, capsys):
    fill(tmp_path, "model.safetensors")
    deepspeed = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"
    for path in (tmp_path, tmp_path / "model.safetensors", deepspeed / "zero2"):
        with pytest.raises(ValueError, match=r"`key` is 'model', but .* Leave `key` out"):
            interop.open_checkpoint(path, key="model")
    assert cli.main(["inspect", str(tmp_path), "--key", "model"]) == 2
    assert "Leave `key` out" in " ".join(capsys.readouterr().err.split())
