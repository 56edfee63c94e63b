"""Equinox models: arrays and the rest are partitioned, so the trees are full of `None`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from ._case import case, filled, sequences, squared, vectors


class _Cached:
    """An Equinox model as functions of its arrays: the rest is built once, when first needed."""

    def __init__(self, build):
        self.build = build

    @functools.cached_property
    def split(self):
        shapes = eqx.filter_eval_shape(self.build, jax.random.key(0))
        return eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def init(self, key):
        return filled(key, self.split[0])

    def __call__(self, arrays):
        return eqx.combine(arrays, self.split[1])


_mlp = _Cached(lambda key: eqx.nn.MLP(7, 3, 10, 2, activation=jax.nn.gelu, key=key))


@case(_mlp.init, vectors(7, 3))
def equinox_mlp(params, batch):
    return squared(jax.vmap(_mlp(params))(batch["x"]), batch)


class _Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear
    width: int = eqx.field(static=True)

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.width = 6
        self.cell = eqx.nn.GRUCell(5, self.width, key=first)
        self.head = eqx.nn.Linear(self.width, 3, key=second)

    def __call__(self, x):
        start = jnp.zeros((self.width,), x.dtype)
        h, _ = lax.scan(lambda h, x_t: (self.cell(x_t, h), None), start, x)
        return self.head(h)


_recurrent = _Cached(_Recurrent)


@case(_recurrent.init, sequences(4, 5, 3))
def equinox_recurrent(params, batch):
    return squared(jax.vmap(_recurrent(params))(batch["x"]), batch)


class _Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=first)
        self.norm = eqx.nn.LayerNorm(8)
        self.mlp = eqx.nn.MLP(8, 8, 12, 1, key=second)

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(x)


class _Stacked(eqx.Module):
    blocks: _Block

    def __init__(self, key):
        self.blocks = eqx.filter_vmap(_Block)(jax.random.split(key, 3))

    def __call__(self, x):
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)

        @eqx.filter_checkpoint
        def layer(x, block):
            return eqx.combine(block, rest)(x)

        return lax.scan(lambda x, block: (layer(x, block), None), x, arrays)[0].mean(0)


_stacked = _Cached(_Stacked)


@case(_stacked.init, sequences(4, 8, 8))
def equinox_transformer_in_a_scan_with_remat(params, batch):
    return squared(jax.vmap(_stacked(params))(batch["x"]), batch)


_ensemble = _Cached(
    lambda key: eqx.filter_vmap(lambda k: eqx.nn.MLP(6, 4, 5, 1, key=k))(jax.random.split(key, 3))
)


@case(_ensemble.init, vectors(6, 4))
def equinox_ensemble(params, batch):
    members = eqx.filter_vmap(lambda model, x: jax.vmap(model)(x), in_axes=(eqx.if_array(0), None))
    return squared(members(_ensemble(params), batch["x"]).mean(0), batch)
