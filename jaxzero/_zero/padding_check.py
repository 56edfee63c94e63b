"""Warn if an optimizer's updates change when leaves are padded, by running it on tiny leaves.

A single update would not show every difference: learning rates may start at 0, gradients of several
micro-batches may make one update (`optax.MultiSteps`), and only large gradients may be clipped. So
`NUM_UPDATES` updates are compared, by a program that is compiled once, and the second half of them
has gradients of size `LARGE`. Of leaves whose paths differ only by numbers, such as the layers of a
list, only the first is compared in this way. Then all leaves are compared after one update. A
difference can go unnoticed if more than `NUM_UPDATES / 2` micro-batches make an update, or if only
larger gradients are clipped.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._sharding import DimSharding, LeafSpec, StoredArray, TreeLayout, arrays_of
from .._warnings import warn
from .optimizer_state import TrueShapes
from .programs import Programs

# One update tells nothing where a warm-up starts at 0, or `optax.MultiSteps` waits for more.
NUM_UPDATES = 32
LARGE = 1e4  # factor of half of the gradients: they exceed thresholds, such as those of clipping
_REMEDY = "Wrap it: `tx = zero.optimizer(tx)`."


def warn_of_padding(
    tx: optax.GradientTransformation,
    layout: TreeLayout,
    programs: Programs,
    *,
    remedy: str = _REMEDY,
    as_arrays: bool = False,
) -> None:
    """Warn if `tx` computes, or may compute, other updates for leaves because they are padded.

    An optimizer does so if it counts elements, decides by shape (Adafactor, Muon), or selects
    leaves by path: the path of a padded leaf has one more entry.

    Args:
        tx: the optimizer.
        layout: layouts of the parameters.
        programs: the cache of compiled programs.
        remedy: the end of the warning.
        as_arrays: whether `tx` sees padded leaves as arrays, and not as `StoredArray`s.
    """
    padded = [leaf.path for leaf in layout.leaves if leaf.padded_dims]
    if not padded or isinstance(tx, TrueShapes):
        return
    num, first = len(padded), padded[0]
    what = f"Leaves are padded with zeros on this mesh, {num} of them, `{first}` the first, and "
    try:
        widen = _widened if as_arrays else _stored_wide
        trial = functools.partial(_is_same, programs, tx, layout, widen)
        is_same = trial(one_of_each_kind(layout), NUM_UPDATES)
        if is_same and len(set(map(_kind, layout.leaves))) < len(layout.leaves):
            is_same = trial([True] * len(layout.leaves), 1)
    except Exception as error:  # the optimizer is someone else's code, and only tried here
        warn(
            f"{what}whether this optimizer gives them the updates of their own shapes could not "
            f"be tried ({type(error).__name__}: {error}). If it uses shapes, numbers of elements "
            f"or paths, it does not. {remedy}"
        )
        return
    if not is_same:
        warn(f"{what}this optimizer would not give them the updates of their own shapes. {remedy}")


def _is_same(
    programs: Programs,
    tx: optax.GradientTransformation,
    layout: TreeLayout,
    widen: Callable[..., Any],
    is_tried: list[bool],
    num_updates: int,
) -> bool:
    """Return whether `tx` computes equal updates for plain leaves and for leaves padded by `widen`.

    Only the leaves that `is_tried` marks are compared.
    """
    plain, wide = (
        _updates(programs, tx, layout, each, is_tried, num_updates) for each in (None, widen)
    )
    num = min(map(_num_before_overflow, plain), default=0)
    return all(_are_equal(x[:num], y[:num]) for x, y in zip(plain, wide, strict=True))


def _num_before_overflow(updates: np.ndarray) -> int:
    """Return how many updates come before the first one that is so large that squares may overflow.

    An optimizer that scales gradients by the norm of parameters, without a learning rate, lets
    parameters grow that far. A norm of them is then a number, infinity or NaN by rounding alone.
    """
    if not jnp.issubdtype(updates.dtype, jnp.inexact):
        return len(updates)
    most = float(jnp.finfo(updates.dtype).max) ** 0.5 / 64  # a norm may add 4096 squares
    is_large = np.isfinite(updates) & (np.abs(updates) > most)
    return int(np.argmax([*is_large.reshape(len(updates), -1).any(axis=1), True]))


def _kind(leaf: LeafSpec) -> Any:
    """Return a key that is equal for leaves whose paths differ only by numbers, such as layers."""
    path = re.sub("[0-9]+", "", leaf.path)
    return path, len(leaf.shape), leaf.dtype, tuple(x.dim for x in leaf.padded_dims)


def one_of_each_kind(layout: TreeLayout) -> list[bool]:
    """Return for each leaf whether it is the first of its kind (see `_kind`).

    Only these leaves are tried, because all leaves together would be slow to compile.
    """
    kinds = list(map(_kind, layout.leaves))
    return [kinds.index(kind) == i for i, kind in enumerate(kinds)]


def _are_equal(plain: np.ndarray, wide: np.ndarray) -> bool:
    """Return whether the updates `wide` of a padded leaf, cut to the plain shape, equal `plain`.

    Both arrays are `[updates, *shape]`. In padded leaves, norms add their terms in another order,
    which changes an update by some units in the last place of its largest element, and by more once
    parameters have moved. The tolerance allows for that.
    """
    wide = wide[tuple(slice(n) for n in plain.shape)]
    kind = np.complex128 if np.iscomplexobj(plain) else np.float64
    is_inexact = jnp.issubdtype(plain.dtype, jnp.inexact)
    error = 64 * float(jnp.finfo(plain.dtype).eps) if is_inexact else 0.0
    axes = tuple(range(1, plain.ndim))
    plain, wide = plain.astype(kind), wide.astype(kind)
    size = np.abs(np.where(np.isfinite(plain), plain, 0)).max(axis=axes, initial=0, keepdims=True)
    return np.allclose(plain, wide, rtol=error, atol=error * size, equal_nan=True)


def _updates(
    programs: Programs,
    tx: optax.GradientTransformation,
    layout: TreeLayout,
    widen: Callable[..., Any] | None,
    is_tried: list[bool],
    num_updates: int,
) -> list[Any]:
    """Return the first updates of `tx`, as an array `[num_updates, 2, 2, ...]` for each leaf.

    Only one update is returned if `tx` needs more than gradients, such as the loss.

    Args:
        programs: the cache of compiled programs.
        tx: the optimizer.
        layout: layouts of the parameters, whose dims all become 2.
        widen: pads a leaf; None: no leaf is padded.
        is_tried: for each leaf, whether it is in the trees that `tx` gets.
        num_updates: the number of updates.
    """
    random = np.random.default_rng(0)
    trees = []
    for lead in ((), (num_updates,)):  # parameters, gradients of each update
        leaves = [_sample(random, leaf, lead) for leaf in layout.leaves]
        if widen is not None:
            leaves = [widen(x, leaf) for x, leaf in zip(leaves, layout.leaves, strict=True)]
        tried = [x if is_in else None for x, is_in in zip(leaves, is_tried, strict=True)]
        trees.append(layout.whole(tried))
    with own_modes():
        try:
            return _run(programs, tx, False, num_updates, *trees)
        except Exception:
            # `tx` may need more than gradients, such as the loss. What it gets here does not fit
            # the gradients, so that terms of later updates can cancel.
            return _run(programs, tx, True, 1, *trees)


@contextlib.contextmanager
def own_modes() -> Iterator[None]:
    """Run trials of an optimizer with default JAX settings, and outside of the caller's trace."""
    # optax relies on JAX's default promotion of dtypes, which a user may have made strict.
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.ensure_compile_time_eval(),  # a `jit` may be tracing this
        jax.transfer_guard("allow"),  # of a few numbers, which are no transfers of the user's
    ):
        yield


def _sample(random: np.random.Generator, leaf: LeafSpec, lead: tuple[int, ...]) -> np.ndarray:
    """Return random parameters `[2, 2, ...]` for a leaf, or gradients `[*lead, 2, 2, ...]`.

    With an empty `lead` it returns parameters; otherwise `lead` is `(number of updates,)`. The
    gradients of the second half of the updates are large.
    """
    dtype = _dtype_of(leaf)
    shape = (*lead, *(2,) * len(leaf.shape))
    x = random.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * random.normal(size=shape)
    if lead and jnp.issubdtype(dtype, jnp.inexact):
        x[(lead[0] + 1) // 2 :] *= LARGE
    return x.astype(dtype)


def _dtype_of(leaf: LeafSpec) -> Any:
    """Return the leaf's dtype; float32 for narrower floats, whose rounding hides differences."""
    return np.dtype(np.float32) if has_16_bits(leaf) else leaf.dtype


def has_16_bits(leaf: LeafSpec) -> bool:
    """Return whether the dtype of a leaf is a float of 16 bits or fewer."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4


def _run(
    programs: Programs,
    tx: optax.GradientTransformation,
    with_extras: bool,
    num_updates: int,
    params: Any,
    grads: Any,
) -> list[np.ndarray]:
    """Take `num_updates` steps with `tx`; return each leaf's updates, stacked along dim 0.

    Args:
        programs: the cache of compiled programs.
        tx: the optimizer.
        with_extras: whether `tx` also gets the extra arguments that it accepts.
        num_updates: the number of steps.
        params: the parameters before the first step.
        grads: the gradients of all steps, each `[num_updates, ...]`.
    """
    tx = optax.with_extra_args_support(tx)

    # One program and many calls: a loop in the program takes XLA longer to compile.
    def update(grads: Any, state: Any, params: Any) -> Any:
        extras = _extras(tx, params, grads) if with_extras else {}
        updates, new = tx.update(grads, state, params, **extras)
        return updates, typed_like(state, new), optax.apply_updates(params, updates)

    if num_updates == 1:  # one program, in which XLA folds the first state
        updates = programs.run(
            lambda grads, params: update(grads, tx.init(params), params)[0],
            jax.tree.map(lambda x: x[0], grads),
            params,
        )
        return [np.asarray(x)[None] for x in arrays_of(updates)]
    params = jax.tree.map(jnp.asarray, params)
    state = programs.run(tx.init, params)
    state = typed_like(state, state)
    all_updates = []
    gradients = [jax.tree.map(lambda x: x[i], grads) for i in range(num_updates)]  # noqa: B023
    take_step = programs.ready(update, gradients[0], state, params)
    for gradient in gradients:
        updates, state, params = take_step(gradient, state, params)
        all_updates.append(arrays_of(updates))
    return [np.stack(each) for each in zip(*jax.device_get(all_updates), strict=True)]


def typed_like(old: Any, new: Any) -> Any:
    """Cast the arrays of `new` to the dtypes of `old`.

    With a state of unchanged types, all updates run in one compiled program.
    """
    return jax.tree.map(lambda x, y: jnp.asarray(y, jnp.asarray(x).dtype), old, new)


def _squared_norm(params: Any, grad_fn: Any = None, obj_fn: Any = None) -> Any:
    # Line searches give `value_fn` the extra arguments that it names, and refuse all others.
    del grad_fn, obj_fn
    return optax.tree.norm(params, squared=True)


def _extras(tx: optax.GradientTransformation, params: Any, grads: Any) -> dict[str, Any]:
    """Return values for the extra arguments that `tx.update` accepts, by name.

    Line searches, Polyak steps and SAM take such arguments: a loss, a gradient, a function.
    """
    arguments = {
        "value": jnp.float32(1),
        "grad": grads,
        "value_fn": _squared_norm,
        "grad_fn": lambda params, *_, **__: params,
        "obj_fn": lambda params, *_, **__: optax.tree.norm(params, squared=True),
    }
    accepted = inspect.signature(tx.update).parameters
    takes_any = any(p.kind == p.VAR_KEYWORD for p in accepted.values())
    return {key: x for key, x in arguments.items() if takes_any or key in accepted}


def _widened(x: np.ndarray, leaf: LeafSpec) -> np.ndarray:
    """Pad `x` by one element along each dim that is padded in the leaf's layout."""
    if not leaf.padded_dims or math.prod(x.shape) == 0:
        return x
    dims = [x.ndim - len(leaf.shape) + each.dim for each in leaf.padded_dims]
    return np.pad(x, [(0, d in dims) for d in range(x.ndim)])


def _stored_wide(x: np.ndarray, leaf: LeafSpec) -> Any:
    """Return `x`; if its leaf is padded, as a `StoredArray` that is padded by `_widened`."""
    wide = _widened(x, leaf)
    if wide is x:
        return x
    shape = (2,) * len(leaf.shape)
    tiny = [DimSharding(each.dim, size=2, num_shards=3) for each in leaf.padded_dims]
    form = LeafSpec("", shape, _dtype_of(leaf), tiny[0], stages=tiny[1] if tiny[1:] else None)
    return StoredArray.of(wide, form)
