"""The data of a run: tokenized training and held-out pairs, and the order of training."""

import dataclasses
import hashlib
from pathlib import Path

import grain
from rich.console import Console

from ..._zero import Zero
from ...data import Batches
from .._settings import Data, Optimization
from .pairs import collect_pairs, standard_library
from .tokens import PairTokenizer, PairTokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
    """The tokenised pairs of a run, for training and held out."""

    train: PairTokens
    held_out: PairTokens

    @property
    def digest(self) -> str:
        """Digest of all pairs; it detects edited files, another Python or another tokenizer."""
        arrays = (*self.train, *self.held_out)
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def load_examples(settings: Data, checkpoint: Path, console: Console) -> Examples:
    """Collect and tokenise the pairs.

    Raises:
        ValueError: `settings.data` is no folder or has too few functions, or the checkpoint has no
            tokenizer.
    """
    directory = standard_library() if settings.data is None else settings.data
    tokenize = PairTokenizer(checkpoint, settings.max_tokens)
    pairs = collect_pairs(directory)
    console.print(
        f"{directory}: {len(pairs.train)} training and {len(pairs.held_out)} held-out pairs",
        highlight=False,
        soft_wrap=True,
    )
    return Examples(train=tokenize(pairs.train), held_out=tokenize(pairs.held_out))


def training_batches(pairs: PairTokens, zero: Zero, optimization: Optimization) -> Batches:
    """An endless iterator over training batches, one for each step.

    Every epoch is a new permutation of all pairs, without the remainder that does not fill a step:
    a batch that spans two epochs could have a pair twice, which would be its own negative.

    Raises:
        ValueError: there are fewer pairs than a step takes, or they do not divide over the devices.
    """
    per_step, num_devices = optimization.pairs, zero.mesh.size
    if len(pairs) < per_step:
        raise ValueError(
            f"`pairs` asks for {per_step} per step, the data has {len(pairs)}. Ask for fewer, or "
            "point `data` to a larger tree."
        )
    if per_step % num_devices:
        raise ValueError(
            f"`pairs` must be a multiple of the number of devices, {num_devices}; got {per_step}."
        )
    order = grain.MapDataset.range(len(pairs)).seed(optimization.seed).shuffle()
    epochs = order[: len(pairs) - len(pairs) % per_step].repeat()
    return Batches(
        epochs.map(lambda i: PairTokens(pairs.ids[i], pairs.mask[i])),
        zero,
        batch_size=per_step,
        read_options=grain.ReadOptions(num_threads=0, prefetch_buffer_size=0),  # it is in memory
    )
