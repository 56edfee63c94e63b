"""Copies from the host to devices: which matrices are first spread over other cache lines."""

import numpy as np

from jaxzero._zero.transfers import Transfers


def test_which_arrays_are_copied_to_rows_further_apart():
    with Transfers() as transfers:
        square = np.arange(32 * 2048, dtype=np.uint16).reshape(32, 2048)
        copy = transfers.spread_rows(square.T)
        np.testing.assert_array_equal(copy, square.T, strict=True)
        assert copy.strides == (2, 4096 + 64)
        column, large = square[:, :1].T, np.empty((2**13, 2**12), np.uint8).T
        for kept in (square, square[:, :2000].copy().T, square[0], column, large):
            assert transfers.spread_rows(kept) is kept
