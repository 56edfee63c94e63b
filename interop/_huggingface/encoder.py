"""Load and export encoders in Hugging Face directories: weights, `config.json`, tokenizer."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxzero.interop._load import open_checkpoint
from jaxzero.interop._rules import Rule
from jaxzero.models import Encoder, EncoderConfig, read_config

from .abstract import abstract_model
from .encoder_rules import ENCODER_CARRIED, ENCODERS
from .layer_rules import stacked
from .model_directory import is_stacked, load_params, save_params

_SAVE_A_PLAIN_ENCODER = (
    "It must hold the tensors of a plain encoder: load it with "
    "`transformers.AutoModel.from_pretrained` and save it with `save_pretrained`, which drops "
    "heads and prefixes."
)


class LoadedEncoder(NamedTuple):
    """An `Encoder` whose parameters are lazy tensors in a file.

    `nnx.merge(graph, arrays)` builds the model after `params` has been read into arrays.
    """

    config: EncoderConfig
    graph: Any  # nnx.GraphDef[Encoder]; beartype warns of the annotations inside Flax's types
    params: Any  # nnx.State whose leaves are lazy tensors


def load_encoder(
    directory: Path | str, *, dtype: np.typing.DTypeLike | None = None, **changes: Any
) -> LoadedEncoder:
    """Open the checkpoint of an encoder without reading its tensors.

    Args:
        directory: a folder with `config.json` and weights in a format that `open_checkpoint`
            supports, such as `model.safetensors` or `pytorch_model.bin`, in one file or in parts.
        dtype: dtype of the parameters; None keeps the dtype of the file.
        **changes: fields of `EncoderConfig` to override, such as `compute_dtype`.

    Returns:
        The config, the `nnx.GraphDef` and the parameters as lazy tensors. Pass `params` to
        `zero.shard`, which reads on each device only the shards of that device.

    Raises:
        ValueError: the directory is not an encoder's checkpoint, its `model_type` is not
            supported, or a tensor is unknown, missing, or has another shape than `config.json`
            implies. The message names the tensor.
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

    The write is atomic, as in `save_tensors`.

    Args:
        params: the tree of `load_encoder` with full arrays, or shards from `zero.shard`.
        directory: where to write.
        source: the directory that was loaded. Its `config.json`, tokenizer files and the tensors
            that the encoder does not use (the pooler) are copied.

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
    return abstract_model(lambda rngs: Encoder(config, rngs=rngs), scanned=config.scan_layers)


def _rules(directory: Path, config: EncoderConfig) -> tuple[Rule, ...]:
    content, _ = read_config(directory)
    rules = ENCODERS[content["model_type"]]
    return stacked(rules) if config.scan_layers else rules
