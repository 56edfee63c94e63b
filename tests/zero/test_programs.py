"""The cache of compiled programs: which are told apart, and how many are kept."""

from __future__ import annotations

import concurrent.futures

import jax.numpy as jnp
import numpy as np

from jaxzero._zero import programs as module
from jaxzero._zero.programs import Programs
from tests import zoo

from .compiles import COMPILES


def test_programs_of_equal_text_are_told_apart():
    programs = Programs(zoo.make_mesh("2x4-auto"))
    for shape in ((2,), (3,)):  # of an argument that is not used, and so not in the text
        np.testing.assert_array_equal(programs.run(lambda x: jnp.zeros(4), jnp.ones(shape)), 0)
    weak = [programs.run(lambda x, one=one: x + one, 1.0) for one in (1.0, np.float32(1))]
    assert [x.weak_type for x in weak] == [True, False]
    assert programs.run(lambda x: {"x": x, "name": "mse", "none": None}, 1.0)["name"] == "mse"


def test_as_many_programs_are_kept_as_is_said(monkeypatch):
    monkeypatch.setattr(module, "_MOST_KEPT", 2)
    programs = Programs(zoo.make_mesh("2x4-auto"))
    compiled = []
    for size in (1, 2, 3, 3, 2, 1):
        before = len(COMPILES)
        programs.run(lambda x: x + 1, np.ones(size))
        compiled.append(len(COMPILES) - before)
    assert compiled == [1, 1, 1, 0, 0, 1]


def test_threads_share_programs():
    programs = Programs(zoo.make_mesh("2x4-auto"))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        sizes = [1 + i % 3 for i in range(24)]
        sums = list(pool.map(lambda n: programs.run(jnp.sum, np.ones(n, np.float32)), sizes))
    assert list(map(float, sums)) == sizes
    assert len(programs._kept) == 3
