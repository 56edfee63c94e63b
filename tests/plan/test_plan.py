"""The plan as data: what is gathered and reduced, where, and how it prints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz

WIDTH, LAYERS = 16, 3


@pytest.fixture(scope="module")
def zero():
    return jz.Zero(jz.make_mesh(2))


def _params():
    ones = np.ones
    return {
        "stack": ones((LAYERS, WIDTH, WIDTH), np.float32),
        "head": ones((WIDTH, 8), np.float32),
        "scale": np.float32(1),
    }


def _loss(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w.astype(jnp.bfloat16).astype(jnp.float32)), None

    x, _ = jax.lax.scan(layer, x, params["stack"])
    return jnp.mean(x @ params["head"]) * params["scale"]


def test_steps_of_a_scanned_model(zero):
    params = zero.shard(_params())
    plan = zero.plan(_loss, params, np.ones((8, WIDTH), np.float32))
    steps = [(s.action, s.name, s.shape, s.dtype, s.trips) for s in plan.steps]
    layer, head = (WIDTH, WIDTH), (WIDTH, 8)
    assert steps == [
        ("gather", "stack[i]", layer, "bfloat16", LAYERS),
        ("gather", "head", head, "float32", 1),  # held for backward, where it is needed at once
        ("reduce", "head", head, "float32", 1),
        ("gather", "stack[i]", layer, "bfloat16", LAYERS),
        ("reduce", "stack[i]", layer, "bfloat16", LAYERS),
    ]
    regions = [s.region for s in plan.steps if s.name == "head"]
    assert regions == ["forward", "backward"]
    assert plan.at_end == ("scale",)


def test_it_prints(zero):
    params = zero.shard(_params())
    text = str(zero.plan(_loss, params, np.ones((8, WIDTH), np.float32)))
    assert "head" in text
    assert "all-gather bucket 0" in text and "reduce-scatter bucket 0" in text
    assert "prefetched in the iteration before" in text
    assert "deferred to the iteration after" in text
    assert "x3" in text
    assert text.endswith("at the end: all-reduce scale")


def test_its_columns_are_aligned(zero):
    params = zero.shard(_params())
    *lines, _ = str(zero.plan(_loss, params, np.ones((8, WIDTH), np.float32))).splitlines()
    for word in ("before dot_general", "prefetched", "dropped after"):
        assert len({line.index(word) for line in lines if word in line}) == 1


def _hops(plan, action, name):
    return [
        [(x.axis, x.lag) for x in s.hops]
        for s in plan.steps
        if (s.action, s.name) == (action, name)
    ]


def test_each_hop_of_a_bucket_has_its_place(zero):
    params, batch = zero.shard(_params()), np.ones((8, WIDTH), np.float32)
    plan = zero.plan(_loss, params, batch)
    assert _hops(plan, "gather", "head") == [[("node", 0), ("local", 0)]]
    assert _hops(plan, "reduce", "head") == [[("local", 0), ("node", 0)]]
    # Two layers ahead between nodes, one inside; reductions one and two layers later.
    assert _hops(plan, "gather", "stack[i]") == [[("node", -2), ("local", -1)]] * 2
    assert _hops(plan, "reduce", "stack[i]") == [[("local", 1), ("node", 2)]]
    text = str(plan)
    assert "over node" in text and "2 layers ahead" in text and "2 layers later" in text
    kept = jz.Zero(zero.mesh, jz.ZeroConfig(hpz=jz.HpZ(codec=None)))
    later = _hops(kept.plan(_loss, params, batch), "gather", "stack[i]")
    assert later == [[("node", -2), ("local", -1)], [("local", -1)]]  # backward: from node slices
    alone = jz.Zero(jz.make_mesh(1))
    plan = alone.plan(_loss, alone.shard(_params()), batch)
    assert _hops(plan, "gather", "head") == [[("local", 0)]] == _hops(plan, "reduce", "head")


def test_slices_of_a_stack_are_gathered_one_by_one(zero):
    def loss(params, x):
        for i in range(LAYERS):
            x = jnp.tanh(x @ params["stack"][i])
        return jnp.mean(x)

    params = zero.shard({"stack": _params()["stack"]})
    plan = zero.plan(loss, params, np.ones((8, WIDTH), np.float32))
    assert {s.shape for s in plan.steps} == {(1, WIDTH, WIDTH)}
    assert sum(s.action == "reduce" for s in plan.steps) == LAYERS


def test_stage_two_gathers_nothing_and_still_reduces_in_the_loop():
    zero = jz.Zero(jz.make_mesh(2), jz.ZeroConfig(stage=2))
    plan = zero.plan(_loss, zero.shard(_params()), np.ones((8, WIDTH), np.float32))
    assert {s.action for s in plan.steps} == {"reduce"}
    assert ("stack[i]", LAYERS) in {(s.name, s.trips) for s in plan.steps}


def test_unused_leaves_cost_nothing(zero):
    params = zero.shard(
        {"used": np.ones((8, 8), np.float32), "unused": np.ones((8, 8), np.float32)}
    )
    plan = zero.plan(lambda p, x: jnp.mean(x @ p["used"]), params, np.ones((8, 8), np.float32))
    assert {s.name for s in plan.steps if s.action == "gather"} <= {"used"}


def test_two_leaves_with_one_gradient_are_both_reduced(zero):
    params = zero.shard({name: np.ones((16, 16), np.float32) for name in "ab"})
    plan = zero.plan(
        lambda p, x: jnp.mean((x @ (p["a"] + p["b"])) ** 2), params, np.ones((8, 16), np.float32)
    )
    assert [step.name for step in plan.steps if step.action == "reduce"] == ["a", "b"]


def test_a_plan_is_of_the_arguments_given(zero):
    """Also where a program for arguments of those shapes has been traced before."""

    def loss(params, batch):
        return _loss(params, batch["x"]), batch["extra"].mean(0)

    def sent(num):
        batch = {"x": np.ones((8, WIDTH), np.float32), "extra": np.ones((8, num), np.float32)}
        plan = zero.plan(loss, params, batch, has_aux=True)
        return [t.num_bytes for t in plan.transfers if t.name == "aux"]

    params = zero.shard(_params())
    assert [sent(num) for num in (3, 50, 3)] == [[12], [200], [12]]


def test_nothing_enters_the_only_node():
    zero = jz.Zero(jz.make_mesh(1), jz.zeropp())
    params = zero.shard(_params())
    plan = zero.plan(_loss, params, np.ones((8, WIDTH), np.float32))
    assert zero.report(params, plan=plan).traffic.node_bytes == 0


def _unrolled(shapes):
    """The plan of layers with these numbers of hidden units."""

    def loss(layers, x):
        for layer in layers:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x)

    layers = [
        {"up": np.ones((WIDTH, n), np.float32), "down": np.ones((n, WIDTH), np.float32)}
        for n in shapes
    ]
    zero = jz.Zero(jz.make_mesh(2), jz.ZeroConfig(schedule=jz.CommSchedule(bucket_bytes=2**11)))
    return zero.plan(loss, zero.shard(layers), np.ones((8, WIDTH), np.float32))


def test_equal_layers_are_printed_once_and_others_each():
    few, many = _unrolled([32] * 8), _unrolled([32] * 20)
    assert len(many.steps) - len(few.steps) == 12 * 6  # two gathers and a reduction of each array
    assert len(str(many).splitlines()) == len(str(few).splitlines())
    assert "times more, up to  " in str(many)
    between = str(_unrolled([32] * 8 + [24] + [32] * 8))
    (line,) = [x for x in between.splitlines() if "[16, 24]" in x and x.startswith("forward")]
    assert "8.up" in line


def test_hops_of_a_layers_second_bucket_are_apart(zero):
    """Over `local` it is sent between the products of the first bucket, half of them done."""

    def loss(params, x):
        def layer(x, w):
            for name in "abcde":
                x = jnp.tanh(x @ w[name])
            return x, None

        return jnp.mean(jax.lax.scan(layer, x, params)[0])

    layer = WIDTH * WIDTH * 4
    config = jz.ZeroConfig(schedule=jz.CommSchedule(bucket_bytes=4 * layer))
    zero = jz.Zero(zero.mesh, config)
    params = zero.shard({x: np.ones((LAYERS, WIDTH, WIDTH), np.float32) for x in "abcde"})
    plan = zero.plan(loss, params, np.ones((8, WIDTH), np.float32))
    forward = next(x for x in plan.steps if (x.action, x.name) == ("gather", "e[i]"))
    assert [(x.at, x.before) for x in forward.hops] == [(0, "dot_general"), (4, "tanh")]
