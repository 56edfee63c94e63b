"""The result of a comparison: a row for each output, with its difference beside its bound."""

import dataclasses
import re
from collections.abc import Iterable

from jaxzero._report import TextTable

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # between dots
_WIDTH = 100  # columns of the table


@dataclasses.dataclass(frozen=True)
class ComparedOutput:
    """One output of the two models.

    Attributes:
        torch_name: name of the submodule of PyTorch, or of the output: `output.logits`.
        jax_name: name of ours.
        shape: shape of ours.
        dtype: the coarsest dtype that took part, from which the bound follows.
        difference: largest absolute difference, divided by the largest absolute value of
            PyTorch's; NaN if one of the two holds a NaN; infinite if only one holds an infinity, or
            if the numbers of elements differ.
        bound: what rounding may make of it; see `compare`.
        note: what else there is to say, such as another shape in PyTorch; mostly empty.
    """

    torch_name: str
    jax_name: str
    shape: tuple[int, ...]
    dtype: str
    difference: float
    bound: float
    note: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the bound. NaN is not."""
        return self.difference <= self.bound


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found; it prints as a table.

    Attributes:
        outputs: what was compared: submodules in the order in which PyTorch computed them, then
            the outputs of the model.
        only_in_torch: submodules and outputs of PyTorch that were compared with nothing.
        only_in_jax: those of ours.
    """

    outputs: tuple[ComparedOutput, ...]
    only_in_torch: tuple[str, ...] = ()
    only_in_jax: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether every difference is within its bound."""
        return self.first_difference is None

    @property
    def first_difference(self) -> ComparedOutput | None:
        """The first output that differs, in the order in which PyTorch computed them."""
        return next((each for each in self.outputs if not each.agrees), None)

    def __str__(self) -> str:
        rows = [
            (
                each.torch_name,
                each.jax_name,
                str(list(each.shape)),
                each.dtype,
                f"{each.difference:.1e}",
                f"{each.bound:.1e}",
                "" if each.agrees else "DIFFERS",
            )
            for each in self.outputs
        ]
        table = TextTable(
            headings=("torch", "jax", "shape", "dtype", "difference", "bound", ""),
            rows=rows,
            notes=[each.note for each in self.outputs],
            footer=(self._verdict(), *self._unmatched()),
        )
        return "\n".join(table.lines(_WIDTH))

    def _verdict(self) -> str:
        first = self.first_difference
        if first is None:
            return f"All {len(self.outputs)} agree, up to rounding."
        earlier = self.outputs[: self.outputs.index(first)]
        after = f", which comes after `{earlier[-1].torch_name}`, which agrees" if earlier else ""
        return (
            f"The first that differs is `{first.torch_name}`{after}: compare its weights and "
            "settings (such as epsilon), and what is computed from the one to the other."
            if earlier
            else f"The first that differs is `{first.torch_name}`."
        )

    def _unmatched(self) -> list[str]:
        sides = (("torch", self.only_in_torch), ("jax", self.only_in_jax))
        return [f"Only in {side}: {_grouped(names)}" for side, names in sides if names]


def _grouped(names: Iterable[str]) -> str:
    """Names, of which those that differ in numbers only are one."""
    counts: dict[str, int] = {}
    for name in names:
        pattern = _NUMBER.sub("*", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    return ", ".join(name if n == 1 else f"{name} (x{n})" for name, n in counts.items())
