"""What XLA makes of matrix products of 8-bit codes for an H200: whether codes are multiplied.

    python -m benchmarks.compiled.fp8_products

The three products of a layer `y = x w` are compiled ahead of time, each with every form in which
JAX takes codes and scales. A row says which instructions multiply, and the dtypes that they read: a
product of codes reads `f8e4m3fn`; where XLA decodes first, it reads `bf16` or `f32`. Without a GPU
XLA tunes nothing and takes Triton's products, so each is compiled without those too. Needs
`jaxzero[aot]`. Nothing is run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.shared._rows import append_row
from jaxzero._hlo import parse

from ._h200 import h200_mesh

TOKENS, WIDTH, HIDDEN = 4096, 4096, 11008
BLOCK = 32  # numbers that share a scale, in the microscaling formats
# Rows and columns of a product, and the dim over which it sums: an operand's blocks lie along that.
PRODUCTS = {
    "forward": (TOKENS, HIDDEN, WIDTH),
    "gradient of the input": (TOKENS, WIDTH, HIDDEN),
    "gradient of the weight": (WIDTH, HIDDEN, TOKENS),
}
CODES, WIDE, POWERS = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float8_e8m0fnu
OPTIONS: dict[str, dict[str, Any]] = {
    "xla": {},
    "without Triton": {"xla_gpu_enable_triton_gemm": False},
}
_LAST = (((1,), (1,)), ((), ()))  # both operands are summed over their last dim


def _dot(a: Any, b: Any) -> Any:
    return jax.lax.dot_general(a, b, _LAST, preferred_element_type=WIDE)


def _one_scale(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
    """A scale for each operand, in the form that XLA's guide to fp8 asks for."""
    return _dot(a.astype(WIDE) * scale_a, b.astype(WIDE) * scale_b)


def _decoded(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
    """Blocks decoded by hand, and a product of bfloat16."""

    def decode(x: Any, scale: Any) -> Any:
        blocks = x.reshape(*scale.shape, BLOCK).astype(WIDE)
        return (blocks * scale.astype(WIDE)[..., None]).reshape(x.shape)

    return _dot(decode(a, scale_a), decode(b, scale_b))


def _scaled_dot(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
    scales = {"lhs_scale": scale_a, "rhs_scale": scale_b.T}
    return jax.lax.scaled_dot(a, b.T, **scales, preferred_element_type=WIDE)


def _scaled_matmul(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
    stacked = (x[None] for x in (a, b, scale_a, scale_b))
    return jax.nn.scaled_matmul(*stacked, preferred_element_type=WIDE)


def _scaled_dot_general(a: Any, b: Any) -> Any:
    """It encodes operands of 16 bits by itself."""
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8") for _ in range(3)]
    numbers = (((2,), (2,)), ((0,), (0,)))
    return jax.nn.scaled_dot_general(
        a[None], b[None], numbers, preferred_element_type=WIDE, configs=configs
    )


# The function, the dtypes of both operands, and the scales: none, one, or one for each block.
FORMS: dict[str, tuple[Callable[..., Any], Any, Any, str]] = {
    "dot_general of codes": (_dot, CODES, CODES, "none"),
    "dot_general of bfloat16 and codes": (_dot, WIDE, CODES, "none"),
    "one scale for each operand": (_one_scale, CODES, CODES, "one"),
    "blocks, decoded by hand": (_decoded, CODES, CODES, "blocks"),
    "jax.lax.scaled_dot": (_scaled_dot, CODES, CODES, "blocks"),
    "jax.nn.scaled_matmul": (_scaled_matmul, CODES, CODES, "blocks"),
    "jax.nn.scaled_dot_general": (_scaled_dot_general, WIDE, WIDE, "none"),
}


def main() -> None:
    """Compile each form of each product, and append a row for each."""
    one_device = NamedSharding(h200_mesh(1, 1), PartitionSpec())
    array = functools.partial(jax.ShapeDtypeStruct, sharding=one_device)
    for form, (function, *dtypes, scales) in FORMS.items():
        for product, (rows, columns, summed) in PRODUCTS.items():
            args = [array((n, summed), x) for n, x in zip((rows, columns), dtypes, strict=True)]
            if scales == "one":
                args += [array((), WIDE)] * 2
            elif scales == "blocks":
                args += [array((n, summed // BLOCK), POWERS) for n in (rows, columns)]
            results = {"form": form, "product": product, "shape": [rows, columns, summed]}
            for name, options in OPTIONS.items():
                found = {"option_set": name} | compiled(function, args, options)
                append_row("fp8_products", results | found)


def compiled(
    function: Callable[..., Any], args: list[Any], options: dict[str, Any]
) -> dict[str, Any]:
    """What multiplies in the compiled program; or why there is none."""
    try:
        text = jax.jit(function).lower(*args).compile(compiler_options=options).as_text()
    except Exception as error:  # XLA's and JAX's refusals are of several classes
        return {"multiplied_by": [], "refused": f"{type(error).__name__}: {error}"[:160]}
    return {"multiplied_by": multiplications(text or "")}


def multiplications(text: str) -> list[str]:
    """Each matrix product of a program, with the dtypes that it reads: `dot f8e4m3fn f8e4m3fn`."""
    found = []
    for computation in parse(text).computations.values():
        for x in computation.instructions:
            called = re.search(r'custom_call_target="([^"]+)"', x.text)
            name = called[1] if called else x.op
            if x.op in ("dot", "scaled-dot") or "cublas" in name or "cudnn" in name:
                operands = [computation.by_name[each] for each in x.operands]
                read = [each.results[0].dtype for each in operands[:2]]
                found.append(" ".join([name, *read]))
    return found


if __name__ == "__main__":
    main()
