"""The training loss: contrastive, over the pairs of several devices."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from .._task import AXES, Metrics, PairTokens, Params, contrastive_loss, make_embed

LossFn = Callable[[Params, PairTokens], tuple[Float[Array, ""], Metrics]]


def make_loss(graph: Any, *, temperature: float, axes: tuple[str, ...] = AXES) -> LossFn:
    """Make the training loss, `loss(params, tokens) -> (loss, metrics)`.

    The pairs of all devices along the mesh axes `axes` are negatives for each other.

    Args:
        graph: the `nnx.GraphDef` of the encoder.
        temperature: cosine similarities are divided by it.
        axes: of the mesh.
    """
    embed = make_embed(graph)

    def loss(params: Params, tokens: PairTokens) -> tuple[Float[Array, ""], Metrics]:
        return contrastive_loss(embed(params, tokens), temperature=temperature, axes=axes)

    return loss
