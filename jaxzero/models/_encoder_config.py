"""What a BERT encoder's `config.json` says, as a frozen dataclass that was checked once.

Field names are ours (spelled-out, `num_` for counts); `from_json` holds the one list that maps the
names of a Hugging Face `config.json` to them, and refuses what `Encoder` does not compute.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

_JSON_NAMES = {
    "vocab_size": "vocabulary_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_length",
    "type_vocab_size": "num_token_types",
    "layer_norm_eps": "layer_norm_epsilon",
}
# Keys that change the meaning of the model, and the only value `Encoder` computes.
_REQUIRED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
}
_DEFAULTS = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes of a BERT encoder, and the dtype it computes in.

    The defaults are those of all-MiniLM-L6-v2. Parameters keep the dtype they are loaded in;
    `compute_dtype` is what they and the activations are cast to inside a layer. Softmax and
    normalisation statistics stay in float32.
    """

    vocabulary_size: int = 30522
    hidden_size: int = 384
    intermediate_size: int = 1536
    num_layers: int = 6
    num_heads: int = 12
    max_length: int = 512  # positions that have an embedding, in tokens
    num_token_types: int = 2
    layer_norm_epsilon: float = 1e-12
    compute_dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, "int") and not (isinstance(value, int) and value > 0):
                raise ValueError(f"`{field.name}` must be a positive integer; got {value!r}.")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"`hidden_size` must be a multiple of `num_heads`; got {self.hidden_size} and "
                f"{self.num_heads}. Every head takes an equal slice of the hidden vector."
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def from_json(cls, path: Path, **changes: Any) -> "EncoderConfig":
        """Read a Hugging Face `config.json` (or the directory that holds one).

        Args:
            path: the file, or its directory.
            **changes: fields to set differently, e.g. `compute_dtype="bfloat16"`.

        Raises:
            ValueError: the file is missing, lacks a size, or describes a model that `Encoder` does
                not compute (another `model_type`, activation or kind of position embedding).
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"There is no `config.json` at {str(path)!r}. Give a directory that "
                "`save_pretrained` of Hugging Face transformers wrote."
            )
        content = json.loads(path.read_text())
        _check_meaning(content, path)
        missing = sorted(_JSON_NAMES.keys() - content.keys())
        if missing:
            raise ValueError(
                f"{str(path)!r} lacks {', '.join(missing)}. Save the checkpoint again with "
                "`save_pretrained` of a current transformers release, which writes every size."
            )
        return cls(**{ours: content[theirs] for theirs, ours in _JSON_NAMES.items()}, **changes)


def _check_meaning(content: dict[str, Any], path: Path) -> None:
    for key, required in _REQUIRED.items():
        given = content.get(key, _DEFAULTS.get(key))
        if given != required:
            raise ValueError(
                f"`{key}` in {str(path)!r} must be {required!r}; got {given!r}. Only BERT encoders "
                "(such as all-MiniLM-L6-v2) can be loaded so far; convert another checkpoint or "
                "write its model beside `jaxzero.models.Encoder`."
            )
