"""Decoders from and to a Hugging Face directory: weights, `config.json`, tokenizer."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jaxzero.interop._load import open_checkpoint
from jaxzero.interop._rules import Rule
from jaxzero.interop._tensors import Checkpoint, named_leaves
from jaxzero.models import Decoder, DecoderConfig, read_config

from .decoder_rules import EMBEDDINGS, without_prefix
from .family import DecoderFamily, check_family, family_of
from .layer_rules import stacked
from .model_directory import is_stacked, load_params, save_params

_ROWS = 4096  # of embeddings that are compared at a time
_SAVE_A_CAUSAL_MODEL = (
    "It must hold the tensors of a decoder with a head for the next token: load it with "
    "`transformers.AutoModelForCausalLM.from_pretrained` and save it with `save_pretrained`."
)


class LoadedDecoder(NamedTuple):
    """A `Decoder` whose parameters are still in their file.

    `nnx.merge(graph, arrays)` builds the model once `params` has become arrays of the same tree.
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
    """Open the checkpoint of a decoder. No tensor is read yet; give `params` to `zero.shard`.

    A head that is tied to the embeddings and in the file all the same is read, to compare them.

    Args:
        directory: holds `config.json` and weights in a form that `open_checkpoint` knows, such as
            `model.safetensors` or `pytorch_model.bin`, in one file or in parts.
        dtype: of the parameters; as in the file if left out.
        family: how to read it; the one of its `model_type` if left out.
        **changes: fields of `DecoderConfig` to set differently, such as `compute_dtype`,
            `scan_layers` and `remat`.

    Raises:
        ValueError: the directory is not such a checkpoint, is of a `model_type` or has an option
            that the decoder does not compute, or a tensor is unknown, missing, or of another shape
            than `config.json` says, or the head is not the embeddings that it should be tied to.
            Keys and tensors are named.
    """
    family = _family(family, directory)
    config = _config(family, directory, changes)
    graph, abstract = _abstract(config)
    checkpoint = open_checkpoint(directory)
    params = load_params(
        abstract,
        _rules(family, checkpoint, config),
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
    family: DecoderFamily | None = None,
) -> Path:
    """Write parameters as a directory that `transformers.AutoModelForCausalLM` loads.

    The directory appears whole or not at all, as `save_tensors` says.

    Args:
        params: the tree of `load_decoder`, with whole arrays for leaves or those of `zero.shard`,
            of layers in a list or in a stack.
        directory: where to write.
        source: the directory that was loaded. Its `config.json`, tokenizer files and the tensors
            that are computed here (masks, speeds of rotation) are carried along. A head that is
            tied to the embeddings is not written, as transformers does not.
        family: as for `load_decoder`.

    Returns:
        `directory`.

    Raises:
        ValueError: `params` is not the parameter tree of `source`, or `directory` is `source`.
    """
    family = _family(family, source)
    config = _config(family, source, {"scan_layers": is_stacked(params)})
    checkpoint = open_checkpoint(source)
    return save_params(
        params,
        _abstract(config)[1],
        _rules(family, checkpoint, config),
        directory,
        source=checkpoint,
        carried=family.buffers,
    )


def _check_tied(checkpoint: Checkpoint, params: Any, name: str) -> None:
    """Refuse a head that would be lost: transformers 5 does not tie one that differs."""
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
            f"`tie_word_embeddings` in {str(checkpoint.path)!r} says that the head is the "
            f"embeddings, but {name!r} differs from them. Set it to false in `config.json` to keep "
            "both, or take the head out of the checkpoint."
        )


def _abstract(config: DecoderConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def _family(family: DecoderFamily | None, directory: Path | str) -> DecoderFamily:
    if family is None:
        return family_of(*read_config(directory))
    check_family(family)
    return family


def _config(family: DecoderFamily, directory: Path | str, changes: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig(**(family.fields(*read_config(directory)) | changes))


def _rules(
    family: DecoderFamily, checkpoint: Checkpoint, config: DecoderConfig
) -> tuple[Rule, ...]:
    rules = tuple(family.rules(config))
    if config.scan_layers:
        rules = stacked(rules)
    # A model that was saved without its head has names without the prefix; a tied head is no loss.
    prefixes = ("model.", "transformer.")
    has_prefix = any(name.startswith(prefixes) for name in checkpoint)
    return rules if has_prefix else without_prefix(rules)
