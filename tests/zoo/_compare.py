"""The oracle: `jax.value_and_grad` on one device and the whole batch; and the distance to it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._case import Case

# One rounding of the arithmetic, times what a few hundred of them in a row may add up to.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
# A leaf whose gradient cancels to less than this part of the whole gradient holds rounding
# errors of the size of the whole, so that is what it is measured against.
CANCELLED = 1e-3
NUM_EXAMPLES = 24  # a multiple of the device counts of all meshes: 1, 6, 8


def in_dtype(tree: Any, dtype: str) -> Any:
    """Float32 leaves in `dtype`; others as they are."""

    def convert(x):
        return np.asarray(x, dtype) if x.dtype == jnp.float32 else x

    return jax.tree.map(convert, tree)


def arguments(case: Case, dtype: str) -> tuple[tuple[Any, ...], Any]:
    """(parameter trees, batch) of a case, on the host."""
    trees = jax.tree.map(np.asarray, case.init(jax.random.key(0)))
    batch = jax.tree.map(np.asarray, case.batch(jax.random.key(1), NUM_EXAMPLES))
    return in_dtype(trees, dtype), in_dtype(batch, dtype)


@functools.cache
def expected(case: Case, dtype: str, num_slices: int = 1) -> tuple[Any, Any]:
    """What the oracle says: ((loss, aux) or loss, gradients).

    Args:
        case: a model.
        dtype: "float32" or "float64".
        num_slices: into how many slices the batch is cut; the result is the mean over them. One is
            the oracle proper. As many as there are devices is the same in exact arithmetic, but
            rounds to 16 bits where the devices do.
    """
    trees, batch = arguments(case, dtype)
    oracle = jax.jit(jax.value_and_grad(case.oracle, case.argnums, has_aux=case.has_aux))
    rows = NUM_EXAMPLES // num_slices
    slices = [
        jax.tree.map(lambda x, i=i: x[i * rows : (i + 1) * rows], batch) for i in range(num_slices)
    ]
    results = [jax.device_get(oracle(*trees, x)) for x in slices]
    if num_slices == 1:
        return results[0]
    return jax.tree.map(
        lambda *xs: np.mean([np.asarray(x, np.float64) for x in xs], axis=0).astype(xs[0].dtype),
        *results,
    )


def _norm(x: Any) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64).ravel()))


def assert_close(got: Any, want: Any, tolerance: float, what: str) -> None:
    """Every leaf of `got` is within `tolerance` of `want`, relative to the norm of the leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want), f"{what}: another tree"
    total = np.sqrt(sum(_norm(x) ** 2 for x in jax.tree.leaves(want)))
    bad = []
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        at = what + jax.tree_util.keystr(path)
        if np.shape(x) != np.shape(y) or x.dtype != y.dtype:
            bad.append(f"{at}: {x.dtype}{np.shape(x)} where {y.dtype}{np.shape(y)} is right")
            continue
        size = _norm(y)
        scale = size if size > CANCELLED * total else total
        error = _norm(np.asarray(x, np.float64) - np.asarray(y, np.float64))
        if not error <= tolerance * scale:
            bad.append(f"{at}: error {error:.1e}, allowed {tolerance:.0e} x {scale:.1e}")
    assert not bad, "\n".join(bad)


def check(case: Case, zero: Any, dtype: str = "float32") -> None:
    """`zero.value_and_grad` of a case equals its oracle, leaf by leaf."""
    tolerance = case.tolerance or TOLERANCE[dtype]
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        trees, batch = arguments(case, dtype)
        num_devices = zero.mesh.shape["node"] * zero.mesh.shape["local"]
        num_slices = 1 if case.tolerance is None else num_devices
        want_value, want_grads = expected(case, dtype, num_slices)
        sharded = [zero.shard(tree) for tree in trees]
        step = zero.value_and_grad(case.loss, case.argnums, has_aux=case.has_aux)
        value, grads = step(*sharded, batch)
        several = isinstance(case.argnums, tuple)
        got = tuple(map(zero.unshard, grads)) if several else zero.unshard(grads)
        assert_close(jax.device_get(value), want_value, tolerance, "value")
        assert_close(jax.device_get(got), want_grads, tolerance, "grads")
