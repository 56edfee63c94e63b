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
from jaxzero._reshard import channels as channels_module
from jaxzero._reshard import overlapped, parcels, plan, planned, ring, threads
from jaxzero._reshard.channels import Channel, channels, hop_program
from jaxzero._reshard.plan import ReshardPlan
from jaxzero._reshard.ring import RingMove

from .test_reshard import TREE, check, moved

TENSOR_PARALLEL = {"matrix": P("local"), "narrow": P(None, "local")}


_CACHED = (
    plan._make_plan,
    ring.row_shape,
    parcels.parcels,
    overlapped.start_program,
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


def test_connections_carry_data_one_way(of_processes):
    for nodes in (2, 4):
        of_processes(8 // nodes)
        _, made = _plan(nodes, P("local"))
        mesh, (move,) = made.digits.mesh, made.programs[0]
        assert isinstance(move, RingMove)
        entering = collections.Counter()
        found = channels(move.across.digits, mesh)
        assert len({channel.devices for channel in found}) == len(found)
        for channel in found:
            pairs = [pair for hop in channel.hops for pair in hop.pairs]
            assert not set(pairs) & {(to, source) for source, to in pairs}
            assert {i for pair in pairs for i in pair} <= set(channel.devices)
            entering.update(pairs)
        grid = np.arange(8).reshape(nodes, -1).T
        wanted = {(int(a), int(b)) for line in grid for a in line for b in line if a != b}
        assert dict(entering) == dict.fromkeys(wanted, 1)


def test_an_error_while_sending_ends_the_move(of_processes, monkeypatch):
    of_processes(4)
    zero = jz.Zero(jz.make_mesh(2))
    params = zero.shard({str(i): TREE["matrix"] for i in range(4)})

    def fail(*_: Any) -> None:
        raise RuntimeError("the other host is gone")

    monkeypatch.setattr(threads, "send", fail)
    with pytest.raises(RuntimeError, match="the other host is gone"):
        jz.reshard(params, zero, specs=P("local"))


def _plan(nodes: int, spec: P, count: int = 1, **options: Any) -> tuple[Any, ReshardPlan]:
    zero = jz.Zero(jz.make_mesh(nodes))
    params = zero.abstract(lambda: [jnp.zeros((256, 512)) for _ in range(count)])
    report = jz.reshard_report(params, zero, specs=spec, **options)
    return report, planned(params, zero, spec, **options)[1]


def _structs(shards: Iterable[int], shape: Any) -> dict[int, Any]:
    return dict.fromkeys(shards, shape)


def _compiled(mesh: Mesh, moves: tuple[RingMove, ...]) -> tuple[Any, list[Any], Any]:
    """The compiled programs of a window: the first and last of device 0, and those that send."""
    of_sender, of_givers = (
        [_structs(of(x), jax.ShapeDtypeStruct(x.block, x.leaf.stored.dtype)) for x in moves]
        for of in (
            lambda x: parcels.sources(mesh, x, (0,)),
            lambda x: parcels.sources(mesh, x, parcels.givers(mesh, x, 0)),
        )
    )
    start = overlapped.start_program(mesh, moves, 0).lower(of_sender)
    sent, found = start.out_info, parcels.parcels(mesh, moves)
    received = [
        [_structs(x.givers(mesh, moves, 0), message)] * x.distances
        for x, message in zip(found, sent, strict=True)
    ]
    finish = overlapped.finish_program(mesh, moves, 0).lower(of_givers, received)
    across = [
        _lowered_hop(mesh, channel, number, message)
        for parcel, message in zip(found, sent, strict=True)
        for channel in parcel.channels
        for number in range(len(channel.hops))
    ]
    return start.compile(), [(c, x.compile()) for c, x in across], finish.compile()


def _lowered_hop(mesh: Mesh, channel: Channel, number: int, message: Any) -> tuple[Channel, Any]:
    line = channels_module.submesh(mesh, channel)
    sharding = NamedSharding(line, P("line"))
    struct = jax.ShapeDtypeStruct((message.size * line.size,), message.dtype, sharding=sharding)
    return channel, hop_program(mesh, channel, channel.hops[number]).lower(struct)


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
    report, found = _plan(nodes, spec, 12, **options)
    mesh, entering, held = found.digits.mesh, np.zeros((8, 8), int), []
    assert found.num_overlapped == len(found.windows) == report.windows > 1
    for moves in found.programs:
        start, across, finish = _compiled(mesh, moves)
        for channel, hop in across:
            (each,) = collectives(hop.as_text())
            assert each.op == "collective-permute"
            for source, to in each.groups:
                num_bytes = sum(shape.num_bytes for shape in each.results)
                entering[channel.devices[source], channel.devices[to]] += num_bytes
        sizes = [x.memory_analysis() for x in (start, finish)]
        # Of each device, also where it receives nothing.
        out = sum(x.memory_analysis().output_size_in_bytes for c, x in across if 0 in c.devices)
        received = out * (nodes - 1) // nodes
        result = sum(math.prod(x.target_block) * x.dtype.itemsize for x in moves)
        held.append(
            {
                "under way": sizes[0].output_size_in_bytes + out - result,
                "received": received,
                "starts": sizes[0].temp_size_in_bytes,
                "finishes": sizes[1].temp_size_in_bytes,
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


@pytest.mark.parametrize(
    ("nodes", "codec"),
    [
        (2, jz.Int8(block=32)),
        (4, jz.Int4(block=32)),
        pytest.param(2, jz.Int4(block=32), marks=pytest.mark.exhaustive),
        pytest.param(4, jz.Int8(block=32), marks=pytest.mark.exhaustive),
    ],
)
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


def test_64_bits_that_are_on_in_the_calling_thread_only(of_processes):
    """The threads that send have 32 bits, and what they send keeps its own."""
    of_processes(4)
    with jax.enable_x64(True):
        zero = jz.Zero(jz.make_mesh(2))
        exact = np.pi + np.arange(64.0 * 32).reshape(64, 32) * 1e-12
        served = jz.reshard(zero.shard({"x": exact}), zero, specs=P("local"))
        assert served["x"].dtype == np.float64
        np.testing.assert_array_equal(np.asarray(served["x"]), exact)
