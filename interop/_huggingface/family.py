"""A family of decoders as one object: how it reads `config.json`, and how it names its tensors.

The families here join the tables of `jaxzero.models` (configuration) with those of `decoder_rules`
(names). A family of the user is a subclass of `DecoderFamily` with both methods.
"""

import abc
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxzero.interop._rules import Rule
from jaxzero.models import DECODER_FAMILIES, DecoderConfig, decoder_fields

from .decoder_rules import BUFFERS, HEAD, MORE_BUFFERS, OTHER_HEADS, rules_of


class DecoderFamily(abc.ABC):
    """Maps the checkpoints of one `model_type` to a `jaxzero.models.Decoder`: config and tensors.

    To support another family, write a subclass, and pass an instance to
    `load_decoder(..., family=...)` and `export_decoder`, or register it with
    `register_decoder_family`. `decoder_family("llama")` returns a family to start from.

    Attributes:
        model_type: value of `model_type` in `config.json`.
        buffers: patterns (with `*`) for names of tensors in a checkpoint that are not parameters.
        head: name of the tensor of the language-model head. Some files hold this tensor even if it
            is tied to the embedding.
    """

    model_type: str
    buffers: tuple[str, ...] = BUFFERS
    head: str = HEAD

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


@dataclasses.dataclass(frozen=True)
class _KnownFamily(DecoderFamily):
    """A family that `jaxzero.models` has a table for."""

    model_type: str
    buffers: tuple[str, ...] = BUFFERS
    head: str = HEAD

    def fields(self, content: dict[str, Any], path: Path) -> dict[str, Any]:
        return decoder_fields(content | {"model_type": self.model_type}, path)

    def rules(self, config: DecoderConfig) -> tuple[Rule, ...]:
        return rules_of(self.model_type, config)


_registered: dict[str, DecoderFamily] = {}


def register_decoder_family(family: DecoderFamily) -> None:
    """Add a family to `load_decoder` and `export_decoder`, by its `model_type`.

    It takes the place of a family that has the same one.

    Raises:
        ValueError: it is not an instance of a `DecoderFamily`, or has no `model_type`.
    """
    check_family(family)
    _registered[family.model_type] = family


def decoder_family(model_type: str) -> DecoderFamily:
    """The family of a `model_type`, registered or built in.

    Raises:
        ValueError: there is none.
    """
    return _find(model_type, "`model_type`")


def family_of(content: dict[str, Any], path: Path) -> DecoderFamily:
    """The family of a `config.json`.

    Raises:
        ValueError: its `model_type` is not known.
    """
    return _find(content.get("model_type"), f"`model_type` in {str(path)!r}")


def check_family(family: object) -> None:
    """Raise `ValueError` if `family` is not a `DecoderFamily` with a `model_type`."""
    if not isinstance(family, DecoderFamily) or not isinstance(
        getattr(family, "model_type", None), str
    ):
        raise ValueError(
            "A family must be an instance of a subclass of `interop.DecoderFamily` that has a "
            f"`model_type`, such as `MyFamily()`; got {family!r}."
        )


def _find(model_type: Any, what: str) -> DecoderFamily:
    if isinstance(model_type, str) and model_type in _registered:
        return _registered[model_type]
    if not isinstance(model_type, str) or model_type not in DECODER_FAMILIES:
        known = ", ".join(sorted({*DECODER_FAMILIES, *_registered}))
        raise ValueError(
            f"{what} is {model_type!r}; decoders are read of the families {known}. Choose such a "
            "checkpoint, pass a `family=interop.DecoderFamily` of your own, or load the weights "
            "into a model of your own: `interop.match` proposes the rules (docs/howto/rules.md)."
        )
    return _KnownFamily(
        model_type,
        buffers=(*BUFFERS, *MORE_BUFFERS.get(model_type, ())),
        head=OTHER_HEADS.get(model_type, HEAD),
    )
