"""What each device holds before and after the two steps of a gather, and of a reduction."""

from __future__ import annotations

from canvas import Picture

_DEVICE = 76
_CELL = 17
_NODES = (2, 186)
_LEFTS = (6, 94, 190, 278)  # of the devices: two of node 0, two of node 1
_PIECES = (0, 2, 1, 3)  # that they own: local major, node minor


def draw_gather() -> Picture:
    """Shards, the node's slices, whole weights."""
    picture = Picture(252, "The two steps of a gather")
    _nodes(picture)
    _row(picture, 56, "each device: its shard", [{x} for x in _PIECES], "weight")
    _step(picture, 84, "all-gather over node", "slow links; the shard is all that crosses")
    _row(picture, 134, "half of the array, in order", [{0, 1}, {2, 3}, {0, 1}, {2, 3}], "weight")
    _step(picture, 162, "all-gather over local", "fast links")
    _row(picture, 212, "the whole array", [{0, 1, 2, 3}] * 4, "weight")
    picture.text(180, 248, "0 to 3: the four pieces of one array", "small faint", "middle")
    return picture


def draw_reduce() -> Picture:
    """Full gradients, sums of a node, shards of the sum over all."""
    picture = Picture(252, "The two steps of a reduction")
    _nodes(picture)
    _row(picture, 56, "full gradient of its own rows", [{0, 1, 2, 3}] * 4, "reduce")
    _step(picture, 84, "reduce-scatter over local", "fast links")
    _row(picture, 134, "half of the node's sum", [{0, 1}, {2, 3}, {0, 1}, {2, 3}], "reduce")
    _step(picture, 162, "reduce-scatter over node", "slow links; only sums cross")
    _row(picture, 212, "its shard of the sum over all", [{x} for x in _PIECES], "reduce")
    picture.text(180, 248, "0 to 3: the four pieces of one array", "small faint", "middle")
    return picture


def _nodes(picture: Picture) -> None:
    for node, left in enumerate(_NODES):
        picture.text(left + 86, 12, f"node {node}", "bold", "middle")
    for i, left in enumerate(_LEFTS):
        picture.text(left + _DEVICE / 2, 25, f"local {i % 2}", "small faint", "middle")


def _row(picture: Picture, y: float, text: str, held: list[set[int]], look: str) -> None:
    picture.text(180, y - 12, text, "small", "middle")
    for left in _NODES:
        picture.box(left, y - 8, 172, 26, "group")
    for left, pieces in zip(_LEFTS, held, strict=True):
        for i in range(4):
            x = left + 4 + i * _CELL
            picture.box(x, y - 4, _CELL, 18, look if i in pieces else "empty")
            if i in pieces:
                picture.text(x + _CELL / 2, y + 9, str(i), "small", "middle")


def _step(picture: Picture, y: float, name: str, remark: str) -> None:
    for left in (_LEFTS[0], _LEFTS[3]):
        picture.down(left + (14 if left < 100 else _DEVICE - 14), y - 5, y + 36)
    picture.text(180, y + 4, name, "bold", "middle")
    picture.text(180, y + 17, remark, "small faint", "middle")
