"""Load and export decoders in Hugging Face directories: weights, `config.json`, tokenizer."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxzero.interop._load import open_checkpoint
from jaxzero.interop._rules import Rule
from jaxzero.interop._tensors import Checkpoint, named_leaves
from jaxzero.models import Decoder, DecoderConfig, make_config, read_config

from .abstract import abstract_model
from .counts import check_counts
from .decoder_rules import EMBEDDINGS, PREFIXES, without_prefix
from .family import DecoderFamily, check_family, family_of
from .layer_rules import stacked
from .model_directory import is_stacked, load_params, save_params

_ROWS = 4096  # rows of the embeddings that are compared at a time
_SAVE_A_CAUSAL_MODEL = (
    "It must hold the tensors of a decoder with a head for the next token: load it with "
    "`transformers.AutoModelForCausalLM.from_pretrained` and save it with `save_pretrained`."
)


class LoadedDecoder(NamedTuple):
    """A `Decoder` whose parameters are lazy tensors in a file.

    `nnx.merge(graph, arrays)` builds the model after `params` has been read into arrays.
    """

    config: DecoderConfig
    graph: Any  # nnx.GraphDef[Decoder]; beartype warns of the annotations inside Flax's types
    params: Any  # nnx.State whose leaves are lazy tensors


def load_decoder(
    directory: Path | str,
    *,
    dtype: np.typing.DTypeLike | None = None,
    family: DecoderFamily | None = None,
    **changes: Any,
) -> LoadedDecoder:
    """Open the checkpoint of a decoder; pass `params` to `zero.shard` to read the tensors.

    If the head is tied to the embeddings but also stored in the file, both are read and compared.

    Args:
        directory: holds `config.json` and weights in a form that `open_checkpoint` reads, such as
            `model.safetensors` or `pytorch_model.bin`, in one file or in parts. Where there are
            several, give the file or index to read.
        dtype: dtype of the parameters; None keeps that of the file. Train in "float32": updates of
            parameters in 16 bits may be rounded away.
        family: how to read it; by default the family of its `model_type`.
        **changes: fields of `DecoderConfig` to override, such as `compute_dtype`, `scan_layers`
            and `remat`.

    Raises:
        ValueError: the directory is not such a checkpoint; the decoder does not support its
            `model_type` or one of its options; a tensor is unknown, missing, or has another shape
            than in `config.json`; or a tied head differs from the embeddings. The message names
            the key or tensor.
    """
    family = _family(family, directory)
    config = _config(family, directory, changes)
    checkpoint = open_checkpoint(directory)
    rules = _rules(family, checkpoint, config)
    check_counts(rules, checkpoint, config, directory)
    graph, abstract = _abstract(config)
    params = load_params(
        abstract,
        rules,
        checkpoint,
        ignore=(*family.buffers, family.head) if config.tied_head else family.buffers,
        remedy=_SAVE_A_CAUSAL_MODEL,
        dtype=dtype,
    )
    if config.tied_head:
        _check_tied(checkpoint, params, family.head)
    return LoadedDecoder(config, graph, params)


def export_decoder(
    params: Any,
    directory: Path | str,
    *,
    source: Path | str,
    dtype: np.typing.DTypeLike | Literal["source"] | None = None,
    family: DecoderFamily | None = None,
) -> Path:
    """Write parameters as a directory that `transformers.AutoModelForCausalLM` loads.

    The write is atomic, as in `save_tensors`.

    Args:
        params: the tree of `load_decoder` with full arrays, or shards from `zero.shard`; layers
            may be a list or stacked.
        directory: where to write.
        source: the directory that was loaded. Its `config.json`, tokenizer files and buffers
            (masks, rotary frequencies) are copied. Like transformers, it does not write a head
            that is tied to the embeddings.
        dtype: dtype of floating-point parameters: "source" for that of each tensor in `source`, as
            of a bfloat16 checkpoint that was trained in float32. None keeps that of `params`.
            Buffers that are copied keep theirs.
        family: the family of `source`; by default the one registered for its `model_type`.

    Returns:
        `directory`.

    Raises:
        ValueError: `params` is not the parameter tree of `source`, or `directory` is `source`.
    """
    family = _family(family, source)
    config = _config(family, source, {"scan_layers": is_stacked(params)})
    checkpoint = open_checkpoint(source)
    rules = _rules(family, checkpoint, config)
    check_counts(rules, checkpoint, config, source)
    return save_params(
        params,
        _abstract(config)[1],
        rules,
        directory,
        source=source,
        checkpoint=checkpoint,
        carried=family.buffers,
        dtype=dtype,
    )


def _check_tied(checkpoint: Checkpoint, params: Any, name: str) -> None:
    """Raise if a stored head differs from the embeddings it is tied to.

    transformers 5 would use such a head untied, so ignoring it would change the model.
    """
    head = checkpoint.get(name)
    if head is None:
        return
    embeddings = named_leaves(params).leaves[EMBEDDINGS]
    head = head.astype(embeddings.dtype)
    same = head.shape == embeddings.shape and all(
        head[rows].tobytes() == embeddings[rows].tobytes()
        for rows in ((slice(i, i + _ROWS), slice(None)) for i in range(0, head.shape[0], _ROWS))
    )
    if not same:
        raise ValueError(
            f"`tie_word_embeddings` in {str(checkpoint.path)!r} ties the head to the embeddings, "
            f"but {name!r} differs from them. Set it to false in `config.json` to keep both, or "
            "remove the head from the checkpoint."
        )


def _abstract(config: DecoderConfig) -> tuple[Any, Any]:
    return abstract_model(lambda rngs: Decoder(config, rngs=rngs), scanned=config.scan_layers)


def _family(family: DecoderFamily | None, directory: Path | str) -> DecoderFamily:
    if family is None:
        return family_of(*read_config(directory))
    check_family(family)
    return family


def _config(family: DecoderFamily, directory: Path | str, changes: dict[str, Any]) -> DecoderConfig:
    content, path = read_config(directory)
    return make_config(DecoderConfig, family.fields(content, path) | changes, path)


def _rules(
    family: DecoderFamily, checkpoint: Checkpoint, config: DecoderConfig
) -> tuple[Rule, ...]:
    rules = tuple(family.rules(config))
    if config.scan_layers:
        rules = stacked(rules)
    # A model that was saved without its head has names without the prefix. That is sufficient if
    # the head is tied.
    has_prefix = any(name.startswith(PREFIXES) for name in checkpoint)
    return rules if has_prefix else without_prefix(rules)
