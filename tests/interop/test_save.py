"""Checkpoints that are written: byte for byte, in files of bounded size, by several processes."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxzero import interop
from jaxzero.interop import ArrayTensor
from tests.processes import run

# The dtypes of the library of which numpy has one.
DTYPES = (
    *("bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn"),
    *("int16", "uint16", "float16", "bfloat16"),
    *("int32", "uint32", "float32", "int64", "uint64", "float64"),
)


def lazy(arrays: dict[str, np.ndarray]) -> dict[str, ArrayTensor]:
    return {name: ArrayTensor(array, name) for name, array in arrays.items()}


def test_bytes_are_those_of_the_library(tmp_path: Path):
    rng = np.random.default_rng(0)
    held = {}
    for name in DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        held[f"b.{name}"] = (3 * rng.normal(size=(3, 5))).astype(dtype)
        held[f"a.{name}"] = np.zeros((), dtype)
        held[f"c.{name}"] = np.zeros((0, 4), dtype)
    held["\u00fc\u2207"] = rng.normal(size=(4, 3))
    save_file(held, tmp_path / "theirs", {"format": "pt"})
    interop.save_tensors(lazy(held), tmp_path / "ours")
    ours = (tmp_path / "ours" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs").read_bytes()


def test_tensors_in_another_memory_order_are_written_piece_by_piece(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("jaxzero.interop._safetensors.write._CHUNK_BYTES", 64)
    array = np.arange(30 * 20).astype(ml_dtypes.bfloat16).reshape(30, 20)
    interop.save_tensors({"x": ArrayTensor(array, "x").transpose()}, tmp_path / "c")
    np.testing.assert_array_equal(
        load_file(tmp_path / "c" / "model.safetensors")["x"], array.T, strict=True
    )


@dataclasses.dataclass(frozen=True)
class InBoxes(ArrayTensor):
    """An array that its process writes box by box, as one that is split over processes."""

    boxes: tuple = ()

    @property
    def collective(self) -> bool:
        return True

    def own_boxes(self) -> list:
        return list(self.boxes)


def test_boxes_make_the_file_of_one_writer(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("jaxzero.interop._safetensors.write._CHUNK_BYTES", 64)
    rng = np.random.default_rng(0)
    held = {
        "cube": rng.normal(size=(5, 6, 7)).astype(ml_dtypes.bfloat16),
        "row": np.arange(9, dtype=np.int64),
        "one": np.ones((), np.float32),
        "none": np.zeros((0, 3), np.float32),
    }
    cube = [((0, 5), (0, 6), (2, 5)), ((1, 4), (1, 3), (5, 7)), ((0, 5), (0, 6), (0, 2))]
    cube += [((0, 1), (0, 6), (5, 7)), ((4, 5), (0, 6), (5, 7))]
    cube += [((1, 4), (0, 1), (5, 7)), ((1, 4), (3, 6), (5, 7))]
    boxes = {"cube": cube, "row": [((4, 9),), ((0, 4),)], "one": [()], "none": []}
    tensors = {name: InBoxes(x, name, tuple(boxes[name])) for name, x in held.items()}
    interop.save_tensors(tensors, tmp_path / "ours")
    save_file(held, tmp_path / "theirs", {"format": "pt"})
    ours = (tmp_path / "ours" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs").read_bytes()


def test_files_are_as_large_as_they_may_be(tmp_path: Path):
    sizes = {"b": 60, "a": 30, "c": 10, "d": 90, "e": 400, "f": 1}
    held = {
        name: np.full(size, index, np.uint8) for index, (name, size) in enumerate(sizes.items())
    }
    interop.save_tensors(lazy(held), tmp_path / "c", max_shard_bytes=100)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    files = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert index == {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": dict(zip("abcdef", [files[n] for n in (0, 0, 0, 1, 2, 3)], strict=True)),
    }
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        *files,
        "model.safetensors.index.json",
    ]
    for name, tensor in interop.tensors_in(tmp_path / "c").items():
        np.testing.assert_array_equal(tensor.read(), held[name], strict=True)


def test_config_and_tokenizer_are_carried(tmp_path: Path):
    source = tmp_path / "source"
    (source / "1_Pooling").mkdir(parents=True)
    (source / "2_Dense").mkdir()
    (source / "config.json").write_text('{"model_type": "x", "dtype": "float32"}')
    carried = ["tokenizer.json", "merges.txt", "1_Pooling/config.json", "generation_config.json"]
    carried += ["2_Dense/config.json", "2_Dense/model.safetensors"]
    for name in carried:
        (source / name).write_text(name)
    (source / "optimizer.pt").write_text("large, and not asked for")
    held = {"x": np.zeros(3, ml_dtypes.bfloat16), "y": np.zeros(1), "n": np.zeros(9, np.int64)}
    out = interop.save_tensors(lazy(held), tmp_path / "c", source=source)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "x", "dtype": "bfloat16"}
    assert all((out / name).read_text() == name for name in carried)
    assert not (out / "optimizer.pt").exists()
    numbers = interop.save_tensors(lazy({"n": held["n"]}), tmp_path / "n", source=source)
    assert json.loads((numbers / "config.json").read_text())["dtype"] == "float32", "as it was"


@pytest.mark.parametrize("name", ["tokenizer.json", "1_Pooling/config.json"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: path.symlink_to("/dev/zero"),
            "is a symbolic link to '/dev/zero', outside of",
        ),
        (os.mkfifo, "is no regular file, which is not copied"),
    ],
)
def test_devices_are_not_carried(tmp_path: Path, name: str, make, message: str):
    (tmp_path / "source/1_Pooling").mkdir(parents=True)
    make(tmp_path / "source" / name)
    with pytest.raises(ValueError, match=f"{name}' {message}"):
        interop.save_tensors(lazy({"x": np.ones(2)}), tmp_path / "c", source=tmp_path / "source")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("1_x", "../elsewhere", r"1_x' is a symbolic link to '.*elsewhere', outside of the"),
        ("1_loop", ".", r"1_loop' is a symbolic link to a folder, which is not copied"),
        ("1_circle", "1_circle", "1_circle' is a symbolic link that leads to no file"),
        ("tokenizer.json", "gone", "tokenizer.json' is a symbolic link that leads to no file"),
        ("config.json", "gone", "config.json' is a symbolic link that leads to no file"),
        ("vocab.txt", "../elsewhere/secret", r"vocab\.txt' is a symbolic link to '.*secret', outs"),
        ("1_Pooling/x", "../../elsewhere/secret", r"x' is a symbolic link to '.*secret', outside"),
        ("1_Pooling/up", "..", r"up' is a symbolic link to a folder"),
        ("merges.txt", None, r"merges\.txt' is no regular file"),
    ],
)
def test_links_out_of_the_source_are_refused(tmp_path: Path, name: str, target, message: str):
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    (source / "1_Pooling").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "secret").write_text("secret")
    if target is None:
        os.mkfifo(source / name)
    else:
        (source / name).symlink_to(target)
    with pytest.raises(ValueError, match=message):
        interop.save_tensors(lazy({"x": np.zeros(2)}), tmp_path / "out", source=source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "source"]


def test_links_inside_of_a_checkpoint_and_of_the_hub_cache_are_followed(tmp_path: Path):
    blobs, source = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    (source / "1_Pooling").mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("config.json", "tokenizer.json", "1_Pooling/config.json")):
        (blobs / str(number)).write_text(json.dumps({"number": number}))
        (source / name).symlink_to(blobs / str(number))
    (source / "vocab.json").symlink_to("tokenizer.json")
    out = interop.save_tensors(lazy({"x": np.zeros(2)}), tmp_path / "out", source=source)
    assert json.loads((out / "1_Pooling" / "config.json").read_text()) == {"number": 2}
    assert json.loads((out / "vocab.json").read_text()) == {"number": 1}
    assert not any(path.is_symlink() for path in out.rglob("*"))


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_a_broken_config_is_refused_before_anything_is_written(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json' (is not JSON|must hold a JSON object)"):
        interop.save_tensors(lazy({"x": np.zeros(2)}), tmp_path / "out", source=tmp_path)
    with pytest.raises(ValueError, match="`source` must be the directory of a checkpoint"):
        interop.save_tensors(lazy({"x": np.zeros(2)}), tmp_path / "out", source=tmp_path / "no")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("held", "options", "message"),
    [
        ({}, {}, "`tensors` must hold at least one tensor"),
        ({"x": np.zeros(2, np.complex64)}, {}, "'x' has dtype complex64, which safetensors cannot"),
        ({"__metadata__": np.zeros(2)}, {}, "No tensor can be called '__metadata__'"),
        ({"x": np.zeros(2)}, {"max_shard_bytes": 0}, "`max_shard_bytes` must be at least 1; got 0"),
        ({"x": np.zeros(2)}, {"source": "c"}, "`directory` and `source` are both"),
    ],
)
def test_saves_that_are_refused(tmp_path: Path, monkeypatch, held, options, message: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        interop.save_tensors(lazy(held), "c", **options)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_replaced_and_nothing_else(tmp_path: Path):
    runs, link = tmp_path / "runs", tmp_path / "link"
    source = interop.save_tensors(lazy({"x": np.zeros(2)}), runs / "a")
    with pytest.raises(ValueError, match=r"runs' holds 'a', .* would be lost, since"):
        interop.save_tensors(lazy({"x": np.ones(2)}), runs, source=source)
    with pytest.raises(ValueError, match="holds 'a', which are not part of such a checkpoint"):
        interop.save_tensors(lazy({"x": np.ones(2)}), runs)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match="notes' is a file. Name a directory"):
        interop.save_tensors(lazy({"x": np.ones(2)}), tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"
    assert load_file(source / "model.safetensors")["x"].sum() == 0
    link.symlink_to(source)
    interop.save_tensors(lazy({"x": np.ones(2)}), link)
    assert link.is_symlink() and load_file(source / "model.safetensors")["x"].sum() == 2
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert left == ["link", "notes", "runs", "runs/a", "runs/a/model.safetensors"]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory):
    """Two processes load a checkpoint, save it, and fail to save it: what they said, and where."""
    folder = tmp_path_factory.mktemp("processes")
    rng = np.random.default_rng(0)
    shapes = {f"layers.{layer}.weight": (17, 6) for layer in range(3)}
    shapes |= {"first": (5, 4), "second": (12, 4), "scale": (1,)}
    held = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    (folder / "source").mkdir()
    save_file(held, folder / "source" / "model.safetensors")
    (folder / "source" / "config.json").write_text('{"model_type": "x"}')
    (folder / "out").mkdir()
    places = folder / "source", folder / "out"
    ends = run("tests.interop.save_by_processes", 2, *places, seconds=300)
    return held, folder / "out", [end.said() for end in ends]


@pytest.mark.parametrize("mesh", ["saved", "more", "one"])
def test_two_processes_save_what_they_have_loaded(two_processes, mesh: str):
    held, folder, _ = two_processes
    written = interop.tensors_in(folder / mesh)
    assert written.keys() == held.keys()
    assert len({tensor.file for tensor in written.values()}) > 2, "both write some"
    for name, array in held.items():
        np.testing.assert_array_equal(written[name].read(), array, strict=True)
    assert (folder / mesh / "config.json").is_file()


@pytest.mark.parametrize("mesh", ["saved", "more", "one"])
def test_two_processes_write_the_bytes_of_one(two_processes, mesh: str, tmp_path: Path):
    held, folder, _ = two_processes
    alone = interop.save_tensors(lazy(held), tmp_path / "alone", max_shard_bytes=500)
    for file in alone.iterdir():
        assert (folder / mesh / file.name).read_bytes() == file.read_bytes(), file.name


def test_elements_that_no_process_holds_are_missed(tmp_path: Path):
    class Half(ArrayTensor):
        @property
        def collective(self):
            return True

        def own_boxes(self):
            return [((0, 2),)]

    with pytest.raises(ValueError, match="hold 16 bytes of `tensors`, which have 32"):
        interop.save_tensors({"x": Half(np.ones(4), "x")}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_keeps_one_writer_is_refused(two_processes):
    for kind, text in (said["lost"] for said in two_processes[2]):
        assert kind == "OSError"
        assert re.search("does not keep what several processes write .* 2 bytes .* 1 are", text)


def test_a_process_that_fails_leaves_nothing(two_processes):
    _, folder, said = two_processes
    reason = f"[Errno {errno.EFBIG}] File too large"
    assert said[1]["full"] == ["OSError", f"{reason}: '{folder / 'full'}'"]
    kind, text = said[0]["full"]
    assert kind == "RuntimeError" and f"full' failed on process 1: OSError: {reason}" in text
    assert {path.name for path in folder.iterdir()} == {"more", "one", "saved"}


# Peaks of memory of a fresh process that loads two stacks of layers onto 8 devices, and saves them.
MEASURE = """
import os, re, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import jaxzero as jz
from jaxzero import interop
from jaxzero.interop import Rule, Transpose

def peak():  # not `ru_maxrss`, which a process inherits from the one that starts it
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

zero = jz.Zero(jz.make_mesh(nodes=2))
jax.block_until_ready(zero.shard({"x": np.ones((64, 64), np.float32)}))
jax.jit(lambda x: x + 1)(1.0)  # the compiler takes 45 MB, once in a process
rules = [Rule("x.{k}", "layers.{i}.{k}", Transpose())]
tree = {"x": [jax.ShapeDtypeStruct((8, 1024, 2048), "float32")] * 2}
loaded = interop.load_into(tree, sys.argv[1], rules=rules)
before = peak()
params = jax.block_until_ready(zero.shard(loaded))
print(peak() - before)
interop.save_tensors(interop.tensors_from(params, rules), sys.argv[2], max_shard_bytes=32 * 2**20)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peaks of Linux")
@pytest.mark.ci
def test_memory_holds_the_shards_and_one_tensor(tmp_path: Path):
    layer = np.arange(2048 * 1024, dtype=np.float32).reshape(2048, 1024)
    held = {f"layers.{number}.{stack}": layer for number in range(8) for stack in range(2)}
    interop.save_tensors(lazy(held), tmp_path / "source")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "source"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    loading, saving = map(int, done.stdout.split())
    shards, tensor = 16 * layer.nbytes, layer.nbytes
    assert shards < loading < 1.2 * shards + tensor
    assert saving < 1.2 * shards + tensor
