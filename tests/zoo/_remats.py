"""Rematerialisation: every policy, in loops and scans, nested, around jit and over closures."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ._case import affine, case, dense, normal, squared, vectors

_policies = jax.checkpoint_policies


def _layers(key):
    return [dense(key, i, 8, 8) for i in range(3)]


def _stack(key):
    return {"w": normal(key, 0, 8, 6, 6), "b": normal(key, 1, 8, 6, scale=0.1)}


def _layer(x, layer):
    hidden = checkpoint_name(affine(layer, x), "hidden")
    return checkpoint_name(jnp.tanh(hidden), "activation")


def _loop(remat):
    def loss(params, batch):
        x = batch["x"]
        for layer in params:
            x = remat(_layer)(x, layer)
        return squared(x, batch)

    return loss


def _scan(remat):
    def loss(params, batch):
        body = remat(lambda x, layer: (_layer(x, layer), None))
        x, _ = lax.scan(body, batch["x"], params)
        return squared(x, batch)

    return loss


def _enter(name, init, batch, loss):
    loss.__name__ = name
    case(init, batch)(loss)


for _name, _policy in {
    "nothing": _policies.nothing_saveable,
    "dots": _policies.dots_saveable,
    "everything": _policies.everything_saveable,
    "hidden": _policies.save_only_these_names("hidden"),
    "all_but_hidden": _policies.save_anything_except_these_names("hidden"),
    "dots_without_batch": _policies.dots_with_no_batch_dims_saveable,
}.items():
    _remat = functools.partial(jax.checkpoint, policy=_policy)
    _enter(f"remat_saves_{_name}", _layers, vectors(8, 8), _loop(_remat))
    _remat = functools.partial(jax.checkpoint, policy=_policy, prevent_cse=False)
    _enter(f"remat_saves_{_name}_in_scan", _stack, vectors(6, 6), _scan(_remat))


@case(_stack, vectors(6, 6))
def remat_in_scan_that_prevents_cse(params, batch):
    return _scan(functools.partial(jax.checkpoint, prevent_cse=True))(params, batch)


@case(_layers, vectors(8, 8))
def remat_of_the_whole_loss(params, batch):
    return jax.checkpoint(_loop(lambda f: f))(params, batch)


@case(_layers, vectors(8, 8))
def remat_inside_remat(params, batch):
    inner = functools.partial(jax.checkpoint, policy=_policies.dots_saveable)
    return jax.checkpoint(_loop(inner))(params, batch)


@case(_stack, vectors(6, 6))
def remat_of_a_scan(params, batch):
    return jax.checkpoint(_scan(lambda f: f))(params, batch)


@case(_stack, vectors(6, 6))
def remat_of_groups_of_remat_layers(params, batch):
    groups = jax.tree.map(lambda p: p.reshape(2, 4, *p.shape[1:]), params)
    layer = jax.checkpoint(lambda x, p: (_layer(x, p), None), prevent_cse=False)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def group(x, stack):
        return lax.scan(layer, x, stack)

    x, _ = lax.scan(group, batch["x"], groups)
    return squared(x, batch)


@case(_layers, vectors(8, 8))
def remat_over_a_closure(params, batch):
    x = batch["x"]
    for layer in params:
        x = jax.checkpoint(lambda x, layer=layer: _layer(x, layer))(x)
    return squared(x, batch)


@case(_layers, vectors(8, 8))
def remat_of_jit_and_jit_of_remat(params, batch):
    first, second, third = params
    x = jax.checkpoint(jax.jit(_layer))(batch["x"], first)
    x = jax.jit(jax.checkpoint(_layer))(x, second)
    return squared(jax.jit(jax.jit(_layer))(x, third), batch)


@case(_layers, vectors(8, 8))
def remat_with_static_arguments(params, batch):
    @functools.partial(jax.checkpoint, static_argnums=(2,))
    def layer(x, p, deep):
        return _layer(_layer(x, p), p) if deep else _layer(x, p)

    x = layer(batch["x"], params[0], True)
    return squared(layer(x, params[2], False), batch)


@case(_layers, vectors(8, 8))
def remat_of_weights_alone(params, batch):
    """What is recomputed is made of weights only: nothing of it depends on the batch."""

    @jax.checkpoint
    def merged(a, b):
        return jnp.tanh(a["w"] @ b["w"])

    return squared(batch["x"] @ merged(params[0], params[1]), batch)
