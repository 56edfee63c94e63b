"""The oracle for quantised wires: how far from it a right gradient can be.

Weights are moved to two values, plus and minus a power of two for each leaf, which block
codecs with float32 scales write exactly. So all that is lost is lost of the gradients, and
what may be lost there follows from the codecs:

A block of B numbers, rounded to steps of `amax / q`, is off by half a step at most, each
number; so by `c |block|` with `c = sqrt(B) / 2q`, because amax is at most the block's norm
(a rotation changes neither norm). The first hop loses `c |g_d|` of each device's gradient, the
second `c` of the norm of each node's mean, which is at most `(1 + c)` times the mean of the
`|g_d|`. So the mean over devices is off by `(c1 + c2 (1 + c1)) mean |g_d|` at most.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxzero as jz

from ._case import Case
from ._compare import NUM_EXAMPLES, TOLERANCE, arguments

_BLOCK = 32
_INT8 = jz.Int8(block=_BLOCK, scale_dtype="float32")
_ROTATED = dataclasses.replace(_INT8, hadamard=32)
_INT4 = jz.Int4(block=_BLOCK, scale_dtype="float32")
_WEIGHTS = jz.PerAxis(node=_INT8, local=_INT8)

# The presets with exact scales, blocks that the zoo's small leaves can fill, and gradients in 8
# bits: what may be lost in 4 is nearly all, and a gradient of zeros would pass.
PRESETS = {
    "zeropp": dataclasses.replace(
        jz.zeropp(),
        weights=_WEIGHTS,
        gradients=jz.PerAxis(node=_INT8, local=_INT8),
        hpz=jz.HpZ(codec=_INT8),
        min_quantized_size=0,
    ),
    "zeropp4": dataclasses.replace(
        jz.zeropp4(),
        weights=jz.PerAxis(node=jz.WeightDelta(_INT4), local=_INT8),
        gradients=jz.PerAxis(node=_ROTATED, local=_ROTATED),
        hpz=jz.HpZ(codec=_INT8),
        min_quantized_size=0,
    ),
}
_SHARE = math.sqrt(_BLOCK) / (2 * 127)  # the `c` of the text above
_OF_TWO_HOPS = _SHARE + _SHARE * (1 + _SHARE)


def _two_valued(x: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(x.dtype, jnp.floating) or not np.any(x):
        return x
    size = 2.0 ** np.round(np.log2(np.mean(np.abs(np.asarray(x, np.float64)))))
    return np.where(np.asarray(x, np.float64) < 0, -size, size).astype(x.dtype)


def check_quantised(case: Case, zero: jz.Zero) -> None:
    """Loss and gradients of a case are as near to the oracle's as the codecs allow.

    The oracle of a case with collectives has no gradient for each device, so there is no bound;
    gradients then travel whole, and weights alone are quantised.
    """
    alone = case.oracle is case.loss
    if not alone:
        zero = jz.Zero(zero.mesh, dataclasses.replace(zero.config, gradients=jz.PerAxis()))
    with jax.default_matmul_precision("highest"):
        trees, batch = arguments(case, "float32")
        trees = jax.tree.map(_two_valued, trees)
        num_devices = zero.mesh.shape["node"] * zero.mesh.shape["local"]
        want, sizes = expected_and_sizes(case, trees, batch, num_devices)
        got = _run(case, zero, trees, batch)
    tolerance = case.tolerance or TOLERANCE["float32"]
    assert _norm(_flat(got[0]) - _flat(want[0])) <= max(tolerance, 1e-5) * (
        1 + _norm(_flat(want[0]))
    )
    assert_within(got[1], want[1], sizes, _OF_TWO_HOPS if alone else 0.0, tolerance)


def assert_within(got, want, sizes, share=_OF_TWO_HOPS, tolerance=1e-6) -> None:
    """Each leaf is off by no more than `share` of its size, and what float32 loses."""
    total = np.sqrt(sum(_norm(x) ** 2 for x in jax.tree.leaves(want)))
    for (path, x), y, size in zip(
        jax.tree_util.tree_leaves_with_path(got),
        jax.tree.leaves(want),
        jax.tree.leaves(sizes),
        strict=True,
    ):
        at = jax.tree_util.keystr(path)
        assert x.shape == y.shape and x.dtype == y.dtype, f"{at}: {x.dtype}{x.shape}"
        error = _norm(np.asarray(x, np.float64) - np.asarray(y, np.float64))
        allowed = share * size + tolerance * max(_norm(y), total)
        assert error <= allowed, f"{at}: error {error:.2e}, allowed {allowed:.2e}"


def _run(case: Case, zero: jz.Zero, trees, batch):
    sharded = [zero.shard(tree) for tree in trees]
    step = zero.value_and_grad(case.loss, case.argnums, has_aux=case.has_aux)
    several = isinstance(case.argnums, tuple)
    if zero.config.needs_wire_state:
        numbers = case.argnums if several else (case.argnums,)
        states = tuple(zero.init_wire_state(sharded[i]) for i in numbers)
        value, grads, _ = step(*sharded, batch, wire_state=states if several else states[0])
    else:
        value, grads = step(*sharded, batch)
    got = tuple(map(zero.unshard, grads)) if several else zero.unshard(grads)
    return jax.device_get(value), jax.device_get(got)


def expected_and_sizes(case: Case, trees, batch, num_devices: int):
    """The oracle's (value, gradients); and for each leaf the mean norm of devices' gradients."""
    oracle = jax.jit(jax.value_and_grad(case.oracle, case.argnums, has_aux=case.has_aux))
    value, grads = jax.device_get(oracle(*trees, batch))
    if case.oracle is not case.loss:
        return (value, grads), jax.tree.map(_norm, grads)
    rows = NUM_EXAMPLES // num_devices
    slices = [
        jax.tree.map(lambda x, i=i: x[i * rows : (i + 1) * rows], batch) for i in range(num_devices)
    ]
    each = [jax.device_get(oracle(*trees, x)[1]) for x in slices]
    sizes = jax.tree.map(lambda *xs: float(np.mean([_norm(x) for x in xs])), *each)
    if case.tolerance is not None:  # in 16 bits it matters where rounding takes place
        grads = jax.tree.map(
            lambda *xs: np.mean([np.asarray(x, np.float64) for x in xs], 0).astype(xs[0].dtype),
            *each,
        )
    return (value, grads), sizes


def _flat(tree) -> np.ndarray:
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def _norm(x) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64).ravel()))
