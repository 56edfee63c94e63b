"""Open checkpoints of DeepSpeed: ZeRO stages 1 to 3, and universal checkpoints.

The directory of a step holds `*_model_states.pt` (buffers, frozen parameters, and the shapes of
all parameters) and, for each process, `zero_pp_rank_*_optim_states.pt` (see `zero_partitions`). A
universal checkpoint instead has a folder with unpartitioned tensors (see `universal`).
"""

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from jaxzero._text import shown
from jaxzero.interop._tensors import AdamMoments, Checkpoint, LazyTensor

from .model_state import (
    ModelState,
    check_global_steps,
    check_optimizer_step,
    check_order,
    check_values,
    param_shapes,
    untrained_of_stage_3,
    with_aliases,
)
from .moments import MOMENTS, check_no_others
from .universal import open_universal
from .zero_partitions import check_ranks, fragments_of, join, read_ranks, wrong

LATEST = ("latest", "latest_universal")
_MAX_TAG_BYTES = 4096  # of the name of a directory
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHER_PARALLELISM = ("layer_", "expert_")  # prefixes of files of pipeline and expert parallelism


def is_deepspeed(directory: Path) -> bool:
    """Return whether a directory is, or contains, a checkpoint of DeepSpeed."""
    return any((directory / name).is_file() for name in LATEST) or any(
        _MODEL.fullmatch(path.name) for path in directory.iterdir()
    )


def is_part_of_deepspeed(file: Path) -> bool:
    """Return whether a file, by its name, is the part of one process of a ZeRO run."""
    model = _MODEL.fullmatch(file.name)
    return _OPTIMIZER.fullmatch(file.name) is not None or (model is not None and bool(model[1]))


def open_deepspeed(directory: Path, records: Collection[str]) -> Checkpoint:
    """Open a checkpoint that `engine.save_checkpoint` or `ds_to_universal` wrote.

    Args:
        directory: the directory of a run, whose `latest` file names the newest checkpoint, or of
            one step.
        records: full names of classes that a pickle may name; they are not imported.
    """
    directory = _tagged(directory)
    is_universal = (directory / "zero").is_dir()
    models = _ranked(directory, _MODEL, merged=is_universal)
    if not models:
        raise ValueError(
            f"{str(directory)!r} has no `*_model_states.pt`. Give the directory that holds the "
            "`latest` file of a DeepSpeed run."
        )
    states = [ModelState(file, records, merged=is_universal) for file in models]
    check_global_steps(states)
    if is_universal:
        return open_universal(directory, states, records)
    files = _ranked(directory, _OPTIMIZER)
    if not files:
        raise ValueError(
            f"{str(directory)!r} has no `zero_pp_rank_*_optim_states.pt`, so it was saved without "
            f"ZeRO: its weights are the entry 'module' of {models[0].name}. Open that file, with "
            "`key='module'`."
        )
    return _open_zero(directory, states, files, records)


def _tagged(directory: Path) -> Path:
    for name in LATEST:
        if (directory / name).is_file():
            with (directory / name).open("rb") as opened:
                tag = opened.read(_MAX_TAG_BYTES).decode(errors="replace").strip()
            inside = Path(tag).name == tag and tag not in ("", "..") and tag.isprintable()
            # Not `Path.is_dir`, which raises if a name is too long.
            if not inside or not os.path.isdir(directory / tag):
                raise ValueError(
                    f"{str(directory / name)!r} names {shown(tag)}, which is not a directory "
                    "beside it. Copy that directory too, or give the directory of another step."
                )
            return directory / tag
    return directory


def _ranked(directory: Path, pattern: re.Pattern[str], *, merged: bool = False) -> list[Path]:
    """List the files of all processes whose names match `pattern`, in the order of ranks.

    In a universal checkpoint (`merged`) trained parameters have been merged over model parallelism,
    so only the files of model-parallel rank 0 are listed.

    Raises:
        NotImplementedError: tensor, pipeline or expert parallelism wrote the files, and the
            checkpoint is not universal.
        ValueError: a rank is missing, or has two files.
    """
    files: dict[int, Path] = {}
    for path in directory.iterdir():
        if path.name.startswith(_OTHER_PARALLELISM) and not merged:
            raise NotImplementedError(
                f"{str(path)!r} was written by pipeline or expert parallelism. Convert the "
                "checkpoint with DeepSpeed's `ds_to_universal.py` and open the result."
            )
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]) and merged:
            continue
        if int(match[2]):
            raise NotImplementedError(
                f"{str(path)!r} was written by tensor parallelism. Convert the checkpoint with "
                "DeepSpeed's `ds_to_universal.py` and open the result."
            )
        rank = int(match[1] or 0)
        if rank in files:
            raise ValueError(
                f"{str(path)!r} and {files[rank].name!r} are both of rank {rank}. Files of two "
                "checkpoints lie in one directory: keep those of one."
            )
        files[rank] = path
    missing = sorted(set(range(max(files, default=-1) + 1)) - files.keys())
    if missing:
        raise ValueError(
            f"{str(directory)!r} has files of rank {max(files)}, but none like "
            f"{files[max(files)].name!r} of rank {missing[0]}. Copy the files of all processes."
        )
    return [files[rank] for rank in sorted(files)]


def _open_zero(
    directory: Path, states: list[ModelState], files: list[Path], records: Collection[str]
) -> Checkpoint:
    stage, ranks = read_ranks(files, records)
    check_ranks(ranks)
    check_optimizer_step(stage, states[0], ranks[0])
    groups = param_shapes(states)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    fragments = fragments_of(stage, groups, ranks)
    whole = states[0].tensors(leaving_out=shapes)
    tensors = untrained_of_stage_3(states) if stage == 3 else whole

    def of(kind: str) -> dict[str, LazyTensor]:  # "fp32" or a moment, of all trained parameters
        return {name: join(name, kind, shape, fragments, ranks) for name, shape in shapes.items()}

    def moments(_: Sequence[str] | None = None) -> AdamMoments:
        for rank in ranks:
            check_no_others(rank.entries, f"The optimizer state in {str(rank.file)!r}")
        steps = sorted(ranks[0].steps)  # `check_ranks` has compared them
        if len(steps) != 1:
            what = f"gives its groups the steps {steps} instead of one"
            remedy = "optax has one step count for all; train every parameter in each step."
            raise wrong(ranks[0].file, what, remedy)
        means, squares = map(of, MOMENTS)
        return AdamMoments(step=steps[0], exp_avg=means, exp_avg_sq=squares)

    trained = of("fp32")
    if stage == 3:
        check_order(states[0], groups)
    else:
        check_values(states[0], trained, fragments)
    has_moments = all(kind in rank.flat for rank in ranks for kind in MOMENTS)
    return with_aliases(
        Checkpoint(
            path=directory,
            form=f"DeepSpeed ZeRO-{stage}",
            tensors=tensors | trained,
            moments=moments if has_moments else None,
        ),
        states[0],
        trained,
    )
