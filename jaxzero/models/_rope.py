"""Rotary position embeddings (https://arxiv.org/abs/2104.09864), with scalings for long contexts.

A head is divided into two halves of r numbers, (a, b); the pair (a_i, b_i) of the token at position
p is rotated by the angle p f_i with f_i = base^(-i / r), so that the product of a query and a key
depends only on the distance of the two tokens:

    rotate(a, b) = (a cos - b sin, b cos + a sin)

Numbers of a head beyond the first 2 r are not rotated (partial rotation). A model that was extended
from short to long texts rotates its slow pairs more slowly; each such scaling is one dataclass.

Dimensions: b batch (or 1), t tokens, h heads, k head size, r rotated pairs.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Divides the frequency of every pair by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Lowers the frequency of pairs with less than `slow_turns` turns in `trained_length` tokens.

    Pairs with more than `fast_turns` keep their frequency; those in between are interpolated.

    References:
        The Llama 3 herd of models (https://arxiv.org/abs/2407.21783); `config.json` names
        the two numbers of turns `low_freq_factor` and `high_freq_factor`.
    """

    factor: float
    slow_turns: float = 1.0
    fast_turns: float = 4.0
    trained_length: int = 8192  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongScaling:
    """A divisor per pair, with one set for texts of up to `trained_length` tokens, one for longer.

    Args:
        short, long: divisors of each pair's frequency.
        trained_length: in tokens; compared with the largest position to choose the set.
        magnitude: multiplies sines and cosines, for both sets.

    References:
        LongRoPE (https://arxiv.org/abs/2402.13753).
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained_length: int
    magnitude: float = 1.0


Scaling = LinearScaling | Llama3Scaling | LongScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Number of rotated elements of a head, and the frequency of each pair."""

    rotary_size: int  # numbers of a head that are rotated, from its start
    base: float = 10000.0
    scaling: Scaling | None = None

    def __post_init__(self):
        if self.rotary_size < 2 or self.rotary_size % 2:
            raise ValueError(
                f"`rotary_size` must be even and at least 2; got {self.rotary_size}. Numbers of a "
                "head are rotated in pairs."
            )
        if isinstance(self.scaling, LongScaling):
            for name in ("short", "long"):
                given = len(getattr(self.scaling, name))
                if given != self.rotary_size // 2:
                    raise ValueError(
                        f"`{name}` of LongScaling must hold {self.rotary_size // 2} factors, one "
                        f"for each rotated pair; got {given}."
                    )


class Turns(NamedTuple):
    """Sine and cosine of the rotation angle of each pair of each token."""

    cos: Float32[Array, "b t r"]
    sin: Float32[Array, "b t r"]


def turns(rope: Rope, positions: Int[Array, "b t"]) -> Turns:
    """Compute sines and cosines in float32, independent of the compute dtype."""
    scaling = rope.scaling
    if isinstance(scaling, LongScaling):
        is_long = jnp.max(positions) >= scaling.trained_length
        speeds = jnp.where(is_long, _speeds(rope, scaling.long), _speeds(rope, scaling.short))
        magnitude = scaling.magnitude
    else:
        speeds, magnitude = jnp.asarray(_speeds(rope)), 1.0
    angles = positions[:, :, None].astype(jnp.float32) * speeds[None, None]
    return Turns(jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude)


def rotate(x_bthk: Float[Array, "b t h k"], by: Turns) -> Float[Array, "b t h k"]:
    """Rotate queries or keys, in float32."""
    num_pairs = by.cos.shape[-1]
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    first, second, rest = jnp.split(x_bthk, [num_pairs, 2 * num_pairs], axis=-1)
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = [a * cos - b * sin, b * cos + a * sin]
    return jnp.concatenate([*(each.astype(x_bthk.dtype) for each in rotated), rest], axis=-1)


def _speeds(rope: Rope, factors: tuple[float, ...] | None = None) -> np.ndarray:
    """Compute the frequency of each pair in radians per token, float32 `[r]`.

    The order of operations and the dtype are those of transformers: at position 100,000 a rounding
    error of a frequency is a noticeable angle.
    """
    exponents = np.arange(0, rope.rotary_size, 2, dtype=np.float32) / np.float32(rope.rotary_size)
    periods = np.float32(rope.base) ** exponents
    if factors is not None:
        periods = np.asarray(factors, np.float32) * periods
    speeds = (1 / periods).astype(np.float32)
    if isinstance(rope.scaling, LinearScaling):
        speeds = speeds / np.float32(rope.scaling.factor)
    if isinstance(rope.scaling, Llama3Scaling):
        speeds = _slow_down(speeds, rope.scaling)
    return speeds.astype(np.float32)


def _slow_down(speeds: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    num_turns = scaling.trained_length * speeds / (2 * math.pi)
    kept = (num_turns - scaling.slow_turns) / (scaling.fast_turns - scaling.slow_turns)
    kept = np.clip(kept, 0, 1)
    return kept * speeds + (1 - kept) * speeds / scaling.factor
