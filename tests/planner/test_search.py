"""The search, with a compiler whose answers are made up: what it compiles, takes and discards."""

from __future__ import annotations

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxzero as jz
from jaxzero._hlo import Timeline
from jaxzero._planner.candidates import enumerate_candidates
from jaxzero._planner.compiles import Compiled
from jaxzero._planner.flops import matrix_flops
from jaxzero._planner.job import Job
from jaxzero._planner.search import MAX_FULL, MAX_PROXIES, Search, ranked
from jaxzero._planner.tune import tune

CLUSTER = jz.Cluster(nodes=2, local=2, device="h100", link=1e9)
GIB = 2**30


def init():
    return {"layers": jnp.ones((4, 64, 64)), "head": jnp.ones((64, 8))}


def loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


BATCH = jax.ShapeDtypeStruct((16, 64), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Answer(Compiled):
    seconds: float = 0.0

    def timeline(self, rates):
        return Timeline(seconds=self.seconds)


class Compiler:
    """Answers by tables; a plan that is not there takes a second and nothing."""

    def __init__(self, proxies, full=None, same=()):
        self.proxies, self.full, self.same = proxies, full or {}, same
        self.asked = []

    def key(self, candidate):
        return "same" if candidate.name in self.same else candidate.name

    def compile(self, candidate, *, is_proxy):
        self.asked.append((candidate.name, "proxy" if is_proxy else "full"))
        known = self.proxies if is_proxy else {**self.proxies, **self.full}
        seconds, gib = known.get(candidate.name, (1.0, 0))
        return Answer("", int(gib * GIB), 0, 0.0, seconds)


@functools.cache
def bounded(quantized):
    """A search that has bounds, and no compiler."""
    job = Job({"": loss}, init, BATCH, optax.adamw(1e-3), {})
    search = Search(job, CLUSTER, 10 * GIB, "step_time", None, math.inf, lambda line: None)
    search._bound(list(enumerate_candidates(CLUSTER, ("",), 4, quantized)))
    return search


def searched(compiler, *, objective="step_time", seconds=60.0, quantized=True):
    known = bounded(quantized)
    deadline = time.monotonic() + seconds
    search = dataclasses.replace(
        known,
        compiler=compiler,
        objective=objective,
        deadline=deadline,
        rows=dict(known.rows),
        notes=[],
    )
    search.run([])
    return search, ranked(search)


def test_the_fastest_that_fits_wins_and_is_compiled_in_full():
    times = {"zero3, prefetch 1": (0.3, 1), "zeropp, prefetch 1": (0.2, 1), "stage 2": (0.25, 1)}
    compiler = Compiler(times)
    search, rows = searched(compiler)
    assert rows[0].candidate.name == "zeropp, prefetch 1"
    assert rows[0].stage == "compiled"
    assert search.proxies <= MAX_PROXIES
    assert search.full <= MAX_FULL
    # What only saves memory is not compiled where more speed fits.
    assert not [name for name, _ in compiler.asked if "micro" in name or "prefetch 0" in name]


def test_memory_is_a_hard_limit_of_full_compiles():
    proxies = {"zero3, prefetch 1": (0.3, 5), "zeropp, prefetch 1": (0.2, 9)}
    _, rows = searched(Compiler(proxies, full={"zeropp, prefetch 1": (0.2, 11)}))
    taken = [row for row in rows if not row.discarded]
    assert taken[0].candidate.name == "zero3, prefetch 1"
    refused = next(row for row in rows if row.candidate.name == "zeropp, prefetch 1")
    assert "needs 11.0 GiB of 10.0 GiB" in refused.discarded


def test_microbatches_come_where_the_fastest_does_not_fit():
    """Temporaries of 16 GiB: with two micro-batches at least 8 remain, which may fit."""
    proxies = {name: (0.2, 16) for name in ("zero3, prefetch 1", "zero3, prefetch 0")}
    proxies["zero3, prefetch 1, 2 micro-batches"] = (0.4, 8)
    others = ["ddp", "stage 2", "hsdp, prefetch 1", "hsdp, prefetch 0"]
    proxies |= {f"{name}{k}": (9.0, 99) for name in others for k in ("", ", 2 micro-batches")}
    compiler = Compiler(proxies)
    _, rows = searched(compiler, quantized=False)
    assert rows[0].candidate.name == "zero3, prefetch 1, 2 micro-batches"
    assert rows[0].candidate.microbatches == 2


def test_equal_programs_are_compiled_once():
    same = ("zero3, prefetch 1", "zeropp, prefetch 1")
    compiler = Compiler({name: (0.2, 1) for name in same}, same=same)
    _, rows = searched(compiler)
    assert len([x for x in compiler.asked if x[0] in same and x[1] == "proxy"]) == 1
    assert [row for row in rows if "its program is that of" in row.discarded]


def test_the_objective_of_memory():
    proxies = {"hsdp, prefetch 1": (0.1, 0), "zero3, prefetch 0": (0.5, 0)}
    _, rows = searched(Compiler(proxies), objective="memory", quantized=False)
    assert rows[0].candidate.preset == "zero3"


def test_no_compile_starts_after_the_budget():
    compiler = Compiler({})
    search, _ = searched(compiler, seconds=-1.0)
    assert compiler.asked == []
    assert search.notes == ["the budget was spent: further plans were not compiled"]


def test_ctrl_c_returns_the_best_so_far():
    class Interrupted(Compiler):
        def compile(self, candidate, *, is_proxy):
            if self.asked:
                raise KeyboardInterrupt
            return super().compile(candidate, is_proxy=is_proxy)

    search, rows = searched(Interrupted({}))
    assert rows[0].stage == "proxy"
    assert search.notes == ["it was interrupted: these are the best so far"]


def test_without_a_compiler_plans_are_ranked_by_bounds():
    device = jz.Device(
        name="mine",
        flops=1e12,
        memory_bandwidth=1e11,
        memory=1e9,
        local_link=1e10,
        host_link=1e10,
    )
    cluster = jz.Cluster(nodes=2, local=2, device=device, link=1e9)
    plans = tune(loss, init, BATCH, cluster, quantized=False, cache=None)
    assert {row.stage for row in plans.rows} == {"bound"}
    assert "ranked by lower bounds alone" in plans.notes[0]
    zero = jz.Zero(jz.make_mesh(2, simulate=4), plans.config)
    params = zero.abstract(init)
    report = zero.report(params, zero.init_optimizer(optax.adamw(1e-4), params))
    assert plans.best.memory == sum(report.device_bytes(kind) for kind in report.kinds)
    with pytest.raises(ValueError, match="No plan fits: .* needs least"):
        _ = tune(loss, init, BATCH, cluster, memory=1e3, quantized=False, cache=None).best


def test_flops_count_loops_and_batches():
    """Three layers of `[16, 64] @ [64, 64]`, and one of `[2, 8, 4] @ [2, 4, 3]`."""

    def f(x, w, a, b):
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, w)
        return x, jnp.einsum("nij,njk->nik", a, b)

    shapes = [(16, 64), (3, 64, 64), (2, 8, 4), (2, 4, 3)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert matrix_flops(f, *args) == 3 * 2 * 16 * 64 * 64 + 2 * 2 * 8 * 4 * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "`nodes` of `Cluster` must be an integer of at least 1; got 0"),
        ({"device": "v5e"}, "`device` of `Cluster` must be one of a100, .*; got 'v5e'"),
        ({"link": 50}, "`link` of `Cluster` is bytes a second; 50 is less than a megabyte"),
        ({"host_memory": -1.0}, "`host_memory` of `Cluster` must be at least 0 bytes"),
    ],
)
def test_clusters(options, message):
    with pytest.raises(ValueError, match=message):
        jz.Cluster(**{"nodes": 2, "local": 2, **options})


def test_arguments():
    with pytest.raises(ValueError, match="`batch` has 6 rows, which 4 devices cannot share"):
        tune(loss, init, jax.ShapeDtypeStruct((6, 64), jnp.float32), CLUSTER)
    with pytest.raises(ValueError, match="`memory` is bytes of a device, above 0; got -1"):
        tune(loss, init, BATCH, CLUSTER, memory=-1)
