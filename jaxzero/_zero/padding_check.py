"""Warn if an optimizer's updates change when leaves are padded, by running it on tiny leaves."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._sharding import DimSharding, LeafSpec, StoredArray, TreePlan, arrays_of
from .._warnings import warn
from .optimizer_state import TrueShapes

_REMEDY = "Wrap it: `tx = zero.optimizer(tx)`."


def warn_of_padding(
    tx: optax.GradientTransformation,
    plan: TreePlan,
    *,
    remedy: str = _REMEDY,
    as_arrays: bool = False,
) -> None:
    """Warn if `tx` gives, or may give, other updates because some of its leaves are padded.

    It does so if it counts elements, decides by shape (Adafactor, Muon), or selects leaves by
    path: the path of a padded leaf has one more entry.

    Args:
        tx: the optimizer.
        plan: layouts of the parameters.
        remedy: the end of the warning.
        as_arrays: whether it sees padded leaves as arrays, and not as `StoredArray`s.
    """
    padded = [leaf.path for leaf in plan.leaves if leaf.layout and leaf.layout.is_padded]
    if not padded or isinstance(tx, TrueShapes):
        return
    what = f"{len(padded)} leaves are padded with zeros on this mesh, `{padded[0]}` the first, and "
    try:
        plain, wide = (
            _updates(tx, plan, widen) for widen in (None, _widened if as_arrays else _stored_wide)
        )
    except Exception as error:  # the optimizer is someone else's code, and only tried here
        warn(
            f"{what}whether this optimizer gives them the updates of their own shapes could not "
            f"be tried ({type(error).__name__}: {error}). If it uses shapes, numbers of elements "
            f"or paths, it does not. {remedy}"
        )
        return
    if not all(
        np.allclose(np.float32(a), np.float32(b[tuple(slice(n) for n in a.shape)]), rtol=1e-3)
        for a, b in zip(plain, wide, strict=True)
    ):
        warn(f"{what}this optimizer would not give them the updates of their own shapes. {remedy}")


def _updates(
    tx: optax.GradientTransformation, plan: TreePlan, widen: Callable[..., Any] | None
) -> list[Any]:
    """The updates of `tx` for random gradients, leaves `[2, 2, ...]`, which `widen` pads."""
    random = np.random.default_rng(0)
    trees = []
    for _ in ("parameters", "gradients"):
        leaves = [
            random.normal(size=(2,) * len(leaf.shape)).astype(leaf.dtype) for leaf in plan.leaves
        ]
        if widen is not None:
            leaves = [widen(x, leaf) for x, leaf in zip(leaves, plan.leaves, strict=True)]
        trees.append(plan.whole(leaves))
    # optax relies on JAX's default promotion of dtypes, which a user may have made strict.
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.ensure_compile_time_eval(),  # a `jit` may be tracing this
    ):
        try:
            updates = jax.jit(lambda *trees: _run(tx, {}, *trees))(*trees)
        except Exception:  # some optimizers need more than gradients
            updates = jax.jit(lambda *trees: _run(tx, _extras(tx, *trees), *trees))(*trees)
    return [np.asarray(x) for x in arrays_of(updates)]


def _run(tx: optax.GradientTransformation, extras: dict[str, Any], params: Any, grads: Any) -> Any:
    tx = optax.with_extra_args_support(tx)
    return tx.update(grads, tx.init(params), params, **extras)[0]


def _extras(tx: optax.GradientTransformation, params: Any, grads: Any) -> dict[str, Any]:
    """The extra arguments of line searches, Polyak steps and SAM that `tx.update` accepts."""
    known = {
        "value": jnp.float32(1),
        "grad": grads,
        "value_fn": lambda params, *_, **__: optax.tree.norm(params, squared=True),
        "grad_fn": lambda params, *_, **__: params,
        "obj_fn": lambda params, *_, **__: optax.tree.norm(params, squared=True),
    }
    accepted = inspect.signature(tx.update).parameters
    takes_any = any(p.kind == p.VAR_KEYWORD for p in accepted.values())
    return {key: x for key, x in known.items() if takes_any or key in accepted}


def _widened(x: np.ndarray, leaf: LeafSpec) -> np.ndarray:
    """`x` with one element of padding, if its leaf is padded; otherwise unchanged."""
    if leaf.is_plain or leaf.layout is None or math.prod(x.shape) == 0:
        return x
    return np.pad(x, [(0, d == leaf.layout.dim) for d in range(x.ndim)])


def _stored_wide(x: np.ndarray, leaf: LeafSpec) -> Any:
    """`_widened` as a `StoredArray`, if its leaf is padded."""
    wide = _widened(x, leaf)
    if wide is x or leaf.layout is None:
        return x
    form = LeafSpec("", x.shape, leaf.dtype, DimSharding(leaf.layout.dim, size=2, num_shards=3))
    return StoredArray.of(wide, form)
