"""Headers of safetensors files that lie: refused by name, and nothing large allocated for them."""

from __future__ import annotations

import functools
import json
import random
import tracemalloc
import zipfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load, save

from jaxzero import interop
from jaxzero.interop import ArrayTensor

from .fuzzing import damaged, fuzz

BYTES = bytes(range(64))
FUZZ = hypothesis.settings(
    max_examples=150, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


def entry(dtype="F32", shape=(4, 4), offsets=(0, 64), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def write(folder: Path, header: dict | bytes, data: bytes = BYTES, length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    length = len(text) if length is None else length
    file.write_bytes(length.to_bytes(8, "little") + text + data)
    return file


TWO = {"a": entry(shape=(2, 4), offsets=(0, 32)), "b": entry(shape=(2, 4), offsets=(32, 64))}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(shape=(-4, -4))}, r"tensor 'a' is .*non-negative integers"),
        ({"a": entry(offsets=(-64, 0))}, r"tensor 'a' is .*non-negative integers"),
        ({"a": entry(shape=(4.0, 4))}, r"tensor 'a' is .*integers"),
        ({"a": entry(shape=(True, 16))}, r"tensor 'a' is .*integers"),
        ({"a": entry(offsets=(0, 32, 64))}, r"tensor 'a' is .*two data_offsets"),
        ({"a": 3}, r"the entry of tensor 'a' is 3, but must have a dtype"),
        (TWO | {"b": entry(shape=(4, 4), offsets=(0, 64))}, r"tensor '[ab]' begins at byte"),
        (TWO | {"b": entry(shape=(1, 4), offsets=(48, 64))}, r"tensor 'b' begins at byte"),
        ({"a": entry(shape=(2, 4), offsets=(0, 32))}, r"has \d+ bytes, and its tensors end at"),
        ({"a": entry(shape=(2, 16), offsets=(0, 128))}, r"bytes, and its tensors end at"),
        (
            {"a": entry(shape=(2**40, 2**40))},
            r"'a' of F32 has shape .* match its 64 bytes",
        ),
        (
            {"a": entry(shape=(0, 2**62), offsets=(0, 0))},
            r"'a' of F32 has shape .* match its 0 bytes",
        ),
        (
            {"a": entry(shape=(1,) * 70 + (16,))},
            r"'a' of F32 has shape .* match its 64 bytes",
        ),
        ({"a": entry(offsets=(64, 0))}, r"'a' of F32 has shape .* match its -64 bytes"),
        (
            {"a": entry(dtype="F64")},
            r"'a' of F64 has shape \[4, 4\], .*match its 64 bytes",
        ),
        ({"a": entry(dtype="F4")}, r"Tensor 'a' in .* has dtype 'F4', which is not one of BOOL"),
        ({"a": {"shape": [4, 4], "data_offsets": [0, 64]}}, r"Tensor 'a' in .* has dtype None"),
        (b'{"a":1,"a":1}', r"header is not proper JSON: 'a' is there twice"),
        (b'{"\\ud800":1}', r"header is not proper JSON: 'utf-8' codec"),
        (b'{"a":NaN}', r"header is not proper JSON: .*JSON compliant"),
        (b'{"a":' * 100_000, r"header is not proper JSON: maximum recursion depth"),
        (b"[1]", "header is no table of tensors"),
        ({"__metadata__": {"a": 1}, "a": entry()}, "table of tensors with text for metadata"),
        (b"", "header is not proper JSON"),
    ],
)
def test_lies_are_named(tmp_path: Path, header, message: str):
    file = write(tmp_path, header)
    with pytest.raises(ValueError, match=message) as caught:
        interop.tensors_in(tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "info", "message"),
    [
        (
            "m",
            '{"a": {"saved_offsets": [0, 0]}}',
            None,
        ),  # `HuggingFaceStorageWriter` of one process
        ("m", '{"a": {"saved_offsets": [4, 0]}}', "holds the shards of one process"),
        ("shard-00001-m", '{"a": {"saved_offsets": [0, 0]}}', "holds the shards of one process"),
        ("m", '{"a": [4]}', "no table of offsets"),
        ("m", "[" * 100_000, "no table of offsets"),
    ],
)
def test_shards_of_one_process(tmp_path: Path, name: str, info: str, message: str | None):
    file = tmp_path / f"{name}.safetensors"
    file.write_bytes(save({"a": np.ones((4, 4))}, {"DCP_SHARDING_INFO": info}))
    if message is None:
        assert interop.open_checkpoint(file)["a"].shape == (4, 4)
        return
    for path in (file, tmp_path):
        with pytest.raises(ValueError, match=message):
            interop.open_checkpoint(path)


def test_a_file_of_torch_save_is_named_as_such(tmp_path: Path):
    file = tmp_path / "model.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", b"0" * 64)
    with pytest.raises(ValueError, match=r"model\.pt.*torch\.save.*interop\.open_checkpoint"):
        interop.tensors_in(file)


@pytest.mark.parametrize("length", [2**62, 10**8, 10**9, 200])
def test_a_header_that_is_longer_than_its_file(tmp_path: Path, length: int):
    write(tmp_path, {"a": entry()}, length=length)
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"its 1\d\d bytes do not hold the {length} of its hea"):
        interop.tensors_in(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_a_header_that_is_too_long_to_be_one(tmp_path: Path, monkeypatch):
    write(tmp_path, {"a": entry()})
    monkeypatch.setattr("jaxzero.interop._safetensors.header._MAX_HEADER_BYTES", 10)
    with pytest.raises(ValueError, match="bytes do not hold"):
        interop.tensors_in(tmp_path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(-(2**70), 2**70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
SIZES = st.sampled_from([0, 1, 2, 4, 8, 16, 32, 64, 2**31, 2**62, 2**63, -1])
FIELDS = {
    "dtype": st.sampled_from(["F32", "BF16", "I8", "U64", "F4", "X"]),
    "shape": st.lists(SIZES, max_size=3),
    "data_offsets": st.lists(SIZES, min_size=2, max_size=2),
}


@FUZZ
@hypothesis.given(data=st.data())
def test_any_header_is_refused_or_is_what_the_library_reads(tmp_path: Path, data):
    header = {name: dict(fields) for name, fields in TWO.items()}
    for _ in range(data.draw(st.integers(1, 3))):
        name, field = data.draw(st.tuples(st.sampled_from("abc"), st.sampled_from(sorted(FIELDS))))
        header.setdefault(name, {})[field] = data.draw(FIELDS[field] | JUNK)
    check_against_library(write(tmp_path, header))


@FUZZ
@hypothesis.given(data=st.data())
def test_a_damaged_file_is_refused_or_is_what_the_library_reads(tmp_path: Path, data):
    whole = bytearray(
        save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "bb": np.zeros((0, 2), np.int8)})
    )
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(whole) - 1))
        whole[position] = data.draw(
            st.sampled_from(b'0129{}[]",:-eE\x00\xff') | st.integers(0, 255)
        )
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(whole[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))]))
    check_against_library(file)


def check_against_library(file: Path) -> None:
    """Either both read the same, or ours refuses by name. It reads nothing that theirs refuses."""
    tracemalloc.start()
    try:
        ours = {name: held.read() for name, held in interop.tensors_in(file).items()}
    except ValueError as error:
        assert str(file) in str(error)
        ours = None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6
    if ours is None:
        return
    try:
        check_is_read_by_library(file, ours)
    except SafetensorError as error:
        raise AssertionError(f"the library refuses it: {error}") from error


def check_is_read_by_library(file: Path, ours: dict[str, np.ndarray]) -> None:
    theirs = load(file.read_bytes())
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (array.shape, array.dtype)
        assert ours[name].tobytes() == array.tobytes()


def fuzz_headers(file: Path, count: int, seed: int) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bb": np.zeros((0, 2), np.int8),
        "c.d": np.array(3, np.float64),
        "e": np.array([True, False]),
    }
    genuine = [save(arrays), save(arrays, {"format": "pt"})]

    def damage(rng: random.Random) -> None:
        whole = rng.choice(genuine)
        header = range(8 + int.from_bytes(whole[:8], "little"))
        file.write_bytes(damaged(whole, rng, header))

    accepted = fuzz(
        file,
        count,
        seed,
        damage=damage,
        read=interop.tensors_in,
        check=functools.partial(check_is_read_by_library, file),
    )
    assert accepted > count // 200


def test_damaged_headers(tmp_path: Path):
    fuzz_headers(tmp_path / "model.safetensors", 300, seed=0)


@pytest.mark.ci
def test_many_damaged_headers(tmp_path: Path):
    fuzz_headers(tmp_path / "model.safetensors", 20_000, seed=1)


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"[]",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 3}}',
        b'{"weight_map": {"a": "../model.safetensors"}}',
    ],
)
def test_an_index_that_is_none(tmp_path: Path, index: bytes):
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ValueError, match="index.json' is not an index of safetensors files"):
        interop.tensors_in(tmp_path)


def test_an_index_that_lies(tmp_path: Path):
    write(tmp_path, {"a": entry()})
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="says that tensor 'b' is in model.safetensors, which do"):
        interop.tensors_in(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path):
    write(tmp_path, {"a": entry()}).rename(tmp_path / "old.safetensors")
    write(tmp_path, {"a": entry()})
    index = {"weight_map": {"a": "model.safetensors", "b": "old.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="'a' is in model.safetensors and in old.safetensors"):
        interop.tensors_in(tmp_path)


def test_a_file_that_is_cut_off_after_it_was_opened(tmp_path: Path):
    array = np.arange(16, dtype=np.float32).reshape(4, 4)
    interop.save_tensors({"a": ArrayTensor(array, "a")}, tmp_path / "c")
    tensor = interop.tensors_in(tmp_path / "c")["a"]
    file = tmp_path / "c" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    for box in ((slice(0, 4), slice(0, 4)), (slice(0, 4), slice(2, 4))):
        with pytest.raises(ValueError, match="ends inside tensor 'a': it was cut off after it"):
            tensor[box]


def test_a_name_that_is_not_utf_8(tmp_path: Path):
    held = {"a\ud800": ArrayTensor(np.ones(1, np.float32), "a")}
    with pytest.raises(
        ValueError, match=r"called 'a\\ud800' in safetensors, whose names are UTF-8"
    ):
        interop.save_tensors(held, tmp_path / "c")
