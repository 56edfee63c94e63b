"""Describe which keys a query sees and the formula of logits; find the blocks to compute."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np
from jax import Array

from .._mesh import exchange_over_tokens, split_over_tokens


@dataclasses.dataclass(frozen=True)
class Form:
    """A description of which keys a query sees, and of the formula of its logits.

    Attributes:
        scale: factor of the products of queries and keys.
        softcap: the logits x become `softcap * tanh(x / softcap)`; None: as they are.
        before: a query at position i sees keys from `i - before` on; None: from the first on.
        after: a query at position i sees keys up to `i + after`; None: up to the last.
        marks: when a query sees a key by their marks. "segments": both marks are equal, and not 0;
            "keys": the key's mark is not 0; None: always.
        chunk: the most queries, and keys, of a block.
        query_places: `(factor, offset)`: query x of part p is at position `factor x + offset p`.
        key_places: `(factor, offset)` of keys, likewise.
        is_ring: whether each part begins with its own keys only, and receives the keys of other
            parts one after the other.
        split_dim: the dim of `[b, p, ...]` that is split over devices: 1 the parts, 3 the heads.
    """

    scale: float
    softcap: float | None
    before: int | None
    after: int | None
    marks: Literal["segments", "keys"] | None
    chunk: int
    query_places: tuple[int, int] = (1, 0)
    key_places: tuple[int, int] = (1, 0)
    is_ring: bool = False
    split_dim: int | None = None

    def placed(self, x: Array, collective: str | None = None) -> Array:
        """Constrain `x` to be split over devices on `split_dim`, if it has that dim.

        `collective` names the collective that moves `x` to this split; None if `x` has it already.
        """
        if self.split_dim is None or x.ndim <= self.split_dim:
            return x
        if collective is not None:
            return exchange_over_tokens(x, self.split_dim, collective)
        return split_over_tokens(x, self.split_dim)


def pairs_of_blocks(
    form: Form, num_queries: int, num_keys: int, num_parts: int, sizes: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of a block of queries and a block of keys to compute, in two groups.

    In pairs of the first group, all queries see all keys; in pairs of the second, some queries may
    see some keys. Pairs in which no query sees a key are left out.

    Args:
        form: which keys are seen.
        num_queries: queries of a part.
        num_keys: keys of a part.
        num_parts: the number of parts. A pair is for the same blocks of all parts.
        sizes: the numbers of queries and of keys of a block.

    Returns:
        Two int32 arrays `[pairs, 2]`: the number of the block of queries, and of the block of keys.
    """

    def bounds(places: tuple[int, int], num: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        factor, offset = places
        first = np.arange(0, num, size) * factor
        return first, first + (size - 1) * factor + offset * (num_parts - 1)

    query_first, query_last = (x[:, None] for x in bounds(form.query_places, num_queries, sizes[0]))
    key_first, key_last = (x[None] for x in bounds(form.key_places, num_keys, sizes[1]))
    every = np.ones((query_first.size, key_first.size), bool)
    some = every & some_seen(form, (query_first, query_last), (key_first, key_last))
    if form.after is not None:
        every &= key_last <= query_first + form.after
    if form.before is not None:
        every &= key_first >= query_last - form.before
    return np.argwhere(every).astype(np.int32), np.argwhere(some & ~every).astype(np.int32)


def some_seen(form: Form, queries: tuple[Any, Any], keys: tuple[Any, Any]) -> Any:
    """Return whether a query in one range of positions may see a key in another range.

    Only `form.before` and `form.after` are considered, and no marks.

    Args:
        form: which keys are seen.
        queries: the positions of the first and the last query, as numbers or arrays.
        keys: the positions of the first and the last key, as numbers or arrays.

    Returns:
        A bool for numbers, and a boolean array for arrays.
    """
    seen = True if form.after is None else keys[0] <= queries[1] + form.after
    return seen if form.before is None else seen & (keys[1] >= queries[0] - form.before)


def default_scale(size: int) -> float:
    """Return the default factor of logits, `size ** -0.5`, for queries of `size` numbers."""
    return 1 / math.sqrt(size)
