"""Load and export the models of Hugging Face directories: weights, `config.json`, tokenizer."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxzero._text import matches
from jaxzero.interop._load import checked_dtype, open_checkpoint, tensors_from
from jaxzero.interop._rules import Rule, to_ours
from jaxzero.interop._safetensors import save_tensors
from jaxzero.interop._tensors import Checkpoint, named_leaves
from jaxzero.models import (
    DecoderConfig,
    EncoderConfig,
    ModernBertConfig,
    ShapesOnly,
    ViTConfig,
    read_config,
)

from .decoder_rules import EMBEDDINGS
from .families import DecoderFamily, Family, check_family, decoder_family_of, encoder_family_of

_ROWS = 4096  # rows of the embeddings that are compared at a time
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component of a name that is a number
_COUNTED = {"i": "layer", "e": "expert"}  # other variables count heads
_VARIABLE = re.compile(r"\{(\w+)\}")
Dtype = np.typing.DTypeLike | Literal["source"] | None


class LoadedDecoder(NamedTuple):
    """A `Decoder` whose parameters are lazy tensors in a file.

    `nnx.merge(graph, arrays)` builds the model after `params` has been read into arrays.
    """

    config: DecoderConfig
    graph: Any  # nnx.GraphDef[Decoder]; beartype warns of the annotations inside Flax's types
    params: Any  # nnx.State whose leaves are lazy tensors


class LoadedEncoder(NamedTuple):
    """An encoder whose parameters are lazy tensors in a file.

    Which model it is follows from the `model_type`: a `ModernBert`, a `ViT` or `ViTClassifier`, and
    an `Encoder` for BERT, RoBERTa and DistilBERT.

    `nnx.merge(graph, arrays)` builds the model after `params` has been read into arrays.
    """

    config: EncoderConfig | ModernBertConfig | ViTConfig
    graph: Any  # nnx.GraphDef of the model, as that of a `LoadedDecoder`
    params: Any  # nnx.State whose leaves are lazy tensors


def load_decoder(
    directory: Path | str,
    *,
    dtype: np.typing.DTypeLike | None = None,
    family: DecoderFamily | None = None,
    **changes: Any,
) -> LoadedDecoder:
    """Open the checkpoint of a decoder; pass `params` to `zero.shard` to read the tensors.

    If the head is tied to the embeddings but also stored in the file, head and embeddings are read
    and compared.

    Args:
        directory: holds `config.json` and weights in a form that `open_checkpoint` reads, such as
            `model.safetensors` or `pytorch_model.bin`, in one file or in parts. Where there are
            several, give the file or index to read.
        dtype: dtype of the parameters; None keeps that of the file. Train in "float32": updates of
            parameters in 16 bits may be rounded away.
        family: how to read `config.json` and name the tensors; by default the family of the
            `model_type`.
        **changes: fields of `DecoderConfig` to override, such as `compute_dtype`, `scan_layers`
            and `remat`.

    Raises:
        TypeError: `directory` is not a path, or `DecoderConfig` has no field of a name.
        ValueError: the directory is not such a checkpoint; the decoder does not support its
            `model_type` or one of its options; a tensor is unknown, missing, or has another shape
            than in `config.json`; or a tied head differs from the embeddings. The message names
            the key or tensor.
    """
    family = _decoder_family(family, directory)
    opened = _opened(family, directory, changes)
    params = _loaded(opened, dtype)
    if opened.config.tied_head:
        _check_tied(opened.checkpoint, params, family.head)
    return LoadedDecoder(opened.config, opened.graph, params)


def load_encoder(
    directory: Path | str, *, dtype: np.typing.DTypeLike | None = None, **changes: Any
) -> LoadedEncoder:
    """Open the checkpoint of an encoder; pass `params` to `zero.shard` to read the tensors.

    Args:
        directory: a folder with `config.json` and weights in a format that `open_checkpoint`
            supports, such as `model.safetensors` or `pytorch_model.bin`, in one file or in parts.
        dtype: dtype of the parameters; None keeps that of the file. Train in "float32": updates of
            parameters in 16 bits may be rounded away.
        **changes: fields of the config to override, such as `compute_dtype`.

    Raises:
        ValueError: the directory is not an encoder's checkpoint, its `model_type` is not
            supported, or a tensor is unknown, missing, or has another shape than `config.json`
            implies. The message names the tensor.
    """
    opened = _opened(encoder_family_of(directory), directory, changes)
    return LoadedEncoder(opened.config, opened.graph, _loaded(opened, dtype))


def export_decoder(
    params: Any,
    directory: Path | str,
    *,
    source: Path | str,
    dtype: Dtype = None,
    family: DecoderFamily | None = None,
) -> Path:
    """Write parameters as a directory that `transformers.AutoModelForCausalLM` loads.

    The write is atomic, as in `save_tensors`.

    Args:
        params: the tree of `load_decoder` with full arrays, or shards from `zero.shard`; layers
            may be a list or stacked.
        directory: where to write.
        source: the directory that was loaded. Its `config.json`, tokenizer files and buffers
            (masks, rotary frequencies) are copied. A head that is tied to the embeddings is not
            written, as in transformers.
        dtype: dtype in which floating-point parameters are written. None keeps the dtype in
            `params`. "source" gives each tensor its dtype in `source`, for example bfloat16 for a
            bfloat16 checkpoint that was trained in float32. Copied buffers keep their dtype.
        family: the family of `source`; by default the one registered for its `model_type`.

    Returns:
        `directory`.

    Raises:
        ValueError: `params` is not the parameter tree of `source`, or `directory` is `source`.
    """
    return _export(_decoder_family(family, source), params, directory, source, dtype)


def export_encoder(
    params: Any, directory: Path | str, *, source: Path | str, dtype: Dtype = None
) -> Path:
    """Write parameters as a directory that `transformers` loads.

    `sentence-transformers` loads it as well if the model is an encoder of text. The write is
    atomic, as in `save_tensors`.

    Args:
        params: the tree of `load_encoder` with full arrays, or shards from `zero.shard`.
        directory: where to write.
        source: the directory that was loaded. Its `config.json`, tokenizer files and the tensors
            that the model does not use (such as a pooler) are copied.
        dtype: dtype in which floating-point parameters are written. None keeps the dtype in
            `params`. "source" gives each tensor its dtype in `source`, for example bfloat16 for a
            bfloat16 checkpoint that was trained in float32. Copied tensors keep their dtype.

    Returns:
        `directory`.

    Raises:
        ValueError: `params` is not the parameter tree of `source`, or `directory` is `source`.
    """
    return _export(encoder_family_of(source), params, directory, source, dtype)


class _Opened(NamedTuple):
    """An opened checkpoint, and the family, config, rules and model graph that belong to it."""

    family: Family
    config: Any
    checkpoint: Checkpoint
    rules: tuple[Rule, ...]
    graph: Any
    abstract: Any  # shapes of the parameters


def _opened(family: Family, directory: Path | str, changes: dict[str, Any]) -> _Opened:
    config = family.read_config(directory, changes)
    checkpoint = open_checkpoint(directory)
    rules = family.rules_for(config, checkpoint)
    _check_counts(rules, checkpoint, config, directory)
    graphs = []

    # The model is split inside the trace: `nnx.eval_shape` would walk it twice more.
    def parameters() -> Any:
        # Scanned layers split the keys, for which `ShapesOnly` has none.
        rngs: Any = nnx.Rngs(0) if config.scan_layers else ShapesOnly()
        graph, state = nnx.split(family.make(config, rngs=rngs))
        graphs.append(graph)
        return state

    abstract = jax.eval_shape(parameters)
    return _Opened(family, config, checkpoint, rules, graphs[0], abstract)


def _loaded(opened: _Opened, dtype: np.typing.DTypeLike | None) -> Any:
    """Return the tree of the parameters, with lazy tensors of the checkpoint as leaves."""
    named = named_leaves(opened.abstract)
    loaded = to_ours(
        opened.rules,
        {path: leaf.shape for path, leaf in named.leaves.items()},
        opened.checkpoint,
        where=f"in {str(opened.checkpoint.path)!r}",
        ignore=opened.family.ignored(opened.config),
        remedy=opened.family.remedy,
    )
    if dtype is not None:
        dtype = checked_dtype(dtype)
        loaded = {path: tensor.astype(dtype) for path, tensor in loaded.items()}
    return named.rebuild(loaded)


def _export(
    family: Family, params: Any, directory: Path | str, source: Path | str, dtype: Dtype
) -> Path:
    is_list = any(re.search(r"(^|\.)layers\.\d+\.", path) for path in named_leaves(params).leaves)
    opened = _opened(family, source, {"scan_layers": not is_list})
    held = opened.checkpoint
    as_there = isinstance(dtype, str) and dtype == "source"
    tensors = tensors_from(
        params, opened.rules, like=opened.abstract, dtype=held if as_there else dtype
    )
    tensors |= {
        name: tensor
        for name, tensor in held.items()
        if name not in tensors and matches(name, family.buffers)
    }
    # Not `held.path`: DeepSpeed's is that of a step in the directory, which has no config.
    source = Path(source)
    return save_tensors(tensors, directory, source=source.parent if source.is_file() else source)


def _decoder_family(family: DecoderFamily | None, directory: Path | str) -> DecoderFamily:
    if family is None:
        return decoder_family_of(directory)
    check_family(family)
    return family


def _check_tied(checkpoint: Checkpoint, params: Any, name: str) -> None:
    """Raise `ValueError` if a stored head differs from the embeddings that it is tied to.

    transformers 5 would use such a head untied, so ignoring it would change the model. Nothing is
    raised if the checkpoint has no head.

    Args:
        checkpoint: the checkpoint.
        params: the parameters of the model, which hold the embeddings.
        name: name of the head in the checkpoint.
    """
    head = checkpoint.get(name)
    if head is None:
        return
    embeddings = named_leaves(params).leaves[EMBEDDINGS]
    head = head.astype(embeddings.dtype)
    # As bytes, of which NaNs equal themselves.
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


def _check_counts(
    rules: Iterable[Rule], checkpoint: Checkpoint, config: Any, directory: Path | str
) -> None:
    """Raise if `config.json` claims more layers or experts than the checkpoint has tensors for.

    A wrong count is refused before the model is built, since building it would take time and
    memory for each claimed layer and expert. The names of the tensors that exist are read from the
    headers of the files.
    """
    experts = getattr(config, "experts", None)
    counts = {"layer": config.num_layers, "expert": experts.num_experts if experts else 0}
    kinds = _kinds(rules)
    numbers_of: dict[str, set[str]] = {}  # layers and experts of which there are tensors
    for name in checkpoint:
        counted = kinds.get(_NUMBER.sub("{}", name), ())
        for what, number in zip(counted, _NUMBER.findall(name), strict=False):
            numbers_of.setdefault(what, set()).add(number)
    content, path = read_config(directory)
    for what, count in counts.items():
        if not any(what in each for each in kinds.values()):
            continue  # all experts of a layer are one tensor, whose shape is compared later
        # If no name fits a rule, a later message says so; but each layer has at least one tensor.
        held = len(numbers_of.get(what, ())) or len(checkpoint)
        if count > held:
            key = next((key for key, n in content.items() if what in key and n == count), what)
            tensors = f"tensors of {held} {what}s" if what in numbers_of else f"{held} tensors"
            raise ValueError(
                f"`{key}` in {str(path)!r} is {count}, but {str(checkpoint.path)!r} holds "
                f"{tensors}. They belong to different models, or a part of the checkpoint is "
                "missing: copy or download both again."
            )


def _kinds(rules: Iterable[Rule]) -> dict[str, list[str]]:
    """Return pattern of tensor names -> what each number in these names counts.

    A pattern has `{}` for each number. For example, the pattern `h.{}.experts.{}.weight` is mapped
    to `["layer", "expert"]`.
    """
    return {
        _VARIABLE.sub("{}", theirs): [_COUNTED.get(name, "") for name in _VARIABLE.findall(theirs)]
        for rule in rules
        if "layers." in rule.ours[0]
        for theirs in rule.theirs
    }
