"""A matrix whose products with activations are computed in 8 bits, as Flax's fp8 layers do."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

_HISTORY = 16  # steps whose largest values decide the next scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Matrix:
    """A float32 kernel `[..., m, n]` with the state of an fp8 layer, named as Flax names it.

    `x @ matrix` multiplies `x[..., m]` and the kernel in float8_e4m3fn, and backward multiplies
    their codes with cotangents in float8_e5m2. The gradient of a scale or history is its next
    value, by which jaxzero knows it.
    """

    kernel: jax.Array
    input_scale: jax.Array
    kernel_scale: jax.Array
    output_grad_scale: jax.Array
    input_amax_history: jax.Array
    kernel_amax_history: jax.Array
    output_grad_amax_history: jax.Array

    @classmethod
    def of(cls, kernel: jax.Array) -> Fp8Matrix:
        """Wrap a kernel `[..., m, n]`, with scales of 1 and a history of zeros for each matrix."""
        layers = kernel.shape[:-2]
        scales = [jnp.ones((*layers, 1))] * 3
        return cls(kernel, *scales, *[jnp.zeros((*layers, _HISTORY))] * 3)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return fp8_ops.fp8_scaled_dot_general(
            x,
            self.kernel,
            (((x.ndim - 1,), (0,)), ((), ())),
            preferred_element_type=x.dtype,
            lhs_scale=self.input_scale,
            rhs_scale=self.kernel_scale,
            grad_scale=self.output_grad_scale,
            lhs_amax_history=self.input_amax_history,
            rhs_amax_history=self.kernel_amax_history,
            grad_amax_history=self.output_grad_amax_history,
        )
