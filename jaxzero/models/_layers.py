"""Run a sequence of layers: a list of modules, or one stack of equal layers that is scanned.

With a scan the compile time is independent of the number of layers, and `jz.Zero` gathers the
stack layer by layer in a loop. A list may hold different layers, and XLA schedules across them.

Recomputation (`remat`) is `jax.checkpoint` around each layer: its activations are dropped after the
forward pass, but for those that the policy keeps, and are computed again in the backward pass.
"""

from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

Remat = Literal["none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable"]


def make_layers(
    make: Callable[[nnx.Rngs, int], nnx.Module],
    num_layers: int,
    *,
    kind: Callable[[int], Hashable],
    scanned: bool,
    rngs: nnx.Rngs,
) -> Any:
    """Make a list of layers, or one module whose parameters are stacked along a new first dim.

    Args:
        make: makes a layer from `rngs` and its number.
        num_layers: number of layers.
        kind: maps the number of a layer to its kind; layers of one kind differ in values only.
        scanned: True to stack the layers; then all are made as layer 0 is.
        rngs: keys of the initial values. With `ShapesOnly`, one layer of each kind is made, and all
            other layers of the kind are copies of it.
    """
    if not scanned and isinstance(rngs, ShapesOnly):
        first: dict[Hashable, nnx.Module] = {}
        for i in range(num_layers):
            if kind(i) not in first:
                first[kind(i)] = make(rngs, i)
        return nnx.List([nnx.clone(first[kind(i)]) for i in range(num_layers)])
    if not scanned:
        return nnx.List([make(rngs, i) for i in range(num_layers)])
    stacked = nnx.vmap(lambda rngs: make(rngs, 0), in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=num_layers)(stacked)(rngs)


def run_layers(
    layers: Any,
    step: Callable[[Any, Any, int | jax.Array], Any],
    x: Any,
    num_layers: int,
    remat: Remat,
) -> Any:
    """Run `x = step(layer, x, i)` for each layer, and return the last `x`.

    The number i is an `int` for layers in a list, and a traced integer in a scan.

    Args:
        layers: from `make_layers`.
        step: applies one layer; it must keep the shapes and dtypes of `x`.
        x: input of the first layer: an array, or a tree of them.
        num_layers: number of layers.
        remat: what is kept for the backward pass: everything ("none"), only what enters each layer
            ("full"), or also what the policy of that name in `jax.checkpoint_policies` keeps.
    """
    if isinstance(layers, nnx.List):
        for i, layer in enumerate(layers):
            graph, state = nnx.split(layer)
            x = _layer_function(graph, step, remat, index=i)(state, x)
        return x
    graph, states = nnx.split(layers)

    def body(x, scanned):
        state, i = scanned
        return _layer_function(graph, step, remat, index=i, in_scan=True)(state, x), None

    return jax.lax.scan(body, x, (states, jnp.arange(num_layers)))[0]


def _layer_function(
    graph: Any, step: Any, remat: Remat, *, index: int | jax.Array, in_scan: bool = False
) -> Callable[[Any, Any], Any]:
    def run(state, x):
        return step(nnx.merge(graph, state), x, index)

    if remat == "none":
        return run
    policy = None if remat == "full" else getattr(jax.checkpoint_policies, remat)
    # Inside a scan, XLA cannot merge the recomputation with the forward pass.
    return jax.checkpoint(run, policy=policy, prevent_cse=not in_scan)


class ShapesOnly(nnx.Rngs):
    """An `nnx.Rngs` that returns the same random key for every stream and draw.

    Use it under `nnx.eval_shape`, where `nnx.Rngs` is slow: the counters of its keys are tracers,
    and every draw walks over the program that has been traced so far, which is quadratic in the
    number of layers. Shapes do not depend on keys. `make_layers` builds only one layer of each
    kind from it, and copies that.
    """

    _key: jax.Array

    def __init__(self):  # without streams
        # Not by Flax's `__setattr__`, which would make it a part of the module's state.
        object.__setattr__(self, "_key", jax.random.key(0))

    def __getattr__(self, stream: str) -> Callable[[], jax.Array]:
        return lambda: self._key
