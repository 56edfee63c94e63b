"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) and how long contexts stretch them.

A head is cut into two halves of r numbers, (a, b); the pair (a_i, b_i) of the token at position p
turns by the angle p f_i with f_i = base^(-i / r), so that the product of a query and a key depends
on the distance of the two tokens alone:

    rotate(a, b) = (a cos - b sin, b cos + a sin)

What follows the 2 r rotated numbers in a head, if anything, passes as it is (partial rotation). A
model that was trained on short texts and then on long ones turns its slow pairs more slowly: that
is a scaling, one dataclass for each kind.

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
    """Every pair turns `factor` times more slowly."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Pairs that turn less than `slow_turns` times in `trained_length` tokens are slowed.

    Those above `fast_turns` keep their speed, those between are interpolated.

    References:
        The Llama 3 herd of models (https://arxiv.org/abs/2407.21783); `config.json` says
        `low_freq_factor` and `high_freq_factor` for the two numbers of turns.
    """

    factor: float
    slow_turns: float = 1.0
    fast_turns: float = 4.0
    trained_length: int = 8192  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongScaling:
    """A factor for each pair, one set for texts of up to `trained_length` tokens, one for longer.

    Args:
        short, long: what each pair's speed is divided by.
        trained_length: in tokens; which set is used is decided by the largest position.
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
    """Which part of a head is rotated, and how fast each pair of numbers turns."""

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
    """By how much each pair of each token turns."""

    cos: Float32[Array, "b t r"]
    sin: Float32[Array, "b t r"]


def turns(rope: Rope, positions: Int[Array, "b t"]) -> Turns:
    """Sines and cosines in float32, whatever the model computes in."""
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
    """Radians per token of each pair, float32 `[r]`, in the order of operations that is usual.

    At position 100,000 a rounding error of a speed is a visible angle, so float32 is meant.
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
