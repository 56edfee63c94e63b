"""The pipelined backward scan over four layers: which layer each lane works on, by iteration."""

from __future__ import annotations

from canvas import Picture

_LEFT, _TOP, _WIDTH, _HEIGHT = 84, 34, 45, 27
_COLUMNS = ("before", "layer 3", "layer 2", "layer 1", "layer 0", "after")
# By lane and column: numbers of layers; "x": sent, and not used.
_LANES = [
    ("gather, node", "gather", ("3, 2", "1", "0", "x", "x", "")),
    ("gather, local", "gather", ("3", "2", "1", "0", "x", "")),
    ("compute", "compute", ("", "3", "2", "1", "0", "")),
    ("reduce, local", "reduce", ("", "x", "3", "2", "1", "0")),
    ("reduce, node", "reduce", ("", "x", "x", "3", "2", "1, 0")),
]


def draw() -> Picture:
    """One row for each lane, one column for each iteration."""
    bottom = _TOP + len(_LANES) * _HEIGHT
    picture = Picture(bottom + 40, "The pipelined backward scan over four layers")
    picture.box(_LEFT + _WIDTH - 1, 1, 4 * _WIDTH + 1, bottom + 4, "group")
    picture.text(_LEFT + 3 * _WIDTH, 13, "iterations of the scan", "small faint", "middle")
    for column, text in enumerate(_COLUMNS):
        picture.text(_LEFT + (column + 0.5) * _WIDTH - 1, 28, text, "small", "middle")
    for row, (name, look, cells) in enumerate(_LANES):
        y = _TOP + row * _HEIGHT
        picture.text(0, y + 17, name)
        for column, text in enumerate(cells):
            if text:
                x = _LEFT + column * _WIDTH + 1
                shape = "unused" if text == "x" else look
                shown = "" if text == "x" else text
                picture.box(x, y + 2, _WIDTH - 4, _HEIGHT - 5, shape, shown, small=False)
    picture.text(
        0, bottom + 20, "Number: the layer whose weights or gradients are meant.", "small faint"
    )
    picture.text(
        0, bottom + 34, "Dashed: sent because every iteration sends; not used.", "small faint"
    )
    return picture
