"""The result of a comparison: a row for each output, with its difference beside its bound."""

import dataclasses
import re
from collections.abc import Iterable

from jaxzero._report import TextTable

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component of a name that is a number
_WIDTH = 100  # columns of the table


@dataclasses.dataclass(frozen=True)
class ComparedOutput:
    """One output of the two models, with the difference between them and its bound.

    Attributes:
        torch_name: name of the submodule of PyTorch, or of the model's output: `output.logits`.
        jax_name: name of the submodule or output of the JAX model.
        shape: shape of the JAX output.
        dtype: the coarsest dtype that took part, from which the bound follows.
        difference: largest absolute difference, divided by the largest absolute value of
            PyTorch's output; NaN if one of the two outputs holds a NaN; infinite if only one holds
            an infinity, if integers are not equal, or if the numbers of elements differ.
        bound: the largest difference that rounding explains; see `compare`.
        note: a remark, such as PyTorch's shape if it differs; mostly empty.
        of_model: whether it is an output of the model, not of a submodule.
    """

    torch_name: str
    jax_name: str
    shape: tuple[int, ...]
    dtype: str
    difference: float
    bound: float
    note: str = ""
    of_model: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the bound; False if the difference is NaN."""
        return self.difference <= self.bound


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`; it prints as a table.

    Attributes:
        outputs: the pairs of outputs that were compared: of submodules in the order in which
            PyTorch computed them, then of the models.
        only_in_torch: submodules and outputs of PyTorch that were compared with nothing.
        only_in_jax: submodules and outputs of the JAX model that were compared with nothing.
    """

    outputs: tuple[ComparedOutput, ...]
    only_in_torch: tuple[str, ...] = ()
    only_in_jax: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the outputs of the two models agree.

        Outputs of submodules may differ all the same, where something is computed inside a
        submodule of one model and outside it in the other, such as the factor on Gemma's
        embeddings.
        """
        return all(each.agrees for each in self.outputs if each.of_model)

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
        agree = "The outputs agree" if self.agrees else "The outputs differ"
        first = self.first_difference
        if first is None:
            return f"{agree}, up to rounding."
        if first.of_model:
            return f"{agree}."
        if self.agrees:
            return (
                f"{agree}, but not those of `{first.torch_name}`: something may be computed inside "
                "of the one and outside of the other."
            )
        earlier = self.outputs[: self.outputs.index(first)]
        after = f", after `{earlier[-1].torch_name}`, which agrees" if earlier else ""
        return (
            f"{agree}. The first layer that differs is `{first.torch_name}`{after}: compare its "
            "weights, its settings (epsilon), and what is computed before it."
        )

    def _unmatched(self) -> list[str]:
        sides = (("torch", self.only_in_torch), ("jax", self.only_in_jax))
        return [f"Only in {side}: {_grouped(names)}" for side, names in sides if names]


def _grouped(names: Iterable[str]) -> str:
    """Join names into a text; names that differ only in numbers are written once, with a count."""
    counts: dict[str, int] = {}
    for name in names:
        pattern = _NUMBER.sub("*", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    return ", ".join(name if n == 1 else f"{name} (x{n})" for name, n in counts.items())
