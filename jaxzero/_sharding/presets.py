"""Configurations with a name: ZeRO-3, ZeRO++, and their relatives."""

from __future__ import annotations

from .._codecs import Codec, Int4, Int8
from .config import ZeroConfig
from .hops import HpZ, PerAxis, WeightDelta
from .stages import Stages


def zero3(
    *,
    weights: PerAxis = PerAxis(),  # noqa: B008
    gradients: PerAxis = PerAxis(),  # noqa: B008
    hpz: HpZ | None = None,
) -> ZeroConfig:
    """Split parameters, gradients and optimizer state over all devices (ZeRO-3, FSDP).

    With `hpz=jz.HpZ(codec=jz.Cast(jnp.bfloat16))` a device keeps the slice of its node for the
    step, in 16 bits. That sends a third fewer bytes between nodes, and is exact for weights that
    the program reads in bfloat16.
    """
    return ZeroConfig(weights=weights, gradients=gradients, hpz=hpz)


def zeropp() -> ZeroConfig:
    """Return ZeRO++ with the bits of its paper: qwZ in 8 bits, hpZ, and qgZ in 4 bits on both hops.

    Between nodes a step moves 0.5 M for weights and 0.25 M for gradients, where ZeRO-3 moves 3 M
    (M: the model in 16 bits). Micro-batches add nothing: weights and gradients are sent between
    nodes once per optimizer step. Unlike in the paper, blocks of gradients are small and rotated,
    which costs no bytes.

    References:
        ZeRO++ (https://arxiv.org/abs/2306.10209).
    """
    gradients = Int4(block=128, hadamard=32)
    return ZeroConfig(
        weights=PerAxis(node=Int8(block=256), local=Int8(block=256)),
        gradients=PerAxis(node=gradients, local=gradients),
        hpz=HpZ(codec=Int8(block=256)),
    )


def zeropp4() -> ZeroConfig:
    """Return ZeRO++ with 4 bits between nodes, for weights' changes and for rotated gradients.

    Between nodes a step moves 0.25 M for weights and 0.25 M for gradients (M: the model in 16
    bits); inside a node both travel in 8 bits. It needs a wire state (`Zero.init_wire_state`).

    References:
        SDP4Bit (https://arxiv.org/abs/2410.15526).
    """
    return ZeroConfig(
        weights=PerAxis(node=WeightDelta(Int4(block=128)), local=Int8(block=256)),
        gradients=PerAxis(node=Int4(block=128, hadamard=32), local=Int8(block=128, hadamard=32)),
        hpz=HpZ(codec=Int8(block=256)),
    )


def hsdp(*, weights: PerAxis = PerAxis(), gradients: PerAxis = PerAxis()) -> ZeroConfig:  # noqa: B008
    """Split each array over the devices of a node, and replicate it between nodes (HSDP, MiCS)."""
    return ZeroConfig(split="local", weights=weights, gradients=gradients)


def ddp() -> ZeroConfig:
    """Split nothing: plain data parallelism."""
    return ZeroConfig(stage=0)


def pipeline(
    microbatches: int,
    layers: str | tuple[str, ...] = "layers",
    *,
    weights: PerAxis = PerAxis(),  # noqa: B008
    gradients: PerAxis = PerAxis(),  # noqa: B008
    messages: Codec | None = None,
) -> ZeroConfig:
    """Divide the layers between nodes as pipeline stages, and each stage over its devices (ZeRO-3).

    Between nodes, each micro-batch sends only activations and their cotangents. The gradients of
    parameters outside of the layers are sent once in each step. Use it on links on which ZeRO would
    wait for weights.

    Args:
        microbatches: how many parts a device's rows are cut into in each step. With `S` stages
            a part `(S - 1) / (microbatches + S - 1)` of the time is idle.
        layers: where the layers are; see `Stages`.
        weights: codecs of the weight gathers inside a stage, per axis.
        gradients: codecs of the gradient reductions inside a stage, per axis.
        messages: codec of the activations and cotangents that stages send; see `Stages`.

    References:
        DAPPLE (https://arxiv.org/abs/2007.01045).
    """
    stages = Stages(layers=layers, microbatches=microbatches, messages=messages)
    return ZeroConfig(weights=weights, gradients=gradients, stages=stages)
