"""The report of `reshard` against the collectives and the memory of the compiled programs."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero._hlo.collectives import collectives
from jaxzero._reshard import lowered, planned

TREE = {
    "a": jax.ShapeDtypeStruct((1024, 512), jnp.float32),
    "b": jax.ShapeDtypeStruct((4, 256, 512), jnp.bfloat16),
}
TENSOR_PARALLEL = {"a": P("local"), "b": P(None, None, "local")}


def compiled(zero: jz.Zero, params: Any, specs: Any, **options: Any) -> tuple[int, int, int]:
    """Bytes into the node and into the device that get most, and the most temporary memory."""
    _, plan, _ = planned(params, zero, specs, **options)
    entering = np.zeros((2, zero.mesh.size))  # from all devices, and from other nodes
    node_of = np.arange(zero.mesh.size) // zero.mesh.shape["local"]
    most = 0
    for program in lowered(plan):
        done = program.compile()
        most = max(most, done.memory_analysis().temp_size_in_bytes)
        for each in collectives(done.as_text()):
            held = sum(shape.num_bytes for shape in each.results) * each.trips
            if each.op == "collective-permute":
                for source, target in each.groups:
                    entering[:, target] += held * np.array(
                        [source != target, node_of[source] != node_of[target]]
                    )
                continue
            for group in each.groups:
                for device in group:
                    others = np.sum(node_of[list(group)] != node_of[device])
                    part = held // len(group)
                    entering[:, device] += part * np.array([len(group) - 1, others])
    return int(np.bincount(node_of, entering[1]).max()), int(entering[0].max()), most


@pytest.mark.parametrize(
    ("specs", "options"),
    [
        (P(), {}),
        (TENSOR_PARALLEL, {}),
        (TENSOR_PARALLEL, {"dtype": jnp.bfloat16}),
        (TENSOR_PARALLEL, {"codec": jz.Int8()}),
        ({"a": P(None, ("node", "local")), "b": P(None, ("node", "local"))}, {}),
        ({"a": P("node"), "b": P(None, "node")}, {}),
    ],
)
def test_the_report_is_what_compiled_programs_send_and_hold(specs, options):
    zero = jz.Zero(jz.make_mesh(2))
    params = zero.abstract(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), TREE))
    report = jz.reshard_report(params, zero, specs=specs, **options)
    into_node, into_device, most = compiled(zero, params, specs, **options)
    assert (report.into_node, report.into_device) == (into_node, into_device)
    assert report.least_into_node == into_node  # and no method sends less
    assert 0.9 * into_device <= report.least_into_device <= into_device or "codec" in options
    assert most <= report.program_bytes + 4096  # of tables and alignment


def test_peak_memory_is_the_result_and_about_one_array():
    zero = jz.Zero(jz.make_mesh(2))
    params = zero.abstract(lambda: [jnp.zeros((256, 512)) for _ in range(6)])
    report = jz.reshard_report(params, zero, specs=P("local"), window_bytes=1)
    assert report.windows == 6 and report.largest_leaf_bytes == 256 * 512 * 4
    assert report.source_bytes == 6 * report.largest_leaf_bytes // 8
    assert report.result_bytes == 6 * report.largest_leaf_bytes // 4
    extra = report.peak_bytes - report.source_bytes - report.result_bytes
    assert 0 < extra <= report.largest_leaf_bytes
    assert compiled(zero, params, P("local"), window_bytes=1)[2] <= report.largest_leaf_bytes


def test_windows_of_rows_are_counted_and_hold_no_full_array():
    zero = jz.Zero(jz.make_mesh(2))
    params = zero.abstract(lambda: {"x": jnp.zeros((2044, 130))})
    options = {"window_bytes": 2**16}
    report = jz.reshard_report(params, zero, specs=P("local"), **options)
    into_node, into_device, most = compiled(zero, params, P("local"), **options)
    assert (report.into_node, report.into_device) == (into_node, into_device)
    assert report.least_into_node >= 0.9 * into_node
    assert most <= report.program_bytes + 4096 < report.largest_leaf_bytes
    # With the default, a single window takes all rows, more bytes than a device gets of them.
    report = jz.reshard_report(params, zero, specs=P("local"))
    assert compiled(zero, params, P("local"))[2] <= report.program_bytes + 4096


def test_the_report_prints_and_gives_plain_data():
    zero = jz.Zero(jz.make_mesh(2))
    params = zero.abstract(lambda: {"x": jnp.zeros((16, 8)), "y": jnp.zeros(3)})
    report = jz.reshard_report(params, zero, specs={"x": P("local"), "y": P()})
    text = str(report)
    assert "into a node, from other nodes" in text and "all-gather over node" in text
    assert max(map(len, text.splitlines())) <= 100
    assert report.as_dict()["leaves"][0]["path"] == "x"


def test_moves_to_other_devices_are_not_counted_as_nothing():
    """A padded array is first gathered on each source device; the report counts that memory."""
    zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]))
    params = zero.shard({"even": np.ones((8, 4), np.float32), "odd": np.ones((5, 7), np.float32)})
    mesh = Mesh(np.array(jax.devices()[2:4]), ("model",))
    report = jz.reshard_report(params, zero, specs=P(), mesh=mesh)
    assert report.num_uncounted == 2
    assert report.program_bytes == 5 * 7 * 4
    text = str(report)
    assert text.count("not counted") == 3 and "moves 2 of these arrays" in text
    some = jz.reshard_report(params, zero, specs=P())
    assert some.num_uncounted == 0 and "not counted" not in str(some)


def test_stored_messages_stay_split_on_the_way_to_other_devices():
    zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]))
    full = np.random.default_rng(0).standard_normal((64, 128), np.float32)
    frozen = zero.shard({"x": full}, codec=jz.Int8(block=32))
    mesh = Mesh(np.array(jax.devices()[2:4]), ("model",))
    report = jz.reshard_report(frozen, zero, specs=P(), mesh=mesh)
    assert report.program_bytes == full.nbytes // 4
    there = jz.reshard(frozen, zero, specs=P("model"), mesh=mesh)
    np.testing.assert_array_equal(there["x"], jz.reshard(frozen, zero, specs=P())["x"])


def test_cpus_of_several_processes_refuse_other_devices():
    """What JAX would say only while it moves the arrays."""
    check = importlib.import_module("jaxzero._reshard.reshard")._check_devices

    def devices(ids, processes, platform="cpu"):
        numbers = zip(ids, processes, strict=True)
        return {Device(id=i, process_index=n, platform=platform) for i, n in numbers}

    check(devices([0, 1, 2, 3], [0] * 4), devices([2, 3], [0] * 2))  # of one process
    check(devices([0, 1], [0, 1]), devices([0, 1], [0, 1]))  # the same
    check(devices([0, 1], [0, 1], "gpu"), devices([1], [1], "gpu"))
    with pytest.raises(NotImplementedError, match=r"`mesh` has the devices \[1\].* 2 processes"):
        check(devices([0, 1], [0, 1]), devices([1], [1]))


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str
