"""Compute values of a leaf from one window of its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from .._program import Atom, Constant, Operation, Value, is_elementwise, shape_of
from .analysis import Analysis


def in_window(
    analysis: Analysis,
    wanted: Sequence[Atom],
    windows: Mapping[Value, Shaped[Array, ...]],
    scalars: Mapping[Atom, Array],
    shape: tuple[int, ...],
) -> list[Shaped[Array, ...]]:
    """Compute `wanted` on a window.

    Args:
        analysis: of the update.
        wanted: values of one leaf, or arrays that repeat one scalar.
        windows: windows of the leaf's arrays, in device memory.
        scalars: the scalars that `analysis.window_operations(wanted)` names.
        shape: of a window.
    """
    operations, _ = analysis.window_operations(wanted)
    env: dict[Atom, Any] = {**windows, **{x: y.reshape(()) for x, y in scalars.items()}}
    for operation in operations:
        env[operation.outputs[0]] = _compute(analysis, operation, env, shape)
    return [jnp.broadcast_to(_read(atom, env), shape) for atom in wanted]


def _compute(
    analysis: Analysis, operation: Operation, env: Mapping[Atom, Any], shape: tuple[int, ...]
) -> Any:
    """The output of an operation: a window, or a scalar if it repeats one in every element."""
    inputs = [_read(atom, env) for atom in operation.inputs]
    if not is_elementwise(operation):
        return inputs[0]  # a reshape or a broadcast: the same elements, or the same scalar
    if analysis.leaf_of(operation.outputs[0]) is not None:
        inputs = [
            x if shape_of(atom) == () else jnp.broadcast_to(x, shape)
            for atom, x in zip(operation.inputs, inputs, strict=True)
        ]
    return operation.bind(inputs)[0]


def _read(atom: Atom, env: Mapping[Atom, Any]) -> Any:
    if atom in env:
        return env[atom]
    assert isinstance(atom, Constant)
    return atom.value if shape_of(atom) == () else jnp.reshape(atom.value, ())
