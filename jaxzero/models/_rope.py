"""Rotary position embeddings (https://arxiv.org/abs/2104.09864).

The rotated numbers of a head are pairs; pair (a_i, b_i) of the token at position p is rotated by
the angle p f_i, so that the product of a query and a key depends only on the distance of the two
tokens:

    rotate(a, b) = (a cos - b sin, b cos + a sin)

The frequencies f_i, and how they change for long texts, are in `_rope_scaling`. Numbers of a head
beyond the rotated ones stay as they are (partial rotation). Models differ in which numbers are a
pair: the first and the second half of the rotated numbers are a and b, or each two neighbours are.

Dimensions: b batch (or 1), t tokens, h heads, k head size, r rotated pairs.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from ._rope_scaling import Scaling, plain_speeds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Number of rotated elements of a head, and the frequency of each pair."""

    rotary_size: int  # numbers that are rotated: a head's first ones, in latent attention its last
    base: float = 10000.0
    scaling: Scaling | None = None
    pairs: Literal["halves", "neighbours"] = "halves"

    def __post_init__(self):
        if self.rotary_size < 2 or self.rotary_size % 2:
            raise ValueError(
                f"`rotary_size` must be even and at least 2; got {self.rotary_size}. Numbers of a "
                "head are rotated in pairs."
            )
        if self.scaling is not None:
            self.scaling.check(self.rotary_size, self.base)


class Turns(NamedTuple):
    """Sine and cosine of the rotation angle of each pair of each token."""

    cos: Float32[Array, "b t r"]
    sin: Float32[Array, "b t r"]


def turns(rope: Rope, positions: Int[Array, "b t"]) -> Turns:
    """Compute sines and cosines in float32, independent of the compute dtype."""
    size, base, scaling = rope.rotary_size, rope.base, rope.scaling
    if scaling is None:
        speeds, magnitude = plain_speeds(size, base), 1.0
    else:
        speeds = scaling.speeds(size, base, jnp.max(positions) + 1)
        magnitude = scaling.magnitude
    angles = positions[:, :, None].astype(jnp.float32) * jnp.asarray(speeds)[None, None]
    return Turns(jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude)


def no_turns(like: Turns) -> Turns:
    """The rotation that changes nothing, in the shape of another."""
    return Turns(jnp.ones_like(like.cos), jnp.zeros_like(like.sin))


def rotate(
    x_bthk: Float[Array, "b t h k"], by: Turns, pairs: Literal["halves", "neighbours"] = "halves"
) -> Float[Array, "b t h k"]:
    """Rotate queries or keys, in float32."""
    num_pairs = by.cos.shape[-1]
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    rotated, rest = jnp.split(x_bthk, [2 * num_pairs], axis=-1)
    wide = rotated.astype(jnp.float32)
    if pairs == "halves":
        a, b = jnp.split(wide, 2, axis=-1)
        wide = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = wide[..., 0::2], wide[..., 1::2]
        wide = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(wide.shape)
    return jnp.concatenate([wide.astype(x_bthk.dtype), rest], axis=-1)
