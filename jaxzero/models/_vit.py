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

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key, Shaped

from ._dropout import dropout, split_key
from ._encoder_parts import Perceptron, PreNormLayer, SelfAttention, layer_norm, linear
from ._layers import make_layers, run_layers
from ._vit_config import ViTConfig

# Float[Array, "b c y x"], which `_cut_patches` checks, since it can say what to do about others.
Images = Shaped[Array | np.ndarray, "..."]


class ViT(nnx.Module):
    """Images to one hidden vector for the class token and for each patch.

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
    """Flatten each patch to a vector, its channels outermost: the order of a convolution kernel.

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
