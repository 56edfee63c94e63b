"""An opened PyTorch checkpoint of any format: tensors by name, and the moments of Adam."""

import collections
import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from jaxzero._collectives import readable_bytes
from jaxzero._regular_file import IrregularFile, read_regular
from jaxzero._text import escaped, first_names, shown

from .lazy import LazyTensor

_WHOLE = ("model.safetensors", "pytorch_model.bin")  # before their indexes, for transformers
_ADAM = ("exp_avg", "exp_avg_sq", "step")
_MAX_INDEX_BYTES = 2**26
Moments = Callable[[Sequence[str] | None], "AdamMoments"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AdamMoments:
    """Adam's moments, by the names of the parameters.

    Both PyTorch and optax store the means without bias correction (division by `1 - beta**step`),
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
        """The number of steps, for people: `3 steps (fewer of 2 parameters)`."""
        return f"{self.step} steps" + (
            f" (fewer of {len(self.steps)} parameters)" if self.steps else ""
        )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Checkpoint(Mapping[str, LazyTensor]):
    """Lazy tensors by name.

    Attributes:
        path: file or directory of the checkpoint.
        form: its format, such as "safetensors" or "DeepSpeed ZeRO-3".
        tensors: name -> tensor; read when indexed.
        aliases: name of a tied weight -> name of the tensor that it shares.
        moments: reads the moments of Adam, given `names` (see `adam`); None if there are none.
        in_order: whether `tensors` are in the order of the model's state dict.
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
    """Names of a checkpoint that are not used, of tied weights that are used by another name."""
    aliases: Mapping[str, str] = getattr(source, "aliases", {})
    if not aliases:
        return []
    tied = {aliases.get(name, name) for name in used}
    return [name for name in source if name not in used and aliases.get(name, name) in tied]


def _summary(tensors: Sequence[LazyTensor]) -> str:
    """Number, bytes and dtypes of tensors: `3 tensors of 1.2 MiB, float32 (2), int64 (1)`."""
    counts = collections.Counter(str(tensor.dtype) for tensor in tensors)
    num_bytes = readable_bytes(sum(tensor.nbytes for tensor in tensors))
    kinds = "".join(f", {dtype} ({count})" for dtype, count in counts.most_common())
    return f"{len(tensors)} tensors of {num_bytes}{kinds}"


def gather_moments(
    state: Mapping[str, Mapping],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    step: Callable[[object], int],
    betas: object = None,
) -> AdamMoments:
    """Convert an optimizer state that is grouped by parameter to `AdamMoments`.

    Args:
        state: name -> dict of `exp_avg`, `exp_avg_sq` and `step`.
        shapes: name -> shape of the parameter.
        where: the file or directory, for messages.
        step: converts a stored step (a number or a tensor) to an integer.
        betas: what the file says that they are.
    """
    means, squares, steps = {}, {}, {}
    for name, held in state.items():
        check_is_adam(held, f"The optimizer state of {shown(name)} in {where}")
        for key in ("exp_avg", "exp_avg_sq"):
            if name in shapes and tuple(held[key].shape) != tuple(shapes[name]):
                raise ValueError(
                    f"`{key}` of {shown(name)} in {where} has shape {tuple(held[key].shape)}, but "
                    f"the parameter has {tuple(shapes[name])}. Model and optimizer state belong to "
                    "different runs, or `names` is in another order than the optimizer's."
                )
        means[name], squares[name] = held["exp_avg"], held["exp_avg_sq"]
        steps[name] = step(held["step"])
    if not steps:
        raise ValueError(f"{where} has no optimizer state of a parameter. Start with a new one.")
    last = max(steps.values())
    fewer = {name: count for name, count in steps.items() if count != last}
    known = {"betas": betas} if _are_betas(betas) else {}
    return AdamMoments(step=last, exp_avg=means, exp_avg_sq=squares, steps=fewer, **known)


def _are_betas(value: Any) -> TypeGuard[tuple[float, float]]:
    pair = isinstance(value, tuple | list) and len(value) == 2
    return pair and all(type(beta) is float and 0 <= beta < 1 for beta in value)


def check_no_others(entries: Iterable[Any], what: str) -> None:
    """Raise `ValueError` if an optimizer state has entries that Adam's lacks; see `check_is_adam`.

    It may lack some of Adam's.
    """
    check_is_adam(dict.fromkeys((*_ADAM, *entries)), what)


def check_is_adam(held: Mapping, what: str) -> None:
    """Raise `ValueError` unless the optimizer state of a parameter has exactly Adam's entries.

    `what` names the state in the message, which begins with it.
    """
    if held.keys() == set(_ADAM):
        return
    keys = sorted(key if isinstance(key, str) else shown(key) for key in held)
    others = [key for key in keys if key not in _ADAM]
    missing = [key for key in _ADAM if key not in held]
    wrong = f"has {first_names(others)}" if others else f"has no {first_names(missing)}"
    raise ValueError(
        f"{what} {wrong}: it holds {escaped(', '.join(keys))}. Adam and AdamW "
        "have `exp_avg`, `exp_avg_sq` and `step`, and no other optimizer is read. Weights can be "
        "loaded without it: start with a new optimizer state."
    )


def read_step(value: Any) -> int:
    """Convert a step, stored as a number or a tensor with one element, to an integer."""
    if isinstance(value, LazyTensor):
        if value.size != 1:
            raise ValueError(f"A step must be one number; {value.label} has shape {value.shape}.")
        value = value.read().reshape(()).item()
    if type(value) not in (int, float) or not math.isfinite(value) or value != int(value):
        raise ValueError(f"A step must be a whole number; got {shown(value)}.")
    if not 0 <= value < 2**63:
        raise ValueError(f"A step must be a count that is not negative; got {shown(value)}.")
    return int(value)


def read_index(index: Path, kind: str, *, was_named: bool) -> dict[str, str]:
    """Read an index of Hugging Face: name of each tensor -> file in the same directory.

    Args:
        index: the index.
        kind: of the files, for messages.
        was_named: whether the user named the index, and not its directory.

    Raises:
        ValueError: the index is broken, or names a file elsewhere; or there is a whole file beside
            it, which may be the one to read.
    """
    file_of: dict[str, str] = {}
    try:
        file_of = json.loads(read_regular(index, _MAX_INDEX_BYTES))["weight_map"]
        others = [x for x in file_of.values() if not isinstance(x, str) or Path(x).name != x]
        wrong = f"it names {shown(others[0])}, which is not a file beside it" if others else ""
        wrong = wrong or ("" if file_of else "it has an empty `weight_map`")
    except IrregularFile:
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
    """Raise `ValueError` if an index names other files than the whole one beside it.

    Saving a model in one file over a model in parts, or in parts over one file, leaves the other
    behind. transformers reads the whole file, whichever is newer.
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
    """Turn lookup errors in the body into a `ValueError` that names the checkpoint and format."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} does not have the layout of {form} ({type(error).__name__}: "
            f"{escaped(error)}). Copy the checkpoint again; if it is complete, its version is not "
            "supported."
        ) from error
