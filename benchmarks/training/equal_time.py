"""Local steps and synchronous `zeropp` in the same predicted time on slow links, with their losses.

    python -m benchmarks.training.equal_time            # predict, append a row, print the table
    python -m benchmarks.training.equal_time --summary  # the table of the newest row

The byte decoder of `local_steps` on 8 nodes. A step of synchronous training under `jz.zeropp()`,
and a round of each local method, are compiled for H200s, one in each node, and their time is
predicted for the rate of each link (`jaxzero._hlo.timeline`). A run of local steps begins with
synchronous steps, which take `zeropp`'s time. Losses are those of the rows of `local_steps`, whose
synchronous steps have no codec. Needs jaxzero[aot].
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

import jaxzero as jz
from benchmarks.compiled._h200 import h200_mesh
from benchmarks.shared._byte_decoder import init
from benchmarks.shared._rows import append_row, read_rows
from benchmarks.training._local_steps_methods import method
from benchmarks.training.local_steps import Study, training_step
from jaxzero._hlo import Rates, timeline

_NAME = "local_steps_equal_time"
_LINKS = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6}  # bytes a second that enter a node
_METHODS = tuple(f"diloco{every} sgd(0.7, momentum=0.8, nesterov=True)" for every in (10, 30))
_NODES = 8
_STUDY = Study(
    corpus="packages", rows=64, steps=1500, synchronous_steps=600, nodes=(_NODES,), methods=_METHODS
)

# Weights that are gathered ahead are those of a layer more than there are, a sixth of 5 layers; a
# step waits for its links either way.
_ZEROPP = dataclasses.replace(jz.zeropp(), schedule=jz.CommSchedule(prefetch=0))


def _costs(mesh: jax.sharding.Mesh, name: str) -> dict[str, Any]:
    """Megabytes into a node, and seconds on each link, of a step on average."""
    settings = method(name)
    zero = jz.Zero(mesh, _ZEROPP if settings is None else jz.zero3())
    params = zero.abstract(functools.partial(init, _STUDY.size), jax.random.key(0))
    opt_state = zero.init_optimizer(zero.optimizer(_STUDY.tx()), params)
    shape = _STUDY.rows, _STUDY.size.length + 1
    if settings is None:
        every, run = 1, training_step(_STUDY, zero)
        arguments = params, opt_state, jax.ShapeDtypeStruct(shape, jnp.int32)
    else:
        every = settings.local.every
        run = zero.local_steps(training_step(_STUDY, zero, settings.rate), settings.local)
        stacked = jax.ShapeDtypeStruct((every, *shape), jnp.int32)
        arguments = run.abstract(params, opt_state), stacked
    options = jz.compiler_options("cuda", local_steps=settings is not None)
    program: Any = jax.jit(run).lower(*arguments)
    text = program.compile(compiler_options=options).as_text()
    lines = {link: timeline(text, Rates(num_local=1, node=rate)) for link, rate in _LINKS.items()}
    line = next(iter(lines.values()))
    return {
        "megabytes_into_a_node": round(line.node_bytes / every / 1e6, 4),
        "seconds": {link: round(line.seconds / every, 6) for link, line in lines.items()},
        "compute_seconds": round(line.compute_seconds / every, 6),
        "collectives": round(sum(line.launches.values()) / every, 2),
    }


def _measure() -> dict[str, Any]:
    mesh = h200_mesh(_NODES, 1)
    costs = {name: _costs(mesh, name) for name in ("synchronous", *_METHODS)}
    return append_row(_NAME, {"settings": _STUDY.settings, "nodes": _NODES, "of_a_step": costs})


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run of `steps` steps, the last `local` of them local steps by `method`."""

    method: str
    steps: int
    local: int

    def seconds(self, costs: dict[str, Any], link: str) -> float:
        of_step = {name: cost["seconds"][link] for name, cost in costs.items()}
        return (self.steps - self.local) * of_step["synchronous"] + self.local * of_step[
            self.method
        ]

    def losses(self) -> list[float]:
        """Held-out, of the newest row of each seed; infinite if training diverged."""
        settings = dataclasses.replace(_STUDY, steps=self.steps).settings
        runs = [row["results"] for row in read_rows("local_steps", settings)]
        newest = {
            run["seed"]: math.inf if run["held_out_loss"] is None else run["held_out_loss"]
            for run in runs
            if (run["method"], run["nodes"]) == (self.method, _NODES)
            and run.get("corpus") == runs[-1].get("corpus")  # of the packages that were there
        }
        return list(newest.values())


def _runs(costs: dict[str, Any]) -> Iterator[_Run]:
    """Each local run, and the synchronous run of as much time on the slowest link."""
    link = next(iter(_LINKS))
    yield _Run("synchronous", _STUDY.steps, 0)
    for name in _METHODS:
        local = _Run(name, _STUDY.steps, _STUDY.steps - _STUDY.synchronous_steps)
        yield local
        exact = local.seconds(costs, link) / costs["synchronous"]["seconds"][link]
        yield _Run("synchronous", 100 * round(exact / 100), 0)  # the study takes whole hundreds


def _table(costs: dict[str, Any]) -> Table:
    table = Table(title="held-out loss, nats per byte, and predicted seconds")
    table.add_column("method", no_wrap=True)
    for column in ("steps", "local", "MB a step", *_LINKS, "loss", "seeds"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in _runs(costs):
        found = run.losses()
        loss = f"{statistics.mean(found):.4f}" if found else "not run"
        if len(found) > 1:
            loss += f" ± {statistics.stdev(found) / len(found) ** 0.5:.4f}"
        megabytes = costs[run.method]["megabytes_into_a_node"]
        seconds = (f"{run.seconds(costs, link):.1f}" for link in _LINKS)
        numbers = str(run.steps), str(run.local), f"{megabytes:.3f}", *seconds, loss
        table.add_row(run.method, *numbers, str(len(found)))
    return table


def main(*, summary: bool = False) -> None:
    """Predict the time of each run, and print it beside the losses.

    Args:
        summary: compile nothing; take the newest row.
    """
    if not summary:
        _measure()
    Console(width=140).print(_table(read_rows(_NAME)[-1]["results"]["of_a_step"]))


if __name__ == "__main__":
    tyro.cli(main)
