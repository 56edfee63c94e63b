"""What a model of the zoo is, and the register of them all.

A loss is a mean over its batch. So it may be called on the whole batch or on one device's slice,
and the mean over equal slices is the loss of the whole. A loss that uses collectives cannot run on
one device: such a case carries an `oracle`, the same formula on the whole batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AXES = ("node", "local")
# The mean of gradients in bfloat16 may be rounded once on each of two hops, by 2**-9 each time.
BFLOAT16 = 2.0**-8
Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model: its parameter trees, its loss, its data."""

    name: str
    loss: Callable[..., Any]  # loss(*trees, batch), as one device sees it
    init: Callable[[jax.Array], tuple[Tree, ...]]  # key -> parameter trees
    batch: Callable[[jax.Array, int], Tree]  # key, number of examples -> batch
    oracle: Callable[..., Any]  # the loss on the whole batch and one device
    argnums: int | tuple[int, ...] = 0
    has_aux: bool = False
    tolerance: float | None = None  # for arithmetic in 16 bits; None: what the dtype allows


CASES: dict[str, Case] = {}
THIRD_PARTY: dict[str, Case] = {}  # those that need the extra `zoo`


def case(
    init: Callable[[jax.Array], Tree],
    batch: Callable[[jax.Array, int], Tree],
    *,
    trees: int | None = None,
    oracle: Callable[..., Any] | None = None,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    tolerance: float | None = None,
    register: dict[str, Case] = CASES,
):
    """Enter the decorated loss into the zoo, or another `register`, under its own name.

    `trees` is the number of parameter trees that `init` returns as a tuple; None: it returns one.
    """

    def enter(loss):
        name = loss.__name__
        if name in register:
            raise ValueError(f"two cases are called {name!r}")
        register[name] = Case(
            name=name,
            loss=loss,
            init=init if trees else (lambda key: (init(key),)),
            batch=batch,
            oracle=oracle or loss,
            argnums=argnums,
            has_aux=has_aux,
            tolerance=tolerance,
        )
        return loss

    return enter


def normal(key: jax.Array, seed: int, *shape: int, scale: float | None = None) -> np.ndarray:
    """Float32 weights; the default scale keeps activations near one.

    Drawn by NumPy: JAX would compile a program for every shape, which takes most of a test's time.
    """
    fan_in = shape[-2] if len(shape) > 1 else 1
    scale = fan_in**-0.5 if scale is None else scale
    generator = np.random.default_rng([*np.asarray(jax.random.key_data(key)), seed])
    return np.float32(scale) * generator.standard_normal(shape, np.float32)


def filled(key: jax.Array, shapes: Tree) -> Tree:
    """Weights for a tree of shapes."""
    leaves, treedef = jax.tree.flatten(shapes)
    drawn = [normal(key, seed, *leaf.shape) for seed, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, drawn)


def dense(key: jax.Array, seed: int, rows: int, columns: int) -> dict[str, np.ndarray]:
    return {
        "w": normal(key, 2 * seed, rows, columns),
        "b": normal(key, 2 * seed + 1, columns, scale=0.1),
    }


def affine(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    bias = layer["b"].reshape((1,) * (x.ndim - 1) + (-1,))
    return x @ layer["w"] + bias


def vectors(inputs: int, outputs: int):
    """Batches of regression: `x` (n, inputs) and `y` (n, outputs)."""

    def batch(key, n):
        return {
            "x": normal(key, 0, n, inputs, scale=1.0),
            "y": normal(key, 1, n, outputs, scale=1.0),
        }

    return batch


def sequences(length: int, inputs: int, outputs: int):
    """Batches of regression over time: `x` (n, length, inputs) and `y` (n, outputs)."""

    def batch(key, n):
        return {
            "x": normal(key, 0, n, length, inputs, scale=1.0),
            "y": normal(key, 1, n, outputs, scale=1.0),
        }

    return batch


def tokens(length: int, vocabulary: int):
    """Batches of int32 tokens (n, length)."""

    def batch(key, n):
        drawn = jax.random.randint(key, (n, length), 0, vocabulary, jnp.int32)
        return {"tokens": np.asarray(drawn)}

    return batch


def images(size: int, channels: int, classes: int):
    """Batches of `image` (n, size, size, channels) and integer `label` (n,)."""

    def batch(key, n):
        label = jax.random.randint(key, (n,), 0, classes, jnp.int32)
        return {
            "image": normal(key, 0, n, size, size, channels, scale=1.0),
            "label": np.asarray(label),
        }

    return batch


def squared(prediction: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean squared error against `batch["y"]`."""
    return jnp.mean((prediction - batch["y"]) ** 2)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all positions."""
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -jnp.mean(picked)
