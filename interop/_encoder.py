"""BERT encoders from and to a Hugging Face directory: weights, `config.json`, tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxzero.interop._atomic import new_directory
from jaxzero.interop._convert import to_ours, to_theirs
from jaxzero.interop._file_tensor import tensors_in
from jaxzero.interop._table import BERT, BERT_CARRIED
from jaxzero.interop._tensor import ArrayTensor
from jaxzero.interop._tree import named_leaves
from jaxzero.models import Encoder, EncoderConfig

# What makes a directory usable as a text encoder besides its weights. Files, or folders with files.
_CARRIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling",
)
_SAVE_A_PLAIN_ENCODER = (
    "It must hold the tensors of a plain encoder: load it with "
    "`transformers.BertModel.from_pretrained` and save it with `save_pretrained`, which drops "
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
    directory: Path | str,
    *,
    dtype: np.typing.DTypeLike | None = None,
    compute_dtype: str = "float32",
) -> LoadedEncoder:
    """Open a BERT checkpoint. No tensor is read yet; give `params` to `zero.shard`.

    Args:
        directory: holds `config.json` and `model.safetensors` (or its parts and their index).
        dtype: of the parameters; as in the file if left out.
        compute_dtype: what layers compute in, see `EncoderConfig`.

    Raises:
        ValueError: the directory is not such a checkpoint, is of another `model_type`, or a tensor
            is unknown, missing, or of another shape than `config.json` says. Tensors are named.
    """
    directory = Path(directory)
    config = EncoderConfig.from_json(directory, compute_dtype=compute_dtype)
    graph, abstract = _abstract(config)
    named = named_leaves(abstract)
    loaded = to_ours(
        BERT,
        {path: leaf.shape for path, leaf in named.leaves.items()},
        tensors_in(directory),
        where=f"in {str(directory)!r}",
        ignore=BERT_CARRIED,
        remedy=_SAVE_A_PLAIN_ENCODER,
    )
    if dtype is not None:
        loaded = {path: tensor.astype(dtype) for path, tensor in loaded.items()}
    params = named.rebuild(loaded)
    return LoadedEncoder(config, graph, params)


def export_encoder(params: Any, directory: Path | str, *, source: Path | str) -> Path:
    """Write parameters as a directory that `transformers` and `sentence-transformers` load.

    The directory appears whole or not at all: it is written under a temporary name beside its
    place, flushed to disk, and renamed. One that was there before is replaced in the same manner.

    Args:
        params: the tree of `load_encoder`, with full arrays for leaves (`zero.unshard(params)`).
        directory: where to write.
        source: the directory that was loaded. Its `config.json`, tokenizer files and the tensors
            that take no part in the encoder (the pooler) are carried along.

    Returns:
        `directory`.

    Raises:
        ValueError: `params` is not the parameter tree of `source`, or `directory` is `source`.
    """
    directory, source = Path(directory), Path(source)
    if directory.resolve() == source.resolve():
        raise ValueError(
            f"`directory` and `source` are both {str(source)!r}. Export to another directory, so "
            "that the checkpoint that was loaded stays as it is."
        )
    config = EncoderConfig.from_json(source)
    tensors = _to_tensors(params, config)
    carried = {name: held for name, held in tensors_in(source).items() if name in BERT_CARRIED}
    tensors |= {name: held.read() for name, held in carried.items()}
    with new_directory(directory) as folder:
        _write_config(source, folder, tensors)
        for name in _CARRIED_FILES:
            _copy(source / name, folder / name)
        # Sorted, so that equal parameters make equal files; metadata as transformers writes it.
        save_file(dict(sorted(tensors.items())), folder / "model.safetensors", {"format": "pt"})
    return directory


def _abstract(config: EncoderConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))


def _to_tensors(params: Any, config: EncoderConfig) -> dict[str, np.ndarray]:
    wanted = named_leaves(_abstract(config)[1]).leaves
    given = named_leaves(params).leaves
    if given.keys() != wanted.keys():
        differing = sorted(given.keys() ^ wanted.keys())
        raise ValueError(
            f"`params` is not the parameter tree of `source`: {differing[0]!r} is in only one of "
            f"them ({len(differing)} such paths). Pass the tree that `load_encoder` gave, with "
            "arrays for leaves."
        )
    for path, value in given.items():
        if value.shape != wanted[path].shape:
            raise ValueError(
                f"`params` has shape {value.shape} at {path!r}, the model has "
                f"{wanted[path].shape}. Sharded leaves may be padded: pass `zero.unshard(params)`."
            )
    ours = {path: ArrayTensor(np.asarray(value), path) for path, value in given.items()}
    # safetensors writes memory as it lies, so a transposed view must be copied into order.
    return {
        name: np.ascontiguousarray(tensor.read()) for name, tensor in to_theirs(BERT, ours).items()
    }


def _write_config(source: Path, folder: Path, tensors: dict[str, np.ndarray]) -> None:
    content = json.loads((source / "config.json").read_text())
    dtype = tensors["embeddings.word_embeddings.weight"].dtype.name
    content |= {key: dtype for key in ("dtype", "torch_dtype") if key in content}  # new name, old
    (folder / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.is_file():
        shutil.copyfile(source, target)
