"""Gains of plans over those that are known, against the formula."""

import numpy as np
import pytest

from jaxzero._planner.promise import Promise

from .test_search import Compiler, searched

MEMORY = np.full((4, 2), 1e9)


def promise(values, known, memory=MEMORY):
    return Promise(np.array(values, float), np.array(known, float), memory)


def test_the_largest_gain_is_next_and_others_have_to_improve_on_it():
    found = promise([[0.9, 0.7], [0.9, 1.2], [0.9, 1.2], [0.9, 1.2]], [[1.0]] * 4)
    assert found.next(0.01) == 0  # 0.1 against 0.3 / 4
    found.take(0)
    assert found.next(0.049) == 1  # 0.2 / 4 of what is left
    assert found.next(0.051) is None
    found.drop(1)
    assert found.next(0.0) is None


def test_what_many_plans_promise_counts_together():
    """Each gains 0.04 in one of four draws, 0.01 on average; in which of them is not known."""
    found = promise([[0.96, 1.0], [1.0, 0.96], [1.0, 1.0], [1.0, 1.0]], [[1.0]] * 4)
    assert found.next(0.019) is not None
    assert found.next(0.021) is None


def test_a_plan_that_does_not_fit_gains_nothing():
    found = promise([[np.inf, 0.99]] * 4, [[1.0]] * 4)
    assert found.next(0.005) == 1
    assert not found.is_sure(0) and found.is_sure(1)


def test_memory_decides_while_nothing_fits():
    found = promise([[np.inf, np.inf]] * 4, np.empty((4, 0)), np.array([[2e9, 1e9]] * 4))
    assert found.next(0.5) == 1  # nothing is too little


def test_the_last_compile_is_for_a_plan_that_is_sure():
    found = promise([[0.1, 0.9]] * 3 + [[np.inf, 0.9]], np.empty((4, 0)))
    assert found.next(0.0) == 0
    found.keep_sure()
    assert found.next(0.0) == 1


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_while_hardly_anything_fits_no_promise_is_too_small(share):
    known = np.where(np.arange(4)[:, None] < 4 * share, np.inf, 1.0)
    found = promise([[np.inf, 0.999]] + [[np.inf, np.inf]] * 3, known)
    expected = 1 if share == 1.0 else None
    assert found.next(1.0) == expected


def test_once_proxies_are_spent_a_plan_without_one_is_compiled_in_full():
    """Proxies of 10.2 GB need 12 in full, where 10 fit; a plan without a proxy needs 5."""

    class Answers(Compiler):
        def answer(self, candidate, *, is_proxy):
            has_proxy = (candidate.name, "proxy") in self.asked
            return 1.2, 10.2 if is_proxy else 12 if has_proxy else 5

    compiler = Answers({})
    search, rows = searched(compiler)
    assert search.proxies == 8 and search.full <= 3
    assert (rows[0].candidate.name, "proxy") not in compiler.asked
    assert (rows[0].stage, rows[0].discarded) == ("compiled", "")
