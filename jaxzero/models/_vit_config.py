"""Configuration of a Vision Transformer, as a frozen dataclass that validates itself."""

import dataclasses
import operator
from pathlib import Path
from typing import Any

from .._checked_json import JsonKeys, shown
from ._activations import read_activation
from ._config_json import CHOOSE_ANOTHER, check_only, config_keys, make_config, read_config
from ._encoder_base import EncoderBase, check_heads

_FIELDS = {
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
}
_DEFAULTS = {
    "num_channels": 3,
    "hidden_act": "gelu",
    "qkv_bias": True,
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(EncoderBase):
    """Sizes of a Vision Transformer, and how it is computed.

    The defaults are those of ViT-Base with patches of 16 pixels, without a classifier. Fields that
    all encoders share are those of `EncoderConfig`.

    Args:
        image_size: height and width of the images, in pixels.
        patch_size: height and width of a patch, in pixels. Pixels beyond the last whole patch are
            not seen.
        num_channels: channels of the images.
        num_labels: labels of the classifier; 0 without a classifier.
        query_key_value_bias: True if queries, keys and values have biases.
        hidden_dropout: rate of what enters the first layer and of what each half of a layer adds.
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
        """Rows and columns of patches."""
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        return height // patch_height, width // patch_width

    @property
    def num_patches(self) -> int:
        """Patches of an image; the class token comes on top."""
        rows, columns = self.grid
        return rows * columns

    @property
    def patch_numbers(self) -> int:
        """Numbers of one patch, over all channels."""
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
        keys = config_keys(content, path, defaults=_DEFAULTS)
        for key, only in (("model_type", "vit"), ("quantization_config", None)):
            check_only(keys, key, only, "ViT")
        keys.require(*_FIELDS.values())
        check_heads(keys, "hidden_size", "num_attention_heads")
        if any(map(operator.gt, keys["patch_size"], keys["image_size"])):
            raise keys.error(
                "patch_size",
                f"is {keys['patch_size']}, `image_size` {keys['image_size']}: no patch fits",
            )
        fields = {ours: keys[key] for ours, key in _FIELDS.items()}
        fields["activation"] = read_activation(keys, "hidden_act", "ViT")
        fields["num_labels"] = _read_num_labels(keys)
        return make_config(cls, fields | changes, path)

    def _may_be_zero(self) -> tuple[str, ...]:
        return ("num_labels",)


def _read_num_labels(keys: JsonKeys) -> int:
    """Number of labels of the classifier, 0 if there is none."""
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
