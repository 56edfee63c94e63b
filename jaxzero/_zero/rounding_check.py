"""Warn if updates of parameters in 16 bits would round away, by running the optimizer.

bfloat16 has 8 significant bits, so w + u is w if |u| < |w| / 512. The updates of Adam are about as
large as the learning rate, whatever the gradients: at 1e-5, weights of 0.02 never change. So the
optimizer is run on tiny leaves. All elements of a leaf have the size of the median of a sample of
the weights. Gradients keep their signs, which gives the largest steps, and are of size 1 or
`LARGE`.

No warning is given in three cases: an update changes the leaf, as with optimizers whose updates
follow the gradients (SGD) or are rounded stochastically; all updates are exactly 0, as those of
frozen leaves; or the state holds a copy of the leaf with more bits.

Schedules are run at steps that grow by `_GROWTH` from update to update, so that the end of a
warm-up is seen.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._mesh import in_host, is_traced
from .._sharding import TreeLayout, arrays_of
from .._text import first_names
from .._warnings import warn
from .optimizer_state import TrueShapes
from .padding_check import LARGE, NUM_UPDATES, has_16_bits, one_of_each_kind, own_modes, typed_like
from .programs import Programs

_GROWTH = 1.6  # to the power of 31: 2 million
_SAMPLED = 64  # elements of each of the last two dims


def warn_of_rounding(
    tx: optax.GradientTransformation, params: Any, layout: TreeLayout, programs: Programs
) -> None:
    """Warn if the updates of `tx` are too small for parameters in 16 bits, whatever the gradients.

    Args:
        tx: the optimizer.
        params: the trained parameters; nothing is done if they are abstract or traced.
        layout: the layouts of the parameters.
        programs: compiles the trials.
    """
    arrays = arrays_of(params)
    narrow = [has_16_bits(leaf) for leaf in layout.leaves]
    if not any(narrow) or any(is_traced(x) or not isinstance(x, jax.Array) for x in arrays):
        return
    tx = tx.inner if isinstance(tx, TrueShapes) else tx
    tried = one_of_each_kind(layout)
    with own_modes():
        sizes = [
            _median(x) if is_in and is_narrow else 1.0
            for x, is_in, is_narrow in zip(arrays, tried, narrow, strict=True)
        ]
        try:
            stuck = _stuck(programs, tx, layout, sizes, tried)
        except Exception:  # `tx` needs more than gradients, or all leaves: not known
            return
    paths = [
        leaf.path
        for leaf, is_stuck, is_narrow in zip(layout.leaves, stuck, narrow, strict=True)
        if is_stuck and is_narrow
    ]
    if paths:
        warn(
            f"In {first_names(paths)}, parameters in 16 bits, most elements would never change: an "
            "update of this optimizer is smaller than half of the distance to the next number. "
            'Train parameters in float32 and cast them in the loss: load with `dtype="float32"` '
            "(jaxzero's models compute in their `compute_dtype`), or shard `jax.tree.map(lambda x: "
            'x.astype("float32"), params)`. Optimizers that keep copies in float32, or round '
            "stochastically, work too."
        )


def _median(x: jax.Array) -> float:
    """Return the median absolute value in a corner of the first shard of `x` in this process."""
    if not x.addressable_shards:
        return 0.0
    data = x.addressable_shards[0].data
    if in_host(x):
        data = np.asarray(data)  # nothing is computed in host memory: NumPy takes the slice
    sampled = [1] * (data.ndim - 2) + [_SAMPLED] * min(data.ndim, 2)
    values = np.abs(np.asarray(data[tuple(map(slice, sampled))], np.float32))
    values = values[np.isfinite(values)]
    # The median is an element, not the mean of two: rounding depends on its power of 2.
    return float(np.sort(values)[values.size // 2]) if values.size else 0.0


def _stuck(
    programs: Programs,
    tx: optax.GradientTransformation,
    layout: TreeLayout,
    sizes: list[float],
    tried: list[bool],
) -> list[bool]:
    """Return for each leaf whether its updates round away: some are not 0, but none changes it.

    Args:
        programs: compiles the trials.
        tx: the optimizer.
        layout: the layouts of the parameters.
        sizes: for each leaf, the absolute value of all elements of the tiny leaf that stands for
            it.
        tried: for each leaf, whether it is tried; the result is False for other leaves.
    """
    random = np.random.default_rng(0)
    trees = []
    for scale in (None, 1.0, LARGE):  # parameters, gradients
        leaves = []
        for leaf, size, is_in in zip(layout.leaves, sizes, tried, strict=True):
            signs = random.choice([-1.0, 1.0], (2,) * len(leaf.shape))
            values = signs * (size if scale is None else scale)
            leaves.append(jnp.asarray(values, leaf.dtype) if is_in else None)
        trees.append(layout.whole(leaves))
    params, *grads = trees
    flags = _run(programs, tx, params, grads)
    places = iter(range(sum(tried)))
    order = [next(places) if is_in else None for is_in in tried]
    return [i is not None and bool(flags[1, i] and not flags[0, i]) for i in order]


def _run(
    programs: Programs, tx: optax.GradientTransformation, params: Any, all_grads: list[Any]
) -> np.ndarray:
    """Run all trials; return booleans `[2, leaves]`.

    Row 0 says whether any update changes the leaf; row 1, whether any update of it is not 0. If the
    optimizer state holds a copy of the leaf with more bits, the leaf counts as changed.
    """

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, new = tx.update(grads, state, params)
        changed = optax.apply_updates(params, updates)
        pairs = zip(arrays_of(params), arrays_of(changed), strict=True)
        flags = [jnp.any(old != new) for old, new in pairs]
        nonzero = [jnp.any(x != 0) for x in arrays_of(updates)]
        return typed_like(state, new), changed, jnp.array([flags, nonzero])

    first = programs.run(tx.init, params)
    copied = _copied(first, params)
    first = typed_like(first, first)
    counters, all_flags = _counters(first), []
    take_step = programs.ready(update, all_grads[0], first, params)
    for grads in all_grads:
        state, current = first, params
        for i in range(NUM_UPDATES):
            leaves, treedef = jax.tree.flatten(state)
            for place in counters if i else ():
                leaves[place] = jnp.asarray(int(_GROWTH**i), leaves[place].dtype)
            state, current, flags = take_step(grads, jax.tree.unflatten(treedef, leaves), current)
            all_flags.append(flags)
    changed, updated = np.any(jax.device_get(all_flags), axis=0)
    return np.stack([changed | copied, updated])


def _copied(state: Any, params: Any) -> np.ndarray:
    """Return for each parameter whether the optimizer state holds an equal array with more bits."""
    held = [np.asarray(x) for x in jax.tree.leaves(state)]
    wide = [x for x in held if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 4]
    narrow = [np.asarray(x) if x.dtype.itemsize < 4 else None for x in arrays_of(params)]
    return np.array(
        [
            x is not None and any(np.array_equal(copy, x.astype(copy.dtype)) for copy in wide)
            for x in narrow
        ]
    )


def _counters(state: Any) -> list[int]:
    """Return the indices, among the state's leaves, of the counters that schedules read.

    Counters beside the moments `mu` and `nu` are left out: bias correction reads them.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    owners = {
        path[:i]
        for path, _ in leaves
        for i, key in enumerate(path)
        if getattr(key, "name", None) in ("mu", "nu")
    }
    return [
        place
        for place, (path, x) in enumerate(leaves)
        if jnp.issubdtype(x.dtype, jnp.integer)
        and not x.ndim
        and path[:-1] not in owners
        and getattr(path[-1], "name", None) != "mini_step"  # of `optax.MultiSteps`
    ]
