"""Run a program with the result of each operation moved by its rounding error.

Two right programs of one function round differently: they add in different orders, fuse different
operations, and split sums over different devices. The program alone tells how far apart their
results may be. To sample that, the result `y` of each operation that rounds is moved by

    +- k eps |y|                     for an elementwise operation with an error of k units, and
    +- sqrt(n) eps/2 sum |a_i b_i|   for a sum of n terms, in any order.

A hash of the bits of `y` and of a seed chooses the sign (Monte Carlo arithmetic). Each seed gives
one sample of the results. The first size is twice the largest error of a rounding. The second is
the bound of Higham and Mary, which holds for nearly all roundings. It includes the condition of the
reduction, `sum |a_i b_i| / |sum a_i b_i|`, so that a gradient whose terms cancel gets a large one.

A hash of the value is used and not a random key, so that equal values move alike: a maximum and its
recomputation in backward still agree. Zeros and small integers (counts, masks, one-hot rows) are
exact and are not moved.

References:
    Parker, Monte Carlo Arithmetic (1997);
    Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis (2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._mesh import CALLS_AND_REMAT, bind, equations_inside, evaluate, scan_sizes

_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")
_CALLS = CALLS_AND_REMAT | dict.fromkeys(_WITH_RULES, "call_jaxpr")
_DROPPED = {"debug_callback", "debug_print"}  # not run, or they would print for each sample
# Units in the last place that libraries of elementary functions may be off by, GPUs included.
_UNITS = dict.fromkeys(["add", "add_any", "sub", "mul"], 1) | dict.fromkeys(["div", "sqrt"], 2)
_OF_LIBRARIES = (
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh cumlogsumexp "
    "digamma erf erf_inv erfc exp exp2 expm1 igamma igammac lgamma log log1p logistic pow "
    "pallas_call polygamma rsqrt sin sinh square tan tanh custom_call ffi_call"
)
_UNITS |= dict.fromkeys(_OF_LIBRARIES.split(), 4)
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
# Each element's error is bounded by the largest element, not by its own size.
_NORMWISE = {"cholesky", "eigh", "fft", "householder_product", "lu", "qr", "schur", "svd"}
_NORMWISE |= {"triangular_solve", "tridiagonal_solve", "eig"}


def moved(
    function: Callable, args: Sequence[Any], seed: Any, redraw: Any, product_eps: float = 0.0
) -> list[Any]:
    """Run `function(*args)` with the result of each operation moved by its rounding error.

    Args:
        function: a function of trees of arrays, which returns a tree of arrays.
        args: the arguments of the function, traced or not.
        seed: a uint32 scalar, which chooses the sample.
        redraw: a bool scalar; whether random bits are replaced by other random bits too.
        product_eps: the precision of float32 matrix products on the platform that the results are
            compared with, if it computes them in fewer bits (TF32, bfloat16).

    Returns:
        The leaves of the tree that the function returns.
    """
    closed = jax.make_jaxpr(function)(*args)
    return _Moved(seed, redraw, product_eps).run(closed.jaxpr, closed.consts, jax.tree.leaves(args))


def draws_numbers(function: Callable, *args: Any) -> bool:
    """Return True if `function(*args)` draws random numbers."""
    equations = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return any(x.primitive.name == "random_bits" for y in equations for x in equations_inside(y))


class _Moved:
    """An interpreter of jaxprs that moves each result by its rounding error."""

    def __init__(self, seed: Any, redraw: Any, product_eps: float):
        self.seed, self.redraw, self.product_eps = seed, redraw, product_eps

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        return evaluate(jaxpr, consts, args, self._apply)

    def _closed(self, closed: Any) -> Callable:
        return lambda *args: self.run(closed.jaxpr, closed.consts, args)

    def _apply(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            inner = params[_CALLS[name]]
            return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
        match name:
            case "scan":
                return self._scan(params, inputs)
            case "while":
                return self._while(params, inputs)
            case "cond":
                branches = [self._closed(x) for x in params["branches"]]
                return lax.switch(inputs[0], branches, *inputs[1:])
            case "custom_linear_solve":
                return self._solve(params, inputs)
            case _ if name in _DROPPED:
                return []
        outputs = bind(equation, inputs)
        if name == "random_bits":
            return [jnp.where(self.redraw, _mixed(x, self.seed), x) for x in outputs]
        errors = _errors(equation, inputs, outputs, self.product_eps)
        return [self._move(x, error) for x, error in zip(outputs, errors, strict=True)]

    def _scan(self, params: Any, inputs: list[Any]) -> list[Any]:
        num_consts, num_carry = scan_sizes(params)
        consts, stacks = inputs[:num_consts], inputs[num_consts + num_carry :]
        body = self._closed(params["jaxpr"])

        def step(carry: Any, layers: Any) -> Any:
            outputs = body(*consts, *carry, *layers)
            return outputs[:num_carry], outputs[num_carry:]

        carry = inputs[num_consts : num_consts + num_carry]
        carry, stacked = lax.scan(
            step, carry, stacks, params["length"], params["reverse"], params["unroll"]
        )
        return [*carry, *stacked]

    def _while(self, params: Any, inputs: list[Any]) -> list[Any]:
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = inputs[:num_cond], inputs[num_cond : num_cond + num_body]
        cond, body = self._closed(params["cond_jaxpr"]), self._closed(params["body_jaxpr"])
        return lax.while_loop(
            lambda carry: cond(*of_cond, *carry)[0],
            lambda carry: body(*of_body, *carry),
            inputs[num_cond + num_body :],
        )

    def _solve(self, params: Any, inputs: list[Any]) -> list[Any]:
        """Run a `custom_linear_solve` by the function `solve` that the user gave for it."""
        lengths = params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        consts = inputs[start : start + lengths.solve]
        return self._closed(params["jaxprs"].solve)(*consts, *inputs[sum(lengths) :])

    def _move(self, x: Any, error: Any) -> Any:
        """Return `x` plus or minus `error` in each element, except in small integers.

        If `error` is None, return `x`.
        """
        if error is None:
            return x
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.complex(self._move(x.real, error), self._move(x.imag, error))
        wide = x.astype(_wide(x.dtype))
        largest = 2 ** (jnp.finfo(x.dtype).nmant // 2)  # a product of two is exact too
        exact = (wide == jnp.round(wide)) & (jnp.abs(wide) <= largest)
        sign = jnp.where((_hashed(x, self.seed) & 1) == 0, 1, -1).astype(wide.dtype)
        return jnp.where(exact, wide, wide + sign * error.astype(wide.dtype)).astype(x.dtype)


def _errors(equation: Any, inputs: list[Any], outputs: list[Any], product_eps: float) -> list[Any]:
    """Return the rounding errors of the elements of each output; None for an exact output."""
    name = equation.primitive.name
    terms = _num_terms(equation, inputs, outputs)
    if terms is not None and _rounds(outputs[0]):
        sizes = [jnp.abs(x) if _is_inexact(x) else x for x in inputs]
        eps = _eps(outputs[0].dtype)
        if equation.primitive.name in _PRODUCTS and not _is_exact(equation):
            eps = max(eps, product_eps)
        factor = math.sqrt(terms) * eps / 2
        scale = jnp.abs(bind(equation, sizes)[0])
        return [factor * scale.astype(_wide(scale.dtype)), *[None] * (len(outputs) - 1)]
    return [_error(name, equation, x) if _rounds(x) else None for x in outputs]


def _is_exact(equation: Any) -> bool:
    """Return True if a matrix product is computed in all bits of float32, or in wider floats."""
    precision = equation.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    return lax.Precision.HIGHEST in asked or any(x.aval.dtype.itemsize > 4 for x in equation.invars)


def _error(name: str, equation: Any, x: Any) -> Any:
    units = _UNITS.get(name)
    eps = _eps(x.dtype)
    size = jnp.abs(x)
    size = size.astype(_wide(size.dtype))
    if name in _NORMWISE:
        return math.sqrt(max(x.shape or (1,))) * eps * jnp.max(size, initial=0) + 0 * size
    if name == "integer_pow":
        units = max(1, abs(equation.params["y"]))
    elif name == "reduce_precision":
        eps, units = 2.0 ** -equation.params["mantissa_bits"], 1
    elif name in ("convert_element_type", "copy") and equation.invars[0].aval.dtype != x.dtype:
        old = equation.invars[0].aval.dtype
        is_narrower = jnp.issubdtype(old, jnp.inexact) and _eps(old) < eps
        units = 1 if is_narrower else None
    elif name in ("cumprod", "reduce_prod"):
        units = max(equation.invars[0].aval.shape or (1,))
    return None if units is None else units * eps * size


def _num_terms(equation: Any, inputs: list[Any], outputs: list[Any]) -> int | None:
    """Return how many terms the sums of an operation have; None if it computes no sums."""
    params = equation.params
    match equation.primitive.name:
        case "dot_general" | "ragged_dot" | "ragged_dot_general":
            numbers = params.get("dimension_numbers")
            numbers = getattr(numbers, "dot_dimension_numbers", numbers)
            if not isinstance(numbers, tuple):
                return inputs[0].shape[-1]
            return math.prod(inputs[0].shape[i] for i in numbers[0][0])
        case "conv_general_dilated":
            features = inputs[1].shape[params["dimension_numbers"].rhs_spec[0]]
            return max(1, inputs[1].size // max(features, 1))
        case "reduce_sum":
            return max(1, inputs[0].size // max(outputs[0].size, 1))
        case "cumsum":
            return inputs[0].shape[params["axis"]]
        case "scatter-add" | "scatter_add":
            return 1 + inputs[1].size // max(inputs[1].shape[-1], 1)
        case "reduce_window_sum":
            return math.prod(params["window_dimensions"])
        case "select_and_scatter_add":
            return math.prod(params["window_dimensions"])
    return None


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _rounds(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 1


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(jnp.float32, dtype) if jnp.finfo(dtype).bits > 16 else jnp.float32


def shifted(x: Any, by: Any, seed: Any) -> Any:
    """Move each number of `x` up or down by `by`, as `seed` chooses; leave integers unchanged."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    wide = x.astype(_wide(x.dtype))
    # The seed differs from that of roundings, so that a number is not moved twice in one direction.
    sign = jnp.where((_hashed(x, seed + jnp.uint32(77)) & 1) == 0, 1, -1).astype(wide.dtype)
    return (wide + sign * by).astype(x.dtype)


def _hashed(x: Any, seed: Any) -> Any:
    """Hash the magnitude of each number of `x`, together with `seed`, to a uint32."""
    size = jnp.abs(x)
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(size, kind)
    if x.dtype.itemsize == 8:
        bits = bits ^ (bits >> 32)
    return _mixed(bits.astype(jnp.uint32), seed)


def _mixed(bits: Any, seed: Any) -> Any:
    """Hash each integer, together with `seed`, to an integer of its type; one to one for uint32."""
    kind = bits.dtype
    x = bits.astype(jnp.uint32) ^ (seed.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # those of MurmurHash3
        x = (x ^ (x >> 16)) * jnp.uint32(factor)
    return (x ^ (x >> 16)).astype(kind)
