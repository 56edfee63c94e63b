"""Load and export encoders in Hugging Face directories: weights, `config.json`, tokenizer."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxzero.interop._load import open_checkpoint
from jaxzero.models import EncoderConfig, ModernBertConfig, ViTConfig

from .abstract import abstract_model
from .counts import check_counts
from .encoder_family import EncoderFamily, encoder_family
from .model_directory import is_stacked, load_params, save_params

AnyEncoderConfig = EncoderConfig | ModernBertConfig | ViTConfig


class LoadedEncoder(NamedTuple):
    """An encoder whose parameters are lazy tensors in a file.

    Which model it is follows from the `model_type`: a `ModernBert`, a `ViT` or `ViTClassifier`, and
    an `Encoder` for BERT, RoBERTa and DistilBERT.

    `nnx.merge(graph, arrays)` builds the model after `params` has been read into arrays.
    """

    config: AnyEncoderConfig
    graph: Any  # nnx.GraphDef of the model; beartype warns of the annotations inside Flax's types
    params: Any  # nnx.State whose leaves are lazy tensors


def load_encoder(
    directory: Path | str, *, dtype: np.typing.DTypeLike | None = None, **changes: Any
) -> LoadedEncoder:
    """Open the checkpoint of an encoder without reading its tensors.

    Args:
        directory: a folder with `config.json` and weights in a format that `open_checkpoint`
            supports, such as `model.safetensors` or `pytorch_model.bin`, in one file or in parts.
        dtype: dtype of the parameters; None keeps that of the file. Train in "float32": updates of
            parameters in 16 bits may be rounded away.
        **changes: fields of the config to override, such as `compute_dtype`.

    Returns:
        The config, the `nnx.GraphDef` and the parameters as lazy tensors. Pass `params` to
        `zero.shard`, which reads on each device only the shards of that device.

    Raises:
        ValueError: the directory is not an encoder's checkpoint, its `model_type` is not
            supported, or a tensor is unknown, missing, or has another shape than `config.json`
            implies. The message names the tensor.
    """
    family = encoder_family(directory)
    config = family.config.from_json(directory, **changes)
    checkpoint, rules = open_checkpoint(directory), family.rules(config)
    check_counts(rules, checkpoint, config, directory)
    graph, abstract = _abstract(family, config)
    params = load_params(
        abstract,
        rules,
        checkpoint,
        ignore=family.carried,
        remedy=family.remedy,
        dtype=dtype,
    )
    return LoadedEncoder(config, graph, params)


def export_encoder(
    params: Any,
    directory: Path | str,
    *,
    source: Path | str,
    dtype: np.typing.DTypeLike | Literal["source"] | None = None,
) -> Path:
    """Write parameters as a directory that `transformers` loads.

    `sentence-transformers` loads it as well if it is an encoder of text. The write is atomic, as in
    `save_tensors`.

    Args:
        params: the tree of `load_encoder` with full arrays, or shards from `zero.shard`.
        directory: where to write.
        source: the directory that was loaded. Its `config.json`, tokenizer files and the tensors
            that the model does not use (such as a pooler) are copied.
        dtype: dtype of floating-point parameters: "source" for that of each tensor in `source`, as
            of a bfloat16 checkpoint that was trained in float32. None keeps that of `params`.
            Buffers that are copied keep theirs.

    Returns:
        `directory`.

    Raises:
        ValueError: `params` is not the parameter tree of `source`, or `directory` is `source`.
    """
    family = encoder_family(source)
    config = family.config.from_json(source, scan_layers=is_stacked(params))
    checkpoint, rules = open_checkpoint(source), family.rules(config)
    check_counts(rules, checkpoint, config, source)
    return save_params(
        params,
        _abstract(family, config)[1],
        rules,
        directory,
        source=source,
        checkpoint=checkpoint,
        carried=family.carried,
        dtype=dtype,
    )


def _abstract(family: EncoderFamily, config: AnyEncoderConfig) -> tuple[Any, Any]:
    return abstract_model(lambda rngs: family.model(config, rngs=rngs), scanned=config.scan_layers)
