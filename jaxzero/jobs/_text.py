"""Cut files into rows of text for a decoder, and compute the loss of each next token.

Files are read in sorted order, and their tokens follow each other. A hash of its path decides
whether a file is held out from training, as a whole, as in `_data`. If the tree has too few files
for that, the last rows of the text are held out.

Dimensions: b rows of this device, t tokens.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console

from ._data import (
    HELD_OUT_SHARE,
    Examples,
    is_held_out,
    open_tokenizer,
    python_files,
    standard_library,
)
from ._retrieval import LossFn, Params

_MOST_HELD_OUT = 512  # rows that are scored, so that an evaluation takes as long as a few steps
_FILES_AT_ONCE = 64  # the tokenizer splits so many into tokens in parallel, in its own threads


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextScores:
    """The score of a decoder: the mean loss of a token of the held-out rows, in nats."""

    loss: float


def load_rows(
    directory: Path | None, checkpoint: Path, num_tokens: int, console: Console
) -> Examples:
    """Cut the text of all files into rows of `num_tokens` tokens; a last short row is dropped.

    Args:
        directory: the folder of the files; None: the standard library.
        checkpoint: the folder with the tokenizer.
        num_tokens: tokens of a row.
        console: where to print how many rows there are.

    Raises:
        ValueError: `directory` is not a folder or has less than two rows of text, or `checkpoint`
            has no tokenizer.
    """
    files = _files(directory)
    tokenizer = open_tokenizer(checkpoint)
    ids: dict[bool, list[int]] = {False: [], True: []}  # by whether they are held out
    names = list(files)
    for start in range(0, len(names), _FILES_AT_ONCE):
        some = names[start : start + _FILES_AT_ONCE]
        texts = {name: text for name in some if (text := _text(files[name]))}
        encodings = tokenizer.encode_batch(list(texts.values()))
        for name, encoding in zip(texts, encodings, strict=True):
            ids[is_held_out(name)] += encoding.ids
    train, held_out = (_rows(ids[side], num_tokens) for side in (False, True))
    if not len(train) or not len(held_out):
        rows = np.concatenate([train, held_out])
        num_held_out = -(-len(rows) // HELD_OUT_SHARE)
        train, held_out = rows[:-num_held_out], rows[len(rows) - num_held_out :]
    where = standard_library() if directory is None else directory
    if not len(train) or not len(held_out):
        raise ValueError(
            f"{str(where)!r} gives {len(train) + len(held_out)} rows of {num_tokens} tokens, too "
            "few to train on some and hold out others. Point `data` to more text, or lower "
            "`max_tokens`."
        )
    console.print(
        f"{where}: {len(train)} training and {len(held_out)} held-out rows of {num_tokens} tokens",
        highlight=False,
        soft_wrap=True,
    )
    return Examples(train=train, held_out=held_out[:: -(-len(held_out) // _MOST_HELD_OUT)])


def _files(directory: Path | None) -> dict[str, Path]:
    """Return path inside the folder -> file, for the files that are not hidden.

    The hash of this path decides whether a file is held out.
    """
    if directory is None:
        root = standard_library()
        paths = python_files(root)
    elif directory.is_dir():
        root = directory
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
    else:
        raise ValueError(
            f"`data` must be a directory of text files; {str(directory)!r} is not a directory. "
            "Leave it out to use the sources of the standard library."
        )
    named = {path.relative_to(root).as_posix(): path for path in paths}
    return {name: path for name, path in named.items() if not f"/{name}".count("/.")}


def _text(path: Path) -> str:
    """Return the text of a file; "" if it is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return ""


def _rows(ids: list[int], num_tokens: int) -> Int[np.ndarray, "rows tokens"]:
    num_rows = len(ids) // num_tokens
    return np.array(ids[: num_rows * num_tokens], np.int32).reshape(num_rows, num_tokens)


def make_text_loss(graph: Any) -> LossFn:
    """Make the training loss `loss(params, ids) -> (loss, {})`, the mean over all next tokens."""

    def loss(params: Params, ids: Int[Array, "b t"]) -> tuple[Float[Array, ""], dict[str, Any]]:
        model, labels = nnx.merge(graph, params), ids[:, 1:]
        # With weights, forward computes the gradients too, and backward no logits again.
        weights = jnp.ones(labels.shape, jnp.float32)
        total, _ = model.cross_entropy(model.hidden(ids)[:, :-1], labels, weights)
        return total / labels.size, {}

    return loss


def make_row_losses(graph: Any) -> Callable[[Params, Int[Array, "b t"]], Float[Array, "b"]]:
    """Make `row_losses(params, ids)`, which returns the mean loss of each row, for evaluation."""

    def row_losses(params: Params, ids: Int[Array, "b t"]) -> Float[Array, "b"]:
        model = nnx.merge(graph, params)
        return model.cross_entropy(model.hidden(ids)[:, :-1], ids[:, 1:]).mean(axis=1)

    return row_losses
