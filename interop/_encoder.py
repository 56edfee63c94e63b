"""BERT encoders from and to a Hugging Face directory: weights, `config.json`, tokenizer."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jaxzero.interop._convert import to_ours
from jaxzero.interop._file_tensor import tensors_in
from jaxzero.interop._load_into import tensors_from
from jaxzero.interop._save import save_tensors
from jaxzero.interop._table import BERT, BERT_CARRIED
from jaxzero.interop._tree import named_leaves
from jaxzero.models import Encoder, EncoderConfig

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
    source = Path(source)
    model = _abstract(EncoderConfig.from_json(source))[1]
    tensors = tensors_from(params, BERT, like=model)
    carried = {name: held for name, held in tensors_in(source).items() if name in BERT_CARRIED}
    return save_tensors(tensors | carried, directory, source=source)


def _abstract(config: EncoderConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))))
