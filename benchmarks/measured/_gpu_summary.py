"""The page and the figure that sum up what was measured on a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared._rows import read_rows

_TIMES = ("bfloat16_us", "bfloat16_gb_per_s", "quantized_us", "time_over_bfloat16")
_PEERS = ("copy", "xla", "mosaic_gpu", "torch_compile")


def write_summary(directory: Path) -> None:
    """Write `gpu.md`, and `gpu.png` if kernels were measured, from the rows of a folder."""
    kernels = _rows("kernels", directory)
    text = "\n\n".join(
        part
        for part in (
            "# On a GPU",
            _outcomes(directory),
            *_exchanges(directory),
            _step(directory),
            _walked(directory),
            _host_copies(directory),
            _kernels(kernels),
        )
        if part
    )
    (directory / "gpu.md").write_text(text + "\n")
    if kernels:
        _draw(kernels, directory / "gpu.png")
    print(text)


def _rows(name: str, directory: Path) -> list[dict[str, Any]]:
    """The rows that were made on a GPU: the latest of each device and version."""
    rows = [row for row in read_rows(name, directory=directory) if row["hardware"]["accelerator"]]
    return [row for row in rows if _made_by(row) == _made_by(rows[-1])]


def _made_by(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["commit"], row["versions"]["jax"], row["hardware"]["accelerator"]


def _outcomes(directory: Path) -> str:
    file = directory / "gpu.json"
    if not file.exists():
        return ""
    rows = [
        (each["part"], each["ended"], f"{each['seconds']} s", each["last_line"].replace("|", " "))
        for each in json.loads(file.read_text())
    ]
    return _table(("part", "", "took", "last line"), rows)


def _step(directory: Path) -> str:
    lines = []
    for row in _rows("gpu_step", directory)[-1:]:
        results = row["results"]
        peers = {name: each for name, each in results.items() if isinstance(each, dict)}
        title = (
            f"## A training step\n\n{results['parameters'] / 1e9:.2f}B parameters, "
            f"{results['batch']} x {results['tokens']} tokens, {row['hardware']['accelerator']}, "
            f"JAX {row['versions']['jax']}\n"
        )
        figures = [
            (name, f"{each['step_ms_median']:.1f} ms", f"{each['time_over_first_median']:.3f}")
            for name, each in peers.items()
        ]
        lines += [title, _table(("", "step", "over the first"), figures)]
    return "\n".join(lines)


def _walked(directory: Path) -> str:
    found = [row["results"] for row in _rows("walked_step", directory)]
    if not found:
        return ""
    reached = ("product_over_assumed", "memory_over_assumed")
    figures = [
        (
            each["model"],
            f"{each['measured_ms']:.1f} ms",
            f"{each['predicted_ms']:.1f} ms",
            f"{each['predicted_over_measured']:.2f}",
            _ms(each, "predicted_by_measured_rates_ms"),
            *(f"{each[x]:.2f}" if x in each else "" for x in reached),
        )
        for each in found
    ]
    head = ("model", "measured", "predicted", "ratio", "by measured rates")
    head += ("products, of assumed", "memory, of assumed")
    return "## A step beside its prediction\n\n" + _table(head, figures)


def _ms(results: dict[str, Any], name: str) -> str:
    return f"{results[name]:.1f} ms" if name in results else ""


def _exchanges(directory: Path) -> list[str]:
    """What several GPUs showed: equal bits, times, and steps."""
    bits, rates, steps = (
        [row["results"] for row in _rows(f"exchange_{name}", directory)]
        for name in ("bits", "rates", "steps")
    )
    parts = []
    if bits:
        figures = [(x["implementation"], x["format"], f"{x['numbers']}", _verdict(x)) for x in bits]
        head = ("implementation", "format", "numbers", "beside XLA's")
        parts.append("## Exchanges: bits\n\n" + _table(head, figures))
    if rates:
        names = ("operation", "format", "implementation")
        figures = [
            (
                *(x[name] for name in names),
                f"{x['received_bfloat16_bytes'] / 1e6:.3g}",
                # A refusal stands once, in the first of these columns.
                *((_verdict(x), "", "", "") if "refused" in x else (f"{x[n]}" for n in _TIMES)),
            )
            for x in rates
        ]
        head = (*names, "MB received as bfloat16", "us in bfloat16", "GB/s in bfloat16")
        head += ("us quantized", "over bfloat16")
        parts.append("## Exchanges: times\n\n" + _table(head, figures))
    if steps:
        times = ("measured_ms", "predicted_ms", "predicted_by_measured_rates_ms")
        figures = [
            (x["model"], x["implementation"], *(_ms(x, name) for name in times), _verdict(x))
            for x in steps
        ]
        head = (
            "model",
            "implementation",
            "measured",
            "predicted",
            "by measured rates",
            "gradients",
        )
        parts.append("## Steps of several GPUs\n\n" + _table(head, figures))
    return parts


def _verdict(results: dict[str, Any]) -> str:
    if "refused" in results:
        why = results["refused"].replace("|", " ").replace("\n", " ")
        return f"**failed**: {why}" if results.get("failed") else f"refused: {why}"
    if "equal" not in results:
        return ""
    return {True: "equal", False: "**differ**", None: "not compared"}[results["equal"]]


def _host_copies(directory: Path) -> str:
    found = [row["results"] for row in _rows("host_copies", directory)]
    if not found:
        return ""
    names = ("to_host_gb_per_s", "to_device_gb_per_s", "both_gb_per_s_each_way")
    figures = [
        (f"{each['copy_bytes'] / 1e6:g}", *(f"{each[name]:.1f}" for name in names))
        for each in found
    ]
    head = ("MB", "to the host, GB/s", "to the device", "both at once, each way")
    return "## Pinned host memory\n\n" + _table(head, figures)


def _kernels(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    figures = [
        (
            each["operation"],
            each["format"],
            f"{each['moved_bytes'] / 1e6:.0f}",
            *(_rate(each, peer) for peer in _PEERS),
        )
        for each in (row["results"] for row in rows)
    ]
    return "## Kernels, GB/s\n\n" + _table(("operation", "format", "MB moved", *_PEERS), figures)


def _rate(results: dict[str, Any], peer: str) -> str:
    rate = results.get(f"{peer}_gb_per_s")
    return "" if rate is None else f"{rate:.0f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """For each operation, the share of a copy's bandwidth over the bytes moved."""
    from matplotlib.figure import Figure  # without pyplot no display is looked for

    found = [row["results"] for row in rows]
    operations = list(dict.fromkeys(each["operation"] for each in found))
    figure = Figure(figsize=(3.2 * len(operations), 3.2), layout="constrained")
    panels = figure.subplots(1, len(operations), sharey=True, squeeze=False)[0]
    for panel, operation in zip(panels, operations, strict=True):
        for number, format in enumerate(dict.fromkeys(each["format"] for each in found)):
            chosen = [x for x in found if (x["operation"], x["format"]) == (operation, format)]
            chosen.sort(key=lambda x: x["moved_bytes"])
            moved = [x["moved_bytes"] / 1e6 for x in chosen]
            for peer, style in (("mosaic_gpu", "-o"), ("xla", "--x")):
                share = [x[f"{peer}_gb_per_s"] / x["copy_gb_per_s"] for x in chosen]
                panel.semilogx(
                    moved, share, style, color=f"C{number}", label=f"{format}, {peer}", ms=4
                )
        panel.set(title=operation.replace("_", " "), xlabel="MB moved", ylim=(0, 1.1))
    panels[0].set_ylabel("bandwidth over that of a copy")
    panels[-1].legend(fontsize=6)
    figure.savefig(file, dpi=120)
