"""Record the collectives that a program issues, with sizes, mesh axes and the leaves they send.

Copies between device memory and host memory are recorded too (`primitives`). Records are made while
a program is traced, so a report shows what is sent, not an estimate. For an array of B bytes and n
devices, an all-gather, all-to-all or reduce-scatter brings B (n - 1) / n bytes into each device, an
all-reduce twice that.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from .._mesh import LOCAL, TOKENS

Axes = str | tuple[str, ...]
_AnyTransfer = TypeVar("_AnyTransfer", "Transfer", "HostTransfer")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of a program.

    Attributes:
        purpose: "weights", "gradients", "activations" (between stages, and of attention over the
            axis `tokens`; cotangents too), "fragments" (of parameters, `Zero.local_steps`),
            "tangents" (weights, gradients and their tangents in a program that `jax.jvp` derives),
            or "other" (losses, weights of examples, aux).
        name: name of the leaf whose values are sent, or of the first of several; "" for values of
            no leaf, such as losses.
        collective: "all-gather", "all-to-all", "reduce-scatter", "all-reduce" or "permute".
        axis: the mesh axes of more than one device that it runs over, such as "node+local".
        dtype: dtype on the wire.
        forms: what the numbers are sent as, in the order of the message: codecs by name, and the
            dtypes of arrays without one.
        num_bytes: size on one device of the gathered result, of the array that is exchanged or
            scattered, or of the array that is all-reduced or permuted.
        entering_bytes: bytes that one device receives: `num_bytes * (n - 1) / n` over `n` devices,
            twice that for an all-reduce, and `num_bytes` for a permute.
        node_bytes: the part of `entering_bytes` that comes from other nodes.
        trips: how often it runs in one execution of the program, an optimizer step.
        microbatches: the factor of `trips` that comes from a loop over micro-batches; 0 outside of
            such a loop.
        parts: for a message of several leaves, the name of each and its part of `num_bytes`.
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
    microbatches: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    forms: tuple[str, ...] = ()

    def by_leaf(self) -> tuple[Transfer, ...]:
        """Return one transfer for each leaf, with the leaf's part of the bytes."""
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


@dataclasses.dataclass(frozen=True)
class HostTransfer:
    """One copy between device memory and host memory, which every device makes of its own part.

    Attributes:
        purpose: "weights", "gradients", "update" (of parameters and state in a loop), or
            "activations" (copied by the function itself).
        name: name of the leaf, "" for activations; `[i]` after the name of a stack stands for one
            of its layers.
        to: where the copy is, "device" or "host".
        region: when it begins: "before forward", "forward", "backward", or "the end".
        path: indices of the loops that it is in, the outermost first.
        shape, dtype: those of the array as it lies in host memory, on one device: of a shard, or of
            a message if the leaf is stored encoded.
        num_bytes: bytes of that array.
        windowed: whether layers are copied one by one; otherwise the full leaf is copied at once,
            and lies in device memory until the step no longer needs it.
        trips: how often it runs in one execution of the program, an optimizer step.
        microbatches: the factor of `trips` that comes from a loop over micro-batches; 0 outside of
            such a loop.
    """

    purpose: str
    name: str
    to: str
    region: str
    path: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    windowed: bool
    trips: int = 1
    microbatches: int = 0


class Ledger:
    """A list of the collectives and host copies of a program, recorded in program order.

    Args:
        sizes: number of devices along each mesh axis.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = sizes
        self.transfers: list[Transfer] = []
        self.host_transfers: list[HostTransfer] = []

    def note(
        self,
        collective: str,
        axis: Axes,
        dtype: Any,
        num_bytes: int,
        shares: tuple[int, ...] = (),
        forms: Sequence[Any] = (),
    ) -> None:
        """Record one collective, unless all its axes have one device.

        Args:
            collective: its name, as in `Transfer`.
            axis: the mesh axis or axes.
            dtype: dtype on the wire.
            num_bytes: as in `Transfer`.
            shares: for a message with several leaves, the bytes of each leaf in one of the
                message's rows, in the order of the label's names; they divide `num_bytes` between
                the leaves. Empty for a message with one leaf.
            forms: what the numbers of each leaf are sent as, its codec or its dtype; empty: all
                are sent in `dtype`.
        """
        axes = tuple(a for a in ((axis,) if isinstance(axis, str) else axis) if self.sizes[a] > 1)
        if not axes:
            return
        sent = 2 * num_bytes if collective == "all-reduce" else num_bytes
        num = math.prod(self.sizes[name] for name in axes)
        nodes = math.prod(self.sizes[name] for name in axes if name not in (LOCAL, TOKENS))
        is_permute = collective == "permute"
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
                # In a permute each device receives all that another one sends.
                entering_bytes=sent if is_permute else sent * (num - 1) // num,
                node_bytes=sent if is_permute and nodes > 1 else sent * (nodes - 1) // nodes,
                parts=parts,
                forms=tuple(dict.fromkeys(map(str, forms or (dtype,)))),
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
    """Record in `ledger` the collectives traced in this context; `None` records nothing."""
    token = _ledger.set(ledger)
    try:
        yield
    finally:
        _ledger.reset(token)


@contextlib.contextmanager
def labelled(purpose: str, *names: str) -> Iterator[None]:
    """Label the collectives traced in this context with their purpose and leaves.

    The label is also a named scope of the compiled program, which profilers show:
    `jaxzero/gather/decoder.layers.3`.

    Args:
        purpose: "weights", "gradients", "fragments", "activations" or "other".
        names: names of the leaves.
    """
    token = _label.set((purpose, names or ("",)))
    try:
        with jax.named_scope(_scope(purpose, names)):
            yield
    finally:
        _label.reset(token)


def _scope(purpose: str, names: tuple[str, ...]) -> str:
    """Return the named scope under which profilers show the collectives of a label.

    It has a verb for the purpose, and the path prefix that all leaves share. Leaves without a
    common prefix are named by the first one and the number of the others.
    """
    if purpose == "activations":
        return "jaxzero/send activations"
    if purpose == "other":
        return "/".join(("jaxzero", *names))
    verb = {"weights": "gather", "gradients": "reduce", "fragments": "exchange"}[purpose]
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
    """Label the collectives in this context with only some of the names given to `labelled`.

    `numbers` are the indices of the names to use.
    """
    purpose, names = _label.get()
    if len(names) == 1:
        yield
        return
    token = _label.set((purpose, tuple(names[i] for i in numbers)))
    try:
        yield
    finally:
        _label.reset(token)


@contextlib.contextmanager
def noted() -> Iterator[list[Transfer]]:
    """Collect the collectives traced in this context in a list, instead of recording them.

    The list is yielded; `note_again` records it.
    """
    outer, (purpose, names) = _ledger.get(), _label.get()
    ledger = outer and Ledger(outer.sizes)
    numbered = tuple(map(str, range(len(names))))  # `note_again` puts names for the numbers
    label = _label.set((purpose, numbered))
    try:
        with recording(ledger):
            yield (ledger.transfers if ledger else [])
    finally:
        _label.reset(label)


def note_again(transfers: Sequence[Transfer]) -> None:
    """Record collectives that `noted` has listed, with the label of this context."""
    ledger, (purpose, names) = _ledger.get(), _label.get()
    if ledger is None:
        return
    for x in transfers:
        parts = tuple((names[int(number)], size) for number, size in x.parts)
        name = names[int(x.name)]
        ledger.transfers.append(dataclasses.replace(x, purpose=purpose, name=name, parts=parts))


def repeated(
    body: Callable, trips: int, *, microbatches: bool = False
) -> tuple[Callable, Callable[[], None]]:
    """Make a loop's body whose collectives and copies are recorded once, with the number of trips.

    JAX may trace the body several times.

    Args:
        body: the loop's body.
        trips: how often it runs.
        microbatches: whether each trip is a micro-batch.

    Returns:
        The body to give to `lax.scan`, and a function to call after it. That function records what
        the last trace of the body has sent and copied.
    """
    outer, last = _ledger.get(), None

    def traced(*args):
        nonlocal last
        last = None if outer is None else Ledger(outer.sizes)
        with recording(last):
            return body(*args)

    def in_all_trips(transfer: _AnyTransfer) -> _AnyTransfer:
        return dataclasses.replace(
            transfer,
            trips=transfer.trips * trips,
            microbatches=trips if microbatches else transfer.microbatches,
        )

    def done() -> None:
        if outer is not None and last is not None:
            outer.transfers += map(in_all_trips, last.transfers)
            outer.host_transfers += map(in_all_trips, last.host_transfers)

    return traced, done


def current_ledger() -> Ledger | None:
    """Return the ledger that records what is traced now; None if nothing is recorded."""
    return _ledger.get()


def note(
    collective: str, axis: Axes, x: Any, shares: tuple[int, ...] = (), forms: Sequence[Any] = ()
) -> None:
    """Record a collective on `x` by `Ledger.note`, if there is a current ledger."""
    ledger = _ledger.get()
    if ledger is not None:
        ledger.note(collective, axis, x.dtype, x.size * x.dtype.itemsize, shares, forms)


def readable_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text in GiB, MiB or KiB, with two decimals, or in B."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
