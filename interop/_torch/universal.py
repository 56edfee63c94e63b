"""Open universal checkpoints of DeepSpeed, which `ds_to_universal.py` makes.

`zero/NAME/` holds the tensors of a trained parameter, whole: `fp32.pt`, `exp_avg.pt`,
`exp_avg_sq.pt` and `step.pt`. If the checkpoint was converted from stage 3, tensors are flat,
except where tensor parallelism was merged, and the step is in `zero/optimizer_state.pt` only.

Shapes of stage 3, buffers and untrained parameters are in the model states, which the converter
copies. From stages 1 and 2 the converter also writes `fp32.pt` for tensors without optimizer state.
It copies these tensors from the first model state that has them, casts them to float32, and does
not merge them over tensor parallelism. The model state is exact, so it is read instead.

https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxzero._text import shown
from jaxzero.interop._tensors import (
    AdamMoments,
    Checkpoint,
    LazyTensor,
    by_plain_name,
    called,
    plain_name,
)

from .model_state import ModelState, param_shapes, untrained_of_stage_3, with_aliases
from .moments import MOMENTS, check_no_others, gather_moments, read_step
from .torch_file import read_torch_file
from .zero_partitions import Shape

_OPTIMIZER = "optimizer_state.pt"


def open_universal(
    directory: Path, states: Sequence[ModelState], records: Collection[str]
) -> Checkpoint:
    """Open a universal checkpoint of one step.

    Args:
        directory: holds the model states, and a folder `zero`.
        states: the model states.
        records: full names of classes that a pickle may name; they are not imported.
    """
    folders = _folders(directory / "zero")
    trained = [name for name, folder in folders.items() if _is_trained(folder)]
    of_stage_3 = states[0].file.name.startswith("zero_")
    groups = param_shapes(states) if of_stage_3 else []
    shapes = {name: shape for group in groups for name, shape in group.items()}
    cut = _of_tensor_parallelism(directory, "zero_pp_rank_*_" if of_stage_3 else "")

    def whole(name: str, kind: str) -> LazyTensor:
        held = _whole(folders[name], kind, records)
        return _shaped(held, folders[name], kind, shapes, cut) if of_stage_3 else held

    unmerged = states[0].tensors(leaving_out=trained)
    others = untrained_of_stage_3(states) if of_stage_3 else unmerged
    _check_whole(states[0], folders | others, trained, cut)
    kept = {name: whole(name, "fp32") for name in folders}
    if not of_stage_3:
        _check_copies(folders, kept, others)
        kept = {name: tensor for name, tensor in kept.items() if name not in others}

    def moments(_: Sequence[str] | None = None) -> AdamMoments:
        file = directory / "zero" / _OPTIMIZER
        optimizer = functools.cache(lambda: _content(file, records))  # of all parameters
        for name in trained:
            check_no_others(_entries(folders[name]), f"The optimizer state of {shown(name)}")
        if file.exists():
            _check_optimizer(optimizer(), file)
        state = {
            name: {kind: whole(name, kind) for kind in MOMENTS}
            | {"step": _step(folders[name], records, optimizer)}
            for name in trained
        }
        sizes = {name: tensor.shape for name, tensor in kept.items()}
        return gather_moments(state, sizes, repr(str(directory)))

    return with_aliases(
        Checkpoint(
            path=directory,
            form="DeepSpeed universal",
            tensors=others | kept,
            moments=moments if trained else None,
        ),
        states[0],
        trained,
        cut=bool(cut),
    )


def _folders(directory: Path) -> dict[str, Path]:
    """Map the name of each parameter to its folder in `directory`.

    Activation checkpointing gives a parameter two names, each with a folder. The result has only
    the folder with the moments. The other folder is a copy of the tensor in the model state, which
    `ds_to_universal.py` makes.
    """
    folders = [path for path in sorted(directory.iterdir()) if path.is_dir()]
    trained = {plain_name(path.name) for path in folders if _is_trained(path)}
    return by_plain_name(
        {x.name: x for x in folders if _is_trained(x) or plain_name(x.name) not in trained},
        repr(str(directory)),
    )


def _entries(folder: Path) -> set[str]:
    """Return the names of a parameter's optimizer entries in its folder, such as `exp_avg`."""
    return {path.stem for path in folder.glob("*.pt")} - {"fp32"}


def _is_trained(folder: Path) -> bool:
    return bool(_entries(folder))


def _check_optimizer(optimizer: Any, file: Path) -> None:
    """Raise `ValueError` if `optimizer_state.pt` belongs to another optimizer than Adam.

    Older converters write only Adam's entries into the folders, so only this file shows whether the
    optimizer has other entries.
    """
    what, groups = f"The optimizer in {str(file)!r}", optimizer.get("param_groups") or ()
    for state in _states_in(optimizer):
        check_no_others(state, what)
    for group in groups:
        for option in ("amsgrad", "momentum_decay"):  # the second: of NAdam
            if isinstance(group, Mapping) and group.get(option):
                raise ValueError(
                    f"{what} has the option `{option}`, {shown(group[option])}, and is no Adam. No "
                    "other optimizer is read. Weights can be loaded without it: start with a new "
                    "optimizer state."
                )


def _shaped(
    tensor: LazyTensor, folder: Path, kind: str, shapes: Mapping[str, Shape], cut: Sequence[Path]
) -> LazyTensor:
    """Give a tensor that was converted from stage 3 the shape of its parameter.

    Without tensor parallelism the tensor is stored flat. If it was merged over tensor parallelism,
    it is stored in its full shape; `shapes` then has the shape of one process's part, which may
    differ from the full shape in one dimension.

    Args:
        tensor: the stored tensor.
        folder: the folder of its parameter.
        kind: which tensor of the parameter it is, such as "fp32".
        shapes: name -> shape, from the model states.
        cut: model states of the other processes of tensor parallelism; empty without it.
    """
    shape = shapes.get(plain_name(folder.name))
    if shape is None:
        raise ValueError(
            f"{str(folder)!r} is of no parameter that `param_shapes` in the model states gives a "
            "shape. Files belong to different checkpoints: convert again."
        )
    if tensor.shape == shape:
        return tensor
    if not cut and tensor.shape == (math.prod(shape),):
        return tensor.reshape(shape)
    pairs = zip(tensor.shape, shape, strict=False)
    if not cut or len(tensor.shape) != len(shape) or sum(a != b for a, b in pairs) > 1:
        raise ValueError(
            f"{str(folder / kind) + '.pt'!r} has shape {tensor.shape}, but `param_shapes` in the "
            f"model states gives {shape}. Files belong to different checkpoints: convert again."
        )
    return tensor


def _check_copies(
    folders: Mapping[str, Path], kept: Mapping[str, LazyTensor], others: Mapping[str, LazyTensor]
) -> None:
    """Raise unless the converter's copies have the shapes of the tensors in the model state.

    Args:
        folders: name -> folder with the converter's copy.
        kept: name -> tensor in the folder.
        others: name -> tensor in the first model state.
    """
    for name in kept.keys() & others.keys():
        if kept[name].shape != others[name].shape:
            raise ValueError(
                f"{str(folders[name] / 'fp32.pt')!r} has shape {kept[name].shape}, but the tensor "
                f"in the first model state, of which it is a copy, has {others[name].shape}. Files "
                "belong to different checkpoints: convert again."
            )


def _of_tensor_parallelism(directory: Path, prefix: str) -> list[Path]:
    """List the model states of all processes of tensor or pipeline parallelism but the first.

    `prefix` is the glob pattern of what stands before `mp_rank_` in the names of the files.
    """
    files = sorted(directory.glob(f"{prefix}mp_rank_*_model_states.pt"))
    return [path for path in files if "mp_rank_00_" not in path.name]


def _check_whole(
    state: ModelState, names: Collection[str], trained: Collection[str], cut: Sequence[Path]
) -> None:
    """Raise if a parameter would be read from a model state that may hold only a part of it.

    Args:
        state: the first model state.
        names: all parameters and buffers that are read.
        trained: parameters with optimizer state, which were merged over tensor parallelism.
        cut: model states of the other processes of tensor parallelism; empty without it.
    """
    merged = {*trained, *(name for name, other in state.shared.items() if other in trained)}
    parameters = [name for name in names if name not in merged and name not in state.buffers]
    if cut and parameters:
        raise NotImplementedError(
            f"{shown(parameters[0])} ({len(parameters)} such parameters) has no optimizer state, "
            "so it was not merged over tensor parallelism: each of the model states, such as "
            f"{str(cut[0])!r}, may hold a part of it. Gather the weights in the run, and save them "
            "with `torch.save`."
        )


def _step(folder: Path, records: Collection[str], read_optimizer: Callable[[], Any]) -> Any:
    if (folder / "step.pt").exists():
        return _content(folder / "step.pt", records)
    groups = [group for group in _states_in(read_optimizer()) if isinstance(group, Mapping)]
    steps = {read_step(group["step"]) for group in groups if "step" in group}
    if len(steps) != 1:
        raise ValueError(
            f"{str(folder)!r} lacks step.pt, and {str(folder.parent / _OPTIMIZER)!r} gives the "
            f"steps {sorted(steps)} instead of one. Convert the checkpoint again."
        )
    return steps.pop()


def _states_in(optimizer: Any) -> Collection[Any]:
    """Return the dicts of entries that `zero/optimizer_state.pt`, read as `optimizer`, holds."""
    held = optimizer.get("optimizer_state_dict") if isinstance(optimizer, Mapping) else None
    states = held.get("state") if isinstance(held, Mapping) else None
    return states.values() if isinstance(states, Mapping) else ()


def _whole(folder: Path, kind: str, records: Collection[str]) -> LazyTensor:
    held = _content(folder / f"{kind}.pt", records)
    if not isinstance(held, LazyTensor):
        raise ValueError(
            f"{str(folder / kind) + '.pt'!r} holds no tensor. Convert the checkpoint again."
        )
    return called(f"{folder.name}.{kind}", held)


def _content(file: Path, records: Collection[str]) -> Any:
    if not file.exists():
        raise ValueError(f"{str(file.parent)!r} lacks {file.name}. Convert the checkpoint again.")
    held = read_torch_file(file, records=records)
    return held["param"] if isinstance(held, Mapping) and "param" in held else held
