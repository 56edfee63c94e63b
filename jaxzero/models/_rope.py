"""Rotary position embeddings (https://arxiv.org/abs/2104.09864), and their frequencies.

The rotated numbers of a head are pairs; pair (a_i, b_i) of the token at position p is rotated by
the angle p f_i, so that the product of a query and a key depends only on the distance of the two
tokens:

    rotate(a, b) = (a cos - b sin, b cos + a sin)

Numbers of a head beyond the rotated ones stay as they are (partial rotation). Models differ in
which numbers form a pair. In some, a is in the first half of the rotated numbers and b at the same
place in the second half; in others, a and b are neighbours.

Pair i of r rotated pairs turns by f_i = base^(-i / r) radians per token. A scaling lowers the
frequencies for texts longer than in training. It is a frozen dataclass of numbers from
`config.json`, and computes the frequencies. Frequencies are computed in the order of operations and
the dtype of transformers: at position 100,000 a rounding error of a frequency is a noticeable
angle.

Dimensions: b batch (or 1), t tokens, h heads, k head size, r rotated pairs.
"""

import abc
import dataclasses
import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

Speeds = Float32[Array, "r"] | Float32[np.ndarray, "r"]


class Scaling(abc.ABC):
    """Computes the frequency of each pair for texts longer than in training.

    A subclass is a frozen dataclass.
    """

    magnitude: float = 1.0  # multiplies sines and cosines

    @property
    def constant_up_to(self) -> int | None:
        """Number of tokens up to which the length of the text does not change the frequencies.

        None if the length never changes them.
        """
        return None

    @abc.abstractmethod
    def speeds(self, rotary_size: int, base: float, num_tokens: Int[Array, ""]) -> Speeds:
        """Return the frequency of each pair in radians per token, float32.

        Args:
            rotary_size: numbers of a head that are rotated, twice the number of pairs.
            base: the base of the frequencies without scaling.
            num_tokens: the largest position of the batch plus 1.
        """

    def check(self, rotary_size: int, base: float) -> None:  # noqa: B027 (most fit every `Rope`)
        """Raise `ValueError` if the scaling does not fit a `Rope` with these fields."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(Scaling):
    """Divides the frequency of every pair by `factor`."""

    factor: float

    def speeds(self, rotary_size, base, num_tokens):
        return (plain_speeds(rotary_size, base) / np.float32(self.factor)).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Scaling):
    """Lowers the frequency of pairs with less than `slow_turns` turns in `trained_length` tokens.

    Pairs with more than `fast_turns` turns keep their frequency; for pairs in between it is
    interpolated.

    References:
        The Llama 3 herd of models (https://arxiv.org/abs/2407.21783); `config.json` names
        the two numbers of turns `low_freq_factor` and `high_freq_factor`.
    """

    factor: float
    slow_turns: float = 1.0
    fast_turns: float = 4.0
    trained_length: int = 8192  # tokens

    def speeds(self, rotary_size, base, num_tokens):
        speeds = plain_speeds(rotary_size, base)
        num_turns = self.trained_length * speeds / (2 * math.pi)
        kept = (num_turns - self.slow_turns) / (self.fast_turns - self.slow_turns)
        kept = np.clip(kept, 0, 1)
        return (kept * speeds + (1 - kept) * speeds / self.factor).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongScaling(Scaling):
    """Divides the frequency of each pair by a divisor of its own, chosen by the length of the text.

    Args:
        short: divisor of each pair for texts of up to `trained_length` tokens.
        long: divisor of each pair for longer texts.
        trained_length: in tokens; compared with the largest position of the batch.
        magnitude: multiplies sines and cosines, for texts of any length.

    References:
        LongRoPE (https://arxiv.org/abs/2402.13753).
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained_length: int
    magnitude: float = 1.0

    @property
    def constant_up_to(self):
        return None if self.short == self.long else self.trained_length

    def speeds(self, rotary_size, base, num_tokens):
        short, long = (
            (1 / (np.asarray(factors, np.float32) * _periods(rotary_size, base))).astype(np.float32)
            for factors in (self.short, self.long)
        )
        return jnp.where(num_tokens > self.trained_length, long, short)

    def check(self, rotary_size, base):
        for name in ("short", "long"):
            given = len(getattr(self, name))
            if given != rotary_size // 2:
                raise ValueError(
                    f"`{name}` of LongScaling must hold {rotary_size // 2} factors, one for each "
                    f"rotated pair; got {given}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScaling(Scaling):
    """Raises the base for a batch with more than `trained_length` tokens in a row ("dynamic NTK").

    The base follows from the longest row of the batch alone. transformers also keeps the base of
    the longest row it has seen before, until a row fits in `trained_length` again.

    Args:
        factor: how strongly the base grows with the length.
        trained_length: tokens up to which nothing changes.
    """

    factor: float
    trained_length: int

    @property
    def constant_up_to(self):
        return self.trained_length

    def speeds(self, rotary_size, base, num_tokens):
        stretch = jnp.maximum(num_tokens, self.trained_length).astype(jnp.float32)
        stretch = self.factor * stretch / self.trained_length - (self.factor - 1)
        grown = base * stretch ** (rotary_size / (rotary_size - 2))
        longer = 1 / grown ** jnp.asarray(_exponents(rotary_size))
        return jnp.where(num_tokens > self.trained_length, longer, plain_speeds(rotary_size, base))

    def check(self, rotary_size, base):
        if rotary_size < 4:
            raise ValueError(
                f"DynamicScaling needs a `rotary_size` of at least 4; got {rotary_size}. The only "
                "pair has frequency 1 for every base."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(Scaling):
    """Divides the frequency of slow pairs by `factor`, keeps fast ones, interpolates in between.

    Pairs are fast or slow by their turns in `trained_length` tokens, as in `Llama3Scaling`, but the
    interpolation is linear in the number of the pair.

    Args:
        factor: by which the text may be longer than in training.
        trained_length: in tokens.
        fast_turns: pairs with more turns than this keep their frequency.
        slow_turns: the frequency of pairs with fewer turns than this is divided by `factor`.
        magnitude: multiplies sines and cosines.
        whole_pairs: round both limits outwards to whole numbers of pairs.

    References:
        YaRN (https://arxiv.org/abs/2309.00071); `config.json` names the two numbers of turns
        `beta_fast` and `beta_slow`, and `whole_pairs` `truncate`.
    """

    factor: float
    trained_length: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    magnitude: float = 1.0
    whole_pairs: bool = True

    def check(self, rotary_size, base):
        if base <= 1:
            raise ValueError(
                f"YarnScaling needs a `base` above 1; got {base}. Only then do later pairs turn "
                "more slowly."
            )

    def speeds(self, rotary_size, base, num_tokens):
        # Pair i makes trained_length / (2 pi base^(2 i / rotary_size)) turns: solved for i.
        first, last = (
            rotary_size
            * math.log(self.trained_length / (turns * 2 * math.pi))
            / (2 * math.log(base))
            for turns in (self.fast_turns, self.slow_turns)
        )
        if self.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_size - 1)
        if first == last:
            last += 0.001  # as transformers does, so that nothing is divided by 0
        pairs = np.arange(rotary_size // 2, dtype=np.float32)
        kept = 1 - np.clip((pairs - first) / (last - first), 0, 1)
        periods = _periods(rotary_size, base)
        speeds = 1 / (self.factor * periods) * (1 - kept) + 1 / periods * kept
        return speeds.astype(np.float32)


def plain_speeds(rotary_size: int, base: float) -> Float32[np.ndarray, "r"]:
    """Return the frequency of each pair without scaling, in radians per token."""
    return (1 / _periods(rotary_size, base)).astype(np.float32)


def _periods(rotary_size: int, base: float) -> np.ndarray:
    return np.float32(base) ** _exponents(rotary_size)


def _exponents(rotary_size: int) -> np.ndarray:
    return np.arange(0, rotary_size, 2, dtype=np.float32) / np.float32(rotary_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotation: which elements of a head are rotated, and the frequency of each pair.

    Attributes:
        rotary_size: number of elements that are rotated: the first ones of a head, or in latent
            attention the last ones.
        base: base of the frequencies.
        scaling: changes the frequencies for long texts; None for none.
        pairs: "halves" if elements i and i + rotary_size / 2 are a pair, "neighbours" if 2 i and
            2 i + 1 are.
    """

    rotary_size: int
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
    """The sine and the cosine of the angle by which each pair of each token is rotated."""

    cos: Float32[Array, "b t r"]
    sin: Float32[Array, "b t r"]


def turns(rope: Rope, positions: Int[Array, "b t"]) -> Turns:
    """Compute the sines and cosines of a rotation at `positions`, in float32."""
    size, base, scaling = rope.rotary_size, rope.base, rope.scaling
    if scaling is None:
        speeds, magnitude = plain_speeds(size, base), 1.0
    else:
        speeds = scaling.speeds(size, base, jnp.max(positions) + 1)
        magnitude = scaling.magnitude
    angles = positions[:, :, None].astype(jnp.float32) * jnp.asarray(speeds)[None, None]
    return Turns(jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude)


def no_turns(like: Turns) -> Turns:
    """Return the rotation by angle 0, in the shapes of `like`."""
    return Turns(jnp.ones_like(like.cos), jnp.zeros_like(like.sin))


def rotate(
    x_bthk: Float[Array, "b t h k"], by: Turns, pairs: Literal["halves", "neighbours"] = "halves"
) -> Float[Array, "b t h k"]:
    """Rotate the pairs of queries or keys, in float32; numbers that are not rotated stay."""
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
