"""What Mosaic GPU makes of the kernels for an H200, on a machine without: `make test-aot-latest`.

They are compiled and their PTX is read; none is executed.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from benchmarks.compiled import wire
from benchmarks.compiled._h200 import h200_mesh
from benchmarks.shared._llama import LlamaSize
from jaxzero import pallas_kernels as pk

from .test_kernels import OPERATIONS, cuda_program, needs_mosaic

pytestmark = needs_mosaic

FORMATS = [
    pk.Format(kind="int8", block=256),
    pk.Format(kind="int8", block=8192, rounding="stochastic"),
    pk.Format(kind="int4", block=128, scale_dtype="float32"),
    pk.Format(kind="float8_e4m3fn", block=32, rounding="stochastic"),
    pk.Format(kind="float8_e5m2", block=1024),
]
ROTATED = [
    pk.Format(kind="int4", block=128, hadamard=32),
    pk.Format(kind="int8", block=2048, hadamard=32),
]


@pytest.fixture(scope="module")
def devices():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")
    return h200_mesh(1, 1)


@pytest.fixture
def dump(tmp_path, monkeypatch):
    """Where Mosaic writes what it makes."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    return tmp_path


def program(mesh, function, args):
    """The HLO."""
    everywhere = NamedSharding(mesh, P())
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in args]
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text is not None
    return text


def compiled(mesh, dump, function, args):
    """The HLO, the PTX and what ptxas says."""
    text = program(mesh, function, args)
    (ptx,) = [path.read_text() for path in dump.glob("*.ptx")]
    (said,) = [path.read_text() for path in dump.glob("*.ptxas")]
    return text, ptx, said


def assert_nothing_spills(said):
    assert re.search(r"Used \d+ registers", said)
    assert re.findall(r"(\d+) bytes spill", said) == ["0", "0"], said


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("quantize", jnp.float32),
        ("dequantize", jnp.float32),
        *((op, jnp.bfloat16) for op in OPERATIONS),
    ],
)
@pytest.mark.parametrize("format", FORMATS, ids=lambda x: f"{x.kind}/{x.block}")
def test_kernels_move_16_bytes_at_once(devices, dump, op, format, dtype):
    """The wide side of each does: numbers. Their codes come and go with the same lanes."""
    function, args = cuda_program(op, format, 2**20, dtype)
    text, ptx, said = compiled(devices, dump, function, args)
    assert "sm_90a" in ptx
    assert_nothing_spills(said)
    loads, stores = (set(re.findall(rf"\b{way}[\w.:]*\s", ptx)) for way in ("ld", "st"))
    if op == "quantize":
        assert any(".v4.b32" in x for x in loads), loads
        assert any(".v2.b32" in x or ".v4.b32" in x for x in stores), stores
    elif op == "dequantize_sum_requantize":  # codes to codes
        assert any(".v2.b32" in x or ".v4.b32" in x for x in loads), loads
    else:
        assert any(".v4.b32" in x for x in stores), stores
    assert text.count("custom-call(") == 1
    assert not re.search(r" (copy|transpose|concatenate|fusion)\(", text), text


@pytest.mark.parametrize("op", OPERATIONS[:3])
@pytest.mark.parametrize("format", ROTATED, ids=lambda x: f"{x.kind}/{x.block}")
def test_rotated_kernels_stay_in_registers(devices, dump, op, format):
    """They go through shared memory, four bytes of a lane at once; a sum is encoded by a second."""
    text, _, said = compiled(devices, dump, *cuda_program(op, format, 2**18))
    assert_nothing_spills(said)
    assert text.count("custom-call(") == 1


@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "quantize"])
@pytest.mark.parametrize("start", [4096, 4097])
def test_messages_are_read_in_place_where_that_is_as_fast(devices, dump, op, start):
    """Bytes that lie at odd places would be read one by one: there a copy is made first."""
    # Of a size that no other test has: Mosaic dumps a kernel once, whoever compiles it.
    function, (message, *rest) = cuda_program(op, FORMATS[0], 2**19)
    peers, size = message.shape
    array = jax.ShapeDtypeStruct((peers, 8192 + size), jnp.uint8)
    text, ptx, said = compiled(
        devices, dump, lambda x, *s: function(pk.InPlace(x, start, size), *s), (array, *rest)
    )
    assert_nothing_spills(said)
    assert re.search(r"\bld[\w.:]*\.v[24]\.b32\s", ptx)
    assert text.count("custom-call(") == 1
    makers = made_by(text)
    assert makers == (["parameter"] if start == 4096 else ["fusion"]), text


VIEWS = ("bitcast", "get-tuple-element")  # the same bytes


def instructions(text):
    """By name the shape, the operation and the first operand of each."""
    pattern = r"%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(%?([\w.\-]*)"
    return {name: rest for name, *rest in re.findall(pattern, text)}


def made_by(text):
    """Of each array of bytes that a kernel reads in a program, the operation that made it."""
    made, makers = instructions(text), []
    for operands in re.findall(r"custom-call\(([^)]*)\)[^\n]*_target=\"mosaic_gpu", text):
        for name in re.findall(r"%([\w.\-]+)", operands):
            if not made[name][0].startswith("u8["):
                continue
            while made[name][1] in VIEWS:
                name = made[name][2]
            makers.append(made[name][1])
    return makers


def read_by(text):
    """Of each array of bytes that a kernel writes in a program, what reads it.

    A fusion that puts something else into the same array, where it lies, is one of `put`.
    """
    entry = text[text.index("\nENTRY") :]
    bodies = {x.partition(" ")[0]: x for x in re.split(r"\n\n+%", text)}
    made, readers = instructions(entry), {}
    for line in entry.splitlines():
        if found := re.match(r"\s*(?:ROOT )?%([\w.\-]+) = .*? ([a-z][\w\-]*)\((.*?)\)", line):
            name, op, operands = found.groups()
            called = re.search(r"calls=%([\w.\-]+)", line)
            body = bodies[called[1]] if called else ""
            if " dynamic-update-slice(" in body and " concatenate(" not in body:
                op = "put"
            for operand in re.findall(r"%([\w.\-]+)", operands):
                readers.setdefault(operand, []).append((op, name))

    def ends(name):
        for op, reader in readers[name]:
            yield from ends(reader) if op in VIEWS else [op]

    kernels = [
        name for name, (shape, op, _) in made.items() if op == "custom-call" and "u8[" in shape
    ]
    return [op for name in kernels for op in ends(name)]


@pytest.mark.parametrize("op", ["quantize", "dequantize_sum_requantize"])
@pytest.mark.parametrize("start", [4096, 4097])
def test_messages_are_written_in_place_where_that_is_as_fast(devices, dump, op, start):
    """Two of them into one array; else a copy is put there."""
    function, args = cuda_program(op, FORMATS[0], 2**18 + 2**17)  # a size of its own: see above
    rows, size = jax.eval_shape(function, *args).shape

    def twice(*args):
        first = function(*args, place=pk.Place((rows, start + 2 * size), start))
        array = lax.dynamic_update_slice(first, jnp.zeros((rows, start), jnp.uint8), (0, 0))
        return function(*args, place=pk.Place(array.shape, start + size, array))

    text = program(devices, twice, args)
    for path in dump.glob("*.ptxas"):
        assert_nothing_spills(path.read_text())
    for path in dump.glob("*.ptx"):
        assert re.search(r"\bst[\w.:]*\.v[24]\.b32\s", path.read_text())
    assert "concatenate(" not in text and " copy(" not in text
    num_kernels = len(re.findall(r"_target=\"mosaic_gpu", text))
    num_in_place = len(re.findall(r"output_to_operand_aliasing", text))
    # Of two that do the same, and do not write into one array, XLA keeps one.
    assert (num_kernels, num_in_place) == ((2, 1) if start == 4096 else (1, 0)), text


def with_kernels(x):
    """A config whose codecs all use kernels."""
    if isinstance(x, jz.Int8 | jz.Int4 | jz.Float8):
        return dataclasses.replace(x, implementation="mosaic_gpu")
    if not dataclasses.is_dataclass(x):
        return x
    fields = {field.name: with_kernels(getattr(x, field.name)) for field in dataclasses.fields(x)}
    return dataclasses.replace(x, **fields)


@pytest.mark.standard_promotion
def test_a_step_of_zeropp_compiles_with_kernels(dump):
    """For 2 x 8 H200. Kernels read what collectives brought, and write what they send."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")
    size = LlamaSize(layers=1, width=512, hidden=1536, heads=4, vocabulary=512)
    zero = jz.Zero(h200_mesh(2, 8), with_kernels(jz.zeropp()))
    with jax.numpy_rank_promotion("allow"):
        text, _ = wire.compiled(zero, size, 1, 32)
    kernels = re.findall(r"custom_call_target=\"mosaic_gpu\w*\"", text)
    assert len(kernels) > 10
    names = {path.name.rpartition("_")[0] for path in dump.glob("*.ptx")}
    assert {"quantize", "dequantize", "dequantize_sum"} <= names
    for path in dump.glob("*.ptxas"):
        assert_nothing_spills(path.read_text())
    makers = made_by(text)
    arrived = {"parameter", "all-gather", "all-gather-done", "all-to-all", "all-to-all-done"}
    assert len(makers) > 20 and set(makers) <= arrived | {"custom-call"}, makers
    readers = read_by(text)
    sent = {"all-gather", "all-gather-start", "all-to-all", "all-to-all-start"}
    assert len(readers) > 20 and set(readers) <= sent | {"custom-call", "put"}, readers
    # A whole message is never copied as it is: XLA has no `copy` of bytes.
    assert not re.findall(r"= u8\[[\d,]+\]\S* copy\(", text)
