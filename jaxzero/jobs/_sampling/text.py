"""Texts as rows of token ids, and back, piece by piece.

A token is a part of a text, and may be a part of a character; what it stands for can depend on the
tokens before it. So the text of all tokens so far is decoded each time, and what is new of it is
printed once its last character is complete.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


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


def encode(
    tokenizer: Tokenizer, prompts: Sequence[str], *, has_special_tokens: bool = False
) -> tuple[Int[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
    """Token ids of the prompts with padding on the left, and the mask of tokens.

    Args:
        tokenizer: from `open_tokenizer`.
        prompts: the texts.
        has_special_tokens: whether they hold the tokens that begin a text already, as those from a
            chat template do; otherwise the tokenizer adds its own.

    Raises:
        ValueError: a prompt has no token.
    """
    rows = [tokenizer.encode(x, add_special_tokens=not has_special_tokens).ids for x in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            raise ValueError(f"`prompt` {prompt!r} has no tokens. Give at least one word.")
    longest = max(map(len, rows))
    ids = np.array([[0] * (longest - len(row)) + row for row in rows], np.int32)
    return ids, np.arange(longest)[None] >= longest - np.array([len(row) for row in rows])[:, None]


class Continuation:
    """The text after one prompt, as tokens come."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer, self._prompt = tokenizer, list(prompt)
        self._printed = len(tokenizer.decode(self._prompt))

    def news(self, tokens: Sequence[int], *, is_done: bool) -> str:
        """What the text has more than at the last call.

        Args:
            tokens: all new tokens of the row so far.
            is_done: no more will come, so that an incomplete character is printed too.
        """
        text = self._tokenizer.decode([*self._prompt, *tokens])
        if not is_done:
            text = text.rstrip(_INCOMPLETE)
        news = text[self._printed :]
        self._printed = max(self._printed, len(text))
        return news
