"""A U-Net and a ResNet in Flax Linen, unrolled: layers of many sizes, and many small leaves.

Computed in bfloat16, normalised by GroupNorm, and by default not rematerialised. `constrain` is
called on the activations after every block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._llama import POLICIES, Policy

Constrain = Callable[[Array], Array]
_Dense = functools.partial(nn.Dense, dtype=jnp.bfloat16)
_Conv = functools.partial(nn.Conv, dtype=jnp.bfloat16)
_Norm = functools.partial(nn.GroupNorm, dtype=jnp.bfloat16)


class UNet(nn.Module):
    """The noise in noisy images, as of Stable Diffusion without its text.

    By default 642 million parameters.
    """

    channels: int = 320
    multiples: tuple[int, ...] = (1, 2, 4, 4)  # of `channels`, for each resolution
    blocks: int = 2  # of each resolution, on the way down; one more on the way up
    keeps: Policy = "everything"  # of each block, until backward
    constrain: Constrain = lambda x: x

    @nn.compact
    def __call__(self, images: Float[Array, "b h w 4"], times: Array) -> Array:
        """Noise of the shape of `images`, at `times` (b,)."""
        width = self.channels
        time = nn.silu(_Dense(4 * width)(_waves(times, width)))
        time = nn.silu(_Dense(4 * width)(time))
        x = self.constrain(_Conv(width, (3, 3))(images))
        kept = [x]
        for level, multiple in enumerate(self.multiples):
            for _ in range(self.blocks):
                x = self._block(x, time, multiple * width, level)
                kept.append(x)
            if level + 1 < len(self.multiples):
                x = self.constrain(_Conv(multiple * width, (3, 3), strides=2)(x))
                kept.append(x)
        x = self._block(x, time, x.shape[-1], 1)
        for level, multiple in reversed(list(enumerate(self.multiples))):
            for _ in range(self.blocks + 1):
                x = jnp.concatenate([x, kept.pop()], axis=-1)
                x = self._block(x, time, multiple * width, level)
            if level:
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
                x = self.constrain(_Conv(multiple * width, (3, 3))(x))
        return _Conv(images.shape[-1], (3, 3))(nn.silu(_Norm()(x)))

    def _block(self, x: Array, time: Array, channels: int, level: int) -> Array:
        block = functools.partial(UNet._layers, channels=channels, level=level)
        if self.keeps != "everything":
            block = nn.remat(block, policy=POLICIES[self.keeps])
        return block(self, x, time)

    def _layers(self, x: Array, time: Array, channels: int, level: int) -> Array:
        """Two convolutions, and below the first resolution attention."""
        y = _Conv(channels, (3, 3))(nn.silu(_Norm()(x)))
        y = y + _Dense(channels)(time)[:, None, None]
        y = _Conv(channels, (3, 3))(nn.silu(_Norm()(y)))
        x = self.constrain((x if x.shape == y.shape else _Conv(channels, (1, 1))(x)) + y)
        if not level:
            return x
        rows, height, width, _ = x.shape
        y = _Norm()(x).reshape(rows, height * width, 8, channels // 8)
        project = functools.partial(nn.DenseGeneral, dtype=jnp.bfloat16)
        query, key, value = (project(y.shape[2:])(y.reshape(rows, -1, channels)) for _ in range(3))
        y = jax.nn.dot_product_attention(query, key, value)
        return self.constrain(x + project(channels, (-2, -1))(y).reshape(x.shape))


def _waves(times: Array, width: int) -> Array:
    rates = jnp.exp(jnp.arange(width // 2) * (-math.log(1e4) * 2 / width))
    angles = times[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class ResNet(nn.Module):
    """A ResNet-50 of larger width; by default 217 million parameters.

    https://arxiv.org/abs/1912.11370, with GroupNorm, whose statistics are of one image.
    """

    width: int = 3
    depths: tuple[int, ...] = (3, 4, 6, 3)
    classes: int = 1000
    constrain: Constrain = lambda x: x

    @nn.compact
    def __call__(self, images: Float[Array, "b h w 3"]) -> Array:
        """Logits of the classes."""
        x = self.constrain(_Conv(64 * self.width, (7, 7), strides=2)(images))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, depth in enumerate(self.depths):
            for block in range(depth):
                x = self._block(x, 64 * self.width * 2**stage, 2 if stage and not block else 1)
        return _Dense(self.classes)(nn.relu(_Norm()(x)).mean((1, 2)))

    def _block(self, x: Array, channels: int, stride: int) -> Array:
        y = nn.relu(_Norm()(x))
        kept = x
        if x.shape[-1] != 4 * channels or stride > 1:
            kept = _Conv(4 * channels, (1, 1), strides=stride, use_bias=False)(y)
        y = nn.relu(_Norm()(_Conv(channels, (1, 1), use_bias=False)(y)))
        y = nn.relu(_Norm()(_Conv(channels, (3, 3), strides=stride, use_bias=False)(y)))
        return self.constrain(kept + _Conv(4 * channels, (1, 1), use_bias=False)(y))


def init_unet(model: UNet, key: Array) -> Any:
    """Parameters in float32."""
    return model.init(key, jnp.zeros((1, 32, 32, 4)), jnp.zeros(1))


def unet_loss(
    model: UNet, params: Any, batch: Mapping[str, Array], constrain: Constrain = lambda x: x
) -> Float[Array, ""]:
    """Mean squared error of the noise.

    Args:
        model: the network.
        params: from `init_unet`.
        batch: `images` and `noise`, (b, h, w, 4), and `times`, (b,), from 0 to 1.
        constrain: called on activations.
    """
    times = batch["times"][:, None, None, None]
    noisy = jnp.sqrt(1 - times) * batch["images"] + jnp.sqrt(times) * batch["noise"]
    made = model.clone(constrain=constrain).apply(params, noisy, 1000 * batch["times"])
    return jnp.mean(jnp.square(jnp.asarray(made, jnp.float32) - batch["noise"]))


def init_resnet(model: ResNet, key: Array) -> Any:
    """Parameters in float32."""
    return model.init(key, jnp.zeros((1, 64, 64, 3)))


def resnet_loss(
    model: ResNet, params: Any, batch: Mapping[str, Array], constrain: Constrain = lambda x: x
) -> Float[Array, ""]:
    """Mean cross-entropy.

    Args:
        model: the network.
        params: from `init_resnet`.
        batch: `images`, (b, h, w, 3), and `labels`, (b,).
        constrain: called on activations.
    """
    logits = model.clone(constrain=constrain).apply(params, batch["images"])
    log_probabilities = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, batch["labels"][:, None], axis=-1))
