"""Describe families of models in Hugging Face directories: their configs, and names of tensors.

A built-in family of decoders reads `config.json` by a table of `jaxzero.models`, and takes names of
tensors from a table of `decoder_rules`. Users add families as subclasses of `DecoderFamily`. A new
family of encoders is added as a row of `ENCODERS`.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flax import nnx

from jaxzero.interop._rules import Rule
from jaxzero.models import (
    DECODER_FAMILIES,
    Decoder,
    DecoderConfig,
    Encoder,
    EncoderConfig,
    ModernBert,
    ModernBertConfig,
    ViT,
    ViTClassifier,
    ViTConfig,
    decoder_fields,
    make_config,
    read_config,
)
from jaxzero.models import family_of as row_of

from .decoder_rules import BUFFERS, DECODER_NAMES, HEAD, without_prefix
from .encoder_rules import BERT, DISTILBERT, modern_bert_rules, vit_rules
from .layer_rules import stacked

_POOLER = ("pooler.dense.bias", "pooler.dense.weight")


class DecoderFamily(abc.ABC):
    """Maps the checkpoints of one `model_type` to a `jaxzero.models.Decoder`: config and tensors.

    To support another family, write a subclass with `fields` and `rules`, and pass an instance to
    `load_decoder(..., family=...)` and `export_decoder`, or register it with
    `register_decoder_family`. `decoder_family("llama")` returns a family to start from.

    Attributes:
        model_type: value of `model_type` in `config.json`.
        buffers: patterns (with `*`) for names of tensors in a checkpoint that are not parameters.
            Exporting copies them from the checkpoint that was loaded.
        head: name of the tensor of the language-model head. Some files hold this tensor even if it
            is tied to the embedding.
        remedy: advice about missing and unknown tensors.
    """

    model_type: str
    buffers: tuple[str, ...] = BUFFERS
    head: str = HEAD
    remedy = (
        "It must hold the tensors of a decoder with a head for the next token: load it with "
        "`transformers.AutoModelForCausalLM.from_pretrained` and save it with `save_pretrained`."
    )

    @abc.abstractmethod
    def fields(self, content: dict[str, Any], path: Path) -> dict[str, Any]:
        """Translate a `config.json` to keyword arguments of `DecoderConfig`.

        Args:
            content: the parsed file.
            path: path of the file, for messages.

        Raises:
            ValueError: a field is missing, or requests something that the decoder does not support.
        """

    @abc.abstractmethod
    def rules(self, config: DecoderConfig) -> Iterable[Rule]:
        """Return the rules that map tensor names in a checkpoint to parameters of a `Decoder`.

        Write the rules for a list of layers, with `layers.{i}` in the paths of parameters. The
        rules for stacked layers (`scan_layers`), and for a checkpoint that was saved without the
        language-model head, are derived from them.
        """

    def read_config(self, directory: Path | str, changes: dict[str, Any]) -> DecoderConfig:
        """Read the `config.json` in `directory` into a config; `changes` override its fields."""
        content, path = read_config(directory)
        return make_config(DecoderConfig, self.fields(content, path) | changes, path)

    def make(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> Decoder:
        """Build a `Decoder` with random parameters."""
        return Decoder(config, rngs=rngs)

    def rules_for(self, config: DecoderConfig, names: Iterable[str]) -> tuple[Rule, ...]:
        """Adapt the rules of `rules` to stacked layers, and to the names in one checkpoint.

        If the config scans its layers, the rules are for stacked layers. If the `names` in the
        checkpoint lack a prefix such as `model.`, the rules lack it too.
        """
        rules = tuple(self.rules(config))
        return without_prefix(stacked(rules) if config.scan_layers else rules, names)

    def ignored(self, config: DecoderConfig) -> tuple[str, ...]:
        """Return patterns for names of tensors that loading skips: buffers, and a tied head."""
        return (*self.buffers, self.head) if config.tied_head else self.buffers


@dataclasses.dataclass(frozen=True)
class _KnownDecoders(DecoderFamily):
    """A built-in family of decoders: reads config and names by tables (see the module)."""

    model_type: str
    buffers: tuple[str, ...]
    head: str

    def fields(self, content: dict[str, Any], path: Path) -> dict[str, Any]:
        # The caller may have chosen this family for a file of another `model_type`.
        return decoder_fields(content | {"model_type": self.model_type}, path)

    def rules(self, config: DecoderConfig) -> tuple[Rule, ...]:
        return DECODER_NAMES[self.model_type].rules(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """A built-in family of encoders. It has the methods of a `DecoderFamily` that loading uses.

    Attributes:
        config: the class of its config, whose `from_json` reads `config.json`.
        model: builds the model from a config and `rngs=`.
        rules: returns the rules for a config, with layers in a list or scanned.
        buffers, remedy: as in a `DecoderFamily`.
    """

    config: Any
    model: Callable[..., nnx.Module]
    rules: Callable[[Any], tuple[Rule, ...]]
    buffers: tuple[str, ...]
    remedy: str = (
        "It must hold the tensors of a plain encoder: load it with "
        "`transformers.AutoModel.from_pretrained` and save it with `save_pretrained`, which drops "
        "heads and prefixes."
    )

    def read_config(self, directory: Path | str, changes: dict[str, Any]) -> Any:
        return self.config.from_json(directory, **changes)

    def make(self, config: Any, *, rngs: nnx.Rngs) -> nnx.Module:
        return self.model(config, rngs=rngs)

    def rules_for(self, config: Any, names: Iterable[str]) -> tuple[Rule, ...]:
        return self.rules(config)

    def ignored(self, config: Any) -> tuple[str, ...]:
        return self.buffers


Family = DecoderFamily | EncoderFamily


def _bert_like(rules: tuple[Rule, ...]) -> EncoderFamily:
    return EncoderFamily(
        config=EncoderConfig,
        model=Encoder,
        rules=lambda config: stacked(rules) if config.scan_layers else rules,
        # The pooler feeds a head that the encoder does not have; position ids are 0, 1, 2, ...
        buffers=("embeddings.position_ids", *_POOLER),
    )


ENCODERS: dict[str, EncoderFamily] = {
    "bert": _bert_like(BERT),
    "distilbert": _bert_like(DISTILBERT),
    "roberta": _bert_like(BERT),
    "xlm-roberta": _bert_like(BERT),
    "modernbert": EncoderFamily(
        config=ModernBertConfig, model=ModernBert, rules=modern_bert_rules, buffers=()
    ),
    "vit": EncoderFamily(
        config=ViTConfig,
        model=lambda config, rngs: (ViTClassifier if config.num_labels else ViT)(config, rngs=rngs),
        rules=vit_rules,
        # The classifier reads the class token itself; the mask token is for pretraining.
        buffers=(*(f"*{name}" for name in _POOLER), "*embeddings.mask_token"),
        remedy="`architectures` in `config.json` says which tensors there are: those of "
        "`ViTModel`, or of `ViTForImageClassification`. Load the checkpoint with one of these "
        "classes of transformers and save it with `save_pretrained`.",
    ),
}
_registered: dict[str, DecoderFamily] = {}


def register_decoder_family(family: DecoderFamily) -> None:
    """Add a family to `load_decoder` and `export_decoder`, by its `model_type`.

    It replaces a family of the same `model_type`, built in or registered earlier.

    Raises:
        ValueError: it is not an instance of a `DecoderFamily`, or has no `model_type`.
    """
    check_family(family)
    _registered[family.model_type] = family


def check_family(family: object) -> None:
    """Raise `ValueError` if `family` is not a `DecoderFamily` with a `model_type`."""
    model_type = getattr(family, "model_type", None)
    if not isinstance(family, DecoderFamily) or not isinstance(model_type, str):
        raise ValueError(
            "A family must be an instance of a subclass of `interop.DecoderFamily` that has a "
            f"`model_type`, such as `MyFamily()`; got {family!r}."
        )


def decoder_family(model_type: str) -> DecoderFamily:
    """Return the family of a `model_type`, registered or built in.

    Raises:
        ValueError: there is no family of this `model_type`.
    """
    return _decoder_family(model_type, "`model_type`")


def decoder_family_of(directory: Path | str) -> DecoderFamily:
    """Return the family of decoders that the `model_type` in a directory's `config.json` names."""
    content, path = read_config(directory)
    return _decoder_family(content.get("model_type"), f"`model_type` in {str(path)!r}")


def encoder_family_of(directory: Path | str) -> EncoderFamily:
    """Return the family of encoders that the `model_type` in a directory's `config.json` names."""
    return row_of(*read_config(directory), ENCODERS, "encoders")


def _decoder_family(model_type: Any, what: str) -> DecoderFamily:
    if isinstance(model_type, str) and model_type in _registered:
        return _registered[model_type]
    if not isinstance(model_type, str) or model_type not in DECODER_FAMILIES:
        known = ", ".join(sorted({*DECODER_FAMILIES, *_registered}))
        raise ValueError(
            f"{what} is {model_type!r}; decoders are read of the families {known}. Choose such a "
            "checkpoint, pass a `family=interop.DecoderFamily` of your own, or load the weights "
            "into a model of your own: `interop.match` proposes the rules (docs/howto/rules.md). "
            "Encoders are read by `interop.load_encoder`."
        )
    names = DECODER_NAMES[model_type]
    return _KnownDecoders(model_type, names.buffers, names.head)
