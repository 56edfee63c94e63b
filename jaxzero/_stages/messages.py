"""Send arrays to the next stage or to the stage before, while a loop over layers runs.

[Note: messages beside layers] XLA starts a `ppermute` only after the layer loop that it should
overlap with. So a message is cut into as many parts as a stage has layers, and each iteration sends
one part: activations travel to the next stage while the backward loop runs, and cotangents to the
stage before while the forward loop runs. Two barriers order an iteration. The first makes the layer
wait until the part is cut out of the message. Otherwise XLA cuts the part out, and so sends it,
only when the layer gathers the weights of the next layer, and this gather waits for the part. The
second barrier makes the receipt of the part wait for the layer, so that both overlap.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._codecs import Codec
from .._collectives import labelled, permute, repeated
from .._mesh import AXES, STAGE, device_index
from .._program import Loop
from .layers import Layer, Layers

# Arrays of fewer bytes are sent at once: a part of them would take longer to launch than to send.
_DIVIDED_BYTES = 2**16


class Encoding(NamedTuple):
    """How arrays are encoded before they are sent to another stage.

    Attributes:
        codec: encodes floats; None: all arrays are sent as they are.
        min_size: a codec that quantizes is not used for arrays with fewer elements.
    """

    codec: Codec | None = None
    min_size: int = 0

    def codec_of(self, x: Any) -> Codec | None:
        """Return the codec for an array; None if the array is sent as it is.

        An array that the codec would not make smaller is sent as it is.

        Args:
            x: the array, or a struct with its shape and dtype.
        """
        if self.codec is None or not x.shape or not jnp.issubdtype(x.dtype, jnp.floating):
            return None
        is_used = self.codec.is_used_for(x.size, x.dtype, self.min_size)
        num = x.shape[-1]
        is_smaller = self.codec.num_bytes(num, x.dtype) < num * jnp.dtype(x.dtype).itemsize
        return self.codec if is_used and is_smaller else None

    def encode(self, x: Array) -> Array:
        """Encode an array for sending; each row along its last dim is encoded by itself."""
        codec = self.codec_of(x)
        return x if codec is None else codec.encode_rows(x, seed=device_index((STAGE, *AXES)))

    def decode(self, message: Array, like: Any) -> Array:
        """Decode an encoded array, which had the shape and dtype of `like` before."""
        codec = self.codec_of(like)
        return message if codec is None else codec.decode_rows(message, like.shape[-1], like.dtype)


class Message(NamedTuple):
    """Arrays that each stage sends to a neighbour.

    Attributes:
        arrays: the arrays, not encoded yet.
        shift: 1 to send to the next stage, -1 to send to the stage before.
        encoding: how the arrays are encoded.
    """

    arrays: list[Any]
    shift: int
    encoding: Encoding


def sent(message: Message) -> list[Any]:
    """Send a message, and return the decoded arrays that this stage receives.

    A stage without a sender receives zeros: the first stage if stages send to the next one, the
    last stage if they send to the one before.
    """
    arrays, shift, encoding = message
    received = _permuted([encoding.encode(x) for x in arrays], shift)
    return [encoding.decode(x, like) for x, like in zip(received, arrays, strict=True)]


def _permuted(arrays: list[Any], shift: int) -> list[Any]:
    """Send arrays `shift` stages on, and return the received arrays; None in the list stays."""
    num = lax.axis_size(STAGE)
    pairs = [(i, i + shift) for i in range(num) if 0 <= i + shift < num]
    with labelled("activations"):
        return [None if x is None else permute(x, STAGE, pairs) for x in arrays]


def scan_beside(
    loop: Loop, layer: Layer, carry: list[Any], layers: Layers, num: int, beside: Message | None
) -> tuple[list[Any], list[Any], list[Any]]:
    """Scan layers, and send a message meanwhile (see [Note: messages beside layers]).

    Args:
        loop: the layer loop, whose direction and unrolling are kept.
        layer: runs one layer: maps a carry and the layer's inputs to a carry and outputs.
        carry: the carry before the first layer.
        layers: the stacks to scan, `[num, ...]`.
        num: how many layers there are.
        beside: the message; None: nothing is sent.

    Returns:
        The carry after the last layer, the stacked outputs of the layers, and the decoded arrays
        that this stage has received.
    """
    if beside is None:
        carry, stacked = loop.scan(layer, carry, layers, num)
        return carry, stacked, []
    given, shift, encoding = beside
    arrays = [encoding.encode(x) for x in given]
    divided = [_is_divided(x, num) for x in arrays]
    at_once = [None if d else x for x, d in zip(arrays, divided, strict=True)]
    at_once = _permuted(at_once, shift)
    parts = [_divided(x, num) for x, d in zip(arrays, divided, strict=True) if d]

    def with_part(carry: list[Any], of_layer: Any) -> tuple[list[Any], Any]:
        layers, parts = of_layer
        carry, parts = lax.optimization_barrier((carry, parts))
        parts = _permuted(parts, shift)
        carry, stacked = layer(carry, layers)
        carry, parts = lax.optimization_barrier((carry, parts))
        return carry, (stacked, parts)

    traced, note = repeated(with_part, num)
    carry, (stacked, parts) = loop.scan(traced, carry, (layers, parts), num)
    note()
    parts = iter(parts)
    received = [
        _joined(next(parts), old) if x is None else x
        for x, old in zip(at_once, arrays, strict=True)
    ]
    received = [encoding.decode(x, like) for x, like in zip(received, given, strict=True)]
    return carry, stacked, received


def _is_divided(x: Array, num: int) -> bool:
    return num > 1 and x.size * x.dtype.itemsize >= _DIVIDED_BYTES


def _divided(x: Array, num: int) -> Array:
    """Divide an array into `num` equal parts, `[num, ...]`; pad it if `num` does not divide it."""
    if x.shape[0] % num == 0:
        return x.reshape(num, x.shape[0] // num, *x.shape[1:])
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % num)).reshape(num, -1)


def _joined(parts: Array, like: Array) -> Array:
    """Undo `_divided`: join the parts to an array of the shape of `like`, without the padding."""
    return parts.reshape(-1)[: like.size].reshape(like.shape)
