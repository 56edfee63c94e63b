"""Describe a program's residuals: values that forward makes, and backward reads or recomputes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

from .._collectives import readable_bytes
from .._program import Value
from .costs import flops_of
from .min_cut import Choice, Part

_DONE = {"keep": "kept", "host": "in host memory", "recompute": "recomputed"}


@dataclasses.dataclass(frozen=True)
class Residual:
    """A value that forward makes, and that backward reads or computes again.

    Attributes:
        shape: the shape of the value for the rows of one device, also where several devices share
            the tokens of a row; in a loop, the shape of one layer's value.
        dtype: the dtype of the value.
        layers: how many iterations the loops around the value have, each of which makes one; 1
            outside of loops.
        num_bytes: the bytes of the values of all layers on one device.
        where: file, line and function of the operation that makes the value.
        action: whether it is kept, recomputed in backward, or kept in host memory.
        flops: the FLOPs of the matrix products that recompute the value, in all layers. A product
            that several residuals need counts for the first of them only.
    """

    shape: tuple[int, ...]
    dtype: str
    layers: int
    num_bytes: int
    where: str
    action: Literal["keep", "recompute", "host"]
    flops: int = 0


def kept_bytes(residuals: Iterable[Residual], action: str = "keep") -> int:
    """Return the bytes on one device of the residuals whose action is `action`."""
    return sum(x.num_bytes for x in residuals if x.action == action)


def by_kind(residuals: Iterable[Residual]) -> list[list[Residual]]:
    """Group residuals of equal action, dtype, shape and line, such as those of unrolled layers."""
    kinds: dict[Any, list[Residual]] = {}
    for x in residuals:
        kinds.setdefault((x.action, x.dtype, x.shape, x.where), []).append(x)
    return [*kinds.values()]


def described(alike: Sequence[Residual]) -> tuple[str, ...]:
    """Return the cells of a printed row for residuals of one kind (see `by_kind`).

    They are the action, the array, its bytes, the FLOPs to recompute it, and its line of code.
    """
    first, layers = alike[0], sum(x.layers for x in alike)
    array = f"{first.dtype}{list(first.shape)}{f' x{layers}' if layers > 1 else ''}"
    size = readable_bytes(sum(x.num_bytes for x in alike))
    return f"activation {_DONE[first.action]}", array, size, _products(alike), first.where


def described_total(residuals: Sequence[Residual]) -> str:
    """Return a line with the bytes kept, in host memory and recomputed, for one micro-batch."""
    parts = [
        f"{readable_bytes(kept_bytes(residuals, action))} {done}"
        for action, done in _DONE.items()
        if action == "keep" or any(x.action == action for x in residuals)
    ]
    return "activations in all: " + ", ".join([*parts, *filter(None, [_products(residuals)])])


def _products(residuals: Iterable[Residual]) -> str:
    flops = sum(x.flops for x in residuals)
    return f"{flops / 1e9:.3g} GFLOP" if flops else ""


def residuals_of(part: Part, choice: Choice, in_host: Collection[Value]) -> Iterator[Residual]:
    """Yield a residual for each value that a part of forward keeps, or that backward recomputes.

    Args:
        part: a part of forward, such as the body of a loop over layers.
        choice: the values of the part that are kept, and the operations that are repeated.
        in_host: the kept values that wait in host memory.
    """
    makers = {x: operation for operation in part.operations for x in operation.outputs}
    repeated = {*choice.repeated}
    flops = _flops_by_residual(part, choice)
    for value in dict.fromkeys((*choice.kept, *part.wanted)):
        maker = makers.get(value)
        if value in part.views or (maker is None and value not in part.carried):
            continue
        again = maker in repeated
        kept = "host" if value in in_host else "keep"
        yield Residual(
            value.shape,
            str(value.dtype),
            part.trips,
            part.kept_bytes(value),
            maker.where if maker else "what a layer reads of the one before",
            "recompute" if again else kept,
            part.trips * flops.get(value, 0),
        )


def _flops_by_residual(part: Part, choice: Choice) -> dict[Value, int]:
    """Return the FLOPs to recompute each residual.

    An operation that several residuals need counts for the first of them only.
    """
    makers = {x: operation for operation in choice.repeated for x in operation.outputs}
    left, flops = {*choice.repeated}, {}
    wanted = {*part.wanted}
    for value in (x for x in makers if x in wanted):  # in program order
        waiting, flops[value] = [value], 0
        while waiting:
            operation = makers.get(waiting.pop())
            if operation in left:
                left.remove(operation)
                flops[value] += flops_of(operation)
                waiting += operation.values
    return flops
