"""One way to open a checkpoint, whatever wrote it."""

from collections.abc import Collection
from pathlib import Path

from jaxzero.interop._safetensors import INDEX as SAFETENSORS_INDEX
from jaxzero.interop._safetensors import SINGLE, tensors_in
from jaxzero.interop._tensors import Checkpoint, laid_out_as
from jaxzero.interop._torch import (
    INDEX,
    METADATA,
    WEIGHTS,
    is_deepspeed,
    open_dcp,
    open_deepspeed,
    open_torch_file,
    open_torch_parts,
)


def open_checkpoint(
    path: Path | str, *, key: str | None = None, records: Collection[str] = ()
) -> Checkpoint:
    """Open a checkpoint of PyTorch as a mapping from names to tensors that are read when indexed.

    Reads safetensors (a file, or a directory with one or with parts and their index), files of
    `torch.save` (also in parts), directories of `torch.distributed.checkpoint` (FSDP, FSDP2),
    checkpoints of DeepSpeed ZeRO stages 1 to 3, and universal ones. PyTorch is not needed, and
    nothing that a file pickles is run.

    Args:
        path: a file or a directory. Of DeepSpeed, the directory with `latest`, or that of a step.
        key: of a file that holds several state dicts, which one is the model's.
        records: classes, such as "my_package.Config", that a pickle may name. They are not
            imported: what is kept of such an object is never used.

    Returns:
        The tensors by name. DeepSpeed's are the float32 ones that the optimizer updates.
        `checkpoint.adam()` gives the state of Adam, where there is one.

    Raises:
        ValueError: there is no checkpoint, or it is incomplete, broken, or would run code. The file
            and the tensor are named. Nothing was run.
        NotImplementedError: tensors were cut in a way that is not read here.

    Example:
        >>> checkpoint = interop.open_checkpoint("runs/7b")
        >>> params = zero.shard(interop.load_into(shapes, checkpoint, rules=rules))
    """
    path = Path(path)
    if path.is_file():
        if path.suffix == ".safetensors":
            return Checkpoint(path=path, form="safetensors", tensors=tensors_in(path))
        return open_torch_file(path, key, records)
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} is neither a file nor a directory.")
    if (path / METADATA).is_file():
        with laid_out_as("torch.distributed.checkpoint", path):
            return open_dcp(path)
    if is_deepspeed(path):
        with laid_out_as("DeepSpeed", path):
            return open_deepspeed(path, records)
    # By the names of whole models first: adapters may lie beside them.
    whole = any((path / name).is_file() for name in (SINGLE, SAFETENSORS_INDEX))
    if not whole and ((path / WEIGHTS).is_file() or (path / INDEX).is_file()):
        return open_torch_parts(path, records)
    if whole or any(path.glob("*.safetensors")):
        return Checkpoint(path=path, form="safetensors", tensors=tensors_in(path))
    raise ValueError(
        f"{str(path)!r} holds no checkpoint that is known: no safetensors, no {WEIGHTS}, no "
        f"{METADATA} of torch.distributed.checkpoint, no `latest` of DeepSpeed. Give the directory "
        "that holds one of them, or a file."
    )
