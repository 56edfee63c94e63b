"""`Zero.verify` on several processes: each finds the same."""

import pytest

from tests import processes


@pytest.mark.ci
def test_every_process_finds_the_same():
    first, second = (x.said() for x in processes.run("tests.verify.on_processes", 2, seconds=400))
    assert first == second
    (right, cause, _), (wrong, other_cause, _) = first
    assert right and cause == "" and not wrong and other_cause == "rows"
