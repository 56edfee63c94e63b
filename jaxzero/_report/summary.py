"""The five lines of a report: memory, traffic, full weights, exposed collectives, details."""

from __future__ import annotations

from collections.abc import Sequence

from .._collectives import readable_bytes
from .data import ReportData
from .names import summarized
from .timeline import live_bytes, spans
from .traffic import Traffic
from .waits import Wait, waits

WIDTH = 80  # of every line, whatever the terminal
_NO_PLAN = "not known: pass `plan=zero.plan(loss_fn, params, batch)`"


def summary_lines(report: ReportData, details: Sequence[str]) -> tuple[str, ...]:
    """The five lines, of at most 80 columns. A name that does not fit is left out, never cut.

    Args:
        report: the report to sum up.
        details: names of the tables that it can print.
    """
    return (
        _fitting("Per device", *_held(report)),
        _fitting(*_sent(report.traffic)),
        _fitting("Whole", *_whole(report)),
        _fitting("Largest wait", *_largest_wait(report)),
        _fitting("Details", " ".join(details)),
    )


def _fitting(label: str, *texts: str) -> str:
    """The first of `texts` that leaves the line short enough; the last is always short."""
    lines = [f"{label:<12}  {text}" for text in texts]
    return next((line for line in lines if len(line) <= WIDTH), lines[-1])


def _held(report: ReportData) -> list[str]:
    kinds = [kind for kind in ("parameters", "optimizer state") if kind in report.kinds]
    offloaded = sum(map(report.host_bytes, kinds))
    host = f"; {readable_bytes(offloaded)} on host" if offloaded else ""
    held = [readable_bytes(report.device_bytes(kind)) for kind in kinds]
    total = [readable_bytes(report.total_bytes(kind)) for kind in kinds]
    named = zip(held, total, kinds, strict=True)
    everything = readable_bytes(sum(report.total_bytes(kind) for kind in kinds))
    mine = readable_bytes(sum(report.device_bytes(kind) for kind in kinds))
    return [
        ", ".join(f"{_without_unit(one, of)} of {of} {kind}" for one, of, kind in named) + host,
        " + ".join(map(" ".join, zip(held, kinds, strict=True))) + f", of {everything}{host}",
        f"{mine} of {everything}{host}",
    ]


def _without_unit(size: str, total: str) -> str:
    """`size`, without its unit if `total` has the same one: `1.50`, of `6.00 GiB`."""
    number, unit = size.split(" ")
    return number if total.endswith(f" {unit}") else size


def _sent(traffic: Traffic | None) -> list[str]:
    if traffic is None:
        return ["Into a node", _NO_PLAN]
    purposes = ("weights", "gradients", "tangents", "other")
    if traffic.node_bytes:
        label, total = "Into a node", traffic.node_bytes
        amounts = [traffic.node_bytes_for(purpose) for purpose in purposes]
    else:  # one node
        label, total = "Into device", traffic.amount().device_bytes
        amounts = [
            traffic.amount(lambda t, purpose=purpose: t.purpose == purpose).device_bytes
            for purpose in purposes
        ]
    weights, gradients, tangents, other = map(readable_bytes, amounts)
    text = f"{readable_bytes(total)} per step: {weights} weights, {gradients} gradients"
    text += f", {tangents} tangents" if amounts[2] else ""
    return [label, f"{text}, {other} other", text]


def _whole(report: ReportData) -> list[str]:
    """Texts with the peak of full weights, the largest bucket and leaves stored whole."""
    kept = [row for row in report.rows if row.kind == "parameters" and row.dim is None]
    kept_text = f"{readable_bytes(sum(row.device_bytes for row in kept))} always"
    kept_text = f"{kept_text} ({len(kept)} {'leaf' if len(kept) == 1 else 'leaves'})"
    gathers = [x for x in spans(report.plan) if x.action == "gather"] if report.plan else []
    if not gathers:
        return [kept_text if kept or report.plan else f"{kept_text}; of a step {_NO_PLAN}"]
    assert report.plan is not None
    live = live_bytes(report.plan)
    peak = f"{readable_bytes(int(live[0].max()))} at most"
    largest = max(gathers, key=lambda span: span.num_bytes)
    end = f"; {kept_text}" if kept else ""
    size = readable_bytes(largest.num_bytes)
    held = f"{largest.alive} of {live.shape[1]}"  # operations of the program
    names = _names(largest.names)
    return [
        *(f"{peak}; largest {name}, for {held} operations{end}" for name in names),
        *(f"{peak}; largest {name}, for {held} ops{end}" for name in names),
        *(f"{peak}; largest {name}, {held} ops" for name in names),
        f"{peak}; largest bucket {size}, for {held} ops{end}",
        f"{peak}; largest bucket {size}, for {held} ops",
        peak,
    ]


def _names(names: Sequence[str]) -> tuple[str, str]:
    """A bucket's leaves in a few words, and in fewer: the first leaf and the number of others."""
    num = len(set(names)) - 1
    return summarized(names), f"{names[0]} +{num}" if num else names[0]


def _largest_wait(report: ReportData) -> list[str]:
    if report.plan is None:
        return [_NO_PLAN]
    found = waits(report.plan)
    if not found:
        return ["none: every collective has computation to overlap with"]
    first = found[0]
    action, names = first.action, _names(first.names)
    size = f", {readable_bytes(first.num_bytes)}" if first.num_bytes else ""
    size += f" x{first.trips}" if first.trips > 1 else ""
    more = _more(found)
    return [
        *(f"{action} of {name}{size}, nothing to overlap with{more}" for name in names),
        *(f"{action} of {name}{size}, exposed{more}" for name in names),
        *(f"{action} of {name}{size}{more}" for name in names),
        f"{action} in {first.region}{size}, nothing to overlap with{more}",
        f"{action}{size}, exposed{more}",
    ]


def _more(found: Sequence[Wait]) -> str:
    return f"; {len(found) - 1} more" if len(found) > 1 else ""
