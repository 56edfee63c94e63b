"""Pipeline stages of a list of layers, and of layers that a Python loop unrolls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxzero as jz

from . import models

# Losses and gradients differ from those of one device by the order of sums alone: of 64 tokens, 4
# layers and 16 products, in float64.
_TOLERANCE = 1e-13


def _zero(nodes: int = 2, num_devices: int = 8, layers: str = "layers.*", **mesh: Any) -> jz.Zero:
    devices = jax.devices()[:num_devices]
    return jz.Zero(jz.make_mesh(nodes, devices=devices, **mesh), jz.pipeline(2, layers=layers))


def _params(num: int = models.LAYERS, dtype: Any = np.float32) -> models.Params:
    stacked = models.params(dtype=dtype)
    rows = [i % models.LAYERS for i in range(num)]
    return stacked | {"layers": [{k: w[i] for k, w in stacked["layers"].items()} for i in rows]}


def _loss(
    layer: Callable = models.layer,
    head: Callable = lambda p: p["head"],
    end: Callable = lambda xs, p: xs[-1],
) -> Callable:
    def loss(p: models.Params, rows: models.Params) -> jax.Array:
        xs = [p["embed"][rows["ids"]]]
        for i in range(len(p["layers"])):
            xs.append(layer(xs[-1], p["layers"][i]))
        return models.cross_entropy(end(xs, p), head(p), rows)

    return loss


def _embedding(p: models.Params) -> jax.Array:
    return p["embed"].T


def _decays(p: models.Params, rows: models.Params) -> jax.Array:
    """The loss reads weights of all layers outside of them, as a weight decay does."""
    return _loss()(p, rows) + 0.1 * sum(jnp.sum(w["up"] ** 2) for w in p["layers"])


_EXHAUSTIVE = ("untied", "remat", "decay")  # in part what the others are
LOSSES = {
    "untied": _loss(),
    "tied": _loss(head=_embedding),
    "remat": _loss(jax.checkpoint(models.layer)),
    "remat, tied, skip": _loss(
        jax.checkpoint(models.layer), _embedding, lambda xs, p: xs[-1] + xs[0]
    ),
    "reads all layers": _loss(end=lambda xs, p: sum(xs[1:])),
    "decay": _decays,
}


def _assert_close(got: Any, want: Any, tolerance: float = _TOLERANCE) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = max(1e-3, float(np.abs(y).max()))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)


def _check(zero: jz.Zero, loss: Callable, params: Callable = _params) -> None:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        params, batch = params(dtype=np.float64), models.batch()
        want = jax.jit(jax.value_and_grad(loss))(params, batch)
        value, grads = jax.jit(zero.value_and_grad(loss))(zero.shard(params), batch)
        _assert_close((value, zero.unshard(grads)), want)


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.exhaustive) if x in _EXHAUSTIVE else x for x in LOSSES],
)
def test_a_step_is_that_of_one_device(name):
    _check(_zero(), LOSSES[name])


@pytest.mark.parametrize(
    ("nodes", "num_devices", "num_layers", "mesh"),
    [
        (4, 8, 5, {}),  # 2, 2, 1 and none
        (2, 4, 3, {"axis_type": AxisType.Explicit}),  # 2 layers and 1
        pytest.param(3, 6, 4, {}, marks=pytest.mark.exhaustive),  # 2, 2 and none
        pytest.param(4, 8, 4, {"stages": 2}, marks=pytest.mark.exhaustive),
        pytest.param(2, 4, 6, {}, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.one_in(2)
def test_meshes_and_numbers_of_layers(nodes, num_devices, num_layers, mesh):
    params = functools.partial(_params, num_layers)
    _check(_zero(nodes, num_devices, **mesh), LOSSES["remat, tied, skip"], params)


def test_layers_of_a_dict_whose_sizes_stages_and_devices_do_not_divide():
    """Leaves of layers are padded, as those outside are; numbers are not in the order of names."""
    width, num = 3, 11

    def params(dtype: Any) -> models.Params:
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.standard_normal(shape).astype(dtype) / 2  # noqa: E731
        layers = {
            f"block_{i}": {"up": draw(width, 5), "down": draw(5, width), "gain": draw(width)}
            for i in range(num)
        }
        embed, head = draw(models.VOCABULARY, width), draw(width, models.VOCABULARY)
        return {"embed": embed, "head": head, "params": layers}

    def loss(p: models.Params, rows: models.Params) -> jax.Array:
        x = p["embed"][rows["ids"]]
        for i in range(num):
            w = p["params"][f"block_{i}"]
            x = x + w["gain"][None, None] * (jnp.tanh(x @ w["up"]) @ w["down"])
        return models.cross_entropy(x, p["head"], rows)

    _check(_zero(2, 4, "params.block_*"), loss, params)


@pytest.mark.exhaustive
def test_an_unrolled_loop_over_stacks():
    """A Python loop that takes the layers out of stacks, with a key and a constant for each."""
    stacks = lambda dtype: models.params(dtype=dtype)  # noqa: E731

    def loss(p: models.Params, rows: models.Params) -> jax.Array:
        x, rate = p["embed"][rows["ids"]], [0.5, 1.0, 2.0, 0.25]
        for i in range(models.LAYERS):
            x = models.layer(x, jax.tree.map(lambda w, i=i: w[i], p["layers"])) * rate[i]
        return models.cross_entropy(x, p["head"], rows)

    _check(_zero(2, 4, "layers"), loss, stacks)


@pytest.mark.parametrize(
    "are_split", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["split", "folded"]
)
def test_keys_of_dropout_and_outputs(are_split):
    """Masks are those of as many micro-batches without stages, from the same keys."""

    def loss(params, batch, key):
        x = params["embed"][batch["ids"]]
        means = []
        for w, k in zip(params["layers"], jax.random.split(jz.fold_in_device(key), 4), strict=True):
            x = jnp.where(jax.random.bernoulli(k, 0.7, x.shape), models.layer(x, w), 0)
            means.append(jnp.mean(x))
        return models.cross_entropy(x, params["head"], batch), jnp.stack(means)

    def folded(params, batch, key):
        x = params["embed"][batch["ids"]]
        for i, w in enumerate(params["layers"]):
            k = jax.random.fold_in(jz.fold_in_device(key), i)
            x = jnp.where(jax.random.bernoulli(k, 0.7, x.shape), models.layer(x, w), 0)
        return models.cross_entropy(x, params["head"], batch), jnp.mean(x)

    plain = jz.Zero(jz.make_mesh(1, devices=jax.devices()[:2]))
    key, params = jax.random.key(3), _params()
    found = []
    for z in (_zero(2, 4), plain):
        step = z.value_and_grad(loss if are_split else folded, has_aux=True, microbatches=2)
        found.append(jax.tree.map(z.unshard, step(z.shard(params), models.batch(), key)))
    _assert_close(*found, 1e-5)  # in float32


class _Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(models.WIDTH, rngs=rngs)
        self.up = nnx.Linear(models.WIDTH, 16, rngs=rngs)
        self.down = nnx.Linear(16, models.WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class _Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(models.VOCABULARY, models.WIDTH, rngs=rngs)
        self.blocks = nnx.List([_Block(rngs) for _ in range(3)])

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


@pytest.mark.exhaustive
def test_nnx_with_a_list_of_blocks():
    def loss(model, rows):
        logp = jax.nn.log_softmax(model(rows["ids"]))
        return -jnp.mean(jnp.take_along_axis(logp, rows["targets"][..., None], -1))

    model, zero, batch = _Model(nnx.Rngs(0)), _zero(2, 4, "blocks.*"), models.batch()
    value, grads = zero.value_and_grad(loss)(zero.shard(model), batch)
    want, want_grads = nnx.value_and_grad(loss)(model, batch)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    _assert_close(jax.tree.leaves(zero.unshard(grads)), jax.tree.leaves(want_grads), 1e-5)


@pytest.mark.exhaustive
def test_a_run_goes_on_without_stages():
    """Gradients and optimizer state have the structure of the list."""
    tx, loss, batch = optax.adam(1e-2), LOSSES["tied"], models.batch()
    params = want = _params()
    state = want_state = tx.init(params)
    for zero in (_zero(2, 4), jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]))):
        params = zero.shard(params)
        like = zero.init_optimizer(tx, params)
        state = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), state, like)
        _, grads = zero.value_and_grad(loss)(params, batch)
        assert jax.tree.structure(grads) == jax.tree.structure(params)
        with jax.numpy_dtype_promotion("standard"):  # for optax
            params, state = zero.apply_gradients(tx, grads, state, params)
            params, state = zero.unshard(params), zero.unshard(state)
            updates, want_state = tx.update(jax.grad(loss)(want, batch), want_state, want)
        want = optax.apply_updates(want, updates)
    # Adam divides by the root of small second moments, which magnifies roundings of gradients.
    for x, y in zip(*map(jax.tree.leaves, ((params, state), (want, want_state))), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_apply_plan_and_report():
    def logits(params, batch):
        x = params["embed"][batch["ids"]]
        for w in params["layers"]:
            x = models.layer(x, w)
        return x @ params["head"]

    zero, params, batch = _zero(2, 4), _params(), models.batch()
    sharded = zero.shard(params)
    got = zero.apply(logits)(sharded, batch)
    np.testing.assert_allclose(got, jax.jit(logits)(params, batch), rtol=1e-5, atol=1e-6)
    plan = zero.plan(LOSSES["untied"], sharded, batch)
    assert "activations" in str(zero.report(sharded, plan=plan))
    assert "2 stages of 2 layers" in str(plan)
    assert "layers.*.up" in str(plan)
    assert "roll_layers.py" not in str(plan)


@pytest.mark.exhaustive
def test_verify():
    zero = _zero(2, 4)
    assert zero.verify(LOSSES["untied"], zero.shard(_params()), models.batch()).ok


@pytest.mark.exhaustive
def test_the_head_reads_weights_of_a_layer():
    end = lambda xs, p: xs[2] + xs[-1] @ p["layers"][1]["up"] @ p["layers"][0]["down"]  # noqa: E731
    _check(_zero(2, 4), _loss(end=end))


def test_layers_with_their_own_derivative():
    """A `custom_vjp` is traced anew by each layer."""

    @jax.custom_vjp
    def thrice(x):
        return jnp.tanh(x)

    thrice.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (3 * g / jnp.cosh(x) ** 2,))
    _check(_zero(2, 4), _loss(lambda x, w: thrice(models.layer(x, w))))


def _each(layer: Callable, order: slice = slice(None), times: int = 1) -> Callable:
    def loss(p: models.Params, rows: models.Params) -> jax.Array:
        x = p["embed"][rows["ids"]]
        for i, w in [*enumerate(p["layers"])][order] * times:
            x = layer(i, x, w)
        return models.cross_entropy(x, p["head"], rows)

    return loss


class Store:
    """Named as a class of JAX whose contents do not matter for what a function computes."""

    def __init__(self, scale: float):
        self.scale = scale


def _scaled_by_rule(make: Callable) -> Callable:
    """Layers that differ in nothing but what the rule of a derivative closes over."""

    def layer(i: int, x: jax.Array, w: models.Params) -> jax.Array:
        cells = make(1.0 + (i == 2))  # the name of a variable in which JAX keeps results

        @jax.custom_vjp
        def f(x):
            return jnp.tanh(x)

        scaled = lambda g: g * getattr(cells, "scale", cells)  # noqa: E731
        f.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (scaled(g) / jnp.cosh(x) ** 2,))
        return f(models.layer(x, w))

    return _each(layer)


def _other_activation(i: int, x: jax.Array, w: models.Params) -> jax.Array:
    act = jnp.sin if i == 2 else jnp.tanh
    return x * w["scale"] + act((x * w["gain"][None, None]) @ w["up"]) @ w["down"]


def _other_random_bits(i: int, x: jax.Array, w: models.Params) -> jax.Array:
    """Layers that differ in nothing but how they make random bits of one key."""
    with jax.threefry_partitionable(i != 2):
        mask = jax.random.normal(jax.random.key(0), w["up"].shape)
    return models.layer(x, {**w, "up": w["up"] * mask})


def _more_after_one(i: int, x: jax.Array, w: models.Params) -> jax.Array:
    x = models.layer(x, w)
    return jnp.sin(x) if i == 2 else x


def _plain(i: int, x: jax.Array, w: models.Params) -> jax.Array:
    del i
    return models.layer(x, w)


def _side_by_side(p: models.Params, rows: models.Params) -> jax.Array:
    x = p["embed"][rows["ids"]]
    return models.cross_entropy(sum(models.layer(x, w) for w in p["layers"]), p["head"], rows)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (_scaled_by_rule(float), "layer 2 computes by `custom_vjp_call` .* not known"),
        (_scaled_by_rule(Store), "layer 1 computes by `custom_vjp_call` .* not known"),
        (_each(_other_activation), "layer 2 has `sin` at .* where another has `tanh`"),
        (_each(_other_random_bits), "layer 2 computes by `random_seed` .* not known"),
        (_each(_more_after_one), "not in the order of their numbers, or something"),
        (_each(_plain, slice(None, None, -1)), "not in the order of their numbers"),
        (_each(_plain, times=2), "not in the order of their numbers"),
        (_each(_plain, slice(3)), "nothing reads the weights of layer 3"),
        (_side_by_side, "are unrolled, and cannot run as one"),
    ],
)
def test_refused_programs(loss, message):
    zero = _zero(2, 4)
    with pytest.raises(NotImplementedError, match=message) as error:
        zero.plan(loss, zero.shard(_params()), models.batch())
    assert "leave out `stages`" in str(error.value)


def test_refused_lists():
    zero, batch, loss = _zero(2, 4), models.batch(), LOSSES["untied"]
    params = _params()
    up = {"up": np.zeros((8, 12), np.float32), "down": np.zeros((12, 8), np.float32)}
    params["layers"][2] |= up
    with pytest.raises(ValueError, match=r"`layers.2.down` float32\[12, 8\]"):
        zero.plan(loss, zero.shard(params), batch)
    params["layers"] = {"1": params["layers"][0], "2": params["layers"][1]}
    with pytest.raises(ValueError, match=r"have the numbers \[1, 2\]"):
        zero.plan(loss, zero.shard(params), batch)
    with pytest.raises(ValueError, match=r"`\*` for the number of a layer"):
        _zero(2, 4, "layers").shard(_params())
    with pytest.raises(ValueError, match=r"may have one `\*`"):
        jz.pipeline(2, layers="*.layers.*")
    with pytest.raises(ValueError, match="`layers.*` has 3 layers for 4 stages"):
        zero = _zero(4, 4)
        zero.plan(loss, zero.shard(_params(3)), batch)
