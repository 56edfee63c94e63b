"""Moves between processes of CPUs: here parts of one process, which read their own memory only."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero._hlo.collectives import collectives
from jaxzero._mesh import gloo_workaround
from jaxzero._reshard import overlapped, parcels, planned, ring
from jaxzero._reshard.plan import ReshardPlan
from jaxzero._reshard.ring import RingMove, permutations

from .test_reshard import TREE, check, moved

TENSOR_PARALLEL = {"matrix": P("local"), "narrow": P(None, "local")}


_CACHED = (
    ring.permutations,
    ring.row_shape,
    parcels.parcels,
    overlapped.start_program,
    overlapped.across,
    overlapped.finish_program,
)


@pytest.fixture(autouse=True)
def of_processes(monkeypatch):
    """A function of `count`: from then on each run of `count` devices counts as one process."""
    monkeypatch.setattr(gloo_workaround, "uses_gloo", lambda mesh: True)

    def patch(count: int) -> None:
        monkeypatch.setattr(ring, "process_of", lambda device: device.id // count)
        for function in _CACHED:
            function.cache_clear()

    yield patch
    for function in _CACHED:
        function.cache_clear()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_tensor_parallel_inside_a_node(nodes, axis_type, of_processes):
    of_processes(8 // nodes)
    zero = jz.Zero(jz.make_mesh(nodes, axis_type=axis_type))
    with jax.set_mesh(zero.mesh):
        ways = moved(zero, **TENSOR_PARALLEL)
    if nodes < 8:
        assert ways["padded"].startswith("ring of permutations over node, all-gather over local in")
        assert ways["matrix"] == "all-to-all over local in memory, ring of permutations over node"
    else:  # of two nodes with a device each, both would send to the other
        assert ways["matrix"] == ways["padded"] == "all-gather over node"


@pytest.mark.parametrize("count", [4, 2, 1])
@pytest.mark.parametrize(
    "spec", [P(None, "local"), P("node"), P(None, "node"), P(("node", "local")), P("local", "node")]
)
def test_processes_of_a_node_or_of_a_part_of_it(spec, count, of_processes):
    of_processes(count)
    moved(jz.Zero(jz.make_mesh(2)), matrix=spec)


def test_no_two_devices_send_to_each_other(of_processes):
    for nodes in (2, 4):
        of_processes(8 // nodes)
        _, plan = _plan(nodes, P("local"))
        mesh, (move,) = plan.digits.mesh, plan.programs[0]
        assert isinstance(move, RingMove)
        entering = collections.Counter()
        for each in permutations(move.across, mesh):
            pairs = set(each.pairs)
            assert not pairs & {(to, source) for source, to in pairs}
            assert sorted(to for _, to in pairs) == list(range(8))
            entering.update(to for _, to in pairs)
        assert set(entering.values()) == {nodes - 1}


def _plan(nodes: int, spec: P, count: int = 1, **options: Any) -> tuple[Any, ReshardPlan]:
    zero = jz.Zero(jz.make_mesh(nodes))
    params = zero.abstract(lambda: [jnp.zeros((256, 512)) for _ in range(count)])
    report = jz.reshard_report(params, zero, specs=spec, **options)
    return report, planned(params, zero, spec, **options)[1]


def _structs(shards: Iterable[int], shape: Any) -> dict[int, Any]:
    return dict.fromkeys(shards, shape)


def _compiled(mesh: Mesh, moves: tuple[RingMove, ...]) -> list[Any]:
    """The compiled programs of a window: those of device 0, and the one over all devices."""
    shards = [jax.ShapeDtypeStruct(x.block, x.leaf.stored.dtype) for x in moves]
    of_senders, of_givers = (
        [
            _structs(parcels.sources(mesh, x, of(mesh, x, 0)), shard)
            for x, shard in zip(moves, shards, strict=True)
        ]
        for of in (parcels.senders, parcels.givers)
    )
    start = overlapped.start_program(mesh, moves, 0).lower(of_senders)
    sent = start.out_info
    received = [
        [_structs(x.givers(mesh, moves, 0), messages[0])] * len(x.permutations)
        for x, messages in zip(parcels.parcels(mesh, moves), sent, strict=True)
    ]
    finish = overlapped.finish_program(mesh, moves, 0).lower(of_givers, received)
    split = NamedSharding(mesh, P(mesh.axis_names))
    stacks = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.size * mesh.size,), x.dtype, sharding=split), sent
    )
    across = overlapped.across(mesh, moves).lower(stacks)
    return [x.compile() for x in (start, across, finish)]


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (P("local"), {}),
        (P(None, "local"), {"dtype": jnp.bfloat16}),
        (P(), {}),
        (P("local"), {"codec": jz.Int8()}),
        (P(None, "local"), {"codec": jz.Int4()}),
        (P(), {"codec": jz.Int8()}),
    ],
)
def test_the_report_is_what_compiled_programs_send_and_hold(spec, options, nodes, of_processes):
    of_processes(8 // nodes)
    report, plan = _plan(nodes, spec, 12, **options)
    mesh, entering, held = plan.digits.mesh, np.zeros((8, 8), int), []
    assert plan.num_overlapped == len(plan.windows) == report.windows > 1
    for moves in plan.programs:
        start, across, finish = _compiled(mesh, moves)
        for each in collectives(across.as_text()):
            assert each.op == "collective-permute"
            for source, to in each.groups:
                entering[source, to] += sum(shape.num_bytes for shape in each.results)
        sizes = [x.memory_analysis() for x in (start, across, finish)]
        result = sum(math.prod(x.target_block) * x.dtype.itemsize for x in moves)
        held.append(
            {
                "under way": sizes[0].output_size_in_bytes + sizes[1].output_size_in_bytes - result,
                "received": sizes[1].output_size_in_bytes,
                "starts": sizes[0].temp_size_in_bytes,
                "finishes": sizes[2].temp_size_in_bytes,
            }
        )
    node = np.arange(8) // (8 // nodes)
    into_nodes = np.bincount(node, (entering * (node[:, None] != node)).sum(0))
    assert report.into_node == report.least_into_node == into_nodes.max()
    assert (entering * (node[:, None] == node)).sum() == 0  # inside nodes nothing is sent
    most = max(
        max(
            x["under way"] + y["under way"] + y["starts"],
            x["received"] + x["finishes"] + y["under way"],
        )
        for x, y in itertools.pairwise(held)
    )
    assert most <= report.program_bytes + 4096
    assert report.program_bytes <= report.largest_leaf_bytes or "codec" in options


@pytest.mark.parametrize("codec", [jz.Int8(block=32), jz.Int4(block=32)])
@pytest.mark.parametrize("nodes", [2, 4])
def test_what_a_codec_gives_is_what_one_program_gives(codec, nodes, of_processes, monkeypatch):
    of_processes(8 // nodes)
    zero = jz.Zero(jz.make_mesh(nodes), jz.ZeroConfig(min_quantized_size=64))
    params = zero.shard({"x": TREE["matrix"], "y": TREE["narrow"]})
    frozen = zero.shard({"z": TREE["matrix"]}, codec=codec)
    specs = {"x": P(None, "local"), "y": P()}

    def made() -> dict[str, jax.Array]:
        served = jz.reshard(params, zero, specs=specs, codec=codec)
        return served | jz.reshard(frozen, zero, specs=P("local"), dtype=jnp.bfloat16)

    rings = made()
    monkeypatch.setattr(gloo_workaround, "uses_gloo", lambda mesh: False)
    for name, x in made().items():
        np.testing.assert_array_equal(x, rings[name])


def test_the_source_can_be_donated_afterwards(of_processes):
    of_processes(4)
    zero = jz.Zero(jz.make_mesh(2))
    params = zero.shard({"x": TREE["matrix"]})
    served = jz.reshard(params, zero, specs=P("local"))
    jax.block_until_ready(
        jax.jit(lambda x: jax.tree.map(jnp.negative, x), donate_argnums=0)(params)
    )
    check(served, zero.mesh, {"x": P("local")}, {"x": TREE["matrix"]})
