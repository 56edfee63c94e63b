"""Find code by its description: embeddings, and the contrastive loss over all devices.

With unit vectors d_i (descriptions) and c_j (code) of all pairs of a step on *all* devices,

    logits_ij = d_i . c_j / temperature
    loss = mean_i (-log softmax(logits_i:)_i - log softmax(logits_:i)_i) / 2

(InfoNCE, https://arxiv.org/abs/1807.03748, in both directions as in
https://arxiv.org/abs/2103.00020). Each device holds the rows of its own pairs and gathers the
columns, so more devices mean more negatives. With local steps, "all devices" means those of one
node.

Dimensions: b pairs of this device, n pairs of all devices, t tokens, d embedding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from ..models import mean_pool, normalize
from ._data import PairTokens

AXES = ("node", "local")  # of the mesh, in the order in which the batch is split
NODE_AXES = ("local",)  # the axes inside a node

Params = Any
EmbedFn = Callable[[Params, PairTokens], Float[Array, "b 2 d"]]
Metrics = dict[str, Float[Array, ""]]
LossFn = Callable[[Params, Any], tuple[Float[Array, ""], Metrics]]  # of a device's rows
_ROWS = 1024  # descriptions ranked at once: bounds memory to this times the number of pairs


def make_embed(graph: Any) -> EmbedFn:
    """Make `embed(params, tokens)`, which returns unit vectors of descriptions and of code.

    In the result, `[:, 0]` are the descriptions' vectors and `[:, 1]` the code's.
    """

    def embed(params: Params, tokens: PairTokens) -> Float[Array, "b 2 d"]:
        num_tokens = tokens.ids.shape[-1]
        ids = jnp.asarray(tokens.ids).reshape(-1, num_tokens)
        mask = jnp.asarray(tokens.mask).reshape(-1, num_tokens)
        hidden = nnx.merge(graph, params)(ids, mask)
        return normalize(mean_pool(hidden, mask)).reshape(*tokens.ids.shape[:2], -1)

    return embed


def contrastive_loss(
    embeddings: Float[Array, "b 2 d"], *, temperature: float, axes: tuple[str, ...] = AXES
) -> tuple[Float[Array, ""], Metrics]:
    """Compute the loss of this device's pairs, with the pairs of all devices as negatives.

    "All devices" are those along the mesh axes `axes`. Call this function inside `shard_map`, where
    these axes are bound; it runs one all-gather over them.

    Returns:
        The loss, and metrics of this device's descriptions: `accuracy`, the share whose nearest
        code is the right one; `similarity`, the mean cosine to the right code; and
        `similarity_others`, the mean cosine to all other code.
    """
    own_b2d = embeddings
    all_n2d = lax.all_gather(own_b2d, axes, tiled=True)
    num_own, num_all = own_b2d.shape[0], all_n2d.shape[0]
    right = lax.axis_index(axes) * num_own + jnp.arange(num_own)  # column of the own partner
    to_code_bn = own_b2d[:, 0] @ all_n2d[:, 1].T
    to_description_bn = own_b2d[:, 1] @ all_n2d[:, 0].T
    losses_b = _cross_entropy(to_code_bn / temperature, right)
    losses_b += _cross_entropy(to_description_bn / temperature, right)

    similarity_b = jnp.take_along_axis(to_code_bn, right[:, None], axis=1)[:, 0]
    others = (to_code_bn.sum() - similarity_b.sum()) / max(num_own * (num_all - 1), 1)
    nearest_b = jnp.argmax(to_code_bn, axis=1)
    metrics = {
        "accuracy": jnp.mean((nearest_b == right).astype(jnp.float32)),
        "similarity": similarity_b.mean(),
        "similarity_others": others,
    }
    return losses_b.mean() / 2, jax.tree.map(lax.stop_gradient, metrics)


def _cross_entropy(logits_bn: Float[Array, "b n"], right: Array) -> Float[Array, "b"]:
    log_probabilities = jax.nn.log_softmax(logits_bn, axis=1)
    return -jnp.take_along_axis(log_probabilities, right[:, None], axis=1)[:, 0]


def make_loss(graph: Any, *, temperature: float, axes: tuple[str, ...] = AXES) -> LossFn:
    """Make the training loss, `loss(params, tokens) -> (loss, metrics)`.

    The pairs of all devices along the mesh axes `axes` are negatives for each other.

    Args:
        graph: the `nnx.GraphDef` of the encoder.
        temperature: cosine similarities are divided by it.
        axes: the mesh axes whose devices' pairs are negatives for each other.
    """
    embed = make_embed(graph)

    def loss(params: Params, tokens: PairTokens) -> tuple[Float[Array, ""], Metrics]:
        return contrastive_loss(embed(params, tokens), temperature=temperature, axes=axes)

    return loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval:
    """Scores from 0 to 1 that say how well descriptions of held-out pairs find their code."""

    mrr_at_10: float
    recall_at_1: float


def in_batches(function: Callable[[Any], Any], rows: Any, batch_size: int) -> np.ndarray:
    """Apply a function of a fixed batch size to any number of rows, and join its results.

    The last batch is filled up with rows of padding, whose results are dropped.

    Args:
        function: takes `batch_size` rows, and returns an array with a row for each.
        rows: `PairTokens`, or an array.
        batch_size: the number of rows that the function takes.
    """
    results = []
    for start in range(0, len(rows), batch_size):
        batch = jax.tree.map(lambda x, start=start: x[start : start + batch_size], rows)
        fill = batch_size - len(batch)
        full = jax.tree.map(lambda x, n=fill: np.pad(x, [(0, n)] + [(0, 0)] * (x.ndim - 1)), batch)
        results.append(np.asarray(function(full))[: len(batch)])
    return np.concatenate(results)


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
    """Return, for each query i, the rank of document i among all documents, from 1.

    Documents are ranked by inner product with the query. Ties get the worst rank, so that a model
    that maps everything to one point ranks last.
    """
    ranks = []
    for start in range(0, len(queries), _ROWS):
        similarity = queries[start : start + _ROWS] @ documents.T
        rows = np.arange(len(similarity))
        own = similarity[rows, start + rows]
        ranks.append((similarity >= own[:, None]).sum(axis=1))
    return np.concatenate(ranks)
