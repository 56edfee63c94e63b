"""Codecs with kernels, in all combinations of options that matter, and one of each kind."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

import jaxzero as jz

E5M2 = jnp.float8_e5m2
NEAREST = [
    jz.Int8(),
    jz.Int8(block=32, hadamard=32),
    jz.Int8(block=64, scale_dtype=jnp.float32),
    jz.Int4(),
    jz.Int4(block=32, scale_dtype=jnp.float32),
    jz.Int4(block=64, hadamard=32),
    jz.Float8(block=64),
    jz.Float8(block=32, hadamard=32, scale_dtype=jnp.float32),
    jz.Float8(block=32, dtype=E5M2),
]
CODECS = NEAREST + [dataclasses.replace(codec, rounding="stochastic") for codec in NEAREST]
SMALL = {  # one of each kind, for what does not depend on options
    "int8": jz.Int8(block=32),
    "int4": jz.Int4(block=32, rounding="stochastic"),
    "int4 rotated": jz.Int4(block=32, hadamard=32),
    "e4m3": jz.Float8(block=32, rounding="stochastic"),
    "e5m2": jz.Float8(block=32, dtype=E5M2, scale_dtype=jnp.float32),
}
