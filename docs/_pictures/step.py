"""What one device keeps, sends and holds in full during a step of ZeRO-3 with two layers."""

from __future__ import annotations

from canvas import Picture

_TOP, _HEIGHT = 42, 30
_KEPT, _SENT, _FULL = (64, 82), (158, 96), (266, 92)  # x and width of each column
# By row: what the row is, the message, what is full, and whether a gradient shard results.
_ROWS = (
    ("forward 1", "all-gather W1", "compute with W1", False),
    ("forward 2", "all-gather W2", "compute with W2", False),
    ("backward 2", "all-gather W2", "compute with W2", False),
    ("", "reduce-scatter g2", "gradient g2", True),
    ("backward 1", "all-gather W1", "compute with W1", False),
    ("", "reduce-scatter g1", "gradient g1", True),
)


def draw() -> Picture:
    """One row for each message, from the top of the step to its end."""
    bottom = _TOP + len(_ROWS) * _HEIGHT
    picture = Picture(bottom + 62, "What one device keeps, sends and holds in full during a step")
    titles = (("kept: shards", _KEPT), ("sent", _SENT), ("full: one layer", _FULL))
    for title, (x, width) in titles:
        picture.text(x + width / 2, 13, title, "small bold", "middle")
    picture.box(_KEPT[0], 20, _KEPT[1], 16, "weight", "weights, state")
    for row, (name, message, full, is_reduced) in enumerate(_ROWS):
        y = _TOP + row * _HEIGHT
        picture.text(0, y + 17, name)
        look = "reduce" if is_reduced else "gather"
        picture.box(_SENT[0], y + 3, _SENT[1], 20, look, message)
        picture.box(_FULL[0], y + 3, _FULL[1], 20, "compute", full)
        if is_reduced:
            picture.box(_KEPT[0], y + 3, _KEPT[1], 20, "weight", f"shard of {full[-2:]}")
            picture.left(_SENT[0], _KEPT[0] + _KEPT[1], y + 13)
            picture.left(_FULL[0], _SENT[0] + _SENT[1], y + 13)
        else:
            picture.right(_KEPT[0] + _KEPT[1], _SENT[0], y + 13)
            picture.right(_SENT[0] + _SENT[1], _FULL[0], y + 13)
    picture.text(0, bottom + 17, "update")
    picture.box(_KEPT[0], bottom + 3, _KEPT[1], 20, "weight", "optax")
    picture.text(_SENT[0], bottom + 17, "on shards: nothing is sent", "small faint")
    picture.text(
        0, bottom + 42, "Full weights are dropped after each row. The next layer is", "small faint"
    )
    picture.text(
        0,
        bottom + 55,
        "gathered, and the last one reduced, while this one computes.",
        "small faint",
    )
    return picture
