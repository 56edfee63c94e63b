"""Write tensors as a checkpoint in one of several file formats, and verify the copy."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from jaxzero._first_use import extra_for
from jaxzero._processes import new_directory, new_file
from jaxzero._text import shown
from jaxzero.interop._safetensors import save_tensors
from jaxzero.interop._tensors import AdamMoments, LazyTensor, as_lazy
from jaxzero.interop._torch import DTYPES

from .open import open_checkpoint

Form = Literal["safetensors", "torch", "dcp"]


def write_checkpoint(
    tensors: Mapping[str, LazyTensor],
    path: Path | str,
    *,
    form: Form,
    max_shard_bytes: int = 5 * 10**9,
    source: Path | str | None = None,
) -> Path:
    """Write tensors as a checkpoint, atomically: it is either complete or absent.

    Args:
        tensors: tensors by name.
        path: a directory, or with "torch" a file. An existing checkpoint of that form is replaced.
        form: "safetensors" holds one tensor in memory at a time. "torch" (`torch.save`) and "dcp"
            (`torch.distributed.checkpoint`) need PyTorch, and hold all tensors in memory.
        max_shard_bytes: size limit of a safetensors file, in bytes.
        source: a directory whose config and tokenizer are copied with "safetensors"; the other
            forms hold tensors alone, and ignore it.

    Raises:
        ValueError: `form` is none of these three; or `path` is a file where a directory is needed,
            a directory where a file is needed, or a directory that holds other files than a
            checkpoint's.
        ImportError: the form needs PyTorch, which is not installed.
        OSError: the file system refuses, or is full. Nothing is left behind.
    """
    path = Path(path)
    if form not in get_args(Form):
        raise ValueError(f"`form` must be one of {', '.join(get_args(Form))}; got {form!r}.")
    tensors = {name: as_lazy(tensor, name, "in `tensors`") for name, tensor in tensors.items()}
    if path.is_dir() if form == "torch" else path.is_file():
        raise ValueError(
            f"`path` must be {'a file' if form == 'torch' else 'a directory'} with form={form!r}; "
            f"{str(path)!r} is not. Choose another path."
        )
    if form == "safetensors":
        return save_tensors(tensors, path, max_shard_bytes=max_shard_bytes, source=source)
    with extra_for(f"Writing form={form!r}, unlike safetensors, needs", "torch"):
        import torch
    if form == "dcp":
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        with (
            new_directory(path, replaces=(".metadata", "*.distcp")) as folder,
            warnings.catch_warnings(),
        ):
            # Its warning of `no_dist=True`, which is meant: this process writes all of it.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            content = to_torch(tensors)
            with _errors_of_files():
                save(content, storage_writer=FileSystemWriter(folder), no_dist=True)
        return path
    with new_file(path) as filled:
        content = to_torch(tensors)
        with _errors_of_files(), open(filled, "wb") as file:
            torch.save(content, file)
    return path


@contextlib.contextmanager
def _errors_of_files() -> Iterator[None]:
    """Replace an error that PyTorch raises in the `with` body by the `OSError` that caused it.

    When a disk is full, `torch.save` fails once more while it closes its archive, and reports only
    the second failure ("unexpected pos"). `torch.distributed.checkpoint` wraps errors in a
    `BaseException`.
    """
    try:
        yield
    except BaseException as error:
        failures = getattr(error, "failures", None)  # of a `CheckpointException`, by process
        if not failures and not isinstance(error, Exception):
            raise
        first = next(iter(failures.values()))[0] if failures else error
        cause = first
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None and first is error:
            raise
        raise (cause or first) from None


def check_copy(tensors: Mapping[str, LazyTensor], path: Path | str) -> None:
    """Check that a checkpoint equals the tensors that it was written from, bit for bit.

    Raises:
        ValueError: a tensor is missing, superfluous or different. The message names it.
    """
    copy = open_checkpoint(path)
    alone = sorted(tensors.keys() ^ copy.keys())
    if alone:
        where = "was not written" if alone[0] in tensors else "was not in the source"
        raise ValueError(f"{shown(alone[0])} {where} ({len(alone)} such tensors in {str(path)!r}).")
    for name, tensor in tensors.items():
        wanted, written = tensor.read(), copy[name].read()
        same = wanted.dtype == written.dtype and wanted.shape == written.shape
        if not same or wanted.tobytes() != written.tobytes():
            raise ValueError(
                f"{shown(name)} in {str(path)!r} ({written.dtype}{list(written.shape)}) differs "
                f"from the tensor that was written ({wanted.dtype}{list(wanted.shape)}). The file "
                "was damaged or changed: convert again."
            )


def to_torch(tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """Read lazy tensors into tensors of PyTorch with the same bits, by name."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"Tensor {shown(name)} has dtype {tensor.dtype}, which is not written to files "
                f"of PyTorch. Cast it to one of {', '.join(DTYPES)}."
            )
    return {name: _tensor(tensor.read()) for name, tensor in tensors.items()}


def torch_state_dict(moments: AdamMoments, param_groups: Sequence[Mapping[str, Any]]) -> dict:
    """Convert moments to a state dict for `torch.optim.AdamW(...).load_state_dict`; needs PyTorch.

    Args:
        moments: from `adam_from`, or from a checkpoint.
        param_groups: like those of `optimizer.state_dict()` (`lr`, `betas`, ...), except that
            `params` lists the names of the group's parameters, in the order in which they were
            passed to the optimizer.

    Raises:
        ValueError: a parameter that has moments is in no group, or one is in two groups or is given
            by its number.
    """
    import torch

    if any(isinstance(name, int) for group in param_groups for name in group["params"]):
        raise ValueError(
            "`param_groups` holds the numbers of PyTorch, and moments go by names. "
            "Put names in their place, in the order in which the parameters were passed to the "
            "optimizer: `[{**group, 'params': [names[i] for i in group['params']]} for group in "
            "param_groups]`, with `names = [name for name, _ in model.named_parameters()]`."
        )
    names = [name for group in param_groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    if len(numbers) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"`param_groups` names {shown(twice)} twice, but an optimizer has each parameter once. "
            "Name it in one group."
        )
    missing = sorted(moments.exp_avg.keys() - numbers.keys())
    if missing:
        raise ValueError(
            f"`param_groups` leaves out {shown(missing[0])} ({len(missing)} such parameters), "
            "which has moments. Name every parameter in one group."
        )

    means, squares = (to_torch(kind) for kind in (moments.exp_avg, moments.exp_avg_sq))
    state = {
        number: {
            "step": torch.tensor(float(moments.steps.get(name, moments.step))),
            "exp_avg": means[name],
            "exp_avg_sq": squares[name],
        }
        for name, number in numbers.items()
        if name in moments.exp_avg
    }
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]} for group in param_groups
    ]
    return {"state": state, "param_groups": groups}


def _tensor(array: np.ndarray) -> Any:
    import torch

    # The data is passed as bytes, since PyTorch does not accept the bfloat16 of ml_dtypes, and in a
    # `bytearray`, since it warns of memory that is not writable.
    dtype = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.tobytes()), dtype=dtype).reshape(array.shape)
