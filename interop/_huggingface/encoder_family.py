"""The families of encoders: which model and config a `model_type` has, and which rules.

A new family is one row of the table.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx

from jaxzero.interop._rules import Rule
from jaxzero.models import (
    Encoder,
    EncoderConfig,
    ModernBert,
    ModernBertConfig,
    ViT,
    ViTClassifier,
    ViTConfig,
    family_of,
    read_config,
)

from .encoder_rules import BERT, DISTILBERT, modern_bert_rules, vit_rules
from .layer_rules import stacked

_SAVE_A_PLAIN_ENCODER = (
    "It must hold the tensors of a plain encoder: load it with "
    "`transformers.AutoModel.from_pretrained` and save it with `save_pretrained`, which drops "
    "heads and prefixes."
)
_SAVE_AN_IMAGE_MODEL = (
    "`architectures` in `config.json` says which tensors there are: those of `ViTModel`, or of "
    "`ViTForImageClassification`. Load the checkpoint with one of these classes of transformers "
    "and save it with `save_pretrained`."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """How the checkpoints of one `model_type` are read and written.

    Attributes:
        config: the class of its config, which reads `config.json`.
        model: makes the model, from a config and `rngs=`.
        rules: names of tensors, for a config with layers in a list or in a stack.
        carried: patterns (with `*`) of tensors in the file that the model does not use. Exporting
            copies them from the file that was loaded.
        remedy: advice about missing and unknown tensors.
    """

    config: Any
    model: Callable[..., nnx.Module]
    rules: Callable[[Any], tuple[Rule, ...]]
    carried: tuple[str, ...]
    remedy: str = _SAVE_A_PLAIN_ENCODER


def _bert_like(rules: tuple[Rule, ...]) -> EncoderFamily:
    return EncoderFamily(
        config=EncoderConfig,
        model=Encoder,
        rules=lambda config: stacked(rules) if config.scan_layers else rules,
        # The pooler feeds a head that the encoder does not have; position ids are 0, 1, 2, ...
        carried=("embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight"),
    )


def _vit(config: ViTConfig, *, rngs: nnx.Rngs) -> ViT | ViTClassifier:
    return (ViTClassifier if config.num_labels else ViT)(config, rngs=rngs)


ENCODERS: dict[str, EncoderFamily] = {
    "bert": _bert_like(BERT),
    "distilbert": _bert_like(DISTILBERT),
    "roberta": _bert_like(BERT),
    "xlm-roberta": _bert_like(BERT),
    "modernbert": EncoderFamily(
        config=ModernBertConfig, model=ModernBert, rules=modern_bert_rules, carried=()
    ),
    "vit": EncoderFamily(
        config=ViTConfig,
        model=_vit,
        rules=vit_rules,
        # The classifier reads the class token itself; the mask token is for pretraining.
        carried=("*pooler.dense.bias", "*pooler.dense.weight", "*embeddings.mask_token"),
        remedy=_SAVE_AN_IMAGE_MODEL,
    ),
}


def encoder_family(directory: Path | str) -> EncoderFamily:
    """The family that the `config.json` of a directory names.

    Raises:
        ValueError: there is no such file, or its `model_type` is not known.
    """
    content, path = read_config(directory)
    return family_of(content, path, ENCODERS, "encoders")
