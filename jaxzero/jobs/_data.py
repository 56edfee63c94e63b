"""The data of a run: tokenized training and held-out pairs, and the order of training."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int
from rich.console import Console
from tokenizers import Tokenizer

from .._zero import Zero
from ._pairs import Pair, collect_pairs, standard_library
from ._settings import Data, Optimization

if TYPE_CHECKING:
    from ..data import Batches


class PairTokens(NamedTuple):
    """Tokenised pairs: index 0 of dim 1 is the description, index 1 the code.

    Both are padded or cut to one length, so that a step runs the encoder once. Each weight is then
    gathered once in forward and once in backward, not for descriptions and for code.
    """

    ids: Int[np.ndarray, "pairs 2 tokens"]
    mask: Bool[np.ndarray, "pairs 2 tokens"]  # False for padding

    def __len__(self) -> int:  # of pairs, not of fields
        return self.ids.shape[0]

    def rows(self, rows: slice) -> PairTokens:
        """Select a range of pairs."""
        return PairTokens(self.ids[rows], self.mask[rows])


def abstract_tokens(num_pairs: int, num_tokens: int) -> PairTokens:
    """The tokens of one step as `ShapeDtypeStruct`s."""
    shape = (num_pairs, 2, num_tokens)
    ids, mask = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_))
    return PairTokens(ids, mask)  # pyright: ignore[reportArgumentType]


def open_tokenizer(directory: Path) -> Tokenizer:
    """Read `tokenizer.json`, without the length to which it may cut or pad texts.

    Raises:
        ValueError: there is no such file.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"There is no `tokenizer.json` in {str(directory)!r}. Save the tokenizer there by "
            "`transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)`."
        )
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class PairTokenizer:
    """The tokenizer of a checkpoint, set to a fixed length."""

    def __init__(self, checkpoint: Path, max_tokens: int):
        """Read `tokenizer.json` of a checkpoint; texts will have `max_tokens` tokens, by padding.

        Raises:
            ValueError: `checkpoint` has no `tokenizer.json`, or `max_tokens` leaves no room beside
                the special tokens.
        """
        self._tokenizer = open_tokenizer(checkpoint)
        num_special = self._tokenizer.num_special_tokens_to_add(False)
        if max_tokens <= num_special:
            raise ValueError(
                f"`max_tokens` must be more than the {num_special} special tokens of each text; "
                f"got {max_tokens}."
            )
        # Padding is masked, so its id does not matter.
        self._tokenizer.enable_truncation(max_tokens)
        self._tokenizer.enable_padding(length=max_tokens)

    def __call__(self, pairs: Sequence[Pair]) -> PairTokens:
        """Tokenise pairs; the same text always gives the same row."""
        texts = [text for pair in pairs for text in (pair.description, pair.code)]
        encodings = self._tokenizer.encode_batch(texts)
        shape = (len(pairs), 2, -1)
        ids = np.array([encoding.ids for encoding in encodings], np.int32)
        mask = np.array([encoding.attention_mask for encoding in encodings], bool)
        return PairTokens(ids.reshape(shape), mask.reshape(shape))


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
    import grain  # with `..data` it is needed for training alone, not for a report of it

    from ..data import Batches

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
