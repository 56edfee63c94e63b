"""A checkpoint of PyTorch, whatever wrote it: tensors by name, and the moments of Adam."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from .lazy import LazyTensor

Moments = Callable[[Sequence[str] | None], "AdamMoments"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamMoments:
    """What Adam has gathered for each parameter, by the names of the parameters.

    Means are not yet divided by `1 - beta**step`, in PyTorch as in optax, so they carry over as
    they are.
    """

    step: int  # updates that were made
    exp_avg: Mapping[str, LazyTensor]  # mean of gradients; `mu` in optax
    exp_avg_sq: Mapping[str, LazyTensor]  # mean of squared gradients; `nu` in optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(Mapping[str, LazyTensor]):
    """Tensors by name. None is read until it is indexed.

    Attributes:
        path: what was opened.
        form: what it is, such as "safetensors" or "DeepSpeed ZeRO-3".
        aliases: names that share a tensor with another name (tied weights), and that name.
    """

    path: Path
    form: str
    tensors: Mapping[str, LazyTensor]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    moments: Moments | None = None

    def __getitem__(self, name: str) -> LazyTensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def adam(self, names: Sequence[str] | None = None) -> AdamMoments:
        """The state of Adam or AdamW.

        Args:
            names: of the parameters, in the order in which the optimizer was given them. Needed
                where the checkpoint numbers them, and numbers do not tell which is which.

        Raises:
            ValueError: there is none, it is incomplete, or `names` is missing or does not fit.
        """
        if self.moments is None:
            raise ValueError(
                f"{str(self.path)!r} ({self.form}) holds no optimizer state. Give the checkpoint "
                "that was written for resuming, or start with a new state."
            )
        with laid_out_as(self.form, self.path):
            return self.moments(names)


def gather_moments(
    state: Mapping[str, Mapping],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    step: Callable[[object], int],
) -> AdamMoments:
    """Sort what an optimizer holds for each parameter by kind.

    Args:
        state: name -> `exp_avg`, `exp_avg_sq` and `step`.
        shapes: of the parameters.
        where: the file or directory, for messages.
        step: reads a step, whatever it was saved as.
    """
    means, squares, steps = {}, {}, {}
    for name, held in state.items():
        missing = [key for key in ("exp_avg", "exp_avg_sq", "step") if key not in held]
        if missing or "max_exp_avg_sq" in held:
            raise ValueError(
                f"The optimizer state of {name!r} in {where} holds {', '.join(sorted(held))}; Adam "
                "and AdamW have `exp_avg`, `exp_avg_sq` and `step`, and no other optimizer is read."
            )
        for key in ("exp_avg", "exp_avg_sq"):
            if name in shapes and tuple(held[key].shape) != tuple(shapes[name]):
                raise ValueError(
                    f"`{key}` of {name!r} in {where} has shape {tuple(held[key].shape)}, but the "
                    f"parameter has {tuple(shapes[name])}. Model and optimizer state belong to "
                    "different runs, or `names` is in another order than the optimizer's."
                )
        means[name], squares[name] = held["exp_avg"], held["exp_avg_sq"]
        steps[name] = step(held["step"])
    if len(set(steps.values())) != 1:
        least, most = (pick(steps, key=steps.__getitem__, default="") for pick in (min, max))
        raise ValueError(
            f"{where} has no step that holds for all parameters: "
            + (f"{steps[least]} for {least!r}, {steps[most]} for {most!r}" if steps else "no state")
            + ". optax counts steps once for all; train with every parameter in each step."
        )
    return AdamMoments(step=next(iter(steps.values())), exp_avg=means, exp_avg_sq=squares)


def read_step(value: object) -> int:
    """A number of steps: a number, or a tensor with one element."""
    number = value.read().reshape(()).item() if isinstance(value, LazyTensor) else value
    if not isinstance(number, int | float) or number != int(number) or number < 0:
        raise ValueError(f"A step must be a whole number that is not negative; got {number!r}.")
    return int(number)


@contextlib.contextmanager
def laid_out_as(form: str, path: Path) -> Iterator[None]:
    """Say which checkpoint it is whose content is not where its form has it."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} is not laid out as {form} lays it out ({type(error).__name__}: "
            f"{error}). Copy the checkpoint again; if it is whole, its version is not known here."
        ) from error
