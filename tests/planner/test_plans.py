"""What a search answers: after Ctrl-C, where nothing fits, and as a table."""

from __future__ import annotations

import dataclasses
import math
import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

import jaxzero as jz
from jaxzero._planner.bounder import left_out
from jaxzero._planner.candidates import enumerate_candidates
from jaxzero._planner.job import Job
from jaxzero._planner.plans import PlanRow, Plans
from jaxzero._planner.ranking import ranked
from jaxzero._planner.search import Search

CLUSTER = jz.Cluster(nodes=2, local=2, device="h100", link=1e9)


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def init():
    return {"w": jnp.ones((64, 64))}


def test_ctrl_c_does_not_wait_for_what_compiles():
    class Slow:
        """Compiles until the search has answered; the user presses Ctrl-C meanwhile."""

        def key(self, candidate):
            return candidate.name

        def compile(self, candidate, *, is_proxy):
            if not self.is_asked.is_set():
                self.is_asked.set()
                raise KeyboardInterrupt
            try:
                assert self.has_answered.wait(timeout=20.0)
                raise ValueError("too late")
            finally:
                self.has_ended.set()

        is_asked, has_answered, has_ended = (threading.Event() for _ in range(3))

    job = Job({"": loss}, init, jax.ShapeDtypeStruct((16, 64), jnp.float32), optax.adamw(1e-3), {})
    search = Search(job, CLUSTER, 1e9, "step_time", None, math.inf, lambda line: None)
    search.run(enumerate_candidates(CLUSTER, ("",), (1, 2), False))  # bounds, on simulated devices
    search.compiler = compiler = Slow()
    search.run([])
    assert not compiler.has_ended.is_set()
    compiler.has_answered.set()
    plans = Plans(CLUSTER, 1e9, ranked(search), 0, tuple(search.notes), 2, 0)
    with pytest.raises(ValueError, match="known to fit: no compile has ended; it was interrupted"):
        _ = plans.best


def test_plans_that_share_a_reason_are_left_out_in_one_note():
    notes = left_out([("ddp", "no"), ("zero3", "rows"), ("hsdp", "no.")])  # a note ends in a period
    assert notes == [
        "2 plans, `ddp` the first, were left out, for they cannot be traced: no",
        "`zero3` was left out, for it cannot be traced: rows",
    ]


def row(name, memory=1, host_bytes=0, discarded=""):
    candidate = next(enumerate_candidates(CLUSTER, (name,), (1,), False))
    return PlanRow(candidate, "compiled", 1.0, 0.0, memory, 0, 0, host_bytes, discarded)


def test_bytes_between_device_and_host_are_shown_where_there_are_any():
    def printed(*rows):
        console = Console(width=200, record=True, file=None, quiet=False)
        with console.capture() as text:
            Plans(CLUSTER, 1e9, rows, 0, (), 0, 0).print(console)
        return text.get()

    assert "Host copies" not in printed(row("a"))
    text = printed(row("a"), row("b", host_bytes=3 * 10**9))
    assert "Host copies" in text and "3.0 GB" in text


def test_offload_is_advised_only_where_there_is_no_host_memory():
    rows = (row("a", memory=3 * 10**9, discarded="needs 3.0 GB of 1.0 GB"),)
    for cluster, is_advised in (
        (CLUSTER, True),
        (dataclasses.replace(CLUSTER, host_memory=1e12), False),
    ):
        with pytest.raises(ValueError, match="No plan fits in 1.0 GB") as error:
            _ = Plans(cluster, 1e9, rows, 0, (), 0, 1).best
        assert ("`host_memory`" in str(error.value)) == is_advised
