"""Format the rows of the race over a slow network as a table and a figure."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "slow_network"
BASELINES = ("gspmd", "fsdp2")  # speed-ups are over the faster of them

# ZeRO++'s abstract: throughput on 384 GPUs against ZeRO-3, "up to".
_PAPER_SPEED_UP = 2.16
_BITS_PER_SECOND = {
    "10mbit": 1e7,
    "100mbit": 1e8,
    "1gbit": 1e9,
    "none": 1.8e10,
}  # unshaped: as measured
_RATE_NAMES = {
    "10mbit": "10 Mbit/s",
    "100mbit": "100 Mbit/s",
    "1gbit": "1 Gbit/s",
    "none": "unshaped",
}
_PEER_NAMES = {
    "gspmd": "GSPMD",
    "fsdp2": "PyTorch FSDP2",
    "deepspeed zero3": "DeepSpeed ZeRO-3",
    "deepspeed hpz": "DeepSpeed hpZ",
    "jaxzero zero3": "jaxzero `zero3()`",
    "jaxzero zeropp": "jaxzero `zeropp()`",
    "jaxzero zeropp4": "jaxzero `zeropp4()`",
    "jaxzero pipeline": "jaxzero `pipeline()`",
}
_LOCAL_NAMES = {
    "jaxzero streaming_diloco": "jaxzero `streaming_diloco(every=30)`",
    "jaxzero streaming_diloco100": "jaxzero `streaming_diloco(every=100)`",
    "jaxzero diloco": "jaxzero `diloco(every=30)`",
}

_SHARES = ("both", "one", "neither", "filled")  # as `_link.shares_of` names them

Group = tuple[str, int, str, str]  # size, micro-batches, rate, peer
Results = Mapping[str, Any]


def group(rows: Iterable[Mapping[str, Any]]) -> dict[Group, list[Results]]:
    """The newest run of each round, by what was run."""
    newest = {tuple(row["results"]["settings"].items()): row["results"] for row in rows}
    groups: dict[Group, list[Results]] = {}
    for results in newest.values():
        if "not_run" not in results:
            at = results["settings"]
            key = at["size"], at["microbatches"], at["rate"], at["peer"]
            groups.setdefault(key, []).append(results)
    return groups


def step_seconds(runs: Sequence[Results]) -> float:
    """The median over runs of each run's median step."""
    return statistics.median(run["step_seconds_median"] for run in runs)


def quartiles(runs: Sequence[Results]) -> tuple[float, float] | None:
    """The first and third quartile of the runs; None of fewer than three."""
    values = [run["step_seconds_median"] for run in runs]
    if len(values) < 3:
        return None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def speed_up(groups: Mapping[Group, Sequence[Results]], key: Group) -> float | None:
    """How many times faster than the faster baseline of the same round: the median over rounds.

    None where no round has both baselines. Rounds may be hours and a machine apart, runs of one are
    not.
    """
    mine, *baselines = [
        {run["settings"]["round"]: run["step_seconds_median"] for run in groups.get(at, [])}
        for at in (key, *((*key[:3], name) for name in BASELINES))
    ]
    rounds = mine.keys() & baselines[0].keys() & baselines[1].keys()
    ratios = [min(times[number] for times in baselines) / mine[number] for number in rounds]
    return statistics.median(ratios) if ratios else None


# The table.


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one table for each size and number of micro-batches, and what could not be run."""
    groups = group(rows)
    for size, count in sorted({key[:2] for key in groups}, key=lambda key: (len(key[0]), key)):
        for lines in (
            _lines(groups, size, count),
            _link_lines(groups, size, count),
            _local_lines(groups, size, count),
        ):
            if lines:
                print("\n".join(lines) + "\n")
    refused = {
        row["results"]["settings"]["peer"]: row["results"]["not_run"]
        for row in rows
        if "not_run" in row["results"]
    }
    for peer, reason in refused.items():
        print(f"{peer} was not run: {reason}\n")


def _lines(groups: Mapping[Group, Sequence[Results]], size: str, count: int) -> list[str]:
    here = {key: runs for key, runs in groups.items() if key[:2] == (size, count)}
    rates = _rates(here, _PEER_NAMES)
    lines = _heads(here, rates, "MB sent") if rates else []
    for peer, name in _PEER_NAMES.items():
        mine = [here.get((size, count, rate, peer), []) for rate in rates]
        if any(mine):
            cells = [_cell(groups, (size, count, rate, peer)) for rate in rates]
            lines.append(_line(name, cells, f"{_megabytes(mine):.1f}", mine))
    return lines


def _link_lines(groups: Mapping[Group, Sequence[Results]], size: str, count: int) -> list[str]:
    """How the link is used at each rate, by the samples of both hosts: means over runs."""
    lines = []
    for rate in _rates((key for key in groups if key[:2] == (size, count)), _PEER_NAMES):
        for peer, name in _PEER_NAMES.items():
            runs = groups.get((size, count, rate, peer), [])
            samples = [host for run in runs for host in run.get("link", []) if host]
            if samples:
                means = (statistics.fmean(x[share] for x in samples) for share in _SHARES)
                cells = " | ".join(f"{mean:.0%}" for mean in means)
                lines.append(f"| {name}, {_RATE_NAMES[rate]} | {cells} |")
    heads = "| use of the link | both directions | one | neither | filled while in use |"
    return [heads, "|---" * (1 + len(_SHARES)) + "|", *lines] if lines else []


def _local_lines(groups: Mapping[Group, Sequence[Results]], size: str, count: int) -> list[str]:
    """Local steps, the same steps without exchange, and `zeropp()` at the same rates."""
    here = {key: runs for key, runs in groups.items() if key[:2] == (size, count)}
    rates = _rates(here, _LOCAL_NAMES)
    if not rates:
        return []
    lines = _heads(here, rates, "MB sent in a round (by the report)")
    every = [
        [run["alone"] for peer in _LOCAL_NAMES for run in here.get((size, count, rate, peer), [])]
        for rate in rates
    ]
    cells = [f"{step_seconds(runs):.2f} s" for runs in every]
    lines.append("| without exchange | " + " | ".join([*cells, "", "", ""]) + " |")
    for peer, name in _LOCAL_NAMES.items():
        mine = [here.get((size, count, rate, peer), []) for rate in rates]
        if any(mine):
            first = next(run for runs in mine for run in runs)
            steps = first["method"]["every"]
            told = first["received_bytes_per_step_by_report"] * steps / 1e6
            sent = f"{_megabytes(mine) * steps:.2f} ({told:.2f})"
            lines.append(_line(name, [_ratio_cell(runs) for runs in mine], sent, mine))
    zeropp = [here.get((size, count, rate, "jaxzero zeropp"), []) for rate in rates]
    if any(zeropp):
        cells = [f"{step_seconds(runs):.2f} s" if runs else "" for runs in zeropp]
        lines.append(_line(_PEER_NAMES["jaxzero zeropp"], cells, "", zeropp))
    return lines


def _rates(groups: Iterable[Group], peers: Iterable[str]) -> list[str]:
    """The rates at which any of the peers ran."""
    ran = {key[2] for key in groups if key[3] in peers}
    return [rate for rate in _BITS_PER_SECOND if rate in ran]


def _heads(groups: Mapping[Group, Sequence[Results]], rates: Sequence[str], sent: str) -> list[str]:
    first = next(iter(groups.values()))[0]
    count, tokens = first["settings"]["microbatches"], first["tokens_per_step"]
    batches = "one micro-batch" if count == 1 else f"{count} micro-batches"
    heads = [f"{first['parameters'] / 1e6:.1f}M parameters, {batches}, {tokens} tokens a step"]
    heads += [*(_RATE_NAMES[rate] for rate in rates), sent, "runs", "loss off by"]
    return ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]


def _line(name: str, cells: Sequence[str], sent: str, runs: Sequence[Sequence[Results]]) -> str:
    """A row of the table, of a peer's runs at each rate."""
    every = [run for at_rate in runs for run in at_rate]
    counts = {len(at_rate) for at_rate in runs}
    numbers = "-".join(str(n) for n in sorted({min(counts), max(counts)}))
    off = max(run["loss_deviation"] for run in every)
    mark = "" if all(run["agrees"] for run in every) else " (!)"
    return "| " + " | ".join([name, *cells, sent, numbers, f"{off:.0e}{mark}"]) + " |"


def _megabytes(runs: Sequence[Sequence[Results]]) -> float:
    """What a host sends in a step, 10^6 bytes."""
    sent = (max(run["sent_bytes_per_step"]) for at_rate in runs for run in at_rate)
    return statistics.median(sent) / 1e6


def _ratio_cell(runs: Sequence[Results]) -> str:
    """Seconds, and how many times those without exchange in the same run: median, range."""
    if not runs:
        return ""
    ratios = [ratio for run in runs for ratio in run["step_over_alone"]]
    text = f"{step_seconds(runs):.2f} s, {statistics.median(ratios):.2f}x"
    return f"{text} ({min(ratios):.2f}-{max(ratios):.2f})"


def _cell(groups: Mapping[Group, Sequence[Results]], key: Group) -> str:
    """Seconds (quartiles), times as fast as the faster baseline."""
    runs = groups.get(key, [])
    if not runs:
        return ""
    text = f"{step_seconds(runs):.2f} s"
    if (bounds := quartiles(runs)) is not None:
        text += f" ({bounds[0]:.2f}-{bounds[1]:.2f})"
    ratio = speed_up(groups, key)
    return text if ratio is None or key[3] in BASELINES else f"{text}, {ratio:.2g}x"


# The picture.


def draw(rows: Sequence[Mapping[str, Any]], size: str, file: Path) -> None:
    """Draw step time against bandwidth, one line for each peer and a panel for each k.

    Raises:
        SystemExit: there is no row of a model of this size.
    """
    from matplotlib.figure import Figure  # without pyplot no display is looked for

    groups = {key: runs for key, runs in group(rows).items() if key[0] == size}
    if not groups:
        raise SystemExit(f"No run of size {size!r} has a row: there is nothing to draw.")
    counts = sorted({key[1] for key in groups})
    figure = Figure(figsize=(5 * len(counts), 5.4), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for axes, count in zip(panels, counts, strict=True):
        _draw_panel(axes, groups, size, count)
    panels[0].set_ylabel("seconds for one optimizer step")
    panels[0].legend(fontsize="small")
    caption = textwrap.fill(_caption(groups), 62 * len(counts))
    figure.supxlabel(caption, fontsize="small", color="dimgray")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def _draw_panel(
    axes: Any, groups: Mapping[Group, Sequence[Results]], size: str, count: int
) -> None:
    from matplotlib.ticker import LogLocator

    for number, (peer, name) in enumerate((_PEER_NAMES | _LOCAL_NAMES).items()):
        keys = [key for rate in _BITS_PER_SECOND if (key := (size, count, rate, peer)) in groups]
        if not keys:
            continue
        x = [_BITS_PER_SECOND[key[2]] for key in keys]
        y = [step_seconds(groups[key]) for key in keys]
        bounds = [
            quartiles(groups[key]) or (middle, middle) for key, middle in zip(keys, y, strict=True)
        ]
        errors = [
            [middle - low for middle, (low, _) in zip(y, bounds, strict=True)],
            [high - middle for middle, (_, high) in zip(y, bounds, strict=True)],
        ]
        ours = peer.startswith("jaxzero")
        look = {"linestyle": "-" if ours else "--", "marker": "o" if ours else "s"}
        axes.errorbar(x, y, errors, label=name.replace("`", ""), color=f"C{number}", **look)
    _draw_paper(axes, groups, size, count)
    axes.set(xscale="log", yscale="log", xlim=(5e6, 4e10))
    axes.set_xlabel("bandwidth of the link, each way")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(list(_BITS_PER_SECOND.values()), [_RATE_NAMES[r] for r in _BITS_PER_SECOND])
    axes.minorticks_off()
    axes.set_title("one micro-batch" if count == 1 else f"{count} micro-batches")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_paper(
    axes: Any, groups: Mapping[Group, Sequence[Results]], size: str, count: int
) -> None:
    """The length of the paper's speed-up, hanging from the plain ZeRO-3 of jaxzero."""
    runs = groups.get((size, count, "100mbit", "jaxzero zero3"))
    if not runs:
        return
    top, x = step_seconds(runs), 0.8 * _BITS_PER_SECOND["100mbit"]
    axes.plot([x, x], [top / _PAPER_SPEED_UP, top], color="black", marker="_")
    axes.annotate(
        f"{_PAPER_SPEED_UP}x, ZeRO++\non 384 V100",
        (x, top / _PAPER_SPEED_UP**0.5),
        (-5, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=7,
    )


def _caption(groups: Mapping[Group, Sequence[Results]]) -> str:
    first = next(iter(groups.values()))[0]
    tokens = first["tokens_per_step"] // first["settings"]["microbatches"]
    return (
        "Two network namespaces on one machine with two CPU cores, two devices each: no GPU. "
        f"Float32, {first['parameters'] / 1e6:.1f}M parameters and only {tokens} tokens for each "
        "micro-batch, so that the link is what is measured. Medians of fresh processes in turn, "
        f"with quartiles. The black bar is the headline of ZeRO++, {_PAPER_SPEED_UP} times the "
        "throughput of ZeRO-3 on 384 V100 GPUs, for scale."
    )
