"""The search, with a compiler whose answers are made up: what it compiles, takes and discards."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxzero._hlo import Timeline
from jaxzero._planner.bounds import Bounds
from jaxzero._planner.candidates import enumerate_candidates
from jaxzero._planner.compiles import AT_ONCE, Compiled
from jaxzero._planner.job import Job
from jaxzero._planner.plans import Plans
from jaxzero._planner.ranking import notes_on_best, ranked
from jaxzero._planner.search import MAX_FULL, MAX_PROXIES, Search

from .small_job import BATCH, CLUSTER, absent, averaged, init, loss

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Answer(Compiled):
    seconds: float = 0.0

    def timeline(self, rates):
        return Timeline(seconds=self.seconds)


def plain(candidate):
    """Over the bound, and GB: k micro-batches and no prefetch save memory, and take time."""
    k, prefetch = candidate.microbatches, candidate.config.schedule.prefetch
    return 1.2 + 0.1 * math.log2(k) + 0.3 * (1 - prefetch), 4 / math.sqrt(k)


class Compiler:
    """Answers by tables of seconds over the bound and GB, or errors.

    Args:
        proxies: answers by name.
        full: those that differ in full.
        same: names of plans with one program.
        other: the answer for a plan that is not there, or a function of the candidate.
    """

    def __init__(self, proxies, full=None, same=(), other=plain):
        self.proxies, self.full, self.same, self.other = proxies, full or {}, same, other
        self.asked = []

    def key(self, candidate):
        return "same" if candidate.name in self.same else candidate.name

    def compile(self, candidate, *, is_proxy):
        self.asked.append((candidate.name, "proxy" if is_proxy else "full"))
        answer = self.answer(candidate, is_proxy=is_proxy)
        if isinstance(answer, BaseException):
            raise answer
        over, size = answer
        bounds = bounded(True).bounds.get(candidate)
        return Answer("", int(size * GB), 0, 0.0, over * (bounds.gradients if bounds else 1e-4))

    def answer(self, candidate, *, is_proxy):
        known = self.proxies if is_proxy else {**self.proxies, **self.full}
        other = self.other(candidate) if callable(self.other) else self.other
        return known.get(candidate.name, other)

    def best(self):
        """Names of the plans that fit in 10 GB, the fastest first."""
        bounds = bounded(True).bounds
        found = {each: self.answer(each, is_proxy=False) for each in bounds}
        seconds = {x: over * bounds[x].gradients for x, (over, size) in found.items() if size < 10}
        return [each.name for each in sorted(seconds, key=lambda each: seconds[each])]


@functools.cache
def bounded(quantized):
    """A search that has bounds, in which updates take no time, and no compiler."""
    job = Job({"": loss}, init, BATCH, optax.adamw(1e-3), {})
    search = Search(job, CLUSTER, 10 * GB, "step_time", None, math.inf, lambda line: None)
    search._bound(list(enumerate_candidates(CLUSTER, ("",), (1, 2, 4), quantized)))
    for candidate, bounds in search.bounds.items():
        assert isinstance(bounds, Bounds)
        search.add(candidate, dataclasses.replace(bounds, update=1e-7))
    return search


def searched(compiler, *, objective="step_time", seconds=60.0, quantized=True, names=None):
    known = bounded(quantized)
    deadline = time.monotonic() + seconds
    search = dataclasses.replace(
        known,
        compiler=compiler,
        objective=objective,
        deadline=deadline,
        rows={x: row for x, row in known.rows.items() if names is None or x.name in names},
        programs={},
        failures=[],
        notes=[],
    )
    search.run([])
    return search, ranked(search)


def plans_of(search):
    return Plans(CLUSTER, 10 * GB, ranked(search), 0, tuple(search.notes), 0, search.full)


def test_the_fastest_that_fits_wins_and_is_compiled_in_full():
    compiler = Compiler({})
    search, rows = searched(compiler)
    assert rows[0].candidate.name == compiler.best()[0]
    assert rows[0].stage == "compiled"
    assert search.proxies + search.full < MAX_PROXIES + MAX_FULL
    # What only saves memory is not compiled where more speed fits.
    assert not [name for name, _ in compiler.asked if "prefetch 0" in name]


def test_memory_is_a_hard_limit_of_full_compiles():
    first = Compiler({}).best()[0]
    compiler = Compiler({first: (1.2, 9)}, full={first: (1.2, 11)})
    _, rows = searched(compiler)
    assert rows[0].candidate.name == compiler.best()[0]
    assert (rows[0].stage, rows[0].discarded) == ("compiled", "")
    refused = next(row for row in rows if row.candidate.name == first)
    assert "needs 11.0 GB of 10.0 GB" in refused.discarded


def test_microbatches_come_where_the_fastest_does_not_fit():
    """16 GB of temporaries, with two micro-batches 9.5, with four 5.7."""

    def large(candidate):
        return plain(candidate)[0], 16 / candidate.microbatches**0.75

    compiler = Compiler({}, other=large)
    _, rows = searched(compiler)
    assert rows[0].candidate.name == compiler.best()[0]
    assert rows[0].candidate.microbatches > 1


def test_equal_programs_are_compiled_once():
    names = [candidate.name for candidate in bounded(True).bounds]
    compiler = Compiler({}, same=names)
    _, rows = searched(compiler)
    assert [kind for _, kind in compiler.asked] == ["proxy", "full"]
    assert [row for row in rows if "its program is that of" in row.discarded]


def test_the_objective_of_memory():
    """Temporaries of a kilobyte: the plan with the smallest state, however slow."""
    _, rows = searched(Compiler({}, other=(1.2, 1e-6)), objective="memory", quantized=False)
    assert rows[0].candidate.preset == "zero3"
    assert rows[0].stage == "compiled"


def test_no_compile_starts_after_the_budget():
    compiler = Compiler({})
    search, _ = searched(compiler, seconds=-1.0)
    assert compiler.asked == []
    assert search.notes == ["the budget was spent: further plans were not compiled"]


def test_two_programs_are_compiled_at_once():
    """Each waits for another to begin: a search that compiles one at a time would break."""

    class Together(Compiler):
        def compile(self, candidate, *, is_proxy):
            if is_proxy:
                both.wait()
            return super().compile(candidate, is_proxy=is_proxy)

    both = threading.Barrier(AT_ONCE, timeout=60.0)
    search, rows = searched(Together({}, other=(1e-9, 1)))
    assert search.proxies == AT_ONCE
    assert len({row.candidate.family for row in rows if row.stage != "bound"}) == AT_ONCE


def test_one_full_compile_where_the_best_proxy_surely_fits():
    """A second plan is expected to be faster by less than the least gain that is compiled for."""
    search, rows = searched(Compiler({}))
    assert [row.stage for row in rows].count("compiled") == search.full == 1


def test_programs_with_arrays_in_host_memory_are_compiled_in_this_thread():
    """They are traced again, by what JAX keeps for each thread, such as `jax.enable_x64`."""

    class Threads(Compiler):
        def compile(self, candidate, *, is_proxy):
            threads.append(threading.current_thread())
            return super().compile(candidate, is_proxy=is_proxy)

    threads = []
    search = dataclasses.replace(bounded(True), compiler=Threads({}))
    rows = list(search.rows.values())[:2]
    offloaded = dataclasses.replace(rows[0].candidate, offload="all")
    rows[0] = dataclasses.replace(rows[0], candidate=offloaded)
    for _, result in search._compile(rows, is_proxy=True):
        result()
    assert threads == [threading.main_thread()] * 2


def test_ctrl_c_returns_the_best_so_far():
    class Interrupted(Compiler):
        def compile(self, candidate, *, is_proxy):
            if self.asked:
                raise KeyboardInterrupt
            return super().compile(candidate, is_proxy=is_proxy)

    search, rows = searched(Interrupted({}))
    assert rows[0].stage == "proxy"
    notes = [*search.notes, *notes_on_best(rows)]
    assert notes[0] == "it was interrupted: these are the best so far"
    assert f"`{rows[0].candidate.name}` was not compiled in full" in notes[1]


def test_plans_behind_one_that_is_refused_in_full_are_compiled():
    """The bound of zero3 is above the step of zeropp4, which then needs more than the limit."""

    def sizes(candidate):
        return 1.2, {"zero3": 5, "zeropp4": 9}[candidate.preset]

    names = ("zero3, prefetch 1", "zeropp4, prefetch 1")
    compiler = Compiler({}, full={names[1]: (1.2, 11)}, other=sizes)
    search, rows = searched(compiler, names=names)
    refused = [row for row in rows if "needs 11.0 GB of 10.0 GB" in row.discarded]
    assert {row.candidate.preset for row in refused} == {"zeropp4"}
    assert plans_of(search).best.candidate.preset == "zero3"
    assert rows[0].stage == "compiled"


def test_a_bound_above_the_best_says_so():
    search, rows = searched(Compiler({}, other=(1e-9, 1)))
    assert search.proxies < MAX_PROXIES
    why = "its bound is above the best plan"
    assert {row.discarded for row in rows if row.stage == "bound"} == {why}
    assert not [row for row in rows if row.undecided]


def test_nothing_that_was_compiled_fits():
    search, rows = searched(Compiler({}, other=(0.2, 200)))
    assert "bound" in {row.stage for row in rows}
    assert all(row.discarded for row in rows)
    estimated = [row for row in rows if "by the temporaries of `" in row.discarded]
    assert estimated
    assert {row.stage for row in estimated} == {"bound"}
    with pytest.raises(ValueError, match="No plan fits in 10.0 GB of a device"):
        _ = plans_of(search).best


def test_a_proxy_above_the_limit_is_not_the_best():
    """At 10.5 of 10 GB it is worth a full compile, for which there is no time."""

    class Late(Compiler):
        def compile(self, candidate, *, is_proxy):
            late.deadline = -1.0
            return super().compile(candidate, is_proxy=is_proxy)

    late = dataclasses.replace(
        bounded(True), rows=dict(bounded(True).rows), programs={}, failures=[], notes=[]
    )
    late.compiler = Late({}, other=(1e-9, 10.5))
    late.run([])
    assert [kind for _, kind in late.compiler.asked] == ["proxy"] * AT_ONCE
    proxies = [row for row in ranked(late) if row.stage == "proxy"]
    assert len(proxies) == AT_ONCE
    for proxy in proxies:
        assert "needs 10.5 GB of 10.0 GB, and was not compiled in full" in proxy.discarded
    with pytest.raises(ValueError, match="No plan is known to fit: .*the budget was spent"):
        _ = plans_of(late).best


def test_nothing_was_compiled():
    search, _ = searched(Compiler({}), seconds=-1.0)
    with pytest.raises(ValueError, match="No plan is known to fit: .*the budget was spent"):
        _ = plans_of(search).best


def test_programs_that_do_not_compile_are_discarded():
    broken = jax.errors.JaxRuntimeError("INTERNAL: no kernel\nat line 3")
    first, second, third, *_ = Compiler({}).best()
    compiler = Compiler({first: broken}, full={second: NotImplementedError("not yet")})
    _, rows = searched(compiler)
    reasons = {row.candidate.name: row.discarded for row in rows}
    assert reasons[first] == "does not compile: INTERNAL: no kernel"
    assert reasons[second] == "does not compile: not yet"
    assert (rows[0].candidate.name, rows[0].stage) == (third, "compiled")
    with pytest.raises(ValueError, match="None of the 8 programs that were tried compiles.*INTERN"):
        searched(Compiler({}, other=broken))


def weighted(params, batch):
    return jnp.sum(batch @ params["head"]), jnp.float32(8)


@pytest.mark.parametrize(("f", "options"), [(weighted, {"weighted": True}), (averaged, {})])
def test_losses_with_weights_and_collectives(f, options):
    """`[16, 64] @ [64, 8]`, and as much for the gradient of the weights, over 4 devices."""
    job = Job({"": f}, init, BATCH, optax.sgd(1e-3), options)
    search = Search(job, absent(1e9), 1e9, "step_time", None, math.inf, lambda line: None)
    search.run(list(enumerate_candidates(search.cluster, ("",), (1, 2, 4), False))[:1])
    (bounds,) = search.bounds.values()
    assert isinstance(bounds, Bounds)
    assert bounds.compute == 2 * 2 * 16 * 64 * 8 / 4 / 1e12


def test_a_plan_that_cannot_be_traced_is_left_out():
    def picky(params, batch):
        if batch.shape[0] < 4:
            raise NotImplementedError("at least 4 rows\nand more")
        return jnp.mean(batch @ params["head"])

    job = Job({"": picky}, init, BATCH, optax.sgd(1e-3), {})
    search = Search(job, absent(1e9), 1e9, "step_time", None, math.inf, lambda line: None)
    candidates = list(enumerate_candidates(search.cluster, ("",), (1, 2, 4), False))[:2]
    search.run(candidates)
    assert list(search.rows) == candidates[:1]
    why = "`ddp, 2 micro-batches` was left out, for it cannot be traced: at least 4 rows"
    assert search.notes == [why]
    search = dataclasses.replace(search, rows={}, bounds={}, notes=[])
    with pytest.raises(NotImplementedError, match="at least 4 rows"):
        search.run(candidates[1:])
