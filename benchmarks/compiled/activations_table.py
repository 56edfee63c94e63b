"""Predicted step over memory, of budgets and of policies of `jax.checkpoint`: a table, a plot.

python -m benchmarks.compiled.activations_table
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

from benchmarks.shared._models import MODELS
from benchmarks.shared._rows import RESULTS, read_rows

_LINK = "400 GB/s between nodes"
_PANELS = 3  # side by side
_PROGRAM = ("model", "layers", "nodes", "local", "batch", "tokens")
_NAMES = {
    "nothing": "nothing saved",
    "everything": "no `jax.checkpoint`",
    "dots": "`dots_saveable`",
    "dots_without_batch_dims": "`dots_with_no_batch_dims_saveable`",
    "names": "attention and MLP by name",
    "offload": "`offload_dot_with_no_batch_dims`",
}
Row = Mapping[str, Any]


def programs(rows: Iterable[Row]) -> dict[tuple, list[Row]]:
    """The newest row of each policy and budget, by program; those that keep least come first."""
    newest: dict[tuple, dict[tuple, Row]] = {}
    for row in rows:
        kind = (row.get("policy"), row.get("budget_gib"), row.get("host"))
        newest.setdefault(tuple(row[x] for x in _PROGRAM), {})[kind] = row
    order = list(MODELS)
    known = sorted(newest, key=lambda x: (order.index(x[0]), x[1:]))
    return {x: sorted(newest[x].values(), key=lambda r: r["temporary_gib"]) for x in known}


def _label(program: tuple) -> str:
    name, layers, nodes, local, batch, tokens = program
    model = MODELS[name]
    depth = f", {layers} layers" if layers else ""
    return (
        f"{model.label}{depth}, {nodes} x {local}, {model.rows_of.format(rows=batch, size=tokens)}"
    )


def _kind(row: Row) -> str:
    if "policy" in row:
        return _NAMES[row["policy"]]
    return f"budget {row['budget_gib']:g} GiB{', host' if row['host'] else ''}"


def _seconds(row: Row) -> float:
    return row["predicted"][_LINK]["step_seconds"]


def table(program: tuple, rows: Sequence[Row]) -> str:
    """Markdown: what is kept down; memory, steps and compute across."""
    sizes = {"kept": "keep_gib"}
    if any(row.get("host") for row in rows):
        sizes["in host memory"] = "host_gib"
    head = (_label(program), "temporaries", "step", "compute", *sizes)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        compute = row["predicted"][_LINK]["compute_seconds"]
        cells = [_kind(row), f"{row['temporary_gib']:.1f} GiB", f"{_seconds(row):.3f} s"]
        cells += [f"{compute:.3f} s"]
        planned = "policy" not in row
        cells += [f"{row[x]:.1f} GiB" if planned else "" for x in sizes.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(found: Mapping[tuple, Sequence[Row]]) -> Figure:
    """A panel for each program: budgets as a line, policies as points."""
    lines = -(-len(found) // _PANELS)
    drawn = Figure(figsize=(5.2 * _PANELS, 4 * lines), layout="constrained")
    panels = drawn.subplots(lines, _PANELS, squeeze=False).flat
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    for axes, (program, rows) in zip(panels, found.items(), strict=False):
        for host, label in ((False, "jz.Activations"), (True, "jz.Activations(host=True)")):
            line = [x for x in rows if "policy" not in x and x["host"] is host]
            if line:
                memory, seconds = ([f(x) for x in line] for f in (_memory, _seconds))
                axes.plot(memory, seconds, "o-", label=label)
        for row in rows:
            if "policy" in row:
                axes.plot(_memory(row), _seconds(row), "x", color="black")
                text = _kind(row).replace("`", "")
                axes.annotate(text, (_memory(row), _seconds(row)), fontsize=7, rotation=20)
        axes.set_xscale("log")
        axes.set_xlabel("temporaries of a device, GiB")
        axes.set_ylabel("predicted step at 400 GB/s into a node, s")
        axes.set_title(_label(program), fontsize=9)
        axes.legend(fontsize=8)
    return drawn


def _memory(row: Row) -> float:
    return row["temporary_gib"]


def main(jax: str = "0.12.0.1", plot: Path = RESULTS / "activations.png") -> None:
    """Print the tables and draw the plot.

    Args:
        jax: version whose rows are read.
        plot: file of the plot.
    """
    rows = (x["results"] for x in read_rows("activations") if x["versions"]["jax"] == jax)
    found = programs(rows)
    for program, of_program in found.items():
        print(table(program, of_program), end="\n\n")
    figure(found).savefig(plot, dpi=150)


if __name__ == "__main__":
    tyro.cli(main)
