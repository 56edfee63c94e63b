"""`jaxzero plan`: find the best way to train a model on a cluster, from any machine."""

import jax
import jax.numpy as jnp
from rich.console import Console

from .._planner import Cluster, tune
from ._job import load_job
from ._settings import Plan

_GIGA = 1e9


def plan(settings: Plan, console: Console) -> None:
    """Print the plans for a cluster, the best first.

    Raises:
        ValueError: the settings do not fit together, the model cannot be read, or no plan fits.
    """
    # Where JAX looks for GPUs and finds none, it drops the compiler for them too.
    jax.config.update("jax_platforms", "cpu")
    cluster = Cluster(
        nodes=settings.nodes,
        local=settings.local,
        device=settings.device,
        link=settings.link * _GIGA,
        host_memory=settings.host_memory * _GIGA,
    )
    if settings.model is not None:
        from . import decoder_job  # a function of the user may need no Flax

        batch = (settings.num_rows, settings.tokens)
        loss, init_fn = decoder_job(settings.model)
        rows = jax.ShapeDtypeStruct(batch, jnp.int32)
    else:
        assert settings.function is not None
        loss, init_fn, rows = load_job(settings.function, f"`--function {settings.function}`")[:3]
    method = settings.rounds.method
    with console.status("planning") as status:
        plans = tune(
            loss,
            init_fn,
            rows,
            cluster,
            memory=None if settings.memory is None else settings.memory * _GIGA,
            objective=settings.objective,
            quantized=not settings.unquantized,
            local_steps=method or (),
            layers=settings.layers or None,
            activation_budgets=settings.activation_budgets,
            budget=settings.budget,
            progress=status.update,
        )
    plans.print(console, settings.limit)
    best = plans.best  # raises if none fits
    for line in (f"The best: {best.candidate.name}", *plans.code.splitlines()):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
