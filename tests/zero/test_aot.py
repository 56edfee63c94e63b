"""What is compiled for sixteen H200s, on a machine without one: `pip install -e ".[aot]"`."""

import collections
import dataclasses
import functools

import jax
import pytest

import jaxzero as jz
from benchmarks.compiled import aot, wire
from benchmarks.compiled._h200 import h200_mesh
from benchmarks.shared import _llama
from benchmarks.shared._llama import LlamaSize
from jaxzero._hlo import Rates, timeline
from jaxzero._hlo import collectives as _hlo
from jaxzero._hlo.cost import collective_of, flops, link_bytes
from jaxzero._hlo.instructions import Computation, Instruction, Program, parse

SIZE = LlamaSize(layers=3, width=256, hidden=704, heads=4, vocabulary=512)
NODES, LOCAL = 2, 8
NORMS = SIZE.layers * SIZE.width  # elements of the largest leaf that is not quantised


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")
    return h200_mesh(NODES, LOCAL)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("preset", [jz.zeropp, jz.zeropp4])
def test_only_bytes_scales_and_small_leaves_cross_nodes(mesh, preset):
    with jax.numpy_rank_promotion("allow"):
        text, planned = wire.compiled(jz.Zero(mesh, preset()), SIZE, 1, 32)
    crossing = [c for c in _hlo.collectives(text) if c.crosses(LOCAL)]
    elements = collections.Counter()
    for c in crossing:
        for shape in c.results:
            elements[shape.dtype] = max(elements[shape.dtype], shape.size)
    assert elements["u8"] > NORMS  # the large leaves do cross
    assert all(size <= NORMS for dtype, size in elements.items() if dtype != "u8"), elements
    assert sum(c.node_bytes(LOCAL) * c.trips * LOCAL for c in crossing) == planned


DEEP = LlamaSize(layers=16, width=1024, hidden=2816, heads=8, vocabulary=4096)


@pytest.fixture(scope="module")
def scanned(mesh):
    """A step of ZeRO-3 over scanned layers, as it is scheduled."""
    return compiled_step(jz.Zero(mesh), DEEP, (32, 512)).as_text()


def compiled_step(
    zero: jz.Zero, size: LlamaSize, tokens: tuple[int, int], **options
) -> jax.stages.Compiled:
    """A step of a model, compiled with jaxzero's options; `tokens` is the shape of a batch."""
    loss, init = (functools.partial(each, size) for each in (_llama.loss, _llama.init))
    batch = jax.ShapeDtypeStruct(tokens, jax.numpy.int32)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        params = zero.abstract(init, jax.random.key(0))
        lowered = jax.jit(zero.value_and_grad(loss)).lower(params, batch)
        return lowered.compile(compiler_options=jz.compiler_options("cuda") | options)


def test_every_message_is_under_way_while_a_layer_computes(scanned):
    """Of what loops send, all but a little; it is what the schedule and the options are for."""
    line = timeline(scanned, Rates())
    assert line.asynchronous_share > 0.95
    # One message for each hop: a layer is gathered twice and reduced once.
    assert sum(line.launches.values()) <= 2 * (3 * DEEP.layers + 10)


def test_messages_between_nodes_have_a_whole_layer_of_time(scanned):
    """In loops each is under way from before the first matrix product to after the last."""
    program, num = parse(scanned), 0
    for loop in program.entry.instructions:
        if loop.op != "while":
            continue
        body = program.computations[loop.called["body"][0]]
        products = [i for i, x in enumerate(body.instructions) if flops(x, body, program)]
        starts = {
            x.name: i
            for i, x in enumerate(body.instructions)
            if (sent := collective_of(x, program)) and link_bytes(sent, Rates(num_local=LOCAL))[1]
        }
        for i, x in enumerate(body.instructions):
            if x.op.endswith("-done") and x.operands[0] in starts:
                assert starts[x.operands[0]] < products[0], x.text
                assert i > products[-1], x.text
                num += 1
    assert num == 3  # a layer's weights in forward; in backward its weights and its gradients


def test_messages_of_small_leaves_arrive_in_their_place(scanned):
    """Joined, a layer's weights go from one iteration to the next; XLA copies none of it."""
    message = 2 * (4 * DEEP.width + 3 * DEEP.hidden) * DEEP.width  # bytes
    copies = [x for x in in_loops(scanned) if x.op == "copy" and x.num_bytes >= message]
    assert not copies, [x.text[:120] for x in copies]


def test_no_matrix_product_reads_two_messages(mesh):
    """Rotations multiply by one matrix. Merged, those of a message inside a node would wait for the
    message between nodes, which has the whole iteration to arrive."""
    text = compiled_step(jz.Zero(mesh, jz.zeropp()), DEEP, (32, 512)).as_text()
    program, num = parse(text), 0
    for body in of_loops(program):
        read: dict[str, frozenset[str]] = {}  # the messages that an instruction depends on
        for x in body.instructions:
            before = (read.get(name, frozenset()) for name in x.operands)
            is_message = x.op == "all-to-all-done"
            read[x.name] = frozenset({x.name}) if is_message else frozenset().union(*before)
            if flops(x, body, program):
                assert len(read[x.name]) <= 1, x.text
                num += len(read[x.name])
    assert num  # rotations are products


WIDE = LlamaSize(layers=4, width=4096, hidden=4096, heads=32, vocabulary=512)


def test_large_leaves_are_neither_packed_nor_unpacked(mesh):
    """Those of 32 MiB: what is gathered is the weight, and gradients are sent as they are made."""
    text = compiled_step(jz.Zero(mesh), WIDE, (16, 256)).as_text()
    assert text is not None
    leaf = 2 * WIDE.width**2  # bytes
    kernels = [x for x in in_loops(text) if x.op == "fusion" and "jaxzero/" in x.text]
    assert kernels  # norms are joined, and sums computed
    large = [x.text[:120] for x in kernels if x.num_bytes >= leaf]
    assert not large, large
    assert f"u16[{WIDE.width},{WIDE.width}]" in text


def of_loops(program: Program) -> list[Computation]:
    """The bodies of all loops."""
    loops = [x for c in program.computations.values() for x in c.instructions if x.op == "while"]
    return [program.computations[x.called["body"][0]] for x in loops]


def in_loops(text: str) -> list[Instruction]:
    """The instructions of the bodies of all loops."""
    return [x for body in of_loops(parse(text)) for x in body.instructions]


def test_no_whole_gradient_is_held_while_the_layers_run_backward(scanned):
    """The head's is summed inside the node before, the embedding's has not been begun."""
    instructions = parse(scanned).entry.instructions
    backward = max(i for i, x in enumerate(instructions) if x.op == "while")
    before = {x.name: x for x in instructions[:backward] if x.op not in ("parameter", "tuple")}
    later = {name for x in instructions[backward + 1 :] for name in x.operands}
    held = [before[name] for name in later if name in before]
    assert held  # such as what the norms need
    whole = DEEP.vocabulary * DEEP.width
    large = [x.text[:120] for x in held if any(shape.size >= whole for shape in x.results)]
    assert not large, large


@pytest.mark.parametrize("rows", [1, 2])
def test_unrolled_layers_take_little_more_memory_than_scanned_ones(mesh, rows):
    """With one row on each device, XLA once dropped what gathers wait for (`tied`)."""
    scanned, unrolled = (temporary_bytes(mesh, rows, unrolled=x) for x in (False, True))
    layer = 2 * (4 * DEEP.width + 3 * DEEP.hidden) * DEEP.width
    assert unrolled < scanned + layer


def temporary_bytes(mesh, rows: int, *, unrolled: bool) -> int:
    size = dataclasses.replace(DEEP, layers=8, unrolled=unrolled)
    compiled = compiled_step(jz.Zero(mesh), size, (rows * NODES * LOCAL, 1024))
    return compiled.memory_analysis().temp_size_in_bytes


def test_the_benchmark_compares_all_variants_of_a_small_model(mesh, monkeypatch):
    rows = {}
    sets = []

    def keep(_, row):
        rows[row["variant"]] = row
        sets.append((row["variant"], row["option_set"], row["compiler_options"]))

    monkeypatch.setattr(aot, "append_row", keep)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        aot.main(model="tiny", batch=32, tokens=256, options=("xla", "jaxzero"))
    assert [x for x in sets if x[0] == "gspmd-by-hand"] == [
        ("gspmd-by-hand", name, aot.OPTION_SETS[name]) for name in ("xla", "jaxzero")
    ]
    launches = {name: row["launches"] for name, row in rows.items()}
    entering = {name: row["gib_into_a_node"] for name, row in rows.items()}
    assert set(launches) == {"gspmd", "gspmd-by-hand", "zero3", "zeropp", "zeropp4"}
    assert launches["zeropp"] < launches["zero3"], launches
    # The weights once in 8 bits and the gradients in 4, for the weights twice in 16 and the
    # gradients in 16; a loop that is pipelined gathers a layer or two more than it has.
    assert entering["zeropp4"] < entering["zeropp"] < 0.4 * entering["zero3"], entering
    for row in rows.values():
        fastest, fast, slow, _ = (each["step_seconds"] for each in row["predicted"].values())
        assert 0 < fastest < fast < slow
        assert row["temporary_gib"] > 0 < row["compile_seconds"]


def test_separate_ends_send_no_layer_in_vain(mesh):
    """Not more crosses into a node than without prefetch, at the ends of the loops too."""
    tokens = jax.ShapeDtypeStruct((32, 512), jax.numpy.int32)
    loss, init = (functools.partial(each, DEEP) for each in (_llama.loss, _llama.init))
    apart, plain = (
        jz.Zero(mesh, jz.ZeroConfig(schedule=schedule))
        for schedule in (jz.CommSchedule(separate_ends=True), jz.CommSchedule(prefetch=0))
    )
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        plan = plain.plan(loss, plain.abstract(init, jax.random.key(0)), tokens)
    text = compiled_step(apart, DEEP, tokens.shape).as_text()
    planned = LOCAL * sum(x.node_bytes * x.trips for x in plan.transfers)
    line = timeline(text, Rates(num_local=LOCAL))
    assert 0 < line.node_bytes <= planned
    assert line.asynchronous_share > 0.95
