"""What the report says is sent is what the compiled program sends, to the byte."""

import collections
import dataclasses
import functools
import io
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jaxzero as jz
from tests import zoo

MX, NV = jz.MXFloat8(), jz.NVFloat4()
CONFIGS = {
    "zero3": jz.zero3(),
    "zeropp": jz.zeropp(),
    "zeropp4": jz.zeropp4(),
    "hsdp": jz.hsdp(gradients=jz.zeropp().gradients),
    "stage 1": jz.ZeroConfig(stage=1, gradients=jz.zeropp().gradients),
    "feedback": jz.zero3(gradients=jz.PerAxis(node=jz.ErrorFeedback())),
    "aux": jz.zeropp(),
    "halves": jz.zero3(),
    "mx and nv": jz.zero3(
        weights=jz.PerAxis(node=MX, local=MX), gradients=jz.PerAxis(node=NV, local=NV)
    ),
    "nv and mx": jz.ZeroConfig(
        weights=jz.PerAxis(node=NV, local=MX),
        gradients=jz.PerAxis(node=MX, local=NV),
        hpz=jz.HpZ(codec=NV),
    ),
}
WIRE_TYPES = {"u8": "uint8", "u16": "uint16", "f32": "float32", "s32": "int32"}


def _loss(params, x):
    """All in one scan: XLA:CPU would merge a gather of forward with one of backward."""

    def layer(h, weights):
        h = jnp.tanh(h @ weights["up"]) @ weights["down"]
        return h * weights["scale"][None], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)


def _loss_and_aux(params, x):
    return _loss(params, x), {"mean": x.mean(0), "rows": jnp.int32(len(x)), "first": x[0]}


@functools.cache
def _lowered(name, mesh, microbatches):
    """(the step, not compiled; the report)."""
    # Between the size of a layer and that of a node's slice of it.
    config = dataclasses.replace(CONFIGS[name], min_quantized_size=2000)
    zero = jz.Zero(zoo.make_mesh(mesh), config)
    key = jax.random.key(0)
    whole = {
        "up": zoo.normal(key, 0, 5, 40, 72),
        "down": zoo.normal(key, 1, 5, 72, 40),
        "scale": np.ones((5, 40), np.float32),
    }
    params = zero.shard(whole)
    x = zoo.normal(key, 2, 24 * microbatches, 40, scale=1.0)
    state = {"wire_state": zero.init_wire_state(params)} if config.needs_wire_state else {}
    loss, options = _loss, {"microbatches": microbatches}
    if name == "aux":
        loss = _loss_and_aux
        reduce = {"mean": "mean", "rows": "sum", "first": "first"}
        options |= {"has_aux": True, "aux_reduce": reduce}
    if name == "halves":
        options["halves"] = True
    step = jax.jit(zero.value_and_grad(loss, **options))
    plan = zero.plan(loss, params, x, **options, **state)
    return step.lower(params, x, **state), zero.report(params, plan=plan)


@functools.cache
def _compiled(name, mesh, microbatches):
    """(the HLO, the report)."""
    lowered, report = _lowered(name, mesh, microbatches)
    return lowered.compile().as_text(), report


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['node'=2,'local'=2] {'local'}", ((0, 1), (2, 3))),
        ("mesh['node'=2,'local'=2] {'node'}", ((0, 2), (1, 3))),
        ("mesh['node'=2,'local'=2] {'node','local'}", ((0, 1, 2, 3),)),
    ],
)
def test_groups_are_read_as_each_jax_writes_them(written, groups):
    line = f"%x = u8[4]{{0}} all-gather(%y), replica_groups={written}, dimensions={{0}}"
    assert zoo.hlo.collectives(line)[0].groups == groups


def test_groups_that_cannot_be_read_are_refused():
    with pytest.raises(ValueError, match="who takes part"):
        zoo.hlo.collectives("%x = u8[4]{0} all-gather(%y), replica_groups=@someone")


@pytest.mark.parametrize(
    ("op", "who", "into_device", "into_node"),
    [
        ("all-gather", "replica_groups={{0,1,2,3}}", 48, 32),
        ("all-to-all", "replica_groups={{0,1,2,3}}", 48, 32),
        ("all-reduce", "replica_groups={{0,1,2,3}}", 96, 64),
        ("reduce-scatter", "replica_groups={{0,1,2,3}}", 192, 128),
        ("collective-permute", "source_target_pairs={{0,1},{1,0}}", 64, 0),
        ("collective-permute", "source_target_pairs={{0,2},{2,0}}", 64, 64),
    ],
)
def test_bytes_of_a_collective(op, who, into_device, into_node):
    """It leaves 64 bytes on a device; nodes are of two devices."""
    (found,) = zoo.hlo.collectives(f"%x = u8[64]{{0}} {op}(%y), {who}")
    assert (found.entering_bytes, found.node_bytes(2)) == (into_device, into_node)
    assert found.crosses(2) == (into_node > 0)


@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    [
        ("zero3", "2x4-auto", 1),
        ("zeropp", "2x4-auto", 1),
        ("zeropp", "3x2-explicit", 3),
        ("zeropp4", "2x4-auto", 3),
        pytest.param("zeropp4", "2x3-auto", 1, marks=pytest.mark.exhaustive),
        ("hsdp", "2x4-auto", 2),
        ("stage 1", "2x4-auto", 1),
        ("feedback", "2x4-auto", 1),
        ("aux", "2x4-auto", 1),
        ("halves", "2x4-auto", 1),
        ("mx and nv", "2x4-auto", 1),
        *(
            pytest.param(*case, 1, marks=pytest.mark.exhaustive)
            for case in (("nv and mx", "2x3-auto"), ("zeropp", "1x8-auto"), ("zeropp", "8x1-auto"))
        ),
    ],
)
def test_report_equals_the_program(name, mesh, microbatches):
    text, report = _compiled(name, mesh, microbatches)
    nodes, local = (int(n) for n in mesh.split("-")[0].split("x"))
    sent: dict[tuple, list[int]] = collections.defaultdict(lambda: [0, 0])
    for c in zoo.hlo.collectives(text):
        whole_mesh = len(c.groups[0]) == nodes * local and min(nodes, local) > 1
        axis = "node+local" if whole_mesh else "node" if c.crosses(local) else "local"
        key = (axis, c.op, WIRE_TYPES[c.results[0].dtype])
        _add(sent[key], c.trips * c.entering_bytes, c.trips * c.node_bytes(local))
    said: dict[tuple, list[int]] = collections.defaultdict(lambda: [0, 0])
    for transfer in report.traffic.transfers:
        key = (transfer.axis, transfer.collective, transfer.dtype)
        trips = transfer.trips
        _add(said[key], trips * transfer.entering_bytes, trips * transfer.node_bytes)
    assert sent == said
    _check_names(name, text)


def _check_names(name, text):
    """What a profiler shows says what is carried; XLA writes those of joined ones in one list."""
    leaf = r"(?:up|down|scale)(?:\[i\])?(?:\+[12])?"
    named = rf"/jaxzero/\(?(?:(gather|reduce)/(?:{leaf}|whole_leaves)|loss|aux|halves)/"
    for c in zoo.hlo.collectives(text):
        found = re.search(named, c.line)
        assert found, c.line
        assert found[1] != "gather" or c.op == "all-gather", c.line
        assert found[1] == "reduce" or c.op != "reduce-scatter", c.line
    coded = set(re.findall(r"/jaxzero/(gather|reduce)/[^/]*/(encode|decode)/", text))
    with_codecs = ("zeropp", "zeropp4", "aux", "mx and nv", "nv and mx")
    verbs = ["gather"] if name in with_codecs else []
    verbs += ["reduce"] if name not in ("zero3", "halves") else []
    assert coded == set(itertools.product(verbs, ("encode", "decode")))


def _add(total, entering, from_other_nodes):
    total[0] += entering
    total[1] += from_other_nodes


@pytest.mark.parametrize("preset", ["zeropp", "zeropp4", "hsdp", "mx and nv"])
def test_only_bytes_scales_and_small_arrays_cross_nodes(preset):
    text, _ = _compiled(preset, "2x4-auto", 1)
    wide = [
        c
        for c in zoo.hlo.collectives(text)
        if c.crosses(4) and any(shape.dtype != "u8" and shape.size >= 100 for shape in c.results)
    ]
    # The stack of norm scales: its layers are small, and their slices are kept together.
    assert all("scale" in c.line for c in wide), [c.line for c in wide]


def test_messages_have_the_size_of_their_format():
    """A layer's `up` and `down` lie in one message: codes, a scale for each block, and NV's own.

    Beside those of the weights lies the layer's `scale`, which is small and travels as float32.
    """
    text, _ = _compiled("mx and nv", "2x4-auto", 1)
    sizes = {(c.op, shape.size) for c in zoo.hlo.collectives(text) for shape in c.results}
    shard, piece = 40 * 72 // 8, 40 * 72 // 4
    mx, nv = shard + math.ceil(shard / 32), piece // 2 + math.ceil(piece / 16) + 4
    assert ("all-gather", 2 * (2 * mx + 40 // 8 * 4)) in sizes, "The shards of both nodes."
    assert ("all-to-all", 2 * nv) in sizes, "What one device sends to another."
    assert (mx, nv) == (MX.num_bytes(shard, "float32"), NV.num_bytes(piece, "float32"))


@pytest.mark.parametrize("preset", ["zeropp", "zeropp4"])
def test_between_nodes_once_for_all_microbatches(preset):
    mesh = "3x2-explicit" if preset == "zeropp" else "2x4-auto"
    text, report = _compiled(preset, mesh, 3)
    local = int(mesh[2])
    crossing = [c for c in zoo.hlo.collectives(text) if c.crosses(local)]
    # Slices are gathered in the first micro-batch's loop over 5 layers.
    assert {c.trips for c in crossing} == {1, 5}
    traffic, one = report.traffic, _lowered(preset, mesh, 1)[1].traffic
    assert traffic.amount(lambda t: t.axis == "node").microbatch_bytes == 0
    inside, first = (x.amount(lambda t: t.axis == "local") for x in (traffic, one))
    assert traffic.node_bytes_for("weights") == one.node_bytes_for("weights")
    assert inside.device_bytes == first.device_bytes + 2 * inside.microbatch_bytes


def test_report_as_table_and_data():
    _, report = _compiled("zeropp", "2x4-auto", 1)
    out = io.StringIO()
    report.print(["traffic", "parts"], console=Console(file=out, width=140))
    for word in ("weights", "gradients", "node", "local", "uint8", "enter a node", "hpZ"):
        assert word in out.getvalue(), word
    data = report.as_dict()["traffic"]
    assert data["node_bytes"] == report.traffic.node_bytes
    assert data["slice_bytes"] > 0
    by_leaf = sum(row["device_bytes"] for row in data["leaves"])
    by_kind = sum(row["device_bytes"] for row in data["kinds"])
    assert by_leaf == by_kind == data["device_bytes"]
    by_group = sum(row["device_bytes"] for row in data["groups"])
    other = report.traffic.amount(lambda t: t.purpose == "other").device_bytes
    assert by_group == data["device_bytes"] - other
    assert sorted(row["name"] for row in data["groups"][::2]) == ["down", "scale", "up"]
    names = {row["name"] for row in data["leaves"] if row["purpose"] == "gradients"}
    assert names == {"up[i]", "down[i]", "scale[i]"}


def test_halves_of_devices_add_scalars_alone():
    _, plain = _compiled("zero3", "2x4-auto", 1)
    text, halved = _compiled("halves", "2x4-auto", 1)
    added = halved.traffic.amount().device_bytes - plain.traffic.amount().device_bytes
    (scalars,) = (c for c in zoo.hlo.collectives(text) if "halves" in c.line)
    sizes = [shape.size for shape in scalars.results]  # XLA:CPU joins it with that of the loss
    assert (scalars.op, scalars.trips, sizes) == ("all-reduce", 1, [1, 9])
    assert added == 9 * 4 * 2 * 7 // 8
