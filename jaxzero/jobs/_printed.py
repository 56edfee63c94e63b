"""Print memory and communication at the start of a run, a progress bar, and a summary."""

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .._collectives import readable_bytes
from .._mesh import NODE, in_host
from .._plan import Plan
from .._report import LocalReport, Traffic
from .._sharding import ZeroConfig
from .._zero import LocalRounds
from ._data import training_batches
from ._journal import Row
from ._retrieval import LossFn
from ._session import Session, State
from ._settings import LocalOptions, Sharding
from ._setup import Setup, plan_step, zero_config
from ._tasks import Scores

_KINDS = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "wire_state": "wire state",
    "outer_params": "outer parameters",
    "outer_state": "outer optimizer state",
    "residuals": "residuals",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeBytes:
    """Bytes that enter each node in one step, with the job's settings and with plain ZeRO-3.

    Weights and gradients are counted. With local steps, nodes exchange parameters instead, so for
    the job the bytes of these are counted.
    """

    sent: int  # by the job
    round_steps: int  # steps of a round of local steps, over which `sent` is the mean; 0: no rounds
    weights_counted: bool  # False if `sent` counts gradients only; full weights are sent too
    zero3_float32: int  # by plain ZeRO-3, without codecs
    zero3_bfloat16: int  # by plain ZeRO-3 in 16 bits, as in the papers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run: scores on held-out files before and after training, bytes, seconds."""

    before: Scores
    after: Scores
    directory: Path
    node_bytes: NodeBytes | None  # of one step; None if nothing was trained, or on one node
    torch_difference: float | None  # None if PyTorch is not installed, or the model is too large
    seconds: float


def node_bytes(
    setup: Setup, loss: LossFn, tokens: Any, work: Plan | LocalRounds
) -> NodeBytes | None:
    """Count the bytes that enter a node in a step; return None if there is only one node.

    Args:
        setup: devices, sharding, model and optimizer.
        loss: the training loss.
        tokens: shapes and dtypes of the tokens of one step.
        work: the plan of one step, or the rounds of local steps.
    """
    if setup.zero.mesh.shape[NODE] == 1:
        return None

    def count(config: ZeroConfig) -> int:
        zero, params = setup.other_zero(config)
        if isinstance(work, Plan) and config == setup.zero.config:
            plan = work
        else:
            plan = plan_step(zero, params, loss, tokens)
        traffic = zero.report(params, plan=plan).traffic
        assert traffic is not None
        return traffic.node_bytes

    if isinstance(work, Plan):
        sent, round_steps = count(setup.zero.config), 0
    else:
        sent, round_steps = round(work.report().bytes_per_step), work.method.every
    return NodeBytes(
        sent=sent,
        round_steps=round_steps,
        weights_counted=setup.zero.config.stage in (0, 3) or round_steps > 0,
        zero3_float32=count(zero_config(Sharding(wire="float32"))),
        zero3_bfloat16=count(zero_config(Sharding(wire="bfloat16"))),
    )


def print_overview(session: Session, state: State) -> None:
    """Print the bytes that a device holds between steps, and the bytes that a step sends.

    Two numbers are printed for a step: the bytes sent into each node from other nodes, and the
    bytes sent to each device from its own node. With local steps, the mean bytes that nodes
    exchange in a step are printed instead.

    Args:
        session: the session that will train.
        state: the training state before the first step of this session.
    """
    zero = session.setup.zero
    _say(session.console, f"A device holds {_held(state, on_host=False) or 'nothing'}")
    if offloaded := _held(state, on_host=True):
        _say(session.console, f"Host memory holds for each device {offloaded}")
    if session.rounds is not None:
        _say(session.console, _exchanged(session.rounds.report(), session.settings.local))
        return
    report = zero.report(state.params, state.opt_state, plan=session.plan)
    assert report.traffic is not None
    sent = _sent(report.traffic, zero.mesh.shape[NODE])
    if zero.config.stage in (1, 2):  # of shards of new weights, which the compiler gathers
        sent += ", and the whole weights"
    _say(session.console, f"A step sends {sent}")


def print_verified(session: Session, state: State) -> None:
    """Compare the run's first step, computed without codecs, with plain JAX; print the verdict.

    Raises:
        ValueError: the run takes local steps, or no device has the memory for the step in plain JAX
            on one device.
    """
    if session.rounds is not None:
        raise ValueError(
            "`verify` compares steps of all devices together, and `local_steps` are of one node. "
            "Leave one of them out."
        )
    zero, settings = session.setup.zero, session.settings
    batches = training_batches(session.examples.train, zero, settings.optimization)
    report = zero.verify(
        session.loss, state.params, next(batches), has_aux=True, codecs=False, variations=False
    )
    _say(session.console, f"{report.line} {report.first}".strip())


def _held(state: State, *, on_host: bool) -> str:
    """Format the bytes of one device's shards: in host memory if `on_host`, or in device memory."""
    sizes = {name: _bytes(tree, on_host) for name, tree in state.trees.items()}
    held = [f"{readable_bytes(size)} of {_KINDS[name]}" for name, size in sizes.items() if size]
    return _listed(held) if held else ""


def _bytes(tree: Any, on_host: bool) -> int:
    arrays = [x for x in jax.tree.leaves(tree) if in_host(x) == on_host]
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


def _exchanged(report: LocalReport, local: LocalOptions) -> str:
    """Say how many bytes nodes exchange in a step, and after how many steps these are used."""
    sent = readable_bytes(round(report.bytes_per_step))
    plural = "s" if report.delay > 1 else ""
    when = f"used {report.delay} step{plural} later" if report.delay else "for which nodes wait"
    return (
        f"A step sends {sent} into each node on average: all parameters once in {report.every} "
        f"steps, in {report.fragments} messages of {local.local_codec}, {when}"
    )


def _sent(traffic: Traffic, num_nodes: int) -> str:
    """Format the bytes that a step sends into nodes and devices, without the loss's collectives."""
    amounts = []
    if num_nodes > 1:
        amounts.append(f"{readable_bytes(traffic.node_bytes)} into each node")
    inside = sum((t.entering_bytes - t.node_bytes) * t.trips for t in traffic.transfers)
    amounts.append(f"{readable_bytes(inside)} to each device from its own node")
    return _listed(amounts)


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def progress_bar(
    console: Console, *, completed: int, total: int
) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Show a progress bar; yield a function that advances it by one step and shows metrics."""
    columns = (
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("Training", completed=completed, total=total, numbers="compiling")

        def advance(metrics: Mapping[str, float]) -> None:
            progress.update(task, advance=1, numbers=_numbers(metrics))

        yield advance


def _numbers(metrics: Mapping[str, float]) -> str:
    parts = [f"loss {metrics['loss']:.3f}"]
    if "accuracy" in metrics:
        parts.append(f"accuracy {metrics['accuracy']:.2f}")
        parts.append(f"cosine {metrics['similarity']:.2f}/{metrics['similarity_others']:.2f}")
    if "steps_per_update" in metrics:
        parts.append(f"batch of {metrics['steps_per_update']:.0f} steps")
    for name, value in metrics.items():
        if name.endswith("_per_second"):
            parts.append(f"{value:.1f} {name.removesuffix('_per_second')}/s")
    return " ".join(parts)


def print_summary(session: Session, outcome: Outcome) -> None:
    """Print the scores, the speed, the bytes sent, and the folder with the results."""
    task, console, directory = session.setup.task, session.console, outcome.directory
    rows = session.journal.rows("step")
    table = Table(title=task.title, title_justify="left")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="right" if column else "left")
    for name, label in task.labels.items():
        before, after = (getattr(x, name) for x in (outcome.before, outcome.after))
        table.add_row(label, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    console.print(table)

    facts = Table.grid(padding=(0, 2))
    if rows:
        speed = statistics.median(row[f"{task.unit}_per_second"] for row in rows)
        facts.add_row("steps", f"{rows[-1]['step']}, median {speed:.1f} {task.unit}/s")
    if rows and rows[-1]["skipped"]:
        facts.add_row("not finite", f"{rows[-1]['skipped']:.0f} steps, which changed nothing")
    if rows and "updates" in rows[-1]:
        facts.add_row("updates", _batches(rows))
    if outcome.node_bytes:
        facts.add_row("between nodes", _comparison(outcome.node_bytes))
    facts.add_row("time", f"{outcome.seconds:.0f} s in all")
    facts.add_row("metrics", f"{directory / 'metrics.jsonl'}, {directory / 'loss.png'}")
    if (directory / "tensorboard").exists():
        facts.add_row("TensorBoard", f"tensorboard --logdir {directory.parent}")
    facts.add_row("checkpoints", f"{directory / 'checkpoints'}")
    facts.add_row("PyTorch checkpoint", f"{directory / 'export'}")
    facts.add_row("loaded by PyTorch", _verdict(outcome.torch_difference))
    console.print(facts, highlight=False)


def _batches(rows: Sequence[Row]) -> str:
    updates, last = rows[-1]["updates"], rows[-1]
    mean = f", of {last['step'] / updates:.1f} steps on average" if updates else ""
    noise = last.get("noise_scale_steps")
    scale = f"; gradient noise scale {noise:.1f} steps" if noise is not None else ""
    return f"{updates:.0f}{mean}{scale}"


def _comparison(node_bytes: NodeBytes) -> str:
    def beside(name: str, num_bytes: int) -> str:
        return f"{readable_bytes(num_bytes)} in {name} (this is {node_bytes.sent / num_bytes:.0%})"

    sent = readable_bytes(node_bytes.sent)
    if not node_bytes.weights_counted:
        return f"{sent} of gradients entered each node per step; on top come the whole weights"
    what = "weights and gradients"
    if node_bytes.round_steps:
        what = f"parameters, in the mean of rounds of {node_bytes.round_steps} steps,"
    return (
        f"{sent} of {what} entered each node per step; plain ZeRO-3 sends "
        f"{beside('float32', node_bytes.zero3_float32)}, "
        f"{beside('bfloat16', node_bytes.zero3_bfloat16)}"
    )


def _verdict(difference: float | None) -> str:
    if difference is None:
        return (
            "not compared: torch or transformers is missing "
            r'(`pip install "jaxzero\[torch]"`), or the model is too large to be held twice'
        )
    return f"its outputs agree, largest difference {difference:.1e}"
