"""The timeline of a step with three layers, without prefetch and with it."""

from __future__ import annotations

from canvas import Picture

_LEFT, _UNIT = 52, 16.9
_LANES = ("compute", "gather", "reduce")


def draw() -> Picture:
    """The same step twice, at the same scale."""
    picture = Picture(232, "The timeline of a step, without prefetch and with it")
    _step(picture, 0, "prefetch=0", *_serial())
    _step(picture, 108, "prefetch=1", *_pipelined())
    picture.text(0, 226, "Number: layer. Schematic: lengths are not measurements.", "small faint")
    return picture


def _serial():
    """Everything waits for everything: forward 1, 2, 3, backward 3, 2, 1."""
    boxes, now = [], 0.0
    for layer in (1, 2, 3):
        boxes += [("gather", now, 1, layer), ("compute", now + 1, 1, layer)]
        now += 2
    middle = now
    for layer in (3, 2, 1):
        boxes += [("gather", now, 1, layer), ("compute", now + 1, 2, layer)]
        boxes.append(("reduce", now + 3, 1, layer))
        now += 4
    return boxes, middle, now


def _pipelined():
    """A layer is gathered while the one before computes, and reduced while the next one does."""
    gathers = [(0, 1), (1, 2), (2, 3), (3, 3), (4, 2), (6, 1)]
    computes = [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 3), (6, 2, 2), (8, 2, 1)]
    reduces = [(6, 3), (8, 2), (10, 1)]
    boxes = [("gather", at, 1, layer) for at, layer in gathers]
    boxes += [("compute", at, size, layer) for at, size, layer in computes]
    boxes += [("reduce", at, 1, layer) for at, layer in reduces]
    return boxes, 4.0, 11.0


def _step(picture: Picture, y: float, name: str, boxes, middle: float, end: float) -> None:
    picture.text(0, y + 12, name, "code bold")
    picture.text(_LEFT + middle * _UNIT / 2 + 12, y + 26, "forward", "small faint", "middle")
    picture.text(_LEFT + (middle + end) * _UNIT / 2, y + 26, "backward", "small faint", "middle")
    x = _LEFT + middle * _UNIT
    picture.line(x, y + 18, x, y + 98)
    for row, lane in enumerate(_LANES):
        picture.text(0, y + 44 + row * 22, lane, "small")
        picture.line(_LEFT, y + 50.5 + row * 22, 358, y + 50.5 + row * 22)
    for lane, at, size, layer in boxes:
        row = _LANES.index(lane)
        left = _LEFT + at * _UNIT
        picture.box(left + 0.5, y + 32 + row * 22, size * _UNIT - 1, 18, lane, str(layer))
