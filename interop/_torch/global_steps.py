"""Compare the steps in DeepSpeed's model states with each other and with those of the optimizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxzero._text import shown
from jaxzero._warnings import warn

from .partition import Rank


def check_global_steps(models: Sequence[Path], states: Sequence[Mapping[str, Any]]) -> None:
    """Check that the model states of all processes are of one step.

    Args:
        models: their files.
        states: what they hold.

    Raises:
        ValueError: two of them have different steps.
    """
    first = states[0].get("global_steps")
    for file, state in zip(models, states, strict=True):
        step = state.get("global_steps")
        if type(step) is type(first) is int and step != first:
            raise ValueError(
                f"{str(file)!r} is of step {step}, but {models[0].name} of step {first}. The files "
                "belong to different checkpoints: copy those of one."
            )


def check_optimizer_step(stage: int, model: Path, state: Mapping[str, Any], rank: Rank) -> None:
    """Compare the step of a model state with that of the optimizer states beside it.

    The optimizer may have taken fewer steps, if the run once loaded a checkpoint without its
    optimizer. In stages 1 and 2 that is no question, since parameters are compared with the model.
    In stage 3 the files may also be of two checkpoints, so there it is a warning.

    Args:
        stage: of ZeRO.
        model: file of a model state.
        state: what it holds.
        rank: an optimizer state, whose steps are those of all (`check_ranks`).

    Raises:
        ValueError: the optimizer has taken more steps than the run.
    """
    run, skipped = state.get("global_steps"), state.get("skipped_steps", 0)
    if type(run) is not int or type(skipped) is not int or not rank.steps:
        return
    taken = max(rank.steps)
    what = f"{str(rank.file)!r} is of an optimizer's step {shown(taken)}, but {model.name} of step"
    if taken > run:
        raise ValueError(
            f"{what} {run}. The files belong to different checkpoints: copy those of one."
        )
    if stage == 3 and taken != run - skipped:
        after = f", of which {skipped} were skipped" if skipped else ""
        warn(
            f"{what} {run}{after}. If the run did not restart its optimizer, the files belong to "
            "different checkpoints: then buffers and frozen parameters, which are in the model "
            "states, are those of another step. Copy the files of one checkpoint."
        )
