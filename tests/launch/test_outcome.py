"""Which of several processes is the cause of their end, and what the launcher makes of it."""

from __future__ import annotations

import signal

import pytest

from jaxzero.launch._child import slots
from jaxzero.launch._supervisor import Outcome, ProcessExit

ONE, TWO, THREE = slots([0, 1, 2], 1, None)
ALONE = (False, False)  # it was not asked to end
ASKED = (True, False)
HUNG = (True, True)


def outcome(*ends: tuple) -> Outcome:
    return Outcome(tuple(ProcessExit(slot, code, 1.0, *how) for slot, code, how in ends))


@pytest.mark.parametrize(
    ("ends", "blamed"),
    [
        ([(ONE, 0, ALONE)], None),
        ([(ONE, 75, ALONE), (TWO, 75, ALONE)], None),
        ([(ONE, 76, ALONE), (TWO, -15, ASKED)], None),
        ([(ONE, 76, ALONE), (TWO, -9, HUNG)], TWO),
        ([(ONE, 76, ALONE), (TWO, -9, HUNG), (THREE, -9, HUNG)], None),
        ([(ONE, 76, ALONE), (TWO, -11, ALONE)], TWO),
        ([(ONE, -15, ASKED), (TWO, 1, ALONE)], TWO),
        # Alone, native code may have given up.
        ([(TWO, -6, ALONE), (ONE, -15, ASKED)], TWO),
        ([(TWO, -6, ALONE), (ONE, -9, HUNG), (THREE, -9, HUNG)], TWO),
        # Process 0 gives up on one that hangs, and JAX aborts those that lose process 0.
        ([(ONE, 76, ALONE), (TWO, -6, ALONE), (THREE, -9, HUNG)], THREE),
        ([(TWO, -6, ALONE), (ONE, 76, ALONE), (THREE, -9, HUNG)], THREE),
        ([(TWO, -6, ALONE), (THREE, -6, ALONE), (ONE, -9, HUNG)], ONE),
        ([(ONE, 76, ALONE), (TWO, -6, ALONE), (THREE, -15, ASKED)], None),
        # Another failed by itself.
        ([(TWO, -6, ALONE), (ONE, -11, ALONE), (THREE, -9, HUNG)], ONE),
        ([(ONE, 75, ALONE), (TWO, -6, HUNG), (THREE, 1, ALONE)], THREE),
    ],
)
def test_a_peer_is_left_out_only_if_it_is_to_blame(ends: list[tuple], blamed):
    assert outcome(*ends).blamed == blamed


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([(ONE, 76, ALONE), (TWO, -6, ALONE), (THREE, -9, HUNG)], 76),
        ([(TWO, -6, ALONE), (ONE, -11, ALONE)], 139),
        ([(TWO, -6, ALONE), (ONE, 1, ALONE)], 1),
        ([(TWO, -6, ALONE), (ONE, -15, ASKED)], 134),
    ],
)
def test_an_abort_beside_another_end_is_not_the_cause(ends: list[tuple], status: int):
    assert outcome(*ends).status == status


def test_a_save_does_not_hide_one_that_was_cut_off():
    saved = ProcessExit(ONE, 75, 1.0, sigterm_sent=True, hung=False)
    cut_off = ProcessExit(TWO, -9, 2.0, sigterm_sent=True, hung=True)
    assert Outcome((saved, cut_off), signal.SIGTERM).status == 137
    assert Outcome((saved,), signal.SIGTERM).status == 75
