"""Pack documents of different lengths into rows of equal length.

A document of n tokens is n - 1 pairs of a token and the one that follows it. A row holds the pairs
of several documents one after the other, each document as a segment: tokens attend only to tokens
of their own segment, and positions start again in each segment. So each document has the same loss
as in a row of its own.

The largest documents are placed first, each into that row with enough room for it that has the
least room ("best fit decreasing"). The result depends on the lengths alone: it is the same on every
process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int


class PackedRows:
    """Documents as rows of `length` tokens, a source for `grain.MapDataset.source`.

    Rows are in the order of the first document of each, so shuffle them. The same documents share
    a row in every epoch. A row is made when it is read, and only its own documents are read then.

    Args:
        documents: token ids of each document: a sequence of arrays or lists of integers, of
            different lengths. Documents of less than two tokens are left out, since there is
            nothing to predict in them. One of more than `length + 1` tokens is split into pieces,
            each a segment of its own whose positions start at 0: no token is lost or predicted
            twice, but tokens do not see the tokens of earlier pieces.
        length: tokens of a row.
        lengths: number of tokens of each document. If left out, all documents are read to count.

    Yields:
        Dictionaries of arrays `[length]`, with zeros where a row has no more tokens:

        - `ids` (int32): the tokens, without the last one of each document, which is only a label.
        - `labels` (int32): the token of the same document that follows.
        - `weights` (float32): 1 for labels, 0 for padding.
        - `segments` (int32): 1 for the tokens of the first document of the row, 2, ...; padding is
          0.
        - `positions` (int32): index of each token in its segment, from 0.

    Raises:
        ValueError: `length` is less than 1, `lengths` are not those of the documents, or no
            document has two tokens.
        TypeError: when a row is read, if a document is no sequence of integers.
    """

    def __init__(self, documents: Any, length: int, *, lengths: Any = None):
        if length < 1:
            raise ValueError(f"`length` must be a number of tokens, at least 1; got {length}.")
        if lengths is None:
            lengths = [len(documents[i]) for i in range(len(documents))]
        self._documents, self._length = documents, length
        self._lengths = np.asarray(lengths, np.int64)
        if self._lengths.shape != (len(documents),):
            raise ValueError(
                f"`lengths` must hold one number for each of the {len(documents)} documents; got "
                f"shape {self._lengths.shape}."
            )
        self._pieces, self._row_starts = _pack(self._lengths, length)
        if not len(self):
            raise ValueError(
                "None of the `documents` has two tokens, so there is nothing to learn."
            )

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    def __repr__(self) -> str:
        filled = self._pieces[:, 2].sum() / (len(self) * self._length)
        return (
            f"PackedRows({len(self._lengths):,} documents in {len(self):,} rows of "
            f"{self._length:,} tokens, {filled:.1%} filled)"
        )

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        row = range(len(self))[row]  # raises IndexError behind the last row
        names = ("ids", "labels", "segments", "positions")
        arrays = {name: np.zeros(self._length, np.int32) for name in names}
        pieces = self._pieces[self._row_starts[row] : self._row_starts[row + 1]]
        first = 0
        for segment, (document, start, size) in enumerate(pieces.tolist(), 1):
            tokens = self._read(document)[start : start + size + 1]
            held = slice(first, first + size)
            arrays["ids"][held], arrays["labels"][held] = tokens[:-1], tokens[1:]
            arrays["segments"][held], arrays["positions"][held] = segment, np.arange(size)
            first += size
        return arrays | {"weights": (arrays["segments"] > 0).astype(np.float32)}

    def _read(self, document: int) -> np.ndarray:
        tokens = np.asarray(self._documents[document])
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TypeError(
                f"Document {document} must be a sequence of token ids, integers; got an array of "
                f"{tokens.dtype} and shape {tokens.shape}. Tokenize it first."
            )
        if len(tokens) != self._lengths[document]:
            raise ValueError(
                f"Document {document} has {len(tokens)} tokens, but `lengths` says "
                f"{self._lengths[document]}. Give the lengths of these `documents`."
            )
        return tokens


def _pack(
    lengths: Int[np.ndarray, " documents"], length: int
) -> tuple[Int[np.ndarray, "pieces 3"], Int[np.ndarray, " starts"]]:
    """Cut documents into pieces of at most `length` pairs, and pack them into rows.

    Returns:
        The pieces in the order of rows, each (document, its first token in the document, number of
        pairs); and the number of the first piece of each row, with the number of pieces at the end.
    """
    num_pairs = np.maximum(lengths - 1, 0)
    num_pieces = -(-num_pairs // length)
    documents = np.repeat(np.arange(len(lengths)), num_pieces)
    first_pieces = np.cumsum(num_pieces) - num_pieces
    starts = (np.arange(len(documents)) - first_pieces[documents]) * length
    sizes = np.minimum(num_pairs[documents] - starts, length)
    rows = _best_fit(sizes, length)
    firsts = np.unique(rows, return_index=True)[1]  # the first piece of each row
    ranks = np.argsort(np.argsort(firsts))  # number the rows in the order of these
    order = np.argsort(ranks[rows], kind="stable")
    pieces = np.stack([documents, starts, sizes], axis=1)[order]
    return pieces, np.searchsorted(ranks[rows][order], np.arange(len(firsts) + 1))


def _best_fit(sizes: Int[np.ndarray, " pieces"], length: int) -> Int[np.ndarray, " pieces"]:
    """Return the row of each piece: the largest pieces first, each into the tightest row that fits.

    Rooms are integers up to `length`, so the rows are kept by their room, and a bit mask finds the
    least room that is enough without a search over rows.
    """
    rows = np.empty(len(sizes), np.int64)
    with_room: list[list[int]] = [[] for _ in range(length)]  # room -> rows with it
    rooms = 0  # bit n: there is a row with room for n
    num_rows = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():  # stable: equal on all processes
        size = int(sizes[piece])
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1  # the lowest bit
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row, num_rows = length, num_rows, num_rows + 1
        rows[piece] = row
        if left := room - size:
            with_room[left].append(row)
            rooms |= 1 << left
    return rows
