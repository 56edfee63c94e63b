"""The rows of a batch that a process reads: those of its devices, in order, each of them once."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np

from jaxzero.data._batches import HostRows


@st.composite
def assignments(draw: st.DrawFn) -> tuple[int, np.ndarray]:
    """Rows for each device of a mesh `(split, whole)`, and the process of each device."""
    split, whole = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    processes = st.lists(st.integers(0, 3), min_size=split * whole, max_size=split * whole)
    return draw(st.integers(1, 5)), np.array(draw(processes)).reshape(split, whole)


@hypothesis.given(assignments())
def test_rows_of_processes_are_those_of_their_devices(assignment: tuple[int, np.ndarray]):
    each, process_of = assignment
    batch_size = each * len(process_of)
    for process in range(4):
        owned = [
            row for row in range(batch_size) if process in process_of[row // each]
        ]  # one by one
        held = np.argwhere(process_of == process)
        pieces = [slice(int(i) * each, int(i + 1) * each) for i, _ in held]
        rows = HostRows.of_pieces(pieces, batch_size)
        assert rows.numbers.tolist() == owned
        if owned:
            asked = [rows.element(turn) for turn in range(3 * len(owned))]
            assert asked == [b * batch_size + row for b in range(3) for row in owned]
        for piece in pieces:
            assert owned[rows.place(piece)] == list(range(batch_size))[piece]
