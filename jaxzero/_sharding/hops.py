"""Send arrays between nodes by codecs, or by hops: codecs that make up for their rounding errors.

A codec loses what it rounds away. A hop keeps that error, in a wire state that the caller carries
from step to step (`Zero.init_wire_state`), and makes up for it in the next step. `PerAxis.node`
accepts both. Hops of weights and of gradients keep different arrays, so there are two base classes:

    weights     every node keeps its slice w' of the weights
                send d = difference(w, w'),  then  w' = updated(w', decode(encode(d)))
    gradients   every device keeps the residual r of its node's slice
                send g' = corrected(g, r),   then  r = residual(g', decode(encode(g')))

A new hop is a subclass with these two functions, which work element by element.
"""

from __future__ import annotations

import abc
import dataclasses
import numbers

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float32

from .._codecs import Codec, Int4, Int8, check_is_value


@dataclasses.dataclass(frozen=True)
class Hop:
    """The common base class of `WeightHop` and `GradientHop`. Subclass these, not `Hop`.

    Args:
        codec: codec of the message.
    """

    codec: Codec = Int4(block=128)

    def __post_init__(self):
        check_codec("codec", type(self).__name__, self.codec)


class WeightHop(Hop, abc.ABC):
    """A way to send weights between nodes, each of which keeps the slice that it received last."""

    @abc.abstractmethod
    def difference(
        self, weights: Float32[Array, ...], kept: Float32[Array, ...]
    ) -> Float32[Array, ...]:
        """Return the array to encode, from the owner's shard and the copy that all nodes keep."""

    @abc.abstractmethod
    def updated(
        self, kept: Float32[Array, ...], received: Float32[Array, ...]
    ) -> Float32[Array, ...]:
        """Return the slice to keep, from the one kept before and the decoded message."""


@dataclasses.dataclass(frozen=True)
class GradientHop(Hop, abc.ABC):
    """A way to sum gradients over nodes, in which each device keeps a residual between steps.

    Args:
        codec: codec of the corrected gradient.
        dtype: dtype of the residual.
    """

    dtype: DTypeLike = jnp.bfloat16

    def __post_init__(self):
        super().__post_init__()
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise ValueError(
                f"`dtype` of `{type(self).__name__}` must be a float type; got {self.dtype!r}."
            )
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    @abc.abstractmethod
    def corrected(
        self, gradient: Float[Array, ...], residual: Float[Array, ...]
    ) -> Float[Array, ...]:
        """Return the array to encode, from the gradient and the residual of the step before."""

    @abc.abstractmethod
    def residual(self, corrected: Float[Array, ...], sent: Float[Array, ...]) -> Float[Array, ...]:
        """Return the residual for the next step.

        Args:
            corrected: the array that was encoded.
            sent: the same array after encoding and decoding.

        Returns:
            The residual. Where it is not finite, the caller keeps 0.
        """


@dataclasses.dataclass(frozen=True)
class WeightDelta(WeightHop):
    """Send a weight between nodes as its change since the last step, for `weights.node`.

    Every node keeps its slice of the weights from step to step, in a wire state
    (`Zero.init_wire_state`). The owner of a shard sends the difference between the shard and the
    nodes' copy of it, and every node adds the difference. The rounding error is part of the next
    difference, so 4 bits suffice.

    Args:
        codec: codec of the difference.

    References:
        SDP4Bit (https://arxiv.org/abs/2410.15526), quantisation on weight differences.
    """

    def difference(
        self, weights: Float32[Array, ...], kept: Float32[Array, ...]
    ) -> Float32[Array, ...]:
        return weights - kept

    def updated(
        self, kept: Float32[Array, ...], received: Float32[Array, ...]
    ) -> Float32[Array, ...]:
        return kept + received

    def __str__(self) -> str:
        return f"difference in {self.codec}"


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(GradientHop):
    """Add each step's quantization error to the next step's gradient, for `gradients.node`.

    Each device keeps the error (residual) of its node's slice of the gradients in a wire state
    (`Zero.init_wire_state`). There is no such hop for `gradients.local`, where residuals would be
    as large as the full model on every device.

    Args:
        codec: codec of the gradient with the residual added.
        dtype: dtype of the residual.

    References:
        Seide et al., 1-bit SGD (Interspeech 2014), section 3;
        LoCo (https://arxiv.org/abs/2407.04480).
    """

    codec: Codec = Int4(block=128, hadamard=32)

    def corrected(
        self, gradient: Float[Array, ...], residual: Float[Array, ...]
    ) -> Float[Array, ...]:
        return gradient + residual

    def residual(self, corrected: Float[Array, ...], sent: Float[Array, ...]) -> Float[Array, ...]:
        return corrected - sent

    def __str__(self) -> str:
        return f"{self.codec} with error feedback"


def check_integer(
    name: str, owner: str, value: object, least: int, *, optional: bool = False
) -> None:
    """Raise `ValueError` unless a field of a config is an integer of at least `least`.

    With `optional` it may be None.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ValueError(
            f"`{name}` of `{owner}` must be an integer of at least "
            f"{least}{' or None' if optional else ''}; got {value!r}."
        )


def check_codec(name: str, owner: str, codec: object, *, may_exchange: bool = False) -> None:
    """Check that a field of a config holds a codec.

    Args:
        name: name of the field, for the message.
        owner: name of the class that has the field, for the message.
        codec: value of the field.
        may_exchange: whether the codec may be a kernel that encodes, sends and decodes
            (`implementation="nvlink"`). Only `PerAxis.local` may hold such a codec.

    Raises:
        ValueError: `codec` is not an instance of `Codec`, or is such a kernel and may not be.
    """
    if not isinstance(codec, Codec):
        raise ValueError(
            f"`{name}` of `{owner}` must be a codec such as `jz.Int8()` or "
            f"`jz.Cast(jnp.bfloat16)`; got {codec!r}."
        )
    check_is_value(codec)
    if codec.exchange_format is not None and not may_exchange:
        raise ValueError(
            f"`{name}` of `{owner}` must be a codec whose messages are arrays; got {codec}, one "
            "kernel which stores into the memory of the GPUs of a node over NVLink. Give it to "
            '`local` of `PerAxis`, and here leave out `implementation="nvlink"`.'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerAxis:
    """One codec for each mesh axis that a value crosses; `None` sends it without encoding.

    `node` may also be a hop that keeps arrays from step to step: `WeightDelta`, `ErrorFeedback`,
    or a `WeightHop` or `GradientHop` of your own (`jaxzero.extend`).
    """

    node: Codec | Hop | None = None
    local: Codec | None = None

    def __post_init__(self):
        if self.node is not None and not isinstance(self.node, Hop):
            check_codec("node", "PerAxis", self.node)
        if self.local is not None:
            check_codec("local", "PerAxis", self.local, may_exchange=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HpZ:
    """Keep each node slice of a weight, once gathered between nodes, until the step ends.

    Forward, backward and all micro-batches then gather inside the node only, and read the same
    bits. A device's slices take the size of the model, encoded by `codec`, divided by the number of
    devices in a node.

    Args:
        codec: how the slice is kept; `None` keeps it unencoded. If `weights` has the same codec for
            both axes, a weight is encoded only once, by its owner, and decoded where it is used.

    References:
        ZeRO++ (https://arxiv.org/abs/2306.10209), hierarchical partitioning (hpZ).
    """

    codec: Codec | None = Int8(block=256)

    def __post_init__(self):
        if self.codec is not None:
            check_codec("codec", "HpZ", self.codec)
