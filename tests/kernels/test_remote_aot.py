"""The one-kernel collectives, compiled for eight H200s on a machine without: never executed.

Needs JAX 0.11.2 or newer, and the plugin and compiler of `jaxzero[aot]` for that version.
"""

import collections
import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from benchmarks.compiled._h200 import h200_mesh
from benchmarks.shared import _llama
from benchmarks.shared._llama import LlamaSize
from jaxzero._hlo import collectives as _hlo
from jaxzero._hlo.cost import exchanged_bytes, flops
from jaxzero._hlo.instructions import parse
from jaxzero.pallas_kernels import Format
from tests.zero.test_aot import compiled_step

from .test_remote import (
    AXIS,
    DEVICES,
    FORMATS,
    OPERATIONS,
    kernel_of,
    needs_mosaic,
    on_devices,
    twice_and_in_a_scan,
)

pytestmark = needs_mosaic


@pytest.fixture(scope="session")
def mesh():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")
    return h200_mesh(1, DEVICES)


def compiled(f, mesh, x):
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, P(AXIS)))
    return on_devices(f, mesh).lower(x).compile().as_text()


MANY = jax.ShapeDtypeStruct((DEVICES, 8, 1 << 22), jnp.bfloat16)  # places are used again
LARGE = {"the largest blocks": Format(block=2048)}


@pytest.fixture(scope="session")
def dumped(mesh, tmp_path_factory):
    """The PTX of a kernel, and what its assembler reports.

    Each is compiled once in a process: of one that is compiled again Mosaic writes nothing.
    """

    @functools.cache
    def dump(operation, name):
        format = (FORMATS | LARGE)[name]
        folder = tmp_path_factory.mktemp(operation)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
            compiled(functools.partial(kernel_of(operation), format=format), mesh, MANY)
        (ptx,), (report,) = folder.glob("*.ptx"), folder.glob("*.ptxas")
        return ptx.read_text(), report.read_text()

    return dump


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", FORMATS | LARGE)
def test_no_register_is_spilled(dumped, operation, name):
    _, report = dumped(operation, name)
    assert "sm_90a" in report
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert "are spilled" not in report


TOKENS = {
    "release": r"red\.release\.sys\.global\.add\.u32",
    "swap": r"atom\.relaxed\.sys\.global\.cas\.b32",
    "acquire": r"fence\.acquire\.sys",
    "barrier": r"bar\.sync",
    "load": r"ld(?:\.global)?\.(?:v\d\.)?b(?:8|16|32)",  # of 64 bits: addresses of peers
    "store": r"st(?:\.global)?\.(?:v\d\.)?b(?:8|16|32|64)",
}


def tokens(ptx):
    """What touches memory, in the order of the text."""
    found = re.findall("|".join(rf"\b({pattern})\b" for pattern in TOKENS.values()), ptx)
    names = list(TOKENS)
    return [next(name for name, text in zip(names, x, strict=True) if text) for x in found]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_memory_is_touched_in_the_order_of_the_protocol(dumped, operation):
    ptx, _ = dumped(operation, "int8")
    for unwanted in (r"\.nc\b", r"cp\.async", r"red\.relaxed", r"\bst\.async"):
        assert not re.search(unwanted, ptx), unwanted
    order = tokens(ptx)
    # `entered` and `free` are waited for once, `arrived` once for each sender.
    assert order.count("acquire") == order.count("swap") == DEVICES + 2
    assert order.count("store") and order.count("load")
    for i, name in enumerate(order):
        if name == "release":  # all threads have stored and loaded what came before
            last = max((k for k in range(i) if order[k] in ("load", "store")), default=-1)
            assert "barrier" in order[last + 1 : i]
        if name == "acquire":  # nobody stores or loads before all threads know
            assert order[i + 1] == "barrier"
        if name == "swap":
            assert order[i + 1] == "acquire"


def test_every_call_has_semaphores_that_are_zeroed_for_it(mesh):
    """Also in a loop: zeros are written in the body, not before it."""
    text = compiled(twice_and_in_a_scan, mesh, jax.ShapeDtypeStruct((DEVICES, 1000), jnp.float32))
    num = 0
    for computation in re.split(r"\n\n+", text):
        made = dict(re.findall(r"%(\S+) = (.*)", computation))
        calls = [line for line in made.values() if "mosaic_gpu_v2" in line]
        operands = [
            re.findall(r"%([\w.-]+)\)", line.partition(" custom-call(")[2])[0] for line in calls
        ]
        assert len(set(operands)) == len(calls)
        for operand in operands:
            num += 1
            while source := re.match(
                r"s32\S+ (?:get-tuple-element|copy)\(%([\w.-]+)\)", made[operand]
            ):
                operand = source[1]
            assert re.search(r" (fusion|broadcast)\(\)", made[operand]), made[operand]
    assert num == 6


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dim", [0, 1])
def test_nothing_is_copied_around_a_kernel(mesh, operation, dim):
    """Of whole tiles, also where pieces are cut along an inner dim: only semaphores are written."""
    x = jax.ShapeDtypeStruct((DEVICES, 16, 16, 1 << 14), jnp.bfloat16)
    program = parse(compiled(functools.partial(kernel_of(operation), dim=dim), mesh, x))
    assert {x.op for x in program.entry.instructions} <= {
        *("parameter", "bitcast", "call-start", "call-done"),
    }
    (exchange,) = (
        x.called["to_apply"][0] for x in program.entry.instructions if "to_apply" in x.called
    )
    inner = program.computations[exchange].instructions
    assert {x.op for x in inner} <= {
        "parameter",
        "bitcast",
        "custom-call",
        "get-tuple-element",
        "fusion",
    }
    assert [x.results[0].dtype for x in inner if x.op == "fusion"] == ["s32"]


SMALL = LlamaSize(layers=3, width=256, hidden=704, heads=4, vocabulary=512)


def config_by_kernel():
    weights, gradients = (
        jz.PerAxis(local=dataclasses.replace(codec, implementation="nvlink"))
        for codec in (jz.Int8(), jz.Int4())
    )
    options = {"weights": weights, "gradients": gradients, "hpz": None, "min_quantized_size": 0}
    return dataclasses.replace(jz.zeropp(), **options)


@pytest.fixture(scope="session")
def step(mesh, tmp_path_factory):
    """A step of scanned layers whose exchanges are kernels: its text, and where XLA puts arrays."""
    folder = tmp_path_factory.mktemp("step")
    dump = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    dump |= jz.compiler_options("cuda", nvlink=True)
    zero = jz.Zero(mesh, config_by_kernel())
    text = compiled_step(zero, SMALL, (8, 64), **dump).as_text()
    (file,) = folder.glob("*_gpu_after_optimizations-buffer-assignment.txt")
    return text, file.read_text()


def test_a_step_has_kernels_in_the_place_of_collectives(mesh, step):
    """Of scanned layers: all that is left to XLA is the sum of the loss."""
    text, _ = step
    calls = [x for x in text.splitlines() if 'custom_call_target="mosaic_gpu_v2"' in x]
    names = [re.findall(r"/(quantized_\w+)/", x)[0] for x in calls]
    assert names.count("quantized_all_gather") >= 3  # in the loop forward, backward, and outside
    assert names.count("quantized_reduce_scatter") >= 2
    in_loops = [name for name, x in zip(names, calls, strict=True) if "while/body" in x]
    assert set(in_loops) == set(names)
    found = [(c.op, shape.size) for c in _hlo.collectives(text) for shape in c.results]
    assert found == [("all-reduce", 1)]
    assert received(text) == planned(jz.Zero(mesh, config_by_kernel()))


def test_exchanges_of_loops_run_beside_products(step):
    """Between the start of each and its end, XLA has put matrix products of the layer."""
    program, num = parse(step[0]), 0
    for loop in program.entry.instructions:
        if loop.op == "while":
            body = program.computations[loop.called["body"][0]]
            for exchange, others in beside_exchanges(body):
                assert any(flops(x, body, program) for x in others), exchange
                num += 1
    assert num == 3  # weights forward and backward, and gradients


def beside_exchanges(within):
    """Each exchange of a computation, with what is between its start and its end."""
    under_way: dict[str, list] = {}
    for x in within.instructions:
        if x.op == "call-done":
            yield x.operands[0], under_way.pop(x.operands[0])
        elif x.op == "call-start":
            under_way[x.name] = []
        else:
            for others in under_way.values():
                others.append(x)


def test_memory_of_an_exchange_is_its_own_until_it_ends(step):
    """What computes beside it writes nowhere into its inbox, semaphores and result."""
    text, assignment = step
    program, places, num = parse(text), places_of(assignment), 0
    for within in program.computations.values():
        for name, others in beside_exchanges(within):
            called = within.by_name[name].called["to_apply"][0]
            kept = [places[x.name] for x in program.computations[called].instructions]
            for held in itertools.chain(*kept):
                for place in itertools.chain(*(places[x.name] for x in others)):
                    assert not overlap(held, place), name
                    num += 1
    assert num > 100


def places_of(assignment):
    """Allocation, first byte and that after the last, of the arrays of each instruction."""
    found, allocation = collections.defaultdict(list), 0
    for line in assignment.partition("Total bytes used")[0].splitlines():
        if begins := re.match(r"allocation (\d+):", line):
            allocation = int(begins[1])
        value = r" value: <\d+ ([\w.\-]+)(?:\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\)"
        if match := re.match(value, line):
            size, offset = int(match[2]), int(match[3])
            found[match[1]].append((allocation, offset, offset + size))
    return found


def overlap(a, b):
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def received(text):
    """Bytes that a device receives in the exchanges of a program, by what its text says."""
    program = parse(text)

    def of(within):
        total = sum(exchanged_bytes(x, within, program) for x in within.instructions)
        for x in within.instructions:
            for body in x.called.get("body", ()):
                total += x.trips * of(program.computations[body])
        return total

    return of(program.entry)


def planned(zero):
    """The same, by what was noted while it was traced."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        params = zero.abstract(functools.partial(_llama.init, SMALL), jax.random.key(0))
        batch = jax.ShapeDtypeStruct((8, 64), jnp.int32)
        plan = zero.plan(functools.partial(_llama.loss, SMALL), params, batch)
    sent = [x for x in plan.transfers if x.purpose in ("weights", "gradients")]
    assert {(x.axis, x.dtype) for x in sent} == {("local", "uint8")}
    return sum(x.entering_bytes * x.trips for x in sent)


def test_several_processes_are_refused(mesh):
    """Each node of this mesh is a process of its own."""
    zero = jz.Zero(h200_mesh(2, DEVICES), config_by_kernel())
    with pytest.raises(NotImplementedError, match="devices of several processes"):
        compiled_step(zero, SMALL, (16, 64))
