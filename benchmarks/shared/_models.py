"""The models of `benchmarks.compiled.aot`: of each its parameters, its loss and its batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

import jaxzero as jz

from . import _linen_llama, _llama
from ._convolutions import ResNet, UNet, init_resnet, init_unet, resnet_loss, unet_loss
from ._llama import LlamaSize
from ._recommenders import (
    Recommender,
    TwoTower,
    init_recommender,
    init_two_tower,
    recommender_loss,
    two_tower_loss,
)
from ._transformers import (
    CLIP,
    GPT2,
    T5,
    clip_loss,
    gpt2_loss,
    init_clip,
    init_gpt2,
    init_t5,
    t5_loss,
)

AXES = ("node", "local")
Batch = Any  # a tree of `jax.ShapeDtypeStruct`

LlamaName = Literal[
    "7b",
    "7b-long",
    "7b-long-cudnn",
    "7b-long-4-layers",
    "7b-unrolled",
    "1b",
    "1b-unrolled",
    "1b-llama3",
    "moe",
    "mixtral",
    "mamba",
    "gemma",
    "gemma-untied",
    "70b",
    "70b-unrolled",
    "405b",
    "1t",
    "tiny",
    "tiny-unrolled",
]
ModelName = Literal[
    LlamaName, "lora", "gpt2", "t5", "clip", "unet", "resnet", "recommender", "two-tower"
]

_LARGE = LlamaSize(layers=80, width=8192, hidden=28672, heads=64, kv_heads=8, vocabulary=128256)
_TINY_LLAMA = LlamaSize(layers=22, width=2048, hidden=5632, kv_heads=4)
_GEMMA = LlamaSize(
    layers=18, width=2048, hidden=16384, heads=8, kv_heads=1, vocabulary=256000, tied=True
)
_TINY = LlamaSize(layers=4, width=256, hidden=512, heads=4, vocabulary=512)
SIZES: dict[LlamaName, LlamaSize] = {
    "7b": LlamaSize(),
    "7b-long": LlamaSize(long=True),
    "7b-long-cudnn": LlamaSize(long=True, implementation="cudnn"),
    "7b-long-4-layers": LlamaSize(long=True, layers=4),
    "7b-unrolled": LlamaSize(unrolled=True),
    "1b": _TINY_LLAMA,
    "1b-unrolled": dataclasses.replace(_TINY_LLAMA, unrolled=True),
    "1b-llama3": dataclasses.replace(
        _LARGE, layers=16, width=2048, hidden=8192, heads=32, tied=True
    ),
    "moe": LlamaSize(layers=16, width=2048, hidden=4096, heads=16, kv_heads=4, experts=8),
    "mixtral": LlamaSize(hidden=14336, kv_heads=8, experts=8),
    "mamba": LlamaSize(layers=64, width=2560, hidden=5120, vocabulary=50280, state=16),
    "gemma": _GEMMA,
    "gemma-untied": dataclasses.replace(_GEMMA, tied=False),
    "70b": _LARGE,
    "70b-unrolled": dataclasses.replace(_LARGE, unrolled=True),
    "405b": LlamaSize(
        layers=126, width=16384, hidden=53248, heads=128, kv_heads=8, vocabulary=128256
    ),
    # Of DeepSeek-V3 (https://arxiv.org/abs/2412.19437) layers, width, experts and choices; experts
    # are half as wide again, attention is grouped, and all layers are mixtures.
    "1t": LlamaSize(
        layers=61,
        width=7168,
        hidden=3072,
        heads=56,
        kv_heads=8,
        vocabulary=129280,
        experts=256,
        choices=8,
        sorts_tokens=True,
    ),
    "tiny": _TINY,
    "tiny-unrolled": dataclasses.replace(_TINY, unrolled=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train.

    Attributes:
        label: its name in tables.
        init: the trained parameters, from a key.
        loss: from parameters, frozen ones if there are any, and a batch; `constrain` is called on
            activations.
        batch: the arrays of a batch of so many rows of a size.
        rows: of a batch by default, over all devices.
        size: of a row by default: tokens, or pixels on a side.
        rows_of: `batch.rows` and `size` in tables, to be formatted.
        frozen: parameters that are not trained, from a key.
        per_device: the loss of a device's rows, where rows meet in it; by default `loss`.
    """

    label: str
    init: Callable[[Array], Any]
    loss: Callable[..., Array]
    batch: Callable[[int, int], Batch]
    rows: int = 32
    size: int = 2048
    rows_of: str = "{rows} x {size} tokens"
    frozen: Callable[[Array], Any] | None = None
    per_device: Callable[..., Array] | None = None

    @property
    def num_parameters(self) -> int:
        """The number of all parameters, trained or frozen."""
        makers = [x for x in (self.init, self.frozen) if x is not None]
        trees = [jax.eval_shape(make, jax.random.key(0)) for make in makers]
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trees))


def _tokens(rows: int, size: int) -> Batch:
    return jax.ShapeDtypeStruct((rows, size), jnp.int32)


def _images(rows: int, size: int, channels: int = 3) -> Batch:
    return jax.ShapeDtypeStruct((rows, size, size, channels), jnp.float32)


def llama(label: str, size: LlamaSize, form: Any = _llama) -> Model:
    """A model of `_llama` or of `_linen_llama`."""
    init, loss = functools.partial(form.init, size), functools.partial(form.loss, size)
    return Model(label=label, init=init, loss=loss, batch=_tokens)


_LLAMAS: dict[LlamaName, str] = {
    "7b": "Llama-7B, scanned",
    "7b-long": "Llama-7B of long rows, scanned",
    "7b-long-cudnn": "Llama-7B of long rows, attention by cuDNN, scanned",
    "7b-long-4-layers": "4 layers of Llama-7B of long rows, scanned",
    "7b-unrolled": "Llama-7B, unrolled",
    "1b": "Llama-1.1B, scanned",
    "1b-unrolled": "Llama-1.1B, unrolled",
    "moe": "3.5B, 8 experts, scanned",
    "mixtral": "Mixtral 8x7B, scanned",
    "mamba": "Mamba-2.8B, scanned",
    "gemma": "Gemma-2B, tied 256k vocabulary, scanned",
    "gemma-untied": "Gemma-2B, untied 256k vocabulary, scanned",
    "70b": "Llama-70B, scanned",
    "405b": "Llama-405B, scanned",
    "1t": "1.0T, 256 experts, scanned",
    "70b-unrolled": "Llama-70B, unrolled",
    "tiny": "tiny, scanned",
    "tiny-unrolled": "tiny, unrolled",
}
_LORA = LlamaSize(rank=16)


def _text_pair(rows: int, size: int) -> Batch:
    return {"source": _tokens(rows, size), "target": _tokens(rows, size // 4)}


def _captioned(rows: int, size: int) -> Batch:
    return {"images": _images(rows, size), "tokens": _tokens(rows, 77)}


def _noisy(rows: int, size: int) -> Batch:
    image = _images(rows, size, 4)
    times = jax.ShapeDtypeStruct((rows,), jnp.float32)
    return {"images": image, "noise": image, "times": times}


def _labelled(rows: int, size: int) -> Batch:
    return {"images": _images(rows, size), "labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}


def _clicks(rows: int, size: int) -> Batch:
    return {
        "dense": jax.ShapeDtypeStruct((rows, size), jnp.float32),
        "ids": _tokens(rows, Recommender().tables),
        "clicks": jax.ShapeDtypeStruct((rows,), jnp.float32),
    }


def _seen(rows: int, size: int) -> Batch:
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return {"users": ids, "items": ids, "seen": _tokens(rows, size)}


def _gathered(x: Array) -> Array:
    return jax.lax.all_gather(x, AXES, tiled=True)


MODELS: dict[ModelName, Model] = {
    **{name: llama(label, SIZES[name]) for name, label in _LLAMAS.items()},
    "lora": Model(
        label="LoRA of Llama-7B, scanned",
        init=functools.partial(_llama.init_adapters, _LORA),
        frozen=functools.partial(_llama.init_bfloat16, _LORA),
        loss=functools.partial(_llama.lora_loss, _LORA),
        batch=_tokens,
    ),
    "gpt2": Model(
        label="GPT-2 124M, unrolled",
        init=functools.partial(init_gpt2, GPT2()),
        loss=functools.partial(gpt2_loss, GPT2()),
        batch=_tokens,
        rows=64,
        size=1024,
    ),
    "t5": Model(
        label="T5-large, scanned",
        init=functools.partial(init_t5, T5()),
        loss=functools.partial(t5_loss, T5()),
        batch=_text_pair,
        rows=256,
        size=512,
    ),
    "clip": Model(
        label="CLIP ViT-L/14, scanned",
        init=functools.partial(init_clip, CLIP(), _captioned(1, 224)),
        loss=functools.partial(clip_loss, CLIP()),
        per_device=functools.partial(clip_loss, CLIP(), gather=_gathered),
        batch=_captioned,
        rows=1024,
        size=224,
        rows_of="{rows} pairs, images of {size} x {size}",
    ),
    "unet": Model(
        label="U-Net of diffusion, 642M, unrolled",
        init=functools.partial(init_unet, UNet()),
        loss=functools.partial(unet_loss, UNet()),
        batch=_noisy,
        rows=512,
        size=64,
        rows_of="{rows} images of {size} x {size}",
    ),
    "resnet": Model(
        label="ResNet-50 x 3, GroupNorm, unrolled",
        init=functools.partial(init_resnet, ResNet()),
        loss=functools.partial(resnet_loss, ResNet()),
        batch=_labelled,
        rows=1024,
        size=224,
        rows_of="{rows} images of {size} x {size}",
    ),
    "recommender": Model(
        label="recommender, 8 tables of 2M x 128",
        init=functools.partial(init_recommender, Recommender()),
        loss=functools.partial(recommender_loss, Recommender()),
        batch=_clicks,
        rows=65536,
        size=Recommender().dense,
        rows_of="{rows} rows, {size} numbers and 8 ids",
    ),
    "two-tower": Model(
        label="two towers, 8M users and 4M items x 128",
        init=functools.partial(init_two_tower, TwoTower()),
        loss=functools.partial(two_tower_loss, TwoTower()),
        per_device=functools.partial(two_tower_loss, TwoTower(), gather=_gathered),
        batch=_seen,
        rows=8192,
        size=TwoTower().seen,
        rows_of="{rows} users with {size} items",
    ),
}


def in_form(name: ModelName, form: Literal["plain", "linen"]) -> Model:
    """The model, written as in `MODELS` or in Flax Linen.

    Raises:
        ValueError: the model is not written in Flax Linen.
    """
    model = MODELS[name]
    if form == "plain":
        return model
    if name not in SIZES or SIZES[name].experts or SIZES[name].state or SIZES[name].unrolled:
        raise ValueError(
            f"`form` must be 'plain' for {name!r}, which `_linen_llama` does not write; got "
            f"{form!r}. Leave it out."
        )
    return llama(f"{model.label}, Flax Linen", SIZES[name], _linen_llama)


def step_config(name: str) -> jz.ZeroConfig:
    """Weights in 8 bits and gradients in 4 over `local`, in one implementation; or none encoded.

    Args:
        name: "bfloat16", or an implementation of codecs: "xla", "mosaic_gpu" or "nvlink".
    """
    if name == "bfloat16":
        return jz.zero3()
    how: Any = {"implementation": None if name == "xla" else name}
    weights, gradients = jz.Int8(block=256, **how), jz.Int4(block=128, **how)
    return jz.zero3(weights=jz.PerAxis(local=weights), gradients=jz.PerAxis(local=gradients))
