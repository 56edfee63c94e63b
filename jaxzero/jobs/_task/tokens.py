"""Pairs as arrays of token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

from .pairs import Pair


class PairTokens(NamedTuple):
    """Tokenised pairs: index 0 of dim 1 is the description, index 1 the code.

    Both are padded or cut to one length, so that a step runs the encoder once. Each weight is then
    gathered once in forward and once in backward, not for descriptions and for code.
    """

    ids: Int[np.ndarray, "pairs 2 tokens"]
    mask: Bool[np.ndarray, "pairs 2 tokens"]  # False for padding

    def __len__(self) -> int:  # of pairs, not of fields
        return self.ids.shape[0]

    def rows(self, rows: slice) -> "PairTokens":
        """Select a range of pairs."""
        return PairTokens(self.ids[rows], self.mask[rows])


def abstract_tokens(num_pairs: int, num_tokens: int) -> PairTokens:
    """The tokens of one step as `ShapeDtypeStruct`s."""
    shape = (num_pairs, 2, num_tokens)
    ids, mask = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_))
    return PairTokens(ids, mask)  # pyright: ignore[reportArgumentType]


class PairTokenizer:
    """The tokenizer of a checkpoint, set to a fixed length."""

    def __init__(self, checkpoint: Path, max_tokens: int):
        """Read `tokenizer.json` of a checkpoint; texts will have `max_tokens` tokens, by padding.

        Raises:
            ValueError: `checkpoint` has no `tokenizer.json`, or `max_tokens` leaves no room beside
                the special tokens.
        """
        path = checkpoint / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"There is no `tokenizer.json` in {str(checkpoint)!r}. Save the tokenizer there by "
                "`transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)`."
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        num_special = self._tokenizer.num_special_tokens_to_add(False)
        if max_tokens <= num_special:
            raise ValueError(
                f"`max_tokens` must be more than the {num_special} special tokens of each text; "
                f"got {max_tokens}."
            )
        # Replaces both settings of the file. Padding is masked, so its id does not matter.
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
