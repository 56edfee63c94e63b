"""Encoders from and to a Hugging Face directory: weights, `config.json`, tokenizer."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jaxzero.interop._load import open_checkpoint
from jaxzero.interop._rules import Rule
from jaxzero.models import Encoder, EncoderConfig, read_config

from .encoder_rules import ENCODER_CARRIED, ENCODERS
from .layer_rules import stacked
from .model_directory import is_stacked, load_params, save_params

_SAVE_A_PLAIN_ENCODER = (
    "It must hold the tensors of a plain encoder: load it with "
    "`transformers.AutoModel.from_pretrained` and save it with `save_pretrained`, which drops "
    "heads and prefixes."
)


class LoadedEncoder(NamedTuple):
    """An `Encoder` whose parameters are still in their file.

    `nnx.merge(graph, arrays)` builds the model once `params` has become arrays of the same tree.
    """

    config: EncoderConfig
    graph: Any  # nnx.GraphDef[Encoder]; beartype warns of the annotations inside Flax's types
    params: Any  # nnx.State whose leaves are lazy tensors


def load_encoder(
    directory: Path | str, *, dtype: np.typing.DTypeLike | None = None, **changes: Any
) -> LoadedEncoder:
    """Open the checkpoint of an encoder. No tensor is read yet; give `params` to `zero.shard`.

    Args:
        directory: holds `config.json` and weights in a form that `open_checkpoint` knows, such as
            `model.safetensors` or `pytorch_model.bin`, in one file or in parts.
        dtype: of the parameters; as in the file if left out.
        **changes: fields of `EncoderConfig` to set differently, such as `compute_dtype`.

    Raises:
        ValueError: the directory is not such a checkpoint, is of another `model_type`, or a tensor
            is unknown, missing, or of another shape than `config.json` says. Tensors are named.
    """
    directory = Path(directory)
    config = EncoderConfig.from_json(directory, **changes)
    graph, abstract = _abstract(config)
    params = load_params(
        abstract,
        _rules(directory, config),
        open_checkpoint(directory),
        ignore=ENCODER_CARRIED,
        remedy=_SAVE_A_PLAIN_ENCODER,
        dtype=dtype,
    )
    return LoadedEncoder(config, graph, params)


def export_encoder(params: Any, directory: Path | str, *, source: Path | str) -> Path:
    """Write parameters as a directory that `transformers` and `sentence-transformers` load.

    The directory appears whole or not at all, as `save_tensors` says.

    Args:
        params: the tree of `load_encoder`, with whole arrays for leaves or those of `zero.shard`.
        directory: where to write.
        source: the directory that was loaded. Its `config.json`, tokenizer files and the tensors
            that take no part in the encoder (the pooler) are carried along.

    Returns:
        `directory`.

    Raises:
        ValueError: `params` is not the parameter tree of `source`, or `directory` is `source`.
    """
    config = EncoderConfig.from_json(source, scan_layers=is_stacked(params))
    return save_params(
        params,
        _abstract(config)[1],
        _rules(Path(source), config),
        directory,
        source=open_checkpoint(source),
        carried=ENCODER_CARRIED,
    )


def _abstract(config: EncoderConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))


def _rules(directory: Path, config: EncoderConfig) -> tuple[Rule, ...]:
    content, _ = read_config(directory)
    rules = ENCODERS[content["model_type"]]
    return stacked(rules) if config.scan_layers else rules
