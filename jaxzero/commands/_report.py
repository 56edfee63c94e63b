"""`jaxzero report`: print how arrays would be split, and what a step would send; train nothing."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from .._plan import Plan
from .._processes import new_file
from .._report import activation_bytes, live_bytes, spans
from ..jobs import Optimization, describe_devices, plan_step, set_up
from ._settings import Report

SUFFIXES = (".png", ".svg", ".pdf")
_COLORS = {"gather": "tab:blue", "reduce": "tab:orange"}
_COPY_COLORS = {"fetch": "tab:green", "offload": "tab:red"}


def report(settings: Report, console: Console) -> None:
    """Print the report of a step on the batch that `jaxzero train` takes by default.

    Raises:
        ValueError: the settings do not fit the machine, the checkpoint cannot be loaded, or the
            path of the picture has no known format or is in no folder that exists.
        OSError: the picture cannot be written. This is raised before the work begins.
    """
    if settings.plot is not None:
        _check_plot(settings.plot)
    optimization = Optimization()
    setup = set_up(
        settings.checkpoint,
        settings.devices,
        settings.sharding,
        optimization,
        max_tokens=None,
        console=console,
    )
    num_devices = setup.zero.num_devices
    num_rows = -(-optimization.batch_size // num_devices) * num_devices
    tokens = setup.task.abstract_batch(num_rows)
    plan = plan_step(setup.zero, setup.params, setup.task.make_loss(optimization), tokens)
    setup.zero.report(setup.params, setup.opt_state, plan=plan).print(settings.detail, console)
    if settings.plot is not None:
        plot_plan(plan, settings.plot, title=f"one step on {describe_devices(setup.zero.mesh)}")
        console.print(escape(f"Timeline drawn to {settings.plot}"), highlight=False, soft_wrap=True)


def _check_plot(path: Path) -> None:
    flag = f"`--plot {path}`"
    if not path.parent.is_dir():
        raise ValueError(
            f"{flag}: the folder {path.parent} does not exist. Make it, or name another place."
        )
    if path.is_dir():
        raise ValueError(f"{flag} is a folder. Name a file in it, such as {path / 'plan.png'}.")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{flag} must end in {', '.join(SUFFIXES)}, which selects the format.")
    exists = path.exists()
    path.open("ab").close()  # raises the `OSError` that writing the plot would
    if not exists:
        path.unlink()


def plot_plan(plan: Plan, path: Path, *, title: str) -> None:
    """Plot memory, and the buckets in flight, over the operations of a step.

    The upper panel shows the MiB of full weights, unreduced gradients and activations that forward
    keeps for backward, on one device. The lower panel has a bar for each bucket. The bar of a
    gather goes from its send to the last use of its weights, that of a reduction from its first
    gradient to its send. Copies from host memory (green) and to host memory (red) have bars of
    their own; the bar of a copy from host memory ends when its weights are sent.

    Args:
        plan: plan of a training step.
        path: file to write; the suffix, one of `SUFFIXES`, selects the format.
        title: title above the plot.
    """
    from matplotlib.figure import Figure  # slow to import: not at module level

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    memory_axes, wire_axes = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.6])
    weights, gradients = live_bytes(plan)
    held = [weights, gradients, activation_bytes(plan)]
    place = np.arange(max(map(len, held)))
    memory_axes.stackplot(
        place,
        [np.pad(x, (0, len(place) - len(x))) / 2**20 for x in held],
        labels=["full weights", "gradients not yet reduced", "activations kept for backward"],
        colors=[*_COLORS.values(), "tab:gray"],
        alpha=0.7,
        step="post",
    )
    memory_axes.set(ylabel="MiB on one device", ylim=(0, None))
    buckets = spans(plan)
    for row, span in enumerate(buckets):
        color = (_COLORS | _COPY_COLORS)[span.action]
        wire_axes.barh(row, span.alive, left=span.start, color=color, alpha=0.35)
        wire_axes.plot(span.needed, row, marker="|", color=color, markersize=7)
        times = f" x{span.trips}" if span.trips > 1 else ""
        more = f" +{len(span.names) - 1}" if len(span.names) > 1 else ""
        if len(buckets) <= 60:
            label = f" {next(iter(span.names))}{more}{times}"
            wire_axes.text(span.stop + 1, row, label, va="center", fontsize=7)
    wire_axes.invert_yaxis()
    wire_axes.set(
        xlabel="operation of the program (a loop's body once)",
        ylabel="bucket: from sent to dropped; | first use, last gradient",
        yticks=[],
    )
    for axes in (memory_axes, wire_axes):
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    memory_axes.legend(loc="upper right", frameon=False)
    figure.suptitle(title)
    with new_file(path) as filled:
        figure.savefig(filled, dpi=150, format=path.suffix.lower()[1:])
