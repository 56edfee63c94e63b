"""The program of a two-layer network before and after the rewrite, with what is alive when."""

from __future__ import annotations

from canvas import Picture

_ROW = 17.5
_BEFORE = [
    "h = gelu(x @ w1)",
    "y = h @ w2",
    "loss(y)",
    "g2 = hᵀ @ dy",
    "dh = dy @ w2ᵀ",
    "g1 = xᵀ @ dh",
]
_AFTER = [
    ("all-gather w1", "gather"),
    ("h = gelu(x @ w1)", ""),
    ("drop w1", "weight"),
    ("all-gather w2", "gather"),
    ("y = h @ w2", ""),
    ("drop w2", "weight"),
    ("loss(y)", ""),
    ("all-gather w2", "gather"),
    ("g2 = hᵀ @ dy", ""),
    ("reduce-scatter g2", "reduce"),
    ("dh = dy @ w2ᵀ", ""),
    ("drop w2", "weight"),
    ("g1 = xᵀ @ dh", ""),
    ("reduce-scatter g1", "reduce"),
]
# Of each array: column, first and last row, look.
_ALIVE_BEFORE = [(0, 0, 5, "weight"), (1, 0, 5, "weight"), (3, 3, 5, "reduce"), (2, 5, 5, "reduce")]
_ALIVE_AFTER = [
    (0, 0, 2, "weight"),
    (1, 3, 5, "weight"),
    (1, 7, 11, "weight"),
    (3, 8, 9, "reduce"),
    (2, 12, 13, "reduce"),
]


def draw() -> Picture:
    """Both programs side by side."""
    picture = Picture(318, "The program before and after")
    for left, title, what in (
        (2, "Traced", "full shapes, one device"),
        (172, "Run", "by every device"),
    ):
        picture.text(left, 12, title, "bold")
        picture.text(left, 25, what, "small faint")
    _alive(picture, 100, _ALIVE_BEFORE)
    _alive(picture, 291, _ALIVE_AFTER)
    for i, text in enumerate(_BEFORE):
        picture.text(2, _y(i) + 12, text, "code")
    for i, (text, look) in enumerate(_AFTER):
        if look:
            picture.box(172, _y(i) + 1, 114, _ROW - 2.5, look)
        picture.text(176, _y(i) + 12, text, "code")
    for x, first in ((0, 3), (172, 7)):
        picture.line(x, _y(first) - 0.5, x + 166 if x == 0 else 360, _y(first) - 0.5)
    picture.text(2, _y(6) + 14, "line: backward begins", "small faint")
    picture.text(2, _y(8) + 4, "Bars: full arrays that", "small faint")
    picture.text(2, _y(8) + 17, "exist on a device.", "small faint")
    picture.legend(2, _y(10) + 12, [("weight", "weight"), ("reduce", "gradient")], [62, 60])
    return picture


def _y(row: float) -> float:
    return 56 + row * _ROW


def _alive(picture: Picture, left: float, bars: list[tuple[int, int, int, str]]) -> None:
    """One column for each array: w1, w2, g1, g2."""
    for column, name in enumerate(("w1", "w2", "g1", "g2")):
        picture.text(left + column * 18 + 6, 48, name, "small", "middle")
    for column, first, last, look in bars:
        top = _y(first) + 2
        picture.box(left + column * 18 + 1, top, 10, _y(last + 1) - 3 - top, look)
