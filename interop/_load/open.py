"""One way to open a checkpoint, whatever wrote it."""

from collections.abc import Collection, Sequence
from pathlib import Path

from jaxzero._text import first_names, shown, to_download
from jaxzero.interop._tensors import Checkpoint, kind_of_file
from jaxzero.interop._torch import METADATA, WEIGHTS

from .beside import with_optimizer
from .forms import CheckpointForm, adapter_in, check_form, known_forms

_NO_WEIGHTS = (".json", ".jsonl", ".txt", ".md", ".py", ".html", ".xml")


def open_checkpoint(
    path: Path | str,
    *,
    key: str | None = None,
    records: Collection[str] = (),
    forms: Sequence[CheckpointForm] = (),
    optimizer: Path | str | None = None,
) -> Checkpoint:
    """Open a checkpoint of PyTorch as a mapping from names to tensors that are read when indexed.

    Reads safetensors (a file, or a directory with one or with parts and their index), files of
    `torch.save` (also in parts) and `torch.jit.save`, directories of `torch.distributed.checkpoint`
    (FSDP, FSDP2), checkpoints of DeepSpeed ZeRO stages 1 to 3, and universal ones. PyTorch is not
    needed, and nothing that a file pickles is run.

    Args:
        path: a file or a directory: for DeepSpeed the one with `latest`, or that of a step. An
            index of Hugging Face stands for the parts that it names.
        key: dotted path of the model's state dict, where a file of `torch.save`, or a distributed
            checkpoint, holds several. Of a distributed checkpoint that was saved without flattening
            its dict: what the names of the model begin with, such as "model" of `model.up.weight`.
        records: classes that a pickle may name, such as "my_package.Config", or patterns, such as
            "my_package.*". They are not imported: what is kept of such an object is never used.
        forms: forms of your own, tried before those above. `register_checkpoint_form` adds one for
            every call.
        optimizer: a file of `torch.save` with `optimizer.state_dict()`, if the checkpoint has none.
            `optimizer.pt` and `optimizer.bin` in its directory are found.

    Returns:
        The tensors by name, without the components that `torch.compile`, FSDP and activation
        checkpointing add (`_orig_mod` and others). DeepSpeed's are the float32 ones that the
        optimizer updates. `checkpoint.adam()` gives the state of Adam, where there is one.

    Raises:
        ValueError: there is no checkpoint, or it is incomplete, broken, or would run code, or
            `key` is given where there is one state dict. The file and the tensor are named. Nothing
            was run.
        NotImplementedError: tensors were cut in a way that is not read here.

    Example:
        >>> checkpoint = interop.open_checkpoint("runs/7b")
        >>> params = zero.shard(interop.load_into(shapes, checkpoint, rules=rules))
    """
    path = Path(path)
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"{str(path)!r} is neither a file nor a directory.{to_download(path)}")
    for form in forms:
        check_form(form)
    for form in (*forms, *known_forms()):
        if form.recognizes(path):
            return with_optimizer(_opened(form, path, key, records), path, optimizer, records)
    if (told := adapter_in(path)) is not None:
        raise ValueError(f"{str(path)!r} {told}")
    inside = [each.name for each in sorted(path.iterdir()) if _is_checkpoint(each)]
    raise ValueError(
        f"{str(path)!r} holds no checkpoint that is known: no safetensors, no {WEIGHTS}, no "
        f"{METADATA} of torch.distributed.checkpoint, no `latest` of DeepSpeed. "
        + _others_in(path)
        + (
            f"Give one of the directories in it that are checkpoints: {first_names(inside)}."
            if inside
            else "Give the directory that holds one of them, or a file."
        )
    )


def _others_in(path: Path) -> str:
    """Say what the first file is that is known by its first bytes."""
    files = (x for x in sorted(path.iterdir()) if x.is_file() and x.suffix not in _NO_WEIGHTS)
    told = ((file, kind_of_file(file)) for file in files)
    return next((f"{shown(file.name)} in it {kind} " for file, kind in told if kind), "")


def _is_checkpoint(path: Path) -> bool:
    try:
        return path.is_dir() and any(form.recognizes(path) for form in known_forms())
    except OSError:  # it cannot be listed
        return False


def _opened(
    form: CheckpointForm, path: Path, key: str | None, records: Collection[str]
) -> Checkpoint:
    checkpoint = form.open(path, key=key, records=records)
    if not isinstance(checkpoint, Checkpoint):
        raise ValueError(
            f"`open` of the form {type(form).__name__} must return an `interop.Checkpoint`; got "
            f"{type(checkpoint).__name__}. `interop.Checkpoint(path=path, form=name, tensors=...)` "
            "makes one of lazy tensors by name."
        )
    return checkpoint
