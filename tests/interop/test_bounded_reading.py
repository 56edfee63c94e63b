"""Small files that describe endless work: refused at once, and Ctrl-C works."""

from __future__ import annotations

import itertools
import json
import pickle
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxzero import cli, interop
from jaxzero.interop import ArrayTensor

from .fuzzing import bounds, check_refusal
from .torch_files import pack, tensor_pickle

# A tuple that holds the one before it twice, 100 times over: a tree of 2^100 nodes.
NESTED = b"K\x01\x85" + b"".join(
    b"q" + bytes([level]) + b"h" + bytes([level]) + b"\x86" for level in range(100)
)
ORDERED = b"ccollections\nOrderedDict\n"
HOSTILE = {
    "key": b"}" + NESTED + b"K\x01s",
    "key in a list of items": b"}(" + NESTED + b"K\x01u",
    "set": b"cbuiltins\nset\n]" + NESTED + b"a\x85R",
    "frozenset": b"cbuiltins\nfrozenset\n]" + NESTED + b"a\x85R",
    "OrderedDict": ORDERED + b"]]" + NESTED + b"aK\x01aa\x85R",
    "persistent id": NESTED + b"Q",
    "storage key": b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + NESTED + b"NK\x01tQ",
    "storage dtype": b"(X\x07\x00\x00\x00storage" + NESTED + b"X\x01\x00\x00\x000NK\x01tQ",
    "arguments": ORDERED + NESTED + b"R",
    "function": NESTED + b")R",
    "shape": b"ctorch\nSize\n" + NESTED + b"\x85R",
    "state": ORDERED + b")R" + NESTED + b"b",
    "value": b"}X\x01\x00\x00\x00a" + NESTED + b"s",
    "items": NESTED + b"K\x01a",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nested_tuples(tmp_path: Path, case: str):
    data = b"\x80\x02" + HOSTILE[case] + b"."
    assert len(data) < 1000
    files = [pack(tmp_path / "m.bin", data, {"0": bytes(16)}), tmp_path / "dcp"]
    files[1].mkdir()
    (files[1] / ".metadata").write_bytes(data)
    for path in files:
        with bounds(), pytest.raises(ValueError, match="nested tuples") as caught:
            interop.open_checkpoint(path)
        check_refusal(caught.value, path)


def test_one_object_copied_again_and_again(tmp_path: Path):
    """2 MB as bytes, 100,000 times, would be 200 GB."""
    text = b"X" + (2 * 10**6).to_bytes(4, "little") + b"a" * (2 * 10**6)
    encode = b"c_codecs\nencode\nq\x00" + text + b"X\x06\x00\x00\x00latin1\x86q\x01R0"
    data = b"\x80\x02]" + encode + b"(" + b"h\x00h\x01R" * 100_000 + b"e."
    with bounds(), pytest.raises(ValueError, match="more work than .* bytes describe"):
        interop.open_checkpoint(pack(tmp_path / "m.bin", data))


@pytest.mark.parametrize(
    ("key", "message"),
    [(((1, 2), 3), None), (2**64, "integer of 65 bits|18446744073709551616"), (1j, "1j")],
)
def test_keys(tmp_path: Path, key, message):
    data = pickle.dumps({key: 1}, 2)
    path = pack(tmp_path / "m.bin", data)
    with pytest.raises(ValueError, match=message or "holds no dict of tensors"):
        interop.open_checkpoint(path)


def test_dicts_that_share_dicts(tmp_path: Path):
    held: dict = {}
    for _ in range(40):
        held = {"a": held, "b": held}
    with bounds(), pytest.raises(ValueError, match=r"m\.bin' holds dicts nested deeper than 16"):
        interop.open_checkpoint(pack(tmp_path / "m.bin", pickle.dumps(held, 2)))
    held = {}
    for _ in range(15):
        held = {"a": held, "b": held}
    with bounds(), pytest.raises(ValueError, match=r"m\.bin' holds no dict of tensors"):
        interop.open_checkpoint(pack(tmp_path / "m.bin", pickle.dumps(held, 2)))


def test_a_dict_that_contains_itself(tmp_path: Path):
    held: dict = {}
    held["a"] = held
    with bounds(), pytest.raises(ValueError, match=r"m\.bin' holds no dict of tensors"):
        interop.open_checkpoint(pack(tmp_path / "m.bin", pickle.dumps(held, 2)))


def test_two_dicts_of_one_path(tmp_path: Path):
    tensor = tensor_pickle()[2:-1]
    a_dot_b = b"X\x03\x00\x00\x00a.b" + tensor + b"s"
    a_then_b = b"X\x01\x00\x00\x00a}X\x01\x00\x00\x00b" + tensor + b"ss"
    path = pack(tmp_path / "m.bin", b"\x80\x02}" + a_dot_b + a_then_b + b".", {"0": bytes(16)})
    with pytest.raises(ValueError, match=r"m\.bin' holds two dicts of tensors at 'a\.b'"):
        interop.open_checkpoint(path)


def test_many_names_one_of_them_twice(tmp_path: Path):
    entry = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    names = [f'"{number}":{entry}' for number in range(60_000)]
    text = ("{" + ",".join([*names, names[77]]) + "}").encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with bounds(), pytest.raises(ValueError, match="'77' is there twice"):
        interop.tensors_in(path)


@pytest.mark.parametrize(
    "names",
    [
        [f"{'1.' * 600}w{number}.weight" for number in range(4)],
        [f"t{number}" for number in range(60_000)],
        [f"a.{n}.b.{n}.c.{n}.d.{n}.e.{n}.weight" for n in range(60_000)],
        [
            "a{}.b{}.c{}.d{}.e{}.weight".format(*each)
            for each in itertools.product(range(10), range(10), range(6), range(10), range(10))
        ],
        ["a." + "9" * 5000 + ".weight"],
    ],
    ids=["numbers in a name", "names", "five numbers", "ranges of five numbers", "a long number"],
)
@pytest.mark.one_in(2)
def test_names_that_are_matched(names: list[str]):
    tensors = {name: ArrayTensor(np.zeros(3, np.float32), name) for name in names}
    leaf = jax.ShapeDtypeStruct((3,), np.float32)
    with bounds():
        found = interop.match({"a": {"scale": leaf}, "b": {"scale": leaf}}, tensors)
    assert not found.fused


def test_a_table_of_many_tensors(tmp_path: Path, capsys):
    save_file({f"t{n}": np.ones(1, np.float32) for n in range(60_000)}, tmp_path / "m.safetensors")
    with bounds():
        assert cli.main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 60_000 and lines[-1].split() == ["t9999", "[1]", "float32", "1"]


def test_ctrl_c_interrupts(tmp_path: Path):
    path = pack(tmp_path / "m.bin", b"\x80\x02" + b"N0" * 3_000_000 + b"N.")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, 0.3)
    start = time.process_time()
    try:
        with pytest.raises(KeyboardInterrupt):
            interop.open_checkpoint(path)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    assert time.process_time() - start < 3


def test_names_are_escaped(tmp_path: Path):
    hostile = "w\x1b[2J\u202e\n" + "x" * 10_000
    name = b"X" + len(hostile.encode()).to_bytes(4, "little") + hostile.encode()
    data = tensor_pickle(count=5).replace(b"X\x01\x00\x00\x00w", name)
    shape = {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}
    header = json.dumps({hostile: shape}).encode()
    single = tmp_path / "model.safetensors"
    single.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    not_tensor = b"\x80\x02}" + tensor_pickle()[3:-1] + name + b"K\x01s."
    for path in (
        single,
        pack(tmp_path / "a.bin", data, {"0": bytes(16)}),
        pack(tmp_path / "b.bin", not_tensor, {"0": bytes(16)}),
    ):
        with pytest.raises(ValueError) as caught:
            interop.open_checkpoint(path)
        check_refusal(caught.value, path)
