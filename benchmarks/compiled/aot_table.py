"""The steps of jaxzero over those of the best GSPMD and of one device, from the rows of `aot`.

    python -m benchmarks.compiled.aot_table

GSPMD by hand is compiled with several sets of XLA options (`aot.OPTION_SETS`). On each link the set
with the shortest predicted step is the one that jaxzero is compared with. A second table has what
`zero3` computes over what one device by itself computes, with as many rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

import jaxzero as jz
from benchmarks.shared._models import MODELS, in_form
from benchmarks.shared._rows import RESULTS, read_rows

from .aot import LINKS

_PRESETS = ("zero3", "zeropp", "zeropp4")
_LINKS = [f"{link / 1e9:g} GB/s" for link in LINKS]
_PROGRAM = ("model", "form", "nodes", "local", "batch", "tokens")


@dataclasses.dataclass(frozen=True)
class Best:
    """The shortest step of a variant on a link: seconds, the set of options, GiB of temporaries."""

    seconds: float
    option_set: str
    temporary_gib: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A program, and for each link the best GSPMD and jaxzero's presets, by name."""

    label: str
    gspmd: Mapping[str, Best]
    presets: Mapping[str, Mapping[str, Best]]

    def ratio(self, preset: str, link: str) -> float:
        """The preset's step over that of the best GSPMD; above 1 GSPMD is faster."""
        return self.presets[preset][link].seconds / self.gspmd[link].seconds


def comparisons(rows: Iterable[Mapping[str, Any]]) -> list[Comparison]:
    """Compare the newest rows of each program with the best GSPMD, in the order of `MODELS`.

    Args:
        rows: `results` of rows of `aot`. Those without a set of options or a predicted step, with a
            schedule that is not the default, with predicted durations or with micro-batches are
            left out.
    """
    every = [
        Comparison(
            label,
            _best(sets.values(), "gspmd-by-hand"),
            {preset: best for preset in _PRESETS if (best := _best(sets.values(), preset))},
        )
        for label, sets in _newest(rows).items()
    ]
    return [each for each in every if each.gspmd and each.presets]


def _newest(
    rows: Iterable[Mapping[str, Any]],
) -> dict[str, dict[tuple[str, str], Mapping[str, Any]]]:
    """By the program's label, in the order of `MODELS`, and by variant and set of options."""
    default = json.loads(json.dumps(dataclasses.asdict(jz.CommSchedule())))
    newest: dict[tuple, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for row in rows:
        plain = row.get("schedule") in (None, default) and row.get("microbatches") == 1
        if plain and {"option_set", "predicted"} <= row.keys() and not row["durations"]:
            program = tuple(row[name] for name in _PROGRAM)
            newest.setdefault(program, {})[row["variant"], row["option_set"]] = row
    order = list(MODELS)
    known = sorted((x for x in newest if x[0] in order), key=lambda x: (order.index(x[0]), -x[2]))
    return {_label(program): newest[program] for program in known}


def _label(program: Sequence[Any]) -> str:
    name, form, nodes, local, batch, tokens = program
    model = in_form(name, form)
    return f"{model.label}, {nodes} x {local}, {model.rows_of.format(rows=batch, size=tokens)}"


def _best(rows: Iterable[Mapping[str, Any]], variant: str) -> dict[str, Best]:
    """By link."""
    found = [row for row in rows if row["variant"] == variant]
    return {
        link: min(
            (
                Best(
                    row["predicted"][f"{link} between nodes"]["step_seconds"],
                    row["option_set"],
                    row["temporary_gib"],
                )
                for row in found
            ),
            key=lambda best: best.seconds,
        )
        for link in _LINKS
        if found
    }


def table(compared: Sequence[Comparison]) -> str:
    """Markdown: models down, links across, temporaries beside."""
    head = ("", "", *_LINKS, "temporary memory")
    lines = [_line(head), "|---" * len(head) + "|"]
    for each in compared:
        cells = (f"{best.seconds:.3f} s ({best.option_set})" for best in each.gspmd.values())
        lines.append(_line((each.label, "GSPMD", *cells, _memory(each.gspmd))))
        for preset, links in each.presets.items():
            cells = (_emphasised(each.ratio(preset, link)) for link in links)
            lines.append(_line(("", f"`jz.{preset}()`", *cells, _memory(links))))
    return "\n".join(lines)


def compute_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: what one device by itself computes, `zero3` beside it, and what of it waits.

    Args:
        rows: as of `comparisons`; programs without a row of `one-device`, or of `zero3` with its
            `message_seconds`, are left out.
    """
    waits = [f"waits at {link}" for link in _LINKS]
    head = ("", "one device computes", "`jz.zero3()`", "ratio", "of it messages", *waits)
    lines = [_line(head), "|---" * len(head) + "|"]
    for label, sets in _newest(rows).items():
        alone, ours = sets.get(("one-device", "jaxzero")), sets.get(("zero3", "jaxzero"))
        if alone is None or ours is None or "message_seconds" not in ours:
            continue
        links = [ours["predicted"][f"{link} between nodes"] for link in _LINKS]
        mine = links[0]["compute_seconds"]
        other = alone["predicted"][f"{_LINKS[0]} between nodes"]["compute_seconds"]
        cells = (f"{other:.4f} s", f"{mine:.4f} s", f"{mine / other:.3f}")
        handled = f"{ours['message_seconds'] / mine:.1%}"
        lines.append(
            _line((label, *cells, handled, *(f"{1 - x['hidden_share']:.0%}" for x in links)))
        )
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _emphasised(ratio: float) -> str:
    """In bold if GSPMD is faster."""
    return f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}"


def _memory(links: Mapping[str, Best]) -> str:
    """Of the program of each link, once if it is the same."""
    distinct = dict.fromkeys(f"{best.temporary_gib:.1f}" for best in links.values())
    alike = len(distinct) == 1
    return ", ".join(distinct if alike else (f"{x.temporary_gib:.1f}" for x in links.values())) + (
        " GiB"
    )


def figure(compared: Sequence[Comparison]) -> Figure:
    """One panel for each link: a row for each program, a mark for each preset, a line at 1."""
    drawn = Figure(figsize=(12, 1.2 + 0.36 * len(compared)), layout="constrained")
    for axes, link in zip(drawn.subplots(1, len(_LINKS), sharey=True), _LINKS, strict=True):
        axes.axvline(1, color="gray", linewidth=1)
        for preset, marker in zip(_PRESETS, "osD", strict=True):
            points = [
                (each.ratio(preset, link), height)
                for height, each in enumerate(compared)
                if preset in each.presets
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker, label=f"jz.{preset}()")
        axes.set_title(f"{link} into a node", fontsize=10)
        axes.set_xlabel("step / step of the best GSPMD")
        axes.grid(axis="y", alpha=0.3)
        axes.set_yticks(range(len(compared)), [each.label for each in compared], fontsize=8)
    first = drawn.axes[0]
    first.invert_yaxis()
    first.legend(fontsize=8)
    return drawn


def main(jax: str = "0.12.0.1", plot: Path = RESULTS / "aot.png") -> None:
    """Print the tables and draw the plot.

    Args:
        jax: version whose rows are read.
        plot: file of the plot.
    """
    rows = [row["results"] for row in read_rows("aot") if row["versions"]["jax"] == jax]
    compared = comparisons(rows)
    print(table(compared), compute_table(rows), sep="\n\n")
    figure(compared).savefig(plot, dpi=150)


if __name__ == "__main__":
    tyro.cli(main)
