"""Predicted step over memory, of budgets and of policies of `jax.checkpoint`: a table, a plot.

python -m benchmarks.compiled.activations_table
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

from benchmarks.shared._models import MODELS
from benchmarks.shared._rows import RESULTS, read_rows

_LINK = "400 GB/s between nodes"
_PANELS = 3  # side by side
_TICKS = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 80)  # GiB; those of a logarithm overlap
_PROGRAM = ("model", "layers", "nodes", "local", "batch", "tokens", "token_parts")
_POLICIES = {  # name and mark of each policy
    "nothing": ("nothing saved", "x"),
    "everything": ("no `jax.checkpoint`", "s"),
    "dots": ("`dots_saveable`", "^"),
    "dots_without_batch_dims": ("`dots_with_no_batch_dims_saveable`", "v"),
    "names": ("attention and MLP by name", "D"),
    "offload": ("`offload_dot_with_no_batch_dims`", "P"),
}
Row = Mapping[str, Any]


def programs(rows: Iterable[Row]) -> dict[tuple, list[Row]]:
    """The newest row of each policy and budget, by program; those that keep least come first."""
    newest: dict[tuple, dict[tuple, Row]] = {}
    for row in rows:
        kind = (row.get("policy"), row.get("budget_gib"), row.get("host"))
        newest.setdefault(tuple(row.get(x) for x in _PROGRAM), {})[kind] = row
    order = list(MODELS)
    known = sorted(newest, key=lambda x: (order.index(x[0]), x[1:]))
    return {x: sorted(newest[x].values(), key=lambda r: r["temporary_gib"]) for x in known}


def _label(program: tuple) -> str:
    name, layers, nodes, local, batch, tokens, token_parts = program
    model = MODELS[name]
    depth = f", {layers} layers" if layers else ""
    split = f", {token_parts} devices for each row" if token_parts else ""
    rows = model.rows_of.format(rows=batch, size=tokens)
    return f"{model.label}{depth}, {nodes} x {local}, {rows}{split}"


def _kind(row: Row) -> str:
    if "policy" in row:
        return _POLICIES[row["policy"]][0]
    return f"budget {row['budget_gib']:g} GiB{', host' if row['host'] else ''}"


def _seconds(row: Row) -> float:
    return row["predicted"][_LINK]["step_seconds"]


def table(program: tuple, rows: Sequence[Row]) -> str:
    """Markdown: what is kept down; memory, steps and compute across.

    What is expected of a budget is what XLA holds at budget 0, and the bytes that the plan keeps
    more than there. Choices are beside all of tracing and compiling, compilers beside that of
    nothing saved, in seconds of a CPU.
    """
    sizes = {"kept": "keep_gib"}
    if any(row.get("host") for row in rows):
        sizes["in host memory"] = "host_gib"
    head = (_label(program), "temporaries", "expected", "step", "compute", *sizes)
    lines = [f"| {' | '.join((*head, 'choice', 'compiler'))} |", "|---" * (len(head) + 2) + "|"]
    least = next((x for x in rows if x.get("budget_gib") == 0), None)
    by_hand = next((x for x in rows if x.get("policy") == "nothing"), None)
    for row in rows:
        compute = row["predicted"][_LINK]["compute_seconds"]
        planned = "policy" not in row
        cells = [_kind(row), f"{row['temporary_gib']:.1f} GiB", _expected(row, least)]
        cells += [f"{_seconds(row):.3f} s", f"{compute:.3f} s"]
        cells += [f"{row[x]:.1f} GiB" if planned else "" for x in sizes.values()]
        lines.append(f"| {' | '.join((*cells, *_work(row, by_hand)))} |")
    return "\n".join(lines)


def _expected(row: Row, least: Row | None) -> str:
    if "policy" in row or least is None or row is least:
        return ""
    expected = least["temporary_gib"] + row["keep_gib"] - least["keep_gib"]
    return f"{expected:.1f} GiB ({row['temporary_gib'] / expected - 1:+z.0%})"


def _work(row: Row, by_hand: Row | None) -> tuple[str, str]:
    """The share of the choice, and times the compiler's seconds of nothing saved."""
    if "policy" in row or "choice_user_seconds" not in row:
        return "", ""
    compiler = row["compile_user_seconds"]
    share = row["choice_user_seconds"] / (row["lower_user_seconds"] + compiler)
    if by_hand is None or "compile_user_seconds" not in by_hand:
        return f"{share:.1%}", ""
    return f"{share:.1%}", f"{compiler / by_hand['compile_user_seconds']:.2f} x"


def figure(found: Mapping[tuple, Sequence[Row]]) -> Figure:
    """A panel for each program, budgets as lines and policies as points, and one legend."""
    lines = -(-len(found) // _PANELS)
    drawn = Figure(figsize=(4.4 * _PANELS, 3.4 * lines + 0.8), layout="constrained")
    panels = drawn.subplots(lines, _PANELS, squeeze=False).flat
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    legend = {}
    for axes, (program, rows) in zip(panels, found.items(), strict=False):
        for host, label in ((False, "jz.Activations"), (True, "jz.Activations(host=True)")):
            line = [x for x in rows if "policy" not in x and x["host"] is host]
            memory, seconds = ([f(x) for x in line] for f in (_memory, _seconds))
            color = "tab:orange" if host else "tab:blue"
            (legend[label],) = axes.plot(memory, seconds, "o-", color=color)
        for row in rows:
            if "policy" in row:
                name, mark = _POLICIES[row["policy"]]
                (point,) = axes.plot(_memory(row), _seconds(row), mark, color="black")
                legend[name.replace("`", "")] = point
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        ticks = [x for x in _TICKS if low <= x <= high]
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.set_title(textwrap.fill(_label(program), 48), fontsize=9)
    drawn.supxlabel("temporaries of a device, GiB")
    drawn.supylabel("predicted step at 400 GB/s into a node, s")
    drawn.legend(list(legend.values()), list(legend), loc="outside upper center", ncols=4)
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
