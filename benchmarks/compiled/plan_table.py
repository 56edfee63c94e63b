"""Compile every plan of the planner for some models, to know which is best at any rate and limit.

    python -m benchmarks.compiled.plan_table                  # hours; goes on where it was stopped
    python -m benchmarks.compiled.plan_table --models 1b
    python -m benchmarks.compiled.plan_table --proxies        # as `jz.tune` compiles them first
    python -m benchmarks.compiled.plan_table --work           # minutes: rows of `plan_work`

Needs jaxzero[aot]. A row holds what a plan takes of memory, and its predicted step at each link
rate, and at 50 GB/s with each other rate halved and doubled. A row of `plan_work` holds the bytes
and operations that bounds are computed from. `plan_regret` compares with these rows what `jz.tune`
would choose.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._models import SIZES
from benchmarks.shared._rows import append_row, read_rows
from jaxzero._hlo import Rates
from jaxzero._planner import Bounder, Candidate, Compiled, Compiler, Job, enumerate_candidates

Name = Literal["1b", "7b", "moe"]
LINKS = (3e9, 12.5e9, 50e9, 200e9)  # bytes a second that enter a node
PERTURBED = ("flops", "memory", "local", "node", "host")
ROWS_PER_DEVICE, TOKENS = 4, 2048
MICROBATCHES = (1, 2, 4)


def cluster_of(link: float) -> jz.Cluster:
    """2 x 8 H200s with much host memory, so that all forms of offload are plans."""
    return jz.Cluster(nodes=2, local=8, device="h200", link=link, host_memory=200e9)


@functools.cache
def job_of(model: Name) -> Job:
    """Training of a model by AdamW, as `jz.tune` has it by default."""
    size = SIZES[model]
    batch = jax.ShapeDtypeStruct((ROWS_PER_DEVICE * 16, TOKENS), jnp.int32)
    init = functools.partial(_llama.init, size, jax.random.key(0))
    return Job({"": functools.partial(_llama.loss, size)}, init, batch, optax.adamw(1e-4), {})


def candidates() -> list[Candidate]:
    """All plans, those with offload last."""
    found = enumerate_candidates(cluster_of(LINKS[0]), ("",), MICROBATCHES, True)
    return sorted(found, key=lambda each: each.offload)


@functools.cache
def settings_of_rates() -> dict[str, Rates]:
    """The rates that a program is walked with, by name: links, then one other rate changed."""
    rates = {f"{link:g}": cluster_of(link).rates for link in LINKS}
    middle = cluster_of(50e9).rates
    for field, factor in itertools.product(PERTURBED, (0.5, 2.0)):
        changed = {field: factor * getattr(middle, field)}
        rates[f"{field} x {factor:g}"] = dataclasses.replace(middle, **changed)
    return rates


def walked(compiled: Compiled) -> dict[str, list[float]]:
    """For each setting of rates, the seconds of the gradients and those waited for links."""
    lines = {name: compiled.timeline(rates) for name, rates in settings_of_rates().items()}
    return {
        name: [line.seconds, line.exposed_seconds + line.host_exposed_seconds]
        for name, line in lines.items()
    }


def record(
    compiler: Compiler, model: Name, candidate: Candidate, *, is_proxy: bool
) -> dict[str, Any]:
    """Compile a plan, unless its program has a row, and append its row; what is in it."""
    found: dict[str, Any] = {"model": model, "plan": candidate.name, "is_proxy": is_proxy}
    try:
        found["program"] = compiler.key(candidate)
        same = next((each for each in results() if _same_program(each, found)), None)
        found |= _read(compiler.compile(candidate, is_proxy=is_proxy)) if same is None else same
        found["plan"] = candidate.name
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        found["error"] = str(error).strip().splitlines()[0][:300]
    append_row("plan_table", found)
    return found


def _read(compiled: Compiled) -> dict[str, Any]:
    return {
        "seconds_to_compile": round(compiled.seconds_to_compile, 1),
        "temporary": compiled.temporary,
        "host_temporary": compiled.host_temporary,
        "steps": walked(compiled),
    }


def _same_program(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(name) == other[name] for name in ("model", "is_proxy", "program"))


def results() -> Iterator[dict[str, Any]]:
    """What is in all rows."""
    return (row["results"] for row in read_rows("plan_table"))


def record_work(model: Name) -> dict[str, Any]:
    """Trace all plans, and append one row with the work of each."""
    bounder = Bounder(job_of(model), cluster_of(LINKS[0]), is_absent=True)
    works = {each.name: dataclasses.asdict(bounder.work(each)[0]) for each in candidates()}
    return append_row("plan_work", {"model": model, "plans": works})


def main(
    models: Sequence[Name] = ("1b", "moe", "7b"), proxies: bool = False, work: bool = False
) -> None:
    """Compile what has no row yet.

    Args:
        models: which.
        proxies: without the fusion of softmax and RMS norm, as a search compiles most programs.
        work: compile nothing; trace all plans for what bounds are computed from.
    """
    jax.config.update("jax_platforms", "cpu")
    for model in models:
        if work:
            record_work(model)
        else:
            _record_missing(model, is_proxy=proxies)


def _record_missing(model: Name, *, is_proxy: bool) -> None:
    compiler = Compiler(job_of(model), cluster_of(LINKS[0]), None)
    known = (each for each in results() if each["model"] == model)
    done = {each["plan"] for each in known if each["is_proxy"] == is_proxy}
    for candidate in candidates():
        if candidate.name not in done:
            record(compiler, model, candidate, is_proxy=is_proxy)


if __name__ == "__main__":
    tyro.cli(main)
