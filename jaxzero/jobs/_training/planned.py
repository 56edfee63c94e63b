"""`--plan auto`: the config that the planner takes to be best on the devices that are here."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from rich.console import Console

from ..._planner import Cluster, enumerate_candidates, tune
from ..._processes import of_first, process_index
from ..._sharding import ZeroConfig
from .._task import PairTokens
from .loss import LossFn

_SEARCH_SECONDS = 180.0
_MEETING_SECONDS = 1800.0


def planned_config(
    mesh: Mesh,
    shapes: Any,
    optimizer: optax.GradientTransformation,
    loss: LossFn,
    tokens: PairTokens,
    console: Console,
    *,
    quantized: bool,
) -> ZeroConfig:
    """Measure the devices, search, and print what was chosen. All processes must call it.

    The first process searches, so that all take the same plan. The batch is never cut into
    micro-batches, since all pairs are negatives for each other.

    Args:
        mesh: of the devices.
        shapes: of the parameters.
        optimizer: that trains them.
        loss: the training loss.
        tokens: abstract tokens of a step.
        console: for the choice.
        quantized: whether weights and gradients may travel in 4 and 8 bits.

    Raises:
        ValueError: no plan fits into the devices' memory.
    """
    with console.status("measuring the devices"):
        cluster = Cluster.measured(mesh)
    chosen = ""
    if process_index() == 0:
        chosen = _search(cluster, shapes, optimizer, loss, tokens, console, quantized=quantized)
    name = of_first("plan", chosen, _MEETING_SECONDS)
    return _configs(cluster, quantized)[name]


def _configs(cluster: Cluster, quantized: bool) -> Mapping[str, ZeroConfig]:
    """The configs that may be chosen, by the names of their plans."""
    found = enumerate_candidates(cluster, ("",), (1,), quantized)
    return {candidate.name: candidate.config for candidate in found}


def _search(
    cluster: Cluster,
    shapes: Any,
    optimizer: optax.GradientTransformation,
    loss: LossFn,
    tokens: PairTokens,
    console: Console,
    *,
    quantized: bool,
) -> str:
    """The name of the best plan."""

    def init() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    with console.status("planning") as status:
        plans = tune(
            loss,
            init,
            tokens,
            cluster,
            tx=optimizer,
            quantized=quantized,
            microbatches=(1,),
            budget=_SEARCH_SECONDS,
            progress=status.update,
            has_aux=True,
        )
    best = plans.best.candidate.name
    rates = cluster.rates
    console.print(
        f"Plan: {best}; measured {rates.flops / 1e12:.3g} TFLOP/s, memory "
        f"{rates.memory / 1e9:.3g} GB/s, links {rates.local / 1e9:.3g} GB/s to a device of "
        f"the node and {rates.node / 1e9:.3g} GB/s into a node",
        highlight=False,
        soft_wrap=True,
    )
    for note in plans.notes:
        console.print(f"Plan: {note}", highlight=False, soft_wrap=True, markup=False)
    return best
