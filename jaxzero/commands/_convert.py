"""`jaxzero convert`: convert a checkpoint from one format to another."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ..interop import (
    Checkpoint,
    LazyTensor,
    check_copy,
    compare_with_transformers,
    open_checkpoint,
    write_checkpoint,
)
from ._inspect import find_checkpoint, line_of
from ._settings import Convert

_FILES = (".bin", ".pt", ".pth", ".ckpt")  # suffixes of files that `torch.save` writes


def convert(settings: Convert, console: Console) -> None:
    """Write a copy of a checkpoint in another format; compare both if `settings` asks for it.

    Raises:
        ValueError: the source cannot be opened, the target exists or ends in .safetensors,
            `settings.dtype` cannot hold a value, the copy or its model's outputs differ from the
            source's, or the outputs cannot be compared.
    """
    if settings.target.exists():
        raise ValueError(
            f"{str(settings.target)!r} exists. Name a target that does not: nothing is replaced."
        )
    if (own := find_checkpoint(settings.source)) is not None:
        raise ValueError(
            f"{str(own)!r} is a checkpoint of jaxzero, which holds a state to resume from. Convert "
            "the weights that the run has exported (`jaxzero train`: the folder `export`), or "
            "restore it with `jz.Checkpoints` and write them with `interop.save_tensors`."
        )
    checkpoint = open_checkpoint(settings.source, key=settings.key, records=settings.records)
    form = settings.form or ("torch" if settings.target.suffix in _FILES else "safetensors")
    if settings.target.suffix == ".safetensors":
        raise ValueError(
            f"{str(settings.target)!r} would be a directory: safetensors are written with their "
            f"config and index. Name it {settings.target.stem!r}."
        )
    _check_outputs_possible(settings, form)
    tensors = {name: _cast(x, settings.dtype) for name, x in checkpoint.items()}
    changed = any(tensor.dtype != checkpoint[name].dtype for name, tensor in tensors.items())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        total = sum(tensor.nbytes for tensor in tensors.values())

        def watched(what: str) -> dict[str, LazyTensor]:
            report = functools.partial(progress.advance, progress.add_task(what, total=total))
            return {name: _Watched(x, report) for name, x in tensors.items()}

        write_checkpoint(
            watched("Converting"),
            settings.target,
            form=form,
            max_shard_bytes=int(settings.max_shard_gb * 1e9),
            source=settings.source if settings.source.is_dir() else None,
        )
        if settings.check:
            check_copy(watched("Checking"), settings.target)
    console.print(
        line_of(
            f"{len(tensors)} tensors of {checkpoint.form} written to {settings.target} as {form}"
            f"{_compared(settings, changed) if settings.check else ''}."
        ),
        highlight=False,
        soft_wrap=True,
    )
    if settings.check_outputs or settings.check_layers:
        compared = compare_with_transformers(settings.target, submodules=settings.check_layers)
        console.out(str(compared), highlight=False)
        if not compared.agrees:
            raise ValueError(
                f"{str(settings.target)!r} was written, but transformers computes something else "
                "with it than jaxzero does."
            )
    if checkpoint.moments is not None:
        text = f"The optimizer state was not copied: {_readable(checkpoint)}"
        console.print(line_of(text), highlight=False, soft_wrap=True)


def _check_outputs_possible(settings: Convert, form: str) -> None:
    asked = settings.check_outputs or settings.check_layers
    if asked and not (form == "safetensors" and (settings.source / "config.json").is_file()):
        raise ValueError(
            "`check_outputs` needs a source with a `config.json`, and a target that is a directory "
            f"of safetensors; got {str(settings.source)!r}, and {str(settings.target)!r} as {form}."
        )


def _readable(checkpoint: Checkpoint) -> str:
    try:
        checkpoint.adam()
    except ValueError as error:
        return str(error)
    return "`interop.load_adam` reads it."


def _compared(settings: Convert, changed: bool) -> str:
    if changed:
        return f", and every value is that of the source, rounded to {settings.dtype}"
    return ", and every bit is the same"


def _cast(tensor: LazyTensor, dtype: str | None) -> LazyTensor:
    floating = jnp.issubdtype(tensor.dtype, jnp.floating)
    return tensor.astype(jnp.dtype(dtype)) if dtype is not None and floating else tensor


class _Watched(LazyTensor):
    """A lazy tensor that reports how many bytes are read, such as to a progress bar."""

    def __init__(self, tensor: LazyTensor, report: Callable[[int], None]):
        self.shape, self.dtype, self.label = tensor.shape, tensor.dtype, tensor.label
        self._tensor, self._report = tensor, report

    def _read_box(self, box: tuple[tuple[int, int], ...]) -> np.ndarray:
        array = self._tensor[tuple(slice(*bounds) for bounds in box)]
        self._report(array.nbytes)
        return array
