"""What processes are given before they start, which is the cause of their end, and its words."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from jaxzero._processes.exit_codes import MEANINGS, describe, exit_status
from jaxzero.launch._child import environment, reserve_port, slots
from jaxzero.launch._supervisor import Outcome, ProcessExit

from ._launching import EXIT_CODES

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


def test_devices_left_out():
    assert [slot.devices for slot in slots([0, 1], 2, None)] == [(0,), (1,), (2,), (3,)]
    (alone,) = slots([0], 1, None)
    assert alone.devices is None
    told = environment(alone, processes=1, port=1, restarts=0, cpu_devices=None)
    assert "JAX_LOCAL_DEVICE_IDS" not in told.keys() - os.environ.keys()
    assert "JAX_NUM_CPU_DEVICES" not in told.keys() - os.environ.keys()


def test_devices_stay_with_their_node():
    slot_a, slot_b = slots([0, 2], 1, 2)
    assert (slot_a.process, slot_a.node, slot_a.devices) == (0, 0, (0, 1))
    assert (slot_b.process, slot_b.node, slot_b.devices) == (1, 1, (4, 5))


def test_the_port_is_free_and_is_not_given_away():
    ports = [reserve_port() for _ in range(20)]
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket(socket.AF_INET6) as server:  # as gRPC binds it
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("::", port))
            server.listen()


@pytest.mark.parametrize(
    ("returncode", "status", "words"),
    [
        (0, 0, "exit code 0 (done)"),
        (75, 75, "exit code 75 (stopped by SIGTERM after saving: run again to go on)"),
        (55, 55, "exit code 55"),
        (143, 143, "exit code 143 (as after SIGTERM)"),
        (-15, 143, "killed by SIGTERM"),
        (-11, 139, "killed by SIGSEGV; a crash in native code"),
    ],
)
def test_exit_codes_in_words(returncode, status, words):
    assert describe(returncode) == words
    assert exit_status(returncode) == status


def test_all_codes_of_its_own_are_explained():
    assert MEANINGS.keys() - {1, 126, 127} == set(EXIT_CODES)  # those are any program's
