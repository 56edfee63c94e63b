"""Retrieval metrics: rank the code of all held-out pairs for each description.

recall@1 = fraction of descriptions whose own code is nearest
MRR@10 = mean of 1 / rank of the own code, 0 beyond rank 10
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Array, Float, Int

from .tokens import PairTokens

_ROWS = 1024  # descriptions ranked at once: bounds memory to this times the number of pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval:
    """Retrieval scores of the held-out pairs, each between 0 and 1."""

    mrr_at_10: float
    recall_at_1: float


def embed_in_batches(
    embed: Callable[[PairTokens], Array | np.ndarray], tokens: PairTokens, batch_size: int
) -> Float[np.ndarray, "pairs 2 d"]:
    """Embed any number of pairs with a function of a fixed batch size.

    The last batch is filled up with rows of padding, whose embeddings are dropped.
    """
    parts = []
    for start in range(0, len(tokens), batch_size):
        batch = tokens.rows(slice(start, start + batch_size))
        fill = ((0, batch_size - len(batch)), (0, 0), (0, 0))
        full = PairTokens(np.pad(batch.ids, fill), np.pad(batch.mask, fill))
        parts.append(np.asarray(embed(full))[: len(batch)])
    return np.concatenate(parts)


def retrieval_scores(embeddings: Float[np.ndarray, "pairs 2 d"]) -> Retrieval:
    """Compute recall@1 and MRR@10 from the embeddings of descriptions and of their code.

    Args:
        embeddings: for each pair, the embedding of its description, then that of its code.
            Similarity is the inner product, so vectors should have length 1.
    """
    ranks = ranks_of_partners(embeddings[:, 0], embeddings[:, 1])
    return Retrieval(
        mrr_at_10=float(np.where(ranks <= 10, 1 / ranks, 0).mean()),
        recall_at_1=float((ranks == 1).mean()),
    )


def ranks_of_partners(
    queries: Float[np.ndarray, "pairs d"], documents: Float[np.ndarray, "pairs d"]
) -> Int[np.ndarray, "pairs"]:
    """Rank (from 1) of document i among all documents for query i.

    Ties get the worst rank, so that a model that maps everything to one point ranks last.
    """
    ranks = []
    for start in range(0, len(queries), _ROWS):
        similarity = queries[start : start + _ROWS] @ documents.T
        rows = np.arange(len(similarity))
        own = similarity[rows, start + rows]
        ranks.append((similarity >= own[:, None]).sum(axis=1))
    return np.concatenate(ranks)
