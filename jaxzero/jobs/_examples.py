"""The data of a run: tokenised pairs to train on, and to be judged by."""

import dataclasses
import hashlib
from pathlib import Path

from rich.console import Console

from ._pairs import collect_pairs, standard_library
from ._settings import Data
from ._tokens import PairTokenizer, PairTokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
    """Tokenised pairs."""

    train: PairTokens
    held_out: PairTokens

    @property
    def digest(self) -> str:
        """Changes when any pair does: Python was upgraded, files were edited, tokens differ."""
        arrays = (*self.train, *self.held_out)
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def load_examples(settings: Data, checkpoint: Path, console: Console) -> Examples:
    """Collect and tokenise the pairs.

    Raises:
        ValueError: there is no such tree, too little in it, or no tokenizer in the checkpoint.
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
