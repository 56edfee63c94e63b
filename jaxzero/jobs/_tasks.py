"""Define the tasks of a job: to train an encoder to find code, or a decoder to continue text.

A task is a class that makes batches, loss and scores, and checks the export. The rest of a job
(steps, checkpoints, resuming, faults, printing) is the same for all tasks.
"""

import abc
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from .._processes import process_index
from .._zero import Zero
from ..interop import (
    LoadedDecoder,
    LoadedEncoder,
    compare_with_transformers,
    decoder_family,
    embed_with_transformers,
    export_decoder,
    export_encoder,
    load_decoder,
    load_encoder,
)
from ..models import DecoderConfig, EncoderConfig, ModernBertConfig, read_config
from ._data import Examples, abstract_tokens, load_examples
from ._retrieval import (
    AXES,
    LossFn,
    Params,
    Retrieval,
    in_batches,
    make_embed,
    make_loss,
    retrieval_scores,
)
from ._settings import Data, Optimization
from ._text import TextScores, load_rows, make_row_losses, make_text_loss

TOLERANCE = 1e-4  # largest difference of any component of two unit vectors
Scores = Retrieval | TextScores
_EVALUATED_ROWS = 16  # per device and forward pass: a pass gathers every weight, so not too few
_NUM_COMPARED = 32  # pairs
_MOST_COMPARED = 2**30  # parameters of a decoder: PyTorch and JAX hold them at once, in float32
_NOT_WRONG = "Do not use it; this is an error in jaxzero, please report it."  # of what was written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """The parts of a job that differ between encoders and decoders.

    Attributes:
        checkpoint: the folder of the Hugging Face checkpoint.
        loaded: the config, graph and tensors of the checkpoint.
        num_tokens: tokens of a row: texts are cut or padded to this length.
        unit: what a row of a batch is called.
        title: the title of the table of scores.
        scores: the class of the scores.
        labels: name of a field of the scores -> its label in the table.
        curves: name of a metric that is plotted besides the loss -> its label.
    """

    checkpoint: Path
    loaded: Any
    num_tokens: int
    unit: ClassVar[str]
    title: ClassVar[str]
    scores: ClassVar[type[Any]]
    labels: ClassVar[Mapping[str, str]]
    curves: ClassVar[Mapping[str, str]]

    @abc.abstractmethod
    def abstract_batch(self, num_rows: int) -> Any:
        """Return the shapes and dtypes of a batch of `num_rows` rows, as `ShapeDtypeStruct`s."""

    @abc.abstractmethod
    def load_examples(self, data: Data, console: Console) -> Examples:
        """Read the training and the held-out rows, and print their numbers."""

    @abc.abstractmethod
    def make_loss(self, optimization: Optimization, axes: tuple[str, ...] = AXES) -> LossFn:
        """Make the loss of a device's rows.

        Args:
            optimization: the settings of the loss.
            axes: the mesh axes of the devices that take a step together.
        """

    @abc.abstractmethod
    def make_scores(self, zero: Zero) -> Callable[[Params, Any], Scores]:
        """Make a function that scores sharded parameters on held-out rows; it compiles once."""

    @abc.abstractmethod
    def export(self, zero: Zero, params: Params, examples: Any, directory: Path) -> float | None:
        """Write a Hugging Face directory, and compare its outputs in PyTorch with those in JAX.

        All processes must call it.

        Returns:
            The largest difference of outputs; None if torch or transformers is not installed, if
            the model is too large, and on processes other than the first.

        Raises:
            RuntimeError: the outputs differ by more than roundings; the export is not deleted.
        """

    def said(self, scores: Scores) -> str:
        """Return the scores as one line of text."""
        return ", ".join(f"{x} {getattr(scores, name):.3f}" for name, x in self.labels.items())


class FindCode(Task):
    """The task to train an encoder so that a docstring is near to the function it describes."""

    loaded: LoadedEncoder
    unit = "pairs"
    title = "Held-out retrieval"
    scores = Retrieval
    labels = {"mrr_at_10": "MRR@10", "recall_at_1": "recall@1"}
    curves = {
        "accuracy": "right code is nearest in batch",
        "similarity": "cosine to the right code",
        "similarity_others": "cosine to other code",
    }

    def abstract_batch(self, num_rows: int) -> Any:
        return abstract_tokens(num_rows, self.num_tokens)

    def load_examples(self, data: Data, console: Console) -> Examples:
        return load_examples(data.data, self.checkpoint, self.num_tokens, console)

    def make_loss(self, optimization: Optimization, axes: tuple[str, ...] = AXES) -> LossFn:
        return make_loss(self.loaded.graph, temperature=optimization.temperature, axes=axes)

    def make_scores(self, zero: Zero) -> Callable[[Params, Any], Scores]:
        embed = _everywhere(zero, make_embed(self.loaded.graph))

        def scores(params: Params, pairs: Any) -> Retrieval:
            num_rows = _EVALUATED_ROWS * zero.num_devices
            return retrieval_scores(in_batches(lambda x: embed(params, x), pairs, num_rows))

        return scores

    def export(self, zero: Zero, params: Params, examples: Any, directory: Path) -> float | None:
        full = jax.tree.map(np.asarray, zero.unshard(params))
        export_encoder(full, directory, source=self.checkpoint)
        if not _has_torch():
            return None
        sample = examples.rows(slice(_NUM_COMPARED))
        ours = np.asarray(jax.jit(make_embed(self.loaded.graph))(full, sample))
        flat = (array.reshape(-1, array.shape[-1]) for array in sample)
        theirs = embed_with_transformers(directory, *flat).reshape(ours.shape)
        difference = float(np.abs(ours - theirs).max())
        if not difference <= TOLERANCE:  # also when it is NaN
            raise RuntimeError(
                f"The PyTorch checkpoint in {str(directory)!r} does not compute what was trained: "
                f"embeddings differ by {difference:.1e}, more than {TOLERANCE:.0e}. {_NOT_WRONG}"
            )
        return difference


class ContinueText(Task):
    """The task to train a decoder on the next token: weights are float32, computing bfloat16."""

    loaded: LoadedDecoder
    unit = "rows"
    title = "Held-out text"
    scores = TextScores
    labels = {"loss": "loss of a token"}
    curves = {}

    def abstract_batch(self, num_rows: int) -> Any:
        return jax.ShapeDtypeStruct((num_rows, self.num_tokens), jnp.int32)

    def load_examples(self, data: Data, console: Console) -> Examples:
        return load_rows(data.data, self.checkpoint, self.num_tokens, console)

    def make_loss(self, optimization: Optimization, axes: tuple[str, ...] = AXES) -> LossFn:
        return make_text_loss(self.loaded.graph)

    def make_scores(self, zero: Zero) -> Callable[[Params, Any], Scores]:
        row_losses = _everywhere(zero, make_row_losses(self.loaded.graph))

        def scores(params: Params, ids: Any) -> TextScores:
            num_rows = _EVALUATED_ROWS * zero.num_devices
            losses = in_batches(lambda x: row_losses(params, x), ids, num_rows)
            return TextScores(loss=float(losses.mean()))

        return scores

    def export(self, zero: Zero, params: Params, examples: Any, directory: Path) -> float | None:
        export_decoder(params, directory, source=self.checkpoint, dtype="source")
        num_params = sum(x.size for x in jax.tree.leaves(self.loaded.params))
        if not _has_torch() or num_params > _MOST_COMPARED:
            return None
        comparison = compare_with_transformers(directory)
        if not comparison.agrees:
            raise RuntimeError(
                f"The checkpoint in {str(directory)!r} computes something else with transformers. "
                f"{_NOT_WRONG}\n{comparison}"
            )
        return max(output.difference for output in comparison.outputs)


def open_task(checkpoint: Path, max_tokens: int | None) -> Task:
    """Open a checkpoint for training; its `config.json` says if it is a decoder or an encoder.

    Args:
        checkpoint: a Hugging Face directory.
        max_tokens: tokens of a text. None: 32 for an encoder, 256 for a decoder, or the most that
            the model takes.

    Raises:
        ValueError: the checkpoint cannot be loaded, or the model has no positions for `max_tokens`.
    """
    if _is_decoder(checkpoint):
        config = DecoderConfig.from_json(checkpoint)
        loaded = load_decoder(
            checkpoint,
            dtype="float32",
            compute_dtype="bfloat16",
            # A scan needs equal layers.
            scan_layers=not (config.experts and config.experts.dense_layers),
            remat="full",
        )
        num_tokens = _checked_length(max_tokens, 256, loaded.config.max_length)
        return ContinueText(checkpoint=checkpoint, loaded=loaded, num_tokens=num_tokens)
    loaded = load_encoder(checkpoint, dtype=jnp.float32)
    if not isinstance(loaded.config, EncoderConfig | ModernBertConfig):
        raise ValueError(
            f"The checkpoint {str(checkpoint)!r} is a {type(loaded.config).__name__}, no text "
            "encoder and no decoder. Give a checkpoint of BERT, RoBERTa, DistilBERT or ModernBERT, "
            "or of a decoder such as Llama."
        )
    longest = loaded.config.max_length
    if max_tokens is not None and not isinstance(loaded.config, EncoderConfig):
        longest = max(longest, max_tokens)  # rotations have no limit
    num_tokens = _checked_length(max_tokens, 32, longest)
    return FindCode(checkpoint=checkpoint, loaded=loaded, num_tokens=num_tokens)


def _is_decoder(checkpoint: Path) -> bool:
    try:
        decoder_family(str(read_config(checkpoint)[0].get("model_type")))
    except ValueError:  # `load_encoder` then raises, and names the models that can be loaded
        return False
    return True


def _checked_length(max_tokens: int | None, default: int, longest: int) -> int:
    if max_tokens is None:
        return min(default, longest)
    if max_tokens > longest:
        raise ValueError(
            f"`max_tokens` must be at most {longest}, for which the checkpoint has positions; got "
            f"{max_tokens}."
        )
    return max_tokens


def _everywhere(zero: Zero, function: Callable[[Params, Any], Any]) -> Callable[[Params, Any], Any]:
    """Jit `function(params, rows)`; it takes rows in host memory, and replicates its result."""
    result = NamedSharding(zero.mesh, PartitionSpec())
    compiled = jax.jit(zero.apply(function), out_shardings=result)
    rows = NamedSharding(zero.mesh, zero.batch_spec)
    return lambda params, batch: compiled(params, jax.device_put(batch, rows))


def _has_torch() -> bool:
    """Return True if this process is the first, and has the packages to compare with PyTorch."""
    packages = ("torch", "transformers")
    return process_index() == 0 and all(importlib.util.find_spec(name) for name in packages)
