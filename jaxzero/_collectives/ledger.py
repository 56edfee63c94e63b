"""A ledger of the collectives that a program issues, with their sizes and labels."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from .._mesh import NODE

Axes = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of a program.

    Attributes:
        purpose: "weights", "gradients", or "other" (losses, weights of examples, aux).
        name: of the leaf, or of the first of several; or "".
        parts: of a message for several leaves, the name of each and its part of `num_bytes`.
        collective: "all-gather", "all-to-all", "reduce-scatter" or "all-reduce".
        axis: the mesh axis it runs over, of more than one device; or "node+local".
        dtype: on the wire.
        num_bytes: of the gathered result, of the message cut into pieces, or of the array
            that is reduced, on one device.
        entering_bytes: that one device receives: `num_bytes * (n - 1) / n` over `n` devices,
            twice that for an all-reduce.
        node_bytes: those of them that come from other nodes.
        trips: how often one execution of the program, an optimizer step, does it.
        microbatches: how many of those are for the micro-batches of the step; 1: it is done
            once for all of them.
    """

    purpose: str
    name: str
    collective: str
    axis: str
    dtype: str
    num_bytes: int
    entering_bytes: int
    node_bytes: int
    trips: int = 1
    microbatches: int = 1
    parts: tuple[tuple[str, int], ...] = ()

    def by_leaf(self) -> tuple[Transfer, ...]:
        """What it does for each of its leaves, as if each had been sent alone."""
        if not self.parts:
            return (self,)

        def part(name: str, size: int) -> Transfer:
            return dataclasses.replace(
                self,
                name=name,
                parts=(),
                num_bytes=size,
                entering_bytes=self.entering_bytes * size // self.num_bytes,
                node_bytes=self.node_bytes * size // self.num_bytes,
            )

        return tuple(part(*each) for each in self.parts)


class Ledger:
    """What has been noted so far, in program order."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = sizes
        self.transfers: list[Transfer] = []

    def note(
        self,
        collective: str,
        axis: Axes,
        dtype: Any,
        num_bytes: int,
        shares: tuple[int, ...] = (),
    ) -> None:
        axes = tuple(a for a in ((axis,) if isinstance(axis, str) else axis) if self.sizes[a] > 1)
        if not axes:
            return
        sent = 2 * num_bytes if collective == "all-reduce" else num_bytes
        num = math.prod(self.sizes[name] for name in axes)
        nodes = self.sizes[NODE] if NODE in axes else 1
        purpose, names = _label.get()
        parts: tuple[tuple[str, int], ...] = ()
        if shares and len(names) > 1:
            sizes = (share * num_bytes // sum(shares) for share in shares)
            parts = tuple(zip(names, sizes, strict=True))
        self.transfers.append(
            Transfer(
                purpose,
                next(iter(names), ""),
                collective,
                "+".join(axes),
                str(dtype),
                num_bytes,
                entering_bytes=sent * (num - 1) // num,
                node_bytes=sent * (nodes - 1) // nodes,
                parts=parts,
            )
        )


_ledger: contextvars.ContextVar[Ledger | None] = contextvars.ContextVar(
    "jaxzero_ledger", default=None
)


_label: contextvars.ContextVar[tuple[str, tuple[str, ...]]] = contextvars.ContextVar(
    "jaxzero_label", default=("other", ("",))
)


@contextlib.contextmanager
def recording(ledger: Ledger | None) -> Iterator[None]:
    """Note the collectives that are traced inside; `None` notes nothing."""
    token = _ledger.set(ledger)
    try:
        yield
    finally:
        _ledger.reset(token)


@contextlib.contextmanager
def labelled(purpose: str, *names: str) -> Iterator[None]:
    """Say what the collectives inside are for; the compiled program carries it as a scope.

    A profiler shows the scopes: `jaxzero/gather/decoder.layers.3`.

    Args:
        purpose: as in `Transfer`.
        names: of the leaves.
    """
    token = _label.set((purpose, names or ("",)))
    try:
        with jax.named_scope(_scope(purpose, names)):
            yield
    finally:
        _label.reset(token)


def _scope(purpose: str, names: tuple[str, ...]) -> str:
    """What is done, and to what: the path that the leaves share, or the first and how many more."""
    if purpose == "other":
        return "/".join(("jaxzero", *names))
    verb = {"weights": "gather", "gradients": "reduce"}[purpose]
    names = tuple(dict.fromkeys(names)) or ("whole_leaves",)
    if len(names) == 1:
        return f"jaxzero/{verb}/{names[0]}"
    paths = zip(*(name.replace("[i]", "").split(".") for name in names), strict=False)
    shared = [each[0] for each in itertools.takewhile(lambda each: len(set(each)) == 1, paths)]
    if not shared:
        return f"jaxzero/{verb}/{names[0]}+{len(names) - 1}"
    layers = "[i]" * min(name.count("[i]") for name in names)
    return f"jaxzero/{verb}/{'.'.join(shared)}{layers}"


@contextlib.contextmanager
def picked(numbers: Sequence[int]) -> Iterator[None]:
    """Of the names that `labelled` gave, say which the collectives inside are for."""
    purpose, names = _label.get()
    if len(names) == 1:
        yield
        return
    token = _label.set((purpose, tuple(names[i] for i in numbers)))
    try:
        yield
    finally:
        _label.reset(token)


def repeated(
    body: Callable, trips: int, *, microbatches: bool = False
) -> tuple[Callable, Callable[[], None]]:
    """For a loop's body that may be traced more than once and runs `trips` times.

    Args:
        body: of the loop.
        trips: how often it runs.
        microbatches: whether each trip is a micro-batch.

    Returns:
        The body to trace, and what to call afterwards to note what is in it.
    """
    outer, last = _ledger.get(), None

    def traced(*args):
        nonlocal last
        last = None if outer is None else Ledger(outer.sizes)
        with recording(last):
            return body(*args)

    def done() -> None:
        if outer is not None and last is not None:
            outer.transfers += [
                dataclasses.replace(
                    transfer,
                    trips=transfer.trips * trips,
                    microbatches=trips if microbatches else transfer.microbatches,
                )
                for transfer in last.transfers
            ]

    return traced, done


def note(collective: str, axis: Axes, x: Any, shares: tuple[int, ...] = ()) -> None:
    ledger = _ledger.get()
    if ledger is not None:
        ledger.note(collective, axis, x.dtype, x.size * x.dtype.itemsize, shares)


def readable_bytes(num_bytes: int) -> str:
    """A number of bytes in GiB, MiB, KiB or B, with two decimals."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
