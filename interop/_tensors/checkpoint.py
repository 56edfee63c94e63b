"""An opened PyTorch checkpoint of any format: tensors by name, and the moments of Adam."""

import collections
import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxzero._collectives import readable_bytes
from jaxzero._regular_file import IrregularFile, read_regular
from jaxzero._text import escaped, first_names, shown

from .lazy import LazyTensor

_WHOLE = ("model.safetensors", "pytorch_model.bin")  # transformers reads these before an index
_MAX_INDEX_BYTES = 2**26  # 100 bytes for each tensor: far more than models have
Moments = Callable[[Sequence[str] | None], "AdamMoments"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AdamMoments:
    """The moments and step counts of Adam, by the names of the parameters.

    Both PyTorch and optax store the moments without bias correction (division by `1 - beta**step`),
    so they are copied unchanged.
    """

    step: int  # number of updates so far: the most that a parameter took
    exp_avg: Mapping[str, LazyTensor]  # mean of gradients; `mu` in optax
    exp_avg_sq: Mapping[str, LazyTensor]  # mean of squared gradients; `nu` in optax
    # Number of updates of parameters that took fewer, such as those of a layer that was added late.
    steps: Mapping[str, int] = dataclasses.field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.999)  # decay of the means; PyTorch's defaults if unknown

    def __repr__(self) -> str:
        both = [*self.exp_avg.values(), *self.exp_avg_sq.values()]
        return f"<AdamMoments after {self.steps_text}: {_summary(both)}>"

    @property
    def steps_text(self) -> str:
        """The number of steps as text; `3 steps (fewer of 2 parameters)` if two took fewer."""
        return f"{self.step} steps" + (
            f" (fewer of {len(self.steps)} parameters)" if self.steps else ""
        )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Checkpoint(Mapping[str, LazyTensor]):
    """An opened checkpoint: a mapping from names to lazy tensors.

    Attributes:
        path: file or directory of the checkpoint.
        form: its format, such as "safetensors" or "DeepSpeed ZeRO-3".
        tensors: name -> tensor; read when indexed.
        aliases: name of a tied weight -> name of the tensor that it shares.
        moments: reads the moments of Adam, given `names` (see `adam`); None if there are none.
        in_order: whether `tensors` are in the order of the model's state dict; a format that sorts
            them by name loses it.
    """

    path: Path
    form: str
    tensors: Mapping[str, LazyTensor]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    moments: Moments | None = None
    in_order: bool = False

    def __getitem__(self, name: str) -> LazyTensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        parts = [_summary([x for name, x in self.tensors.items() if name not in self.aliases])]
        parts += [f"{len(self.aliases)} more names of them"] if self.aliases else []
        parts += ["optimizer state"] if self.moments is not None else []
        where = escaped(repr(str(self.path)))
        return f"<Checkpoint {where} ({escaped(self.form)}): {', '.join(parts)}>"

    def adam(self, names: Sequence[str] | None = None) -> AdamMoments:
        """Return the state of Adam or AdamW.

        Args:
            names: names of the parameters in the order in which they were passed to the optimizer.
                Needed if the checkpoint identifies parameters by number and the numbers cannot be
                matched to names.

        Raises:
            ValueError: the state is absent or incomplete, or `names` is missing or does not fit.
        """
        if self.moments is None:
            raise ValueError(
                f"{str(self.path)!r} ({self.form}) holds no optimizer state of Adam, the "
                "only one that is read. Give the checkpoint that was written for resuming, or the "
                "optimizer's file, as `open_checkpoint(path, optimizer=file)`; or start with a new "
                "state."
            )
        with laid_out_as(self.form, self.path):
            return self.moments(names)


def other_names(source: Mapping[str, Any], used: Collection[str]) -> list[str]:
    """Return the unused names of tied weights of which another name is used.

    Args:
        source: the tensors by name; a `Checkpoint` knows which names share a tensor.
        used: the names that are used, such as those in rules.
    """
    aliases: Mapping[str, str] = getattr(source, "aliases", {})
    if not aliases:
        return []
    tied = {aliases.get(name, name) for name in used}
    return [name for name in source if name not in used and aliases.get(name, name) in tied]


def _summary(tensors: Sequence[LazyTensor]) -> str:
    """Describe the number, bytes and dtypes of tensors: `3 tensors of 1.2 MiB, float32 (3)`."""
    counts = collections.Counter(str(tensor.dtype) for tensor in tensors)
    num_bytes = readable_bytes(sum(tensor.nbytes for tensor in tensors))
    kinds = "".join(f", {dtype} ({count})" for dtype, count in counts.most_common())
    return f"{len(tensors)} tensors of {num_bytes}{kinds}"


def read_index(index: Path, kind: str, *, was_named: bool) -> dict[str, str]:
    """Read an index of Hugging Face: name of each tensor -> name of a file beside the index.

    Args:
        index: path of the index.
        kind: format of the files, for messages.
        was_named: True if the user gave the path of the index itself, not of its directory.

    Raises:
        ValueError: the index is broken, or names a file in another directory; or, unless the user
            named the index, a model in one file lies beside it, which may be the one to read.
    """
    file_of: dict[str, str] = {}
    try:
        file_of = json.loads(read_regular(index, _MAX_INDEX_BYTES))["weight_map"]
        # A path such as `../other` would lead out of the checkpoint's directory.
        others = [x for x in file_of.values() if not isinstance(x, str) or Path(x).name != x]
        wrong = f"it names {shown(others[0])}, which is not a file beside it" if others else ""
        wrong = wrong or ("" if file_of else "it has an empty `weight_map`")
    except IrregularFile:  # a `ValueError` that says itself what to do
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        wrong = f"its `weight_map` must give files ({type(error).__name__}: {escaped(error)})"
    if wrong:
        raise ValueError(
            f"{str(index)!r} is not an index of {kind} files: {wrong}. Copy or download the "
            "checkpoint again."
        )
    if not was_named:
        _check_no_other(index, file_of.values())
    return file_of


def _check_no_other(index: Path, files: Iterable[str]) -> None:
    """Raise `ValueError` if a model in one file lies beside an index that names other files.

    When a model in one file is saved over a model in parts, or the reverse, the older files are
    left behind. transformers reads the model in one file, whichever is newer.

    Args:
        index: path of the index.
        files: names of the files that the index lists.
    """
    whole = index.parent / index.name.partition(".index.")[0]
    files = sorted(set(files))
    if not whole.is_file() or whole.name in files:
        return
    missing = [name for name in files if not (index.parent / name).is_file()]
    of_them = f", of which {len(missing)} are missing" if missing else ""
    reader = "; transformers reads " + repr(whole.name) if whole.name in _WHOLE else ""
    raise ValueError(
        f"{str(index.parent)!r} holds {whole.name!r}, and {index.name!r}, which names other files: "
        f"{first_names(files)}{of_them}. One of the two was left behind when the model was saved "
        f"again{reader}. Give the path of the one to read, {str(whole)!r} or {str(index)!r}, or "
        "remove the other."
    )


@contextlib.contextmanager
def laid_out_as(form: str, path: Path) -> Iterator[None]:
    """Turn lookup errors in the body into a `ValueError` that names the checkpoint and form."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} does not have the layout of {form} ({type(error).__name__}: "
            f"{escaped(error)}). Copy the checkpoint again; if it is complete, its version is not "
            "supported."
        ) from error
