"""`Zero.verify` on several processes: each finds the same."""

import pytest

from tests import processes
from tests.processes import ROOT


@pytest.mark.ci
def test_every_process_finds_the_same():
    first, second = (x.said() for x in processes.run("tests.verify.on_processes", 2, seconds=400))
    assert first == second
    assert [x[:2] for x in first] == [
        [True, ""],
        [False, "rows"],
        [False, "rows"],
        [False, "keys"],
        [True, ""],
    ]
    right, wrong, centred, same_dropout, round_of_steps = (x[2] for x in first)
    assert right == round_of_steps == ""
    lines = (ROOT / "tests/verify/on_processes.py").read_text().splitlines()

    def line(text: str) -> str:
        return f"on_processes.py:{1 + next(i for i, x in enumerate(lines) if text in x)}:"

    assert "is `sqrt`" in wrong and line("jnp.sqrt(") in wrong
    assert "is `psum`" in centred and line("lax.pmean(") in centred
    assert line("random.bernoulli(") in same_dropout
