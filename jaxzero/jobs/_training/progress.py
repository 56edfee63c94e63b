"""The progress bar of training, and the summary that is printed at the end."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..._collectives import readable_bytes
from .journal import Row
from .node_bytes import NodeBytes


@contextlib.contextmanager
def progress_bar(
    console: Console, *, completed: int, total: int
) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Show a progress bar; yields a function that advances it by one step and shows its metrics."""
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
    batch = ""
    if "steps_per_update" in metrics:
        batch = f"batch of {metrics['steps_per_update']:.0f} steps "
    return (
        f"loss {metrics['loss']:.3f} accuracy {metrics['accuracy']:.2f} "
        f"cosine {metrics['similarity']:.2f}/{metrics['similarity_others']:.2f} "
        f"{batch}{metrics['pairs_per_second']:.1f} pairs/s"
    )


def print_summary(
    console: Console,
    *,
    scores: Mapping[str, Mapping[str, float]],
    rows: Sequence[Row],
    node_bytes: NodeBytes | None,
    directory: Path,
    torch_difference: float | None,
    seconds: float,
) -> None:
    """Print scores, speed and bytes sent, and where the results are.

    Args:
        console: where to print.
        scores: "before" and "after", each with `mrr_at_10` and `recall_at_1`.
        rows: the "step" rows of the journal.
        node_bytes: bytes of one step; None if there is one node or nothing was trained.
        directory: the run's directory.
        torch_difference: from `export_and_compare`.
        seconds: duration of the job.
    """
    before, after = scores["before"], scores["after"]
    table = Table(title="Held-out retrieval", title_justify="left")
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="right" if column else "left")
    for name, label in (("mrr_at_10", "MRR@10"), ("recall_at_1", "recall@1")):
        change = after[name] - before[name]
        table.add_row(label, f"{before[name]:.3f}", f"{after[name]:.3f}", f"{change:+.3f}")
    console.print(table)

    facts = Table.grid(padding=(0, 2))
    if rows:
        speed = statistics.median(row["pairs_per_second"] for row in rows)
        facts.add_row("steps", f"{rows[-1]['step']}, median {speed:.1f} pairs/s")
    if rows and rows[-1]["skipped"]:
        facts.add_row("not finite", f"{rows[-1]['skipped']:.0f} steps, which changed nothing")
    if rows and "updates" in rows[-1]:
        facts.add_row("updates", _batches(rows))
    if node_bytes:
        facts.add_row("between nodes", _comparison(node_bytes))
    facts.add_row("time", f"{seconds:.0f} s in all")
    facts.add_row("metrics", f"{directory / 'metrics.jsonl'}, {directory / 'loss.png'}")
    if (directory / "tensorboard").exists():
        facts.add_row("TensorBoard", f"tensorboard --logdir {directory.parent}")
    facts.add_row("checkpoints", f"{directory / 'checkpoints'}")
    facts.add_row("PyTorch checkpoint", f"{directory / 'export'}")
    facts.add_row("loaded by PyTorch", _verdict(torch_difference))
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
            r'(`pip install -e ".\[torch]"` in a checkout of jaxzero)'
        )
    return f"embeddings agree, largest difference {difference:.1e}"
