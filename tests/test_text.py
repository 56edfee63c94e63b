"""Names and values of files in messages: on one line, escaped, and short."""

from pathlib import Path
from typing import Any

import pytest

from jaxzero._text import escaped, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\x1b[2J\u202e\ud800", r"'a\x1b[2J\u202e\ud800'"),
        ((1,), "(1,)"),
        ((1, 2.5, None, True), "(1, 2.5, None, True)"),
        (10**100, "an integer of 333 bits"),
        ({"a": [1, 2]}, "{'a': [1, 2]}"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
        ([[[[[[1]]]]]], "[[[[...]]]]"),
        ([], "[]"),
        (b"\x00", r"b'\x00'"),
        (Path("a"), "a PosixPath"),
    ],
    ids=lambda x: "" if isinstance(x, str) else type(x).__name__,
)
def test_shown(value: Any, text: str):
    assert shown(value) == text


def test_long_values_are_cut():
    assert len(shown("x" * 10**6)) < 300


def test_escaped():
    assert escaped("a\x1b'b") == "a\\x1b'b"
