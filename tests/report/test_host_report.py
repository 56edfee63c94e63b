"""Host memory in the plan and the report, and the largest model, against counts by hand."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest

import jaxzero as jz

from .printed import live_bytes, printed, spans

pytestmark = pytest.mark.standard_promotion  # optax

LAYERS, WIDTH, DEVICES = 5, 8, 4
LAYER = WIDTH * WIDTH * 4 // DEVICES  # bytes of a layer's shard
HEAD = WIDTH * 12 * 4 // DEVICES  # of the head's
NUM_HOPS = 2  # mesh axes of several devices


def _init(key):
    return {
        "layers": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)),
        "head": jax.random.normal(key, (WIDTH, 12)),
    }


def _loss(params, x):
    def layer(h, weight):
        return jnp.tanh(h @ weight), None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.mean((h @ params["head"]) ** 2)


ALL = jz.Offload(weights=True, gradients=True, optimizer=True, min_size=0)


@functools.cache
def _report(offload=ALL, preset="zero3", prefetch=1, nodes=2, **options):
    config = dataclasses.replace(
        getattr(jz, preset)(), offload=offload, schedule=jz.CommSchedule(prefetch=prefetch)
    )
    zero = jz.Zero(jz.make_mesh(nodes, devices=jax.devices()[:DEVICES]), config)
    params = zero.init(_init, jax.random.key(0))
    opt_state = zero.init_optimizer(optax.adam(1e-3), params)
    x = np.ones((16, WIDTH), np.float32)
    return zero.report(params, opt_state, zero.plan(_loss, params, x, **options))


def _text(report, detail) -> str:
    return "\n".join(printed(report, detail))


def _peak(report) -> int:
    """The most bytes of full weights and unreduced gradients at one operation."""
    return live_bytes(spans(report), "gather", "reduce")


def test_steps_of_the_plan_copy_shards():
    plan = _report().plan
    fetches = [x for x in plan.steps if x.action == "fetch"]
    found = [(x.name, x.shape, x.num_bytes, x.trips, x.ahead, x.windowed) for x in fetches]
    layer = ("layers[i]", (WIDTH // DEVICES, WIDTH), LAYER, LAYERS, 1, True)
    shapes = [tuple(sorted(x[1])) for x in found if x[0] == "layers[i]"]
    assert shapes == [tuple(sorted(layer[1]))] * 2  # in forward and in backward
    assert [x[2:] for x in found if x[0] == "layers[i]"] == [layer[2:]] * 2
    assert [x[2:] for x in found if x[0] == "head"][:1] == [(HEAD, 1, 0, True)]
    offloads = [(x.name, x.num_bytes, x.trips) for x in plan.steps if x.action == "offload"]
    assert sorted(offloads) == [("head", HEAD, 1), ("layers[i]", LAYER, LAYERS)]
    text = str(plan)
    assert "copied 1 layer ahead" in text and "copy to host" in text and "once reduced" in text


def test_copies_without_prefetch_are_made_where_they_are_needed():
    plan = _report(prefetch=0).plan
    fetches = [x for x in plan.steps if x.action == "fetch" and x.name == "layers[i]"]
    assert {(x.ahead, x.sent == "the iteration before") for x in fetches} == {(0, False)}
    assert "ahead" not in str(plan)


@pytest.mark.parametrize("window", [1, 3])
def test_bytes_of_a_step(window):
    report = _report(dataclasses.replace(ALL, window=window))
    traffic = report.host_traffic
    assert traffic is not None and traffic.transfers is not None
    # Before the loop, a layer for each axis and `window` more; backward continues with the last,
    # and copies nothing if these are all.
    first = NUM_HOPS + window
    turns = 2 * LAYERS if first < LAYERS else LAYERS
    heads = sum(x.name == "head" and x.to == "device" for x in traffic.transfers)
    assert traffic.num_bytes("device", "forward") + traffic.num_bytes("device", "backward") == (
        (first + turns) * LAYER + heads * HEAD
    )
    # The last gradients are written after the loop: one for each axis, and one more.
    assert traffic.num_bytes("host", "backward") == (LAYERS + NUM_HOPS + 1) * LAYER + HEAD
    assert traffic.num_bytes("host", "forward") == 0
    shards = LAYERS * LAYER + HEAD
    assert report.host_bytes("parameters") == report.host_bytes("gradients") == shards
    assert report.device_bytes("parameters") == report.device_bytes("gradients") == 0
    assert report.host_bytes("optimizer state") == 2 * shards  # mean and variance
    assert report.device_bytes("optimizer state") == 4  # the counter
    assert traffic.num_bytes("device", "update") == (1 + 1 + 2) * shards
    assert traffic.num_bytes("host", "update") == (1 + 2) * shards


def test_shares_of_a_pattern():
    report = _report(jz.Offload(gradients="layers", min_size=0))
    assert report.host_bytes("parameters") == 0
    assert report.device_bytes("parameters") == LAYERS * LAYER + HEAD
    assert report.host_bytes("gradients") == LAYERS * LAYER
    assert report.device_bytes("gradients") == HEAD
    traffic = report.host_traffic
    assert (traffic.num_bytes("device", "forward"), traffic.update) == (0, (LAYERS * LAYER, 0))


@pytest.mark.parametrize(
    "options", [{"microbatches": 2, "prefetch": 0}, {"nodes": 1}, {"microbatches": 2}], ids=str
)
def test_what_is_copied_in_full_is_named(options):
    report = _report(preset="zeropp", **options)
    weights = {x.name for x in report.host_traffic.whole if x.purpose == "weights"}
    # Node slices (hpZ) are made of full shards, or in the first of several micro-batches.
    is_full = options != {"microbatches": 2}
    assert weights == ({"layers", "head"} if is_full else set())
    text = _text(report, "host")
    assert ("Weights copied in full, not layer by layer: head, layers." in text) == is_full
    assert ("Gradients copied in full" in text) == ("microbatches" in options)
    assert "in full" in str(report.plan)


def test_nothing_is_said_without_offload():
    report = _report(None)
    assert report.host_traffic is None and report.as_dict()["host_traffic"] is None
    assert "Nothing is in host memory." in _text(report, "host")
    assert "host" not in _text(report, "state").split("share")[1]


def test_it_prints_and_is_plain_data():
    report = _report()
    text = _text(report, ["leaves", "state", "host", "timeline"])
    assert max(map(len, text.splitlines())) <= 80
    assert "on host" in text.splitlines()[0]
    assert "copy to device" in text and "copy to host" in text
    data = json.loads(json.dumps(report.as_dict()))
    assert data["bytes"]["parameters"]["host_per_device"] == report.host_bytes("parameters")
    assert data["host_traffic"]["parts"]["update"]["to_host"] == report.host_traffic.update[1]


def test_copies_are_spans_beside_the_buckets():
    with_copies, without = spans(_report()), spans(_report(None))
    assert {x.action for x in with_copies} == {"gather", "reduce", "fetch", "offload"}
    buckets = [x for x in with_copies if x.action in ("gather", "reduce")]
    assert [_held(x) for x in buckets] == [_held(x) for x in without]


def _held(span) -> tuple[str, int, int, int]:
    return span.action, span.num_bytes, span.start, span.stop


# The largest model.


def test_largest_model_without_offload_by_hand():
    report = _report(None)
    full = 4 * WIDTH * WIDTH
    peak = _peak(report)
    assert peak >= full
    # Parameters, gradients, mean and variance: four arrays; and the counter.
    fixed = 4 * HEAD + 4 + peak + 1000
    for num in (1, 7, 100):
        room = fixed + num * (4 * LAYER + 16)
        options = {"activation_bytes": 1000, "layer_activation_bytes": 16}
        found = report.largest_model(device_bytes=room, **options)
        assert (found.num_layers, found.limit, found.host_bytes) == (num, "device", 0)
        assert found.num_parameters == num * WIDTH * WIDTH + WIDTH * 12
        assert found.device_bytes == room
        less = report.largest_model(device_bytes=room - 1, **options)
        assert less.num_layers == num - 1
    assert report.largest_model(device_bytes=0).num_parameters == 0


def test_largest_model_with_all_in_host_memory_by_hand():
    report = _report()
    for num in (1, 9):
        room = 4 * (HEAD + num * LAYER)
        found = report.largest_model(device_bytes=10**6, host_bytes=room)
        assert (found.num_layers, found.limit, found.host_bytes) == (num, "host", room)
        less = report.largest_model(device_bytes=10**6, host_bytes=room - 1)
        assert less.num_layers == num - 1
    assert found.device_bytes < 10**4  # the device holds a window, whatever the depth
    assert report.largest_model(device_bytes=10, host_bytes=10**9).limit == "device"


def test_shards_copied_in_full_take_device_memory():
    report = _report(preset="zeropp", microbatches=2, prefetch=0)
    found = [
        report.largest_model(device_bytes=size, host_bytes=10**9) for size in (10**6, 10**6 + 10**5)
    ]
    assert all(x.limit == "device" for x in found)
    per_layer = 10**5 / (found[1].num_layers - found[0].num_layers)
    # Shards of weights and gradients, and the node slice: a shard of each node.
    np.testing.assert_allclose(per_layer, (1 + 1 + 2) * LAYER, rtol=0.02)


def test_numbered_layers_are_found():
    zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:DEVICES]))
    tree = {"layers": [np.ones((WIDTH, WIDTH), np.float32)] * 3, "head": np.ones((WIDTH, 12), "f4")}
    params = zero.shard(tree)

    def loss(params, x):
        for weight in params["layers"]:
            x = jnp.tanh(x @ weight)
        return jnp.mean((x @ params["head"]) ** 2)

    plan = zero.plan(loss, params, np.ones((16, WIDTH), np.float32))
    opt_state = zero.init_optimizer(optax.sgd(0.1), params)
    report = zero.report(params, opt_state, plan)
    peak = _peak(report)
    found = report.largest_model(device_bytes=2 * HEAD + peak + 10 * 2 * LAYER)
    assert (found.num_layers, found.num_parameters) == (10, 10 * WIDTH**2 + WIDTH * 12)


def test_mistakes(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    report = _report()
    with pytest.raises(ValueError, match="`device_bytes` must be a number of bytes"):
        report.largest_model(device_bytes=-1)
    for wrong in ("80GB", None, True, float("nan")):
        with pytest.raises(ValueError, match=f"`host_bytes` must be .*; got {wrong!r}"):
            report.largest_model(device_bytes=10**9, host_bytes=wrong)
    zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:DEVICES]))
    params = zero.shard({"kernel": np.ones((WIDTH, WIDTH), np.float32)})
    plan = zero.plan(lambda p, x: (x @ p["kernel"]).mean(), params, np.ones((8, WIDTH), "f4"))
    with pytest.raises(ValueError, match="lacks one of them.*zero.report"):
        zero.report(params, plan=plan).largest_model(device_bytes=10**9)
    opt_state = zero.init_optimizer(optax.sgd(0.1), params)
    with pytest.raises(ValueError, match="No layers are found"):
        zero.report(params, opt_state, plan).largest_model(device_bytes=10**9)
