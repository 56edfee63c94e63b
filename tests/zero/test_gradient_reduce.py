"""Gradients that are values of a `custom_vjp`: fp8 layers of Flax, and leaves of one's own."""

import dataclasses
import functools
import io

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import fp8_ops
from rich.console import Console

import jaxzero as jz
from tests import zoo

OWG = "_overwrite_with_gradient"
TYPED = nnx.variablelib.variable_type_from_name(OWG, allow_register=True)
DOT = functools.partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=4)
WIDTH = 6


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH, dot_general_cls=DOT)(nn.tanh(x)), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0, OWG: 0},
            split_rngs={"params": True},
            length=2,
        )
        return scan(name="layers")(x, None)[0]


def _batch(rows=48):
    x = jax.random.normal(jax.random.key(1), (rows, WIDTH))
    return x * jnp.linspace(0.1, 5, rows)[:, None]  # devices see rows of different size


def _sums(variables, batch):
    errors = ((jnp.asarray(Stack().apply(variables, batch)) - 1) ** 2).mean(-1)
    return errors.sum(), jnp.float32(len(batch))


def _loss(variables, batch):
    total, weight = _sums(variables, batch)
    return total / weight


@functools.cache
def _variables():
    """Variables whose histories are not zero, so that scales come from them."""
    variables = jax.jit(Stack().init)(jax.random.key(0), _batch())
    leaves, treedef = jax.tree.flatten(variables[OWG])
    keys = jax.random.split(jax.random.key(2), len(leaves))
    state = [
        jax.random.uniform(k, x.shape, x.dtype, 0.5) for k, x in zip(keys, leaves, strict=True)
    ]
    return {**variables, OWG: jax.tree.unflatten(treedef, state)}


@pytest.fixture(scope="module")
def one_device():
    return jax.device_get(jax.jit(jax.value_and_grad(_loss))(_variables(), _batch()))


def _assert_as_one_device(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found[OWG], expected[OWG])
    # Means of rows in another order: some roundings of float32.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        found["params"],
        expected["params"],
    )


@pytest.mark.parametrize(
    ("config", "mesh", "options"),
    [
        (jz.zero3(), "2x4-auto", {}),
        (jz.zero3(), "2x4-explicit", {"microbatches": 2, "weighted": True}),
        (jz.ddp(), "2x4-auto", {"weighted": True}),
        (jz.ZeroConfig(stage=2), "2x4-auto", {"halves": True}),
        (jz.zero3(), "2x4-auto", {"microbatches": 2, "shares": (2, 1)}),
        pytest.param(jz.hsdp(), "2x4-auto", {"microbatches": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=["zero3", "weighted", "ddp", "halves", "shares", "hsdp"],
)
@pytest.mark.one_in(2)
def test_flax_fp8_has_the_numbers_of_one_device(one_device, config, mesh, options):
    zero = jz.Zero(zoo.make_mesh(mesh), config)
    function = _sums if options.get("weighted") else _loss
    step = jax.jit(zero.value_and_grad(function, **options))
    given = {name: options[name] for name in ("microbatches", "shares") if name in options}
    batch, _ = jz.pad_batch(_batch(), zero, **given)
    loss, grads, *halves = step(zero.shard(_variables()), batch)
    np.testing.assert_allclose(loss, one_device[0], rtol=1e-6)
    _assert_as_one_device(jax.device_get(zero.unshard(grads)), one_device[1])
    for products in halves:
        assert all(x == 0 for x in jax.tree.leaves(products.first[OWG]))


@pytest.mark.ci
def test_flax_fp8_under_the_codecs_of_zeropp(one_device):
    """Gradients in 4 bits change no bit of the state; weights in 8 bits change their maxima."""
    expected = one_device[1]
    for weights, is_exact in ((jz.PerAxis(), True), (jz.zeropp().weights, False)):
        config = jz.zero3(weights=weights, gradients=jz.zeropp().gradients)
        zero = jz.Zero(jz.make_mesh(nodes=2), dataclasses.replace(config, min_quantized_size=0))
        grads = jax.jit(zero.value_and_grad(_loss))(zero.shard(_variables()), _batch())[1]
        found = jax.device_get(zero.unshard(grads))
        of_state, of_params = (
            jax.tree.leaves(jax.tree.map(np.array_equal, found[kind], expected[kind]))
            for kind in (OWG, "params")
        )
        assert all(of_state) == is_exact and not all(of_params)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_state_is_never_encoded(microbatches):
    """With codecs of 4 bits for arrays of any size, and a wire state."""
    config = dataclasses.replace(jz.zeropp4(), min_quantized_size=0)
    zero = jz.Zero(jz.make_mesh(nodes=2), config)
    params = {"w": jnp.ones((8, 16)), "history": jax.random.normal(jax.random.key(3), (8, 16))}
    loss = _state_loss(lambda x, state: jnp.roll(state, 1, axis=0))
    given = zero.shard(params)
    step = zero.value_and_grad(
        loss, gradient_reduce={"w": "mean", "history": "max"}, microbatches=microbatches
    )
    wire_state = zero.init_wire_state(given)
    _, grads, new = step(given, jnp.ones((16, 8)), wire_state=wire_state)
    np.testing.assert_array_equal(
        zero.unshard(grads)["history"], np.roll(params["history"], 1, axis=0)
    )
    assert jax.tree.structure(new) == jax.tree.structure(wire_state)


def _state_loss(next_state, name="history"):
    """A loss whose gradient of `name` is `next_state(rows, state)`."""

    @jax.custom_vjp
    def tap(x, state):
        return x

    tap.defvjp(
        lambda x, state: (x, (x, state)),
        lambda saved, g: (g, next_state(*saved).astype(jnp.float32)),
    )
    return lambda params, batch: ((tap(batch, params[name]) @ params["w"]) ** 2).mean()


@pytest.mark.parametrize(
    ("mesh", "stage", "microbatches", "weighted"),
    [("3x2-auto", 3, 2, True), ("2x4-explicit", 1, 1, False)],
)
def test_reductions_of_own_leaves(mesh, stage, microbatches, weighted):
    """Each device and micro-batch has largest rows of its own; 7 elements are stored padded."""

    @jax.custom_vjp
    def tap(x, states):
        return x

    def backward(saved, g):
        largest, largest_g = jnp.abs(saved).max(0), jnp.abs(g).max(0)
        return g, dict.fromkeys(("max", "sum", "mean", "first"), largest) | {"cotangent": largest_g}

    tap.defvjp(lambda x, states: (x, x), backward)
    names = ("max", "sum", "mean", "first", "cotangent")
    params = {"w": jax.random.normal(jax.random.key(0), (7, 7))}
    params |= {"states": {name: jnp.zeros(7) for name in names}}
    batch = jax.random.normal(jax.random.key(1), (48, 7))

    def sums(params, batch):
        errors = ((tap(batch, params["states"]) @ params["w"]) ** 2).sum(1)
        return errors.sum(), jnp.float32(len(batch))

    def loss(params, batch):
        return jnp.divide(*sums(params, batch))

    zero = jz.Zero(zoo.make_mesh(mesh), jz.ZeroConfig(stage=stage))
    how = {name: name for name in names} | {"cotangent": "max"}
    step = zero.value_and_grad(
        sums if weighted else loss,
        weighted=weighted,
        microbatches=microbatches,
        gradient_reduce={"w": "mean", "states": how},
    )
    grads = zero.unshard(step(zero.shard(params), batch)[1])
    parts = np.abs(batch).reshape(zero.num_devices * microbatches, -1, 7).max(1)
    one = jax.grad(loss)(params, batch)
    states = grads["states"]
    np.testing.assert_array_equal(states["max"], parts.max(0))
    np.testing.assert_array_equal(states["first"], parts[0])
    np.testing.assert_allclose(states["sum"], parts.sum(0), rtol=1e-6)
    np.testing.assert_allclose(states["mean"], parts.mean(0), rtol=1e-6)
    np.testing.assert_allclose(states["cotangent"], one["states"]["cotangent"], rtol=1e-5)
    np.testing.assert_allclose(grads["w"], one["w"], rtol=1e-5, atol=1e-6)


def test_a_nan_of_one_device_is_the_maximum():
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = zero.shard({"w": jnp.ones((8, 8)), "history": jnp.zeros(8)})
    step = zero.value_and_grad(
        _state_loss(lambda x, state: x.max(0)),
        has_aux=False,
        gradient_reduce={"w": "mean", "history": "max"},
    )
    batch = jnp.ones((16, 8)).at[5, 3].set(jnp.nan)
    found = np.asarray(zero.unshard(step(params, batch)[1])["history"])
    np.testing.assert_array_equal(found, np.where(np.arange(8) == 3, np.nan, 1))


def test_maximum_of_outputs():
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = zero.shard({"w": jnp.ones((8, 8))})
    largest = zero.apply(lambda p, b: (b.max(), b.astype(jnp.int32).max()), out_reduce="max")
    assert largest(params, jnp.arange(16.0)[:, None]) == (15, 15)
    complexes = zero.apply(lambda p, b: jax.lax.complex(b.sum(), b.sum()), out_reduce="max")
    with pytest.raises(ValueError, match="complex64 has no order"):
        complexes(params, jnp.ones((16, 8)))


# Optimizers.


def test_optimizers_leave_out_what_gradients_overwrite(one_device):
    zero = jz.Zero(jz.make_mesh(nodes=2))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    params = zero.shard(_variables())
    opt_state = zero.init_optimizer(tx, params)
    assert OWG not in str(jax.tree_util.tree_leaves_with_path(opt_state))

    @jax.jit
    def step(params, opt_state, batch):
        _, grads = zero.value_and_grad(_loss)(params, batch)
        return zero.apply_gradients(tx, grads, opt_state, params)

    weights, grads = _variables()["params"], one_device[1]
    updates, _ = jax.jit(tx.update)(grads["params"], tx.init(weights), weights)
    expected = {"params": optax.apply_updates(weights, updates), OWG: grads[OWG]}
    _assert_as_one_device(zero.unshard(step(params, opt_state, _batch())[0]), expected)
    in_one = zero.value_and_update(_loss, optax.sgd(0.1))
    state = zero.init_optimizer(optax.sgd(0.1), params)
    new = zero.unshard(in_one(params, state, _batch())[1])
    jax.tree.map(np.testing.assert_array_equal, new[OWG], grads[OWG])


class Fp8(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
        for name in ("input", "kernel", "output_grad"):
            setattr(self, f"{name}_scale", TYPED(jnp.ones(1)))
            setattr(self, f"{name}_amax_history", TYPED(jnp.ones(4)))

    def __call__(self, x):
        operands = {"lhs": "input", "rhs": "kernel", "grad": "output_grad"}
        state = {
            f"{operand}_{kind}": getattr(self, f"{name}_{kind}")[...]
            for operand, name in operands.items()
            for kind in ("scale", "amax_history")
        }
        dims = (((1,), (0,)), ((), ()))
        return fp8_ops.fp8_scaled_dot_general(
            x, self.kernel[...], dims, preferred_element_type=x.dtype, **state
        )


def test_nnx():
    """A module; and its parts as two arguments."""
    zero, module = jz.Zero(jz.make_mesh(nodes=2)), Fp8(nnx.Rngs(0))
    graph, weights, state = nnx.split(module, nnx.Param, TYPED)

    def loss(module, batch):
        return (module(batch) ** 2).mean()

    def of_parts(weights, state, batch):
        return loss(nnx.merge(graph, weights, state), batch)

    both = (0, 1)
    expected = jax.jit(jax.grad(of_parts, both))(weights, state, _batch())
    of_module = zero.unshard(zero.value_and_grad(loss)(zero.shard(module), _batch())[1])
    grads = zero.value_and_grad(of_parts, both)(zero.shard(weights), zero.shard(state), _batch())[1]
    for found in (nnx.split(of_module, nnx.Param, TYPED)[1:], tuple(map(zero.unshard, grads))):
        np.testing.assert_allclose(
            found[0]["kernel"][...], expected[0]["kernel"][...], rtol=1e-5, atol=1e-5
        )
        jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])


def test_local_steps_do_not_exchange_it():
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = zero.shard({"w": jnp.ones((8, 8)), OWG: jnp.zeros(8)})
    loss = _state_loss(lambda x, state: x.max(0), OWG)

    def step(params, opt_state, batch):
        value, grads = zero.value_and_grad(loss)(params, batch)
        return {"w": params["w"], OWG: grads[OWG]}, opt_state, value

    rounds = zero.local_steps(step, every=1)
    batch = jnp.repeat(jnp.arange(16.0)[:, None], 8, 1)[None]
    state, _ = rounds(rounds.init(params, zero.shard({"count": jnp.zeros(8)})), batch)
    assert state.outer_params[OWG] is None
    np.testing.assert_array_equal(state.params[OWG][:, 0], [7, 15])
    np.testing.assert_array_equal(zero.unshard(rounds.mean(state))[OWG], 15)


# What is state, and what is shown and refused.


def _are_state(tree):
    """For each leaf: whether it has no momentum, since its gradient is its next value."""
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = zero.abstract(lambda: tree)
    momenta = zero.init_optimizer(optax.trace(0.9), params).trace
    trained = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(momenta)}
    leaves = jax.tree.leaves_with_path(params)
    return [jax.tree_util.keystr(path) not in trained for path, _ in leaves]


def test_recognized_by_collection_type_and_names():
    x = jnp.ones(8)
    names = [
        f"{x}_{y}" for x in ("input", "kernel", "output_grad") for y in ("scale", "amax_history")
    ]
    layer = dict.fromkeys(names, x)
    assert _are_state({OWG: {"dense": {"anything": x}}}) == [True]
    assert _are_state({"dense": layer}) == [True] * 6
    others = {"dense": {"input_scale": x, "kernel": x}, "other": x}
    assert _are_state(others) == [False] * 3
    assert _are_state({"dense": {**layer, "bias": x}}) == [False, *[True] * 6]
    of_module = _are_state(nnx.state(Fp8(nnx.Rngs(0))))
    assert (of_module.count(True), of_module.count(False)) == (6, 1)
    assert _are_state(nnx.State({"a": TYPED(x), "b": nnx.Param(x)})) == [True, False]


def test_plan_and_report_show_the_reduction():
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = zero.shard(_variables())
    plan = zero.plan(_loss, params, _batch())
    assert "at the end: maximum over devices and micro-batches of _overwrite_with" in str(plan)
    assert "reduce-scatter bucket" in str(plan)
    shown = io.StringIO()
    zero.report(params, plan=plan).print("reductions", Console(file=shown, width=400))
    assert "At the end, maximum over devices and micro-batches of _overwrite" in shown.getvalue()
    assert not [x for x in plan.steps if x.action == "reduce" and OWG in x.name]
    sent = [x for x in plan.transfers if OWG in x.name]
    assert {(x.purpose, x.collective) for x in sent} == {("gradients", "all-reduce")}


def test_messages():
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = zero.shard({"w": jnp.ones((8, 8)), "c": jnp.ones(8, jnp.complex64)})
    batch = jnp.ones((16, 8))

    def loss(params, batch):
        return jnp.sum(params["w"]) * batch.mean() + jnp.abs(params["c"]).sum()

    def grad(function=loss, **options):
        return zero.value_and_grad(function, **options)(params, batch)

    with pytest.raises(ValueError, match="`gradient_reduce` must be a tree prefix .* 'concat'"):
        grad(gradient_reduce="concat")
    with pytest.raises(ValueError, match="not a tree prefix of what is differentiated"):
        grad(gradient_reduce={"w": "mean"})
    with pytest.raises(ValueError, match="the maximum of the leaf `c`"):
        grad(gradient_reduce="max")
    of_parameters = {"w": "max", "c": "mean"}
    with pytest.raises(ValueError, match="weight .* is computed from parameters"):
        grad(lambda p, b: (loss(p, b), p["w"].sum()), weighted=True, gradient_reduce=of_parameters)
