"""What programs written for plain JAX, Flax and optax bring along: it works, or the error helps."""

from __future__ import annotations

import functools

import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jaxzero as jz
from tests import zoo

from .helpers import assert_equal, make_rows, mean_loss, on_one_device, whole_params

# Mutable arrays and tokens.


def test_mutable_arrays_of_the_caller_are_refused_by_name(auto):
    params, x, ref = auto.shard(whole_params()), make_rows(auto), jax.new_ref(jnp.zeros(3))

    def closed(params, x):
        ref[...] += 1.0
        return mean_loss(params, x)

    def argument(params, state, x):
        state["mean"][...] = x.mean(0)[:3]
        return mean_loss(params, x)

    for wrap in (lambda f: f, jax.jit):
        with pytest.raises(ValueError, match=r"closes over a mutable array.*float32\[3\].*has_aux"):
            wrap(auto.value_and_grad(closed))(params, x)
        step = auto.value_and_grad(argument, batch_argnums="x")
        with pytest.raises(ValueError, match=r"`state` \(argument 1\), leaf `mean`: it is a mut"):
            wrap(step)(params, {"mean": ref}, x)
    with pytest.raises(ValueError, match="`state` .*mutable array"):
        auto.apply(argument)(params, {"mean": ref}, x)
    with pytest.raises(ValueError, match=r"mutable array .*Pass its value, `ref\[\.\.\.\]`"):
        auto.init(lambda ref: {"w": jnp.ones(3) * ref[...]}, ref)


def test_a_mutable_array_of_the_function_itself(auto):
    def loss(params, x):
        total = jax.new_ref(jnp.zeros([]))

        def add(i, _):
            total[...] += mean_loss(params, x) * (i + 1)
            return i + 1, None

        jax.lax.scan(add, 0.0, length=2)
        return total[...]

    params, x = auto.shard(whole_params()), make_rows(auto)
    step = auto.value_and_grad(loss)
    assert_equal(auto, step(params, x), on_one_device(loss)(whole_params(), x))
    got = jax.jit(lambda p: jax.jvp(lambda p: step(p, x), (p,), (p,))[1])(params)
    want = jax.jvp(jax.value_and_grad(lambda p: loss(p, x)), (whole_params(),), (whole_params(),))
    assert_equal(auto, got, want[1])


def test_a_token_that_is_closed_over(auto):
    token = jax.lax.create_token()

    def loss(params, x):
        value = mean_loss(params, x)

        def doubled(value):
            jax.lax.after_all(token)
            return 2 * value

        return jax.lax.cond(value > 0, doubled, jnp.negative, value), {"token": token}

    (got, aux), grads = auto.value_and_grad(loss, has_aux=True)(
        auto.shard(whole_params()), make_rows(auto)
    )
    want = on_one_device(lambda params, x: loss(params, x)[0])(whole_params(), make_rows(auto))
    assert_equal(auto, (got, grads), want)
    assert aux["token"] is token


# Leaves that are no arrays.


class _Head(eqx.Module):
    scale: jax.Array
    act: object = jax.nn.relu


def test_leaves_of_aux_that_are_no_arrays_come_back(zero):
    given = {"name": "mse", "head": _Head(jnp.ones(3)), "none": None, "numbers": (1.5, 2)}

    def loss(params, x):
        return mean_loss(params, x), given

    step = zero.value_and_grad(loss, has_aux=True, aux_reduce="first")
    aux = step(zero.shard(whole_params()), make_rows(zero))[0][1]
    assert jax.tree.structure(aux) == jax.tree.structure(given)
    assert aux["name"] == "mse" and aux["head"].act is jax.nn.relu
    np.testing.assert_array_equal(aux["head"].scale, np.ones(3))
    assert [float(x) for x in aux["numbers"]] == [1.5, 2]
    apply = zero.apply(lambda params, x: {"sums": x.sum(1), "by": "row"})
    out = apply(zero.shard(whole_params()), make_rows(zero))
    assert out["by"] == "row" and out["sums"].shape == (2 * zero.num_devices,)


def _scaled_by_its_state():
    """An optimizer whose state is a Python number, new at each update."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda x: x * state["scale"], updates), {"scale": 0.25, "count": 1}

    return optax.GradientTransformation(lambda _: {"scale": 0.5, "count": 0}, update)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.one_in(2)
def test_python_numbers_in_the_state_of_an_optimizer(zero, wrap):
    tx = zero.optimizer(_scaled_by_its_state()) if wrap else _scaled_by_its_state()
    params, state = zero.shard(whole_params()), None
    grads, opt_state = params, zero.init_optimizer(tx, params)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(opt_state))
    for _ in range(2):
        params, opt_state = zero.apply_gradients(tx, grads, opt_state, params)
    want, state = whole_params(), _scaled_by_its_state().init(None)
    for _ in range(2):
        updates, state = _scaled_by_its_state().update(whole_params(), state)
        want = optax.apply_updates(want, updates)
    zoo.assert_close(jax.device_get(zero.unshard(params)), jax.device_get(want), 1e-6, "params")
    assert float(opt_state["scale"]) == 0.25 and int(opt_state["count"]) == 1


def test_numbers_that_an_update_outside_of_jit_returns_are_taken(auto):
    params, tx = auto.shard(whole_params()), _scaled_by_its_state()
    opt_state = tx.update(params, auto.init_optimizer(tx, params), params)[1]
    assert opt_state == {"scale": 0.25, "count": 1}
    new = auto.apply_gradients(tx, params, opt_state, params)[0]
    want = jax.tree.map(lambda x: 1.25 * x, whole_params())
    zoo.assert_close(jax.device_get(auto.unshard(new)), jax.device_get(want), 1e-6, "params")


# Python code that reads values.


def _loss_that(reads):
    def loss(params, x, flag=True):
        del flag
        return mean_loss(params, x) * reads(params, x)

    return loss


@pytest.mark.parametrize(
    ("reads", "names"),
    [
        (lambda params, x: 2 if mean_loss(params, x) > 0 else 1, "`params` .0. and `x` .1."),
        (lambda params, x: [1, 2][jnp.argmax(x[0])], "`x` .1."),
        (lambda params, x: np.asarray(params["head"]).sum(), "`params` .0."),
        (lambda params, x: jnp.zeros(jnp.argmax(x[0])).sum(), "`x` .1."),
        (lambda params, x: float(x.sum()), "`x` .1."),
        (lambda params, x: x[x > 0].sum(), ""),
        (lambda params, x: x.sum().item(), "`x` .1."),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_that_reads_values_in_python(auto, reads, names, microbatches):
    named = names.replace(".0.", r"\(argument 0\)").replace(".1.", r"\(argument 1\)")
    what = rf"in Python.*{named}: `.*test_other_programs\.py.*line \d+.*always trace.*lax\.cond"
    step = auto.value_and_grad(_loss_that(reads), microbatches=microbatches)
    with pytest.raises(ValueError, match=what):
        step(auto.shard(whole_params()), make_rows(auto))


def test_an_optimizer_that_reads_values_in_python(auto):
    def halved_if_large(updates, state, params=None):
        del params
        if optax.tree.norm(updates) > 1:
            updates = jax.tree.map(lambda x: x / 2, updates)
        return updates, state

    tx, params = optax.GradientTransformation(lambda _: (), halved_if_large), whole_params()
    with pytest.raises(ValueError, match=r"depends on `grads`: `if optax\.tree\.norm"):
        auto.apply_gradients(tx, auto.shard(params), (), auto.shard(params))


def test_python_code_in_a_part_with_its_own_trace_keeps_the_error_of_jax(auto):
    inner = jax.jit(lambda value: 1 if value > 0 else 2)
    with pytest.raises(jax.errors.TracerBoolConversionError, match="argument value"):
        auto.apply(_loss_that(lambda params, x: inner(x.sum())))(
            auto.shard(whole_params()), make_rows(auto)
        )


# Flax.


class _Plain(nnx.Module):
    def __init__(self, rngs, trained=False):
        self.w = jnp.ones((8, 3))
        if trained:
            self.bias = nnx.Param(jnp.zeros(8))

    def __call__(self, x):
        return (x + self.bias[None]) @ self.w if hasattr(self, "bias") else x @ self.w


def _module_loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


@pytest.mark.standard_promotion
def test_plain_arrays_of_an_nnx_module_are_not_trained_and_it_is_said(auto):
    x = make_rows(auto)
    step = auto.value_and_grad(_module_loss)
    with pytest.raises(ValueError, match=r"`model` .*nothing would get.*`w` the first.*nnx\.Param"):
        step(auto.shard(_Plain(nnx.Rngs(0))), x)
    model = auto.shard({"inner": _Plain(nnx.Rngs(0), trained=True)})
    with pytest.warns(UserWarning, match=r"other leaves is None.*`inner\.w` the first of 1"):
        grads = auto.value_and_grad(lambda m, x: _module_loss(m["inner"], x))(model, x)[1]
    assert grads["inner"].w is None and grads["inner"].bias[...].shape == (8,)
    with pytest.raises(ValueError, match=r"static attribute.*nnx\.Param\(array\).*zero\.shard"):
        auto.init(lambda: _Plain(nnx.Rngs(0)))


class _Partitioned(nn.Module):
    names: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), self.names)
        return nn.Dense(16, kernel_init=kernel_init)(x)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_boxes_that_name_mesh_axes_are_removed(kind):
    mesh = jax.make_mesh((2, 2, 2), ("node", "local", "model"), axis_types=(kind,) * 3)
    zero, model = jz.Zero(mesh), _Partitioned(("data", "model"))
    x = zoo.normal(jax.random.key(1), 0, 16, 8)
    init = functools.partial(model.init, jax.random.key(0), x)
    boxed = init()

    def loss(variables, x):
        return jnp.mean((jnp.asarray(model.apply(variables, x)) - 1) ** 2)

    for params in (zero.init(init), zero.shard(boxed)):
        kernel = params["params"]["Dense_0"]["kernel"]
        assert kernel.sharding.spec == PartitionSpec(("local", "node"), "model")
    assert jax.tree.structure(zero.abstract(init)) == jax.tree.structure(params)
    want = on_one_device(loss)(nn.meta.unbox(boxed), x)
    assert_equal(zero, jax.jit(zero.value_and_grad(loss))(params, x), want)


def test_a_padded_leaf_says_how_to_serialize_and_to_match_it(auto):
    params = auto.shard(whole_params())
    for call in (
        lambda: flax.serialization.to_bytes(params),
        lambda: flax.serialization.from_state_dict(params, whole_params()),
    ):
        with pytest.raises(TypeError, match=r"flax\.serialization.*zero\.unshard"):
            call()
    with pytest.raises(ValueError, match=r"StoredArray'> \(.*zero\.shard.*zero\.unshard"):
        jax.tree.map(jnp.add, params, whole_params())
    assert flax.serialization.to_bytes(auto.unshard(params))
