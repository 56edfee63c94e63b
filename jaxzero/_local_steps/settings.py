"""Settings of local steps: when nodes exchange parameters, in which fragments, and encoded how."""

from __future__ import annotations

import dataclasses
import numbers

import optax

from .._codecs import Codec, Int4
from .._sharding import check_codec, check_integer

# What DiLoCo found best for language models (https://arxiv.org/abs/2311.08105, section 3).
_OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Settings to train every node by itself, and average parameters every few steps.

    A round has `every` steps. Each element of the parameters is exchanged once in a round: the
    difference between the outer parameters and the node's own (the pseudo-gradient) is averaged
    over nodes, and the outer optimizer applies the mean to the outer parameters. The parameters
    are cut into `fragments`, whose turns are spread evenly over the round.

    Attributes:
        every: optimizer steps in a round (H).
        delay: steps between the sending of a fragment and the use of its mean (tau). The message
            travels while these steps are computed. 0: the node waits for it.
        fragments: equal parts of the parameters that are exchanged in turn; a divisor of `every`.
        outer: the outer optimizer, any optax chain. It runs once for each fragment and round, and
            its reductions (such as a norm) are over the fragment.
        codec: encodes the pseudo-gradients; the rounding error is added to the next one of that
            fragment (error feedback). Each node receives the encoded messages of all others, so
            many nodes send more than without a codec (4 bits: from 16 nodes on). None: they are
            sent in float32, and more than two nodes sum them by an all-reduce.
        mixing: the weight of the node's own parameters when the new outer ones arrive:
            `mixing * own + (1 - mixing) * outer`. None: the node's parameters are moved by the
            difference between the new outer parameters and what the node had when it sent; so the
            progress of the `delay` steps is kept, as LOSCAR-SGD does. Without a delay, 0 and None
            are the same. With a codec, take a small weight: the next message sends the rounding
            error of the last, which the node's own parameters, with this weight, still hold.

    Raises:
        ValueError: a number is out of range, `fragments` does not divide `every`, or `delay` is
            longer than the steps between two fragments.

    References:
        DiLoCo (https://arxiv.org/abs/2311.08105);
        Streaming DiLoCo (https://arxiv.org/abs/2501.18512);
        DaSGD (https://arxiv.org/abs/2006.00441);
        LOSCAR-SGD (https://arxiv.org/abs/2605.20866).
    """

    every: int
    delay: int = 0
    fragments: int = 1
    outer: optax.GradientTransformation = _OUTER
    codec: Codec | None = None
    mixing: float | None = None

    def __post_init__(self):
        for name, least in (("every", 1), ("delay", 0), ("fragments", 1)):
            check_integer(name, "LocalSteps", getattr(self, name), least)
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.every % self.fragments:
            raise ValueError(
                f"`fragments` must divide `every`, so that the exchanges are spread evenly over a "
                f"round; got {self.fragments} fragments for {self.every} steps."
            )
        if self.delay > self.steps_per_fragment:
            raise ValueError(
                f"`delay` must be at most `every / fragments` = {self.steps_per_fragment} steps, "
                "so that a fragment arrives before the next is sent; got "
                f"{self.delay}. Take fewer fragments, or more steps in a round."
            )
        if not hasattr(self.outer, "init") or not hasattr(self.outer, "update"):
            raise ValueError(
                "`outer` must be an optax optimizer, such as `optax.sgd(0.7, momentum=0.9, "
                f"nesterov=True)`; got {self.outer!r}."
            )
        if self.codec is not None:
            check_codec("codec", "LocalSteps", self.codec)
        is_share = isinstance(self.mixing, numbers.Real) and 0 <= self.mixing < 1
        if self.mixing is not None and (not is_share or isinstance(self.mixing, bool)):
            raise ValueError(
                f"`mixing` is the weight of a node's own parameters, from 0 to less than 1, or "
                f"None; got {self.mixing!r}."
            )

    @property
    def steps_per_fragment(self) -> int:
        """The number of steps from the exchange of one fragment to that of the next."""
        return self.every // self.fragments


def diloco(*, every: int = 500, codec: Codec | None = None) -> LocalSteps:
    """Return the settings of DiLoCo: exchange all parameters at once, every `every` steps.

    Nodes wait for the exchange, and continue from the new outer parameters. The outer optimizer is
    SGD of rate 0.7 with Nesterov momentum 0.9. Fields are explained at `LocalSteps`.

    References:
        DiLoCo (https://arxiv.org/abs/2311.08105).
    """
    return LocalSteps(every=every, codec=codec)


def streaming_diloco(
    *,
    every: int = 100,
    fragments: int = 4,
    delay: int = 5,
    mixing: float | None = 0.5,
    codec: Codec | None = Int4(block=128),  # noqa: B008
) -> LocalSteps:
    """Return the settings of Streaming DiLoCo: exchange fragments in turn, in 4 bits.

    Each of the `fragments` is exchanged once in `every` steps. `delay` steps after it is sent, the
    node's parameters in it become `mixing * own + (1 - mixing) * outer`; with `mixing=None`, the
    new outer parameters plus the node's progress in these steps (see `LocalSteps`).

    The paper's fragments are groups of layers. Here a fragment is an equal part of each device's
    shard of every leaf, so that all messages have the same size. Of a stack of scanned layers a
    fragment holds neighbouring layers if `fragments` divides their number. The paper quantises to
    4-bit floats, and this to 4-bit integers in blocks, with error feedback.

    References:
        Streaming DiLoCo (https://arxiv.org/abs/2501.18512).
    """
    return LocalSteps(every=every, fragments=fragments, delay=delay, mixing=mixing, codec=codec)


def dasgd(*, every: int, delay: int, codec: Codec | None = None) -> LocalSteps:
    """Return the settings of DaSGD: average parameters every `every` steps, with a delay.

    All parameters are sent once in `every` steps, and their mean over nodes is used `delay` steps
    later. A node keeps the progress of these steps: to its parameters it adds the difference
    between the mean and the parameters that it had sent (`mixing=None`, the rule of LOSCAR-SGD).
    The outer optimizer is SGD of rate 1, so that the outer parameters are the mean.

    References:
        DaSGD (https://arxiv.org/abs/2006.00441);
        LOSCAR-SGD (https://arxiv.org/abs/2605.20866), the rule that merges.
    """
    return LocalSteps(every=every, delay=delay, outer=optax.sgd(1.0), codec=codec)
