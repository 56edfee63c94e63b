"""The Vision Transformer (https://arxiv.org/abs/2010.11929) in Flax NNX, and its image classifier.

    x = [class token, projection(patches)] + positions
    x = x + attention(norm(x))
    x = x + down(gelu(up(norm(x))))
    hidden = norm(x)                 logits = classifier(hidden of the class token)

A patch is a rectangle of pixels, and its projection a convolution whose stride is the size of its
kernel. There is no pooler: the classifier reads the hidden vector of the class token, as
`ViTForImageClassification` of transformers does.

Dimensions: b batch, c channels, y height, x width (pixels), t tokens (patches and 1), d hidden.
"""

import dataclasses
import operator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key, Shaped

from .._checked_json import JsonKeys, shown
from ._config_json import (
    CHOOSE_ANOTHER,
    make_config,
    read_config,
)
from ._encoder_parts import (
    EncoderBase,
    Perceptron,
    PreNormLayer,
    SelfAttention,
    check_heads,
    layer_norm,
    linear,
)
from ._family import ConfigTable
from ._layers import make_layers, run_layers
from ._parts import dropout, split_key

# `Float[Array, "b c y x"]`. `_cut_patches` checks it, with an error that says what to do.
Images = Shaped[Array | np.ndarray, "..."]
_TABLE = ConfigTable(
    sizes={
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "image_size": "image_size",
        "patch_size": "patch_size",
        "num_channels": "num_channels",
        "query_key_value_bias": "qkv_bias",
        "layer_norm_epsilon": "layer_norm_eps",
        "hidden_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    defaults={
        "num_channels": 3,
        "hidden_act": "gelu",
        "qkv_bias": True,
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    required={"model_type": "vit", "quantization_config": None},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(EncoderBase):
    """The config of a Vision Transformer: its sizes, and how it is computed.

    The defaults are those of ViT-Base with patches of 16 pixels, without a classifier. Fields that
    all encoders share are those of `EncoderConfig`.

    Args:
        image_size: height and width of the images, in pixels.
        patch_size: height and width of a patch, in pixels. Pixels beyond the last whole patch are
            not seen.
        num_channels: channels of the images.
        num_labels: labels of the classifier; 0 without a classifier.
        query_key_value_bias: True if queries, keys and values have biases.
        hidden_dropout: dropout rate of the first layer's input and of what each half of a layer
            adds.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    image_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    num_channels: int = 3
    num_labels: int = 0
    query_key_value_bias: bool = True
    hidden_dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("image_size", "patch_size"):
            given = getattr(self, name)
            if len(given) != 2 or not all(type(size) is int and size > 0 for size in given):
                raise ValueError(
                    f"`{name}` must be two positive integers, height and width; got {given!r}."
                )
        if 0 in self.grid:
            raise ValueError(
                f"`patch_size` must not exceed `image_size`; got {self.patch_size} and "
                f"{self.image_size}: no patch fits into the image."
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Number of rows and of columns of patches."""
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        return height // patch_height, width // patch_width

    @property
    def num_patches(self) -> int:
        """Number of patches of an image; the class token is one token more."""
        rows, columns = self.grid
        return rows * columns

    @property
    def patch_numbers(self) -> int:
        """Number of pixel values of one patch, over all channels."""
        height, width = self.patch_size
        return self.num_channels * height * width

    @classmethod
    def from_json(cls, path: Path | str, **changes: Any) -> "ViTConfig":
        """Read a Hugging Face `config.json` (or the directory that holds one).

        Args:
            path: the file, or its directory. `architectures` in it says whether the model has a
                classifier: `ViTForImageClassification` has one, `ViTModel` has not.
            **changes: fields to set differently, e.g. `compute_dtype="bfloat16"`.

        Raises:
            ValueError: the file is missing, lacks a size, or describes a model that `ViT` does not
                compute (another `model_type`, architecture or activation).
        """
        content, path = read_config(path)
        keys, fields = _TABLE.read(content, path, "ViT")
        check_heads(keys, "hidden_size", "num_attention_heads")
        if any(map(operator.gt, keys["patch_size"], keys["image_size"])):
            raise keys.error(
                "patch_size",
                f"is {keys['patch_size']}, `image_size` {keys['image_size']}: no patch fits",
            )
        fields["num_labels"] = _read_num_labels(keys)
        return make_config(cls, fields | changes, path)

    def _may_be_zero(self) -> tuple[str, ...]:
        return ("num_labels",)


def _read_num_labels(keys: JsonKeys) -> int:
    """Return the number of labels of the classifier; 0 if there is none."""
    names = keys.get("architectures") or ("ViTModel",)
    unknown = sorted(set(names) - {"ViTModel", "ViTForImageClassification"})
    if unknown:
        raise keys.error(
            "architectures",
            f"holds {shown(unknown[0])}; 'ViTModel' and 'ViTForImageClassification' are read",
            remedy=CHOOSE_ANOTHER,
        )
    if "ViTForImageClassification" not in names:
        return 0
    labels = keys.get("id2label")
    if labels is None:
        return keys.get("num_labels", 2)  # transformers does not write the names of two labels
    if not labels:
        raise keys.error("id2label", "names no label, but the model is a classifier")
    return len(labels)


class ViT(nnx.Module):
    """An encoder of images, with one hidden vector for the class token and for each patch.

    Build it under `nnx.eval_shape` when the parameters come from a checkpoint: then no random
    weights are ever made.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        normal = nnx.initializers.truncated_normal(0.02)
        size = config.hidden_size
        self.class_token = nnx.Param(normal(rngs.params(), (size,)))
        self.positions = nnx.Param(normal(rngs.params(), (config.num_patches + 1, size)))
        self.patches = linear(config, config.patch_numbers, size, rngs)
        self.layers = make_layers(
            lambda rngs, _: _layer(config, rngs),
            config.num_layers,
            kind=lambda _: None,
            scanned=config.scan_layers,
            rngs=rngs,
        )
        self.norm = layer_norm(config, rngs)

    def __call__(
        self, images: Images, *, dropout_key: Key[Array, ""] | None = None
    ) -> Float[Array, "b t d"]:
        """Encode a batch of images.

        Args:
            images: normalised pixels `[batch, channels, height, width]`, the `pixel_values` of
                transformers' image processors, of the `image_size` and `num_channels` of the
                config.
            dropout_key: turns dropout on, at the rates of the config. Give each device its own
                (`jz.fold_in_device`).

        Returns:
            Hidden vectors `[batch, 1 + patches, hidden]`: first that of the class token, then those
            of the patches, row by row.

        Raises:
            ValueError: the images have another shape than the config says, or are integers.
        """
        config = self.config
        embedding_key, layers_key = split_key(dropout_key, 2)
        dtype = jnp.dtype(config.compute_dtype)
        patches_btd = self.patches(_cut_patches(images, config))
        class_b1d = jnp.broadcast_to(
            self.class_token[...].astype(dtype), (len(images), 1, config.hidden_size)
        )
        x_btd = jnp.concatenate([class_b1d, patches_btd], axis=1)
        x_btd = x_btd + self.positions[...].astype(dtype)[None]
        x_btd = dropout(x_btd, config.hidden_dropout, embedding_key)

        def step(layer: PreNormLayer, x_btd: Array, i: int | Array) -> Array:
            key = None if layers_key is None else jax.random.fold_in(layers_key, i)
            return layer(x_btd, None, dropout_key=key)

        return self.norm(run_layers(self.layers, step, x_btd, config.num_layers, config.remat))


class ViTClassifier(nnx.Module):
    """A `ViT` with a linear classifier on the class token."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.vit = ViT(config, rngs=rngs)
        self.classifier = linear(config, config.hidden_size, config.num_labels, rngs)

    def __call__(
        self, images: Images, *, dropout_key: Key[Array, ""] | None = None
    ) -> Float[Array, "b labels"]:
        """Compute the logits of the labels; the arguments are those of `ViT`."""
        return self.classifier(self.vit(images, dropout_key=dropout_key)[:, 0])


def _layer(config: ViTConfig, rngs: nnx.Rngs) -> PreNormLayer:
    return PreNormLayer(
        attention_norm=layer_norm(config, rngs),
        attention=SelfAttention(config, bias=config.query_key_value_bias, rngs=rngs),
        mlp_norm=layer_norm(config, rngs),
        mlp=Perceptron(config, dropout_rate=config.hidden_dropout, rngs=rngs),
        attention_output_dropout=config.hidden_dropout,
    )


def _cut_patches(images: Images, config: ViTConfig) -> Float[Array, "b p n"]:
    """Flatten each patch to a vector, its channels outermost, as in a convolution kernel.

    Pixels beyond the last whole patch of a row or column are left out, as by the convolution.
    """
    wanted = (config.num_channels, *config.image_size)
    if images.shape[1:] != wanted:
        raise ValueError(
            f"`images` must be [batch, {', '.join(map(str, wanted))}] (channels, height, width); "
            f"got {images.shape}. Resize the images to the model's `image_size`."
        )
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(
            f"`images` must be floats, normalised as the model was trained; got {images.dtype}. "
            "Scale the pixels, subtract the mean and divide by the standard deviation that "
            "`preprocessor_config.json` names."
        )
    (height, width), (rows, columns) = config.patch_size, config.grid
    whole = jnp.asarray(images)[:, :, : rows * height, : columns * width]
    tiled = whole.reshape(len(images), config.num_channels, rows, height, columns, width)
    return tiled.transpose(0, 2, 4, 1, 3, 5).reshape(len(images), rows * columns, -1)
