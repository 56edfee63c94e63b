"""Make the tables of a report: one for each name that `Report.print` takes as `detail`."""

from __future__ import annotations

import re
from collections.abc import Callable

from .._activations import kept_bytes
from .._collectives import readable_bytes
from .._mesh import TOKENS
from .._plan import ACTIONS, Plan
from .data import ReportData, Row, Traffic
from .text_table import TextTable, merge_layers, ranges, summarized
from .timeline import Span, spans, waits


def available_details(report: ReportData) -> tuple[str, ...]:
    """Return the names of the tables that a report can print: most need a plan."""
    return DETAILS if report.plan is not None else NEED_NO_PLAN


def check_detail(report: ReportData, detail: str) -> None:
    """Raise `ValueError` unless the report can print the table `detail`.

    It cannot if there is no table of this name, or if the table needs a plan and the report has
    none.
    """
    if detail not in DETAILS:
        raise ValueError(
            f"`detail` must be one of {', '.join(DETAILS)}, or several of them; got {detail!r}."
        )
    if detail not in available_details(report):
        raise ValueError(
            f"The detail {detail!r} is about a training step, and this report has no plan of one. "
            "Pass `plan=zero.plan(loss_fn, params, batch)` to `zero.report`."
        )


def detail_table(report: ReportData, detail: str) -> TextTable:
    """Make the table `detail`, a name that `check_detail` has accepted."""
    return _TABLES[detail](report)


def _leaves(report: ReportData) -> TextTable:
    rows = [row for row in report.rows if row.kind == "parameters"]
    cells = [
        (
            str(list(row.shape)),
            row.dtype,
            "whole" if row.dim is None else f"dim {row.dim}",
            _padding(row),
            readable_bytes(row.device_bytes + row.host_bytes),
            "host" if row.host_bytes else "",
        )
        for row in rows
    ]
    merged = merge_layers([((row.path,), mine) for row, mine in zip(rows, cells, strict=True)])
    host = report.host_bytes("parameters")
    in_host = f", {readable_bytes(host)} in host memory for it" if host else ""
    table = TextTable(
        title=f"Parameters: {len(rows)} {'leaf' if len(rows) == 1 else 'leaves'}.",
        headings=("leaf", "shape", "dtype", "split on", "padding", "each device", "in", "leaves"),
        rows=[(*row.names, *row.cells, str(len(row.members))) for row in merged],
        footer=(f"{readable_bytes(report.device_bytes('parameters'))} on each device{in_host}.",),
    )
    return table if host else table.without("in")


def _padding(row: Row) -> str:
    of_dims = (row.padding, ""), (row.padding_layers, " layers")
    return ", ".join(f"{num}{unit}" for num, unit in of_dims if num)


def _state(report: ReportData) -> TextTable:
    rows = []
    for kind in report.kinds:
        mine, host, total = (
            amount(kind) for amount in (report.device_bytes, report.host_bytes, report.total_bytes)
        )
        share = f"1/{total / (mine + host):.2f}" if mine + host else ""
        rows.append((kind, *map(readable_bytes, (mine, host, total)), share))
    has_host = any(map(report.host_bytes, report.kinds))
    footer = ["In host memory: for each device."] if has_host else []
    if residuals := report.plan.residuals if report.plan else ():
        mine, host = (kept_bytes(residuals, action) for action in ("keep", "host"))
        rows.append(("activations", readable_bytes(mine), readable_bytes(host), "", ""))
        has_host |= bool(host)
        footer.append("Activations: what forward of a micro-batch keeps for backward.")
    table = TextTable(
        title="Training state, padding included on each device.",
        headings=("arrays", "each device", "in host memory", "in total", "share"),
        rows=rows,
        footer=tuple(footer),
    )
    return table if has_host else table.without("in host memory")


def _gathers(report: ReportData) -> TextTable:
    footer = [
        f"Rows of {x.name} are sent where it is looked up: "
        f"{readable_bytes(sum(x.rows.values()))} into a device."
        for x in _plan(report).rows
    ]
    return _buckets("All-gathers", report, "gather", *footer)


def _reductions(report: ReportData) -> TextTable:
    plan = _plan(report)
    footer = [f"At the end, {x}." for x in plan.described_combined]
    if plan.at_end:
        footer.append(f"At the end, one all-reduce of {', '.join(plan.at_end)}.")
    table = _buckets("Reduce-scatters", report, "reduce", *footer)
    return table.without("held for")


def _buckets(title: str, report: ReportData, action: str, *footer: str) -> TextTable:
    """Make a table with a row for each bucket, and the bucket's leaves below the row.

    Buckets of equal layers share a row.

    Args:
        title: what the buckets are, such as "All-gathers".
        report: the report.
        action: the `Span.action` of the buckets, "gather" or "reduce".
        *footer: lines below the table.
    """
    shown = [span for span in spans(_plan(report)) if span.action == action]
    cells = [
        (
            span.region,
            readable_bytes(span.num_bytes),
            _when(span),
            f"{span.alive} ops" if action == "gather" else "",  # differs between equal layers
            str(span.trips),
        )
        for span in shown
    ]
    rows = merge_layers([(x.names, mine) for x, mine in zip(shown, cells, strict=True)])
    total = sum(span.num_bytes * span.trips for span in shown)
    buckets = "bucket" if len(shown) == 1 else "buckets"
    return TextTable(
        title=f"{title}: {len(shown)} {buckets}, {readable_bytes(total)} whole in a run.",
        headings=("bucket", "in", "whole", "sent", "held for", "times"),
        rows=[(ranges(row.members), *row.cells) for row in rows],
        notes=[", ".join(row.names) for row in rows],
        footer=(*_microbatch_note(_plan(report)), *footer),
    )


def _waits(report: ReportData) -> TextTable:
    rows = []
    for wait in waits(_plan(report)):
        size = readable_bytes(wait.num_bytes) if wait.num_bytes else ""
        rows.append((wait.names, (wait.action, wait.region, size, str(wait.trips))))
    merged = merge_layers(rows)
    return TextTable(
        title="Collectives that no costly operation (matrix product, loop, ...) overlaps with.",
        headings=("collective", "in", "whole", "times", "num"),
        rows=[(*row.cells, str(len(row.members))) for row in merged],
        notes=[", ".join(row.names) for row in merged],
        footer=_microbatch_note(_plan(report)),
    )


def _traffic(report: ReportData) -> TextTable:
    traffic = _sent(report)
    rows = []
    for kind in traffic.kinds:
        amount = traffic.of_kind(kind)
        each = readable_bytes(amount.microbatch_bytes) if amount.microbatch_bytes else ""
        size = readable_bytes(amount.device_bytes)
        rows.append((*kind, str(amount.collectives), size, each))
    has_microbatches = any(row[-1] for row in rows)
    footer = [f"{readable_bytes(traffic.node_bytes)} enter a node in one step."]
    if has_microbatches:
        footer.append("micro-batch: the part that is sent for every micro-batch anew.")
    if TOKENS in traffic.axes:
        footer.append(f"{TOKENS}: what attention exchanges are activations.")
    if traffic.slice_bytes:
        footer.append(f"A device keeps {readable_bytes(traffic.slice_bytes)} of slices (hpZ).")
    table = TextTable(
        title="Sent in one optimizer step; bytes are those that one device receives.",
        headings=("for", "axis", "collective", "dtype", "times", "into device", "micro-batch"),
        rows=rows,
        footer=tuple(footer),
    )
    return table if has_microbatches else table.without("micro-batch")


def _parts(report: ReportData) -> TextTable:
    traffic = _sent(report)
    rows = []
    for group in traffic.groups:
        amounts = [traffic.of_group(group, axis) for axis in traffic.axes]
        sizes = (readable_bytes(amount.device_bytes) for amount in amounts)
        rows.append(((group,), (*sizes, str(sum(amount.collectives for amount in amounts)))))
    merged = merge_layers(rows)
    return TextTable(
        title="Bytes that one device receives in one step, for each part of the model.",
        headings=("part", *(f"over {axis}" for axis in traffic.axes), "times", "num"),
        rows=[(*row.names, *row.cells, str(len(row.members))) for row in merged],
    )


def _host(report: ReportData) -> TextTable:
    traffic = report.host_traffic
    if traffic is None:
        return TextTable(title="Nothing is in host memory.", headings=("part",), rows=[])
    rows = [
        (part, *(readable_bytes(traffic.num_bytes(to, part)) for to in ("device", "host")))
        for part in traffic.parts
    ]
    footer = []
    for purpose, to in (("weights", "device"), ("gradients", "host")):
        whole = [((x.name,), ()) for x in traffic.whole if (x.purpose, x.to) == (purpose, to)]
        if whole:
            names = ", ".join(row.names[0] for row in merge_layers(whole))
            footer.append(f"{purpose.capitalize()} copied in full, not layer by layer: {names}.")
    if "update" in traffic.parts:
        footer.append("update: with `zero.apply_gradients`; a norm over all gradients adds a pass.")
    return TextTable(
        title="Copied from host memory to one device in one step, and from it to host memory.",
        headings=("part", "to device", "to host"),
        rows=rows,
        footer=tuple(footer),
    )


def _timeline(report: ReportData) -> TextTable:
    shown = spans(_plan(report))
    rows = [
        (
            f"{span.start}-{span.stop}",
            ACTIONS[span.action],
            span.region,
            readable_bytes(span.num_bytes),
            str(span.trips),
            ", ".join(f"{axis} {at}" for axis, at in span.hops),
        )
        for span in shown
    ]
    return TextTable(
        title="From the launch of a bucket to its end, in operations of the program.",
        headings=("operations", "action", "in", "whole", "times", "sent over"),
        rows=rows,
        notes=[summarized(span.names) for span in shown],
        footer=_microbatch_note(_plan(report)),
    )


def _when(span: Span) -> str:
    """Say in words when a bucket is sent, without the number of an operation.

    Numbers differ between layers, and would keep equal layers from sharing a row.
    """
    if span.sent == "in the iteration before":
        return "prefetched (iteration before)"
    if span.sent == "in the iteration after":
        return "deferred (iteration after)"
    when = re.sub(r", \d+$", "", span.sent)
    is_early = span.action == "gather" and span.start < span.needed
    return f"prefetched {when}" if is_early else when


def _microbatch_note(plan: Plan) -> tuple[str, ...]:
    if plan.microbatches == 1:
        return ()
    if plan.later is None:
        return (f"In each of {plan.microbatches} micro-batches.",)
    first = f"In the first of {plan.microbatches} micro-batches"
    return (f"{first}; the others gather from node slices (hpZ).",)


def _plan(report: ReportData) -> Plan:
    assert report.plan is not None, "call `check_detail` first"
    return report.plan


def _sent(report: ReportData) -> Traffic:
    assert report.traffic is not None, "call `check_detail` first"
    return report.traffic


_TABLES: dict[str, Callable[[ReportData], TextTable]] = {
    "leaves": _leaves,
    "state": _state,
    "gathers": _gathers,
    "reductions": _reductions,
    "waits": _waits,
    "traffic": _traffic,
    "parts": _parts,
    "host": _host,
    "timeline": _timeline,
}
DETAILS = tuple(_TABLES)
NEED_NO_PLAN: tuple[str, ...] = ("leaves", "state")
