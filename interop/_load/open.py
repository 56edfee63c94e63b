"""Open a checkpoint of any known form: the forms are tried one after the other.

A `CheckpointForm` says whether a path is a checkpoint of its form, and opens it as tensors by name.
It recognizes a checkpoint by the names of files. Their content is read only by the form that
recognized it. Forms that a user has added are tried before those of this module.
"""

import abc
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from jaxzero._text import first_names, shown, to_download
from jaxzero.interop._safetensors import INDEX as SAFETENSORS_INDEX
from jaxzero.interop._safetensors import INDEX_SUFFIX, SINGLE, tensors_and_aliases
from jaxzero.interop._tensors import (
    Checkpoint,
    by_plain_name,
    kind_of_file,
    laid_out_as,
    plain_name,
)
from jaxzero.interop._torch import (
    INDEX,
    METADATA,
    WEIGHTS,
    is_deepspeed,
    is_part_of_deepspeed,
    open_dcp,
    open_deepspeed,
    open_torch_file,
    open_torch_parts,
)

from .beside import with_optimizer

_NO_WEIGHTS = (".json", ".jsonl", ".txt", ".md", ".py", ".html", ".xml")


class CheckpointForm(abc.ABC):
    """A file format of checkpoints: recognizes its files, and opens them as named tensors.

    Subclass it, and pass an instance to `open_checkpoint(path, forms=[...])`, or register it with
    `register_checkpoint_form`, so that every `open_checkpoint` tries it.

    Attributes:
        name: for messages, such as "safetensors".
    """

    name: str

    @abc.abstractmethod
    def recognizes(self, path: Path) -> bool:
        """Return whether an existing file or directory is a checkpoint of this form."""

    @abc.abstractmethod
    def open(
        self, path: Path, *, key: str | None = None, records: Collection[str] = ()
    ) -> Checkpoint:
        """Open the checkpoint without reading its tensors.

        Args:
            path: a path that `recognizes` has accepted.
            key: see `open_checkpoint`; a form of one state dict refuses it.
            records: see `open_checkpoint`; a form that holds no pickle ignores it.

        Raises:
            ValueError: the checkpoint is incomplete or broken, or has no entry `key`.
        """


class DistributedCheckpoint(CheckpointForm):
    """The form of `torch.distributed.checkpoint`: a directory, as FSDP and FSDP2 write it."""

    name = "torch.distributed.checkpoint"

    def recognizes(self, path: Path) -> bool:
        is_part = path.name == METADATA or path.suffix == ".distcp"
        return (path / METADATA).is_file() or (path.is_file() and is_part)

    def open(self, path, *, key=None, records=()):
        if path.is_file():
            raise ValueError(
                f"{str(path)!r} is one file of a directory that torch.distributed.checkpoint wrote."
                f" Give the directory, {str(path.parent)!r}."
            )
        with laid_out_as(self.name, path):
            return open_dcp(path, key)


class DeepSpeed(CheckpointForm):
    """The form of DeepSpeed: a directory of ZeRO stages 1 to 3, or a universal checkpoint."""

    name = "DeepSpeed"

    def recognizes(self, path: Path) -> bool:
        return path.is_dir() and is_deepspeed(path)

    def open(self, path, *, key=None, records=()):
        _refuse_key(self.name, path, key)
        with laid_out_as(self.name, path):
            return open_deepspeed(path, records)


class TorchSave(CheckpointForm):
    """The form of `torch.save`: a file, or a directory that holds one file or an index of parts."""

    name = "torch.save"

    def recognizes(self, path: Path) -> bool:
        if path.is_file():
            return not path.name.endswith((".safetensors", INDEX_SUFFIX))
        has_parts = (path / WEIGHTS).is_file() or (path / INDEX).is_file()
        return has_parts and not _is_whole_model(path)

    def open(self, path, *, key=None, records=()):
        if path.is_file() and is_part_of_deepspeed(path):
            raise ValueError(
                f"{str(path)!r} is one file of a checkpoint of DeepSpeed, and holds a part of each "
                f"tensor. Give the directory, {str(path.parent)!r}."
            )
        if path.is_file() and not path.name.endswith(".bin.index.json"):
            return open_torch_file(path, key, records)
        _refuse_key("torch.save in parts", path, key)
        return open_torch_parts(path, records)


class Safetensors(CheckpointForm):
    """The form of safetensors: a file, or a directory that holds one file or an index of parts."""

    name = "safetensors"

    def recognizes(self, path: Path) -> bool:
        if path.is_file():
            return path.name.endswith((".safetensors", INDEX_SUFFIX))
        return _is_whole_model(path) or any(path.glob("*.safetensors"))

    def open(self, path, *, key=None, records=()):
        _refuse_key(self.name, path, key)
        if path.is_dir() and not _is_whole_model(path) and (told := adapter_in(path)):
            raise ValueError(f"{str(path)!r} {told}")
        held, tied = tensors_and_aliases(path)
        tied = by_plain_name(tied, repr(str(path)))
        aliases = {name: plain_name(other) for name, other in tied.items()}
        tensors = by_plain_name(held, repr(str(path)))
        tensors |= {name: tensors[other] for name, other in aliases.items()}
        return Checkpoint(path=path, form=self.name, tensors=tensors, aliases=aliases)


def _refuse_key(form: str, path: Path, key: str | None) -> None:
    if key is not None:
        raise ValueError(
            f"`key` is {key!r}, but {str(path)!r} ({form}) holds the tensors of one model, not "
            "several state dicts. Leave `key` out."
        )


def adapter_in(path: Path) -> str | None:
    """Say what to do with a directory that holds an adapter of PEFT; None if it holds none.

    The text completes a sentence of an error message that begins with the path.
    """
    if not (path / "adapter_config.json").is_file():
        return None
    files = [file.name for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern)]
    return (
        "holds an adapter of PEFT, such as LoRA, and not the model that it changes. Merge them: "
        "`peft.AutoPeftModelForCausalLM.from_pretrained(directory).merge_and_unload()"
        ".save_pretrained(merged)`, and give `merged`. For the tensors of the adapter itself, give "
        f"its file: {first_names(files)}."
    )


def _is_whole_model(path: Path) -> bool:
    """Return whether a directory has the safetensors files of a full model.

    Safetensors files of other names may belong to an adapter.
    """
    return any((path / name).is_file() for name in (SINGLE, SAFETENSORS_INDEX))


_FORMS = (DistributedCheckpoint(), DeepSpeed(), TorchSave(), Safetensors())
_registered: list[CheckpointForm] = []


def register_checkpoint_form(form: CheckpointForm) -> None:
    """Register a form for `open_checkpoint` and everything that uses it, such as `jaxzero inspect`.

    It is tried before the built-in forms, and before the forms that were registered earlier.

    Raises:
        ValueError: it is not an instance of a `CheckpointForm`.
    """
    check_form(form)
    _registered.insert(0, form)


def known_forms() -> tuple[CheckpointForm, ...]:
    """Return all forms in the order in which they are tried: the registered, then the built-in."""
    return (*_registered, *_FORMS)


def check_form(form: object) -> None:
    """Raise `ValueError` if `form` is not an instance of a `CheckpointForm`."""
    if not isinstance(form, CheckpointForm):
        raise ValueError(
            "A form must be an instance of a subclass of `interop.CheckpointForm`, such as "
            f"`MyForm()`; got {form!r}."
        )


def open_checkpoint(
    path: Path | str,
    *,
    key: str | None = None,
    records: Collection[str] = (),
    forms: Sequence[CheckpointForm] = (),
    optimizer: Path | str | None = None,
) -> Checkpoint:
    """Open a checkpoint of PyTorch as a mapping from names to tensors that are read when indexed.

    Reads safetensors (one file, or a directory that holds one file, or parts and an index), files
    of `torch.save` (also in parts) and `torch.jit.save`, directories of
    `torch.distributed.checkpoint` (FSDP, FSDP2), checkpoints of DeepSpeed ZeRO stages 1 to 3, and
    universal ones. PyTorch is not needed, and nothing that a file pickles is run.

    Args:
        path: a file or a directory; for DeepSpeed the directory of a run, which holds `latest`, or
            of one step. An index of Hugging Face stands for the parts that it names.
        key: dotted path of the model's state dict, if a file of `torch.save` or a distributed
            checkpoint holds several. If a distributed checkpoint was saved without flattening its
            dict: what the names of the model begin with, such as "model" of `model.up.weight`.
        records: classes that a pickle may name, such as "my_package.Config", or patterns, such as
            "my_package.*". They are not imported, and objects of these classes are never used.
        forms: forms of your own, tried before those above. `register_checkpoint_form` adds one for
            every call.
        optimizer: a file of `torch.save` with `optimizer.state_dict()`, if the checkpoint has none.
            `optimizer.pt` and `optimizer.bin` in its directory are found.

    Returns:
        The tensors by name, without the components that `torch.compile`, FSDP and activation
        checkpointing add (`_orig_mod` and others). For DeepSpeed, the tensors are the float32
        parameters that the optimizer updates. `checkpoint.adam()` gives the state of Adam, if there
        is one.

    Raises:
        TypeError: `path` is not a path.
        ValueError: there is no checkpoint, or it is incomplete, broken, or would run code, or
            `key` is given where there is one state dict. The file and the tensor are named. Nothing
            was run.
        NotImplementedError: tensors were divided between processes in a way that is not supported,
            such as DeepSpeed's tensor parallelism in a checkpoint that is not universal.

    Example:
        >>> checkpoint = interop.open_checkpoint("runs/7b")
        >>> params = zero.shard(interop.load_into(shapes, checkpoint, rules=rules))
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`path` of a checkpoint must be a path; got a {type(path).__name__}.")
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
    """Describe a file in a directory that is of a known kind but no checkpoint, such as GGUF.

    The first such file is described, in a text such as "'x.gguf' in it is a GGUF file ...", for an
    error message. If there is none, return "".
    """
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
