"""Which parameter each number in an optimizer's state dict means.

`optimizer.state_dict()` numbers the parameters in the order in which the optimizer got them, group
after group, and the shape of a moment is that of its parameter. A shape that only one tensor of the
model has names its parameter. Otherwise each group must be in the order of `model.parameters()`:
then all ways are followed in which the groups, in their order, take names from the model's list,
some of which they may leave out (frozen parameters, buffers). A number is known if in all these
ways it gets the same name.
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxzero._text import shown
from jaxzero.interop._tensors import LazyTensor

from .torch_file import TorchTensor

Shape = tuple[int, ...]
_Taken = tuple[int, ...]  # how many parameters each group has
_MAX_STATES = 2**20
_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")


class ModelOrder(NamedTuple):
    """The parameters of a model, and how the Trainer of transformers divides them.

    Attributes:
        names: in the order of `model.parameters()`.
        decayed: those of the first of its two groups; None if it is only known that no name with
            "bias" in it is one of them.
    """

    names: Sequence[str]
    decayed: Collection[str] | None = None


def parameters_in(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """Return the names in a model's state dict that `model.named_parameters()` may have.

    It has no integers, no statistics of batch normalization, and no second name of a tied weight,
    which is the same place in the file. Other buffers cannot be told from parameters.
    """
    seen, names = set(), []
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        stem = f"{layer}." if layer else ""
        is_statistic = last in _BATCH_NORM and all(stem + each in tensors for each in _BATCH_NORM)
        place = tensor.place if isinstance(tensor, TorchTensor) and tensor.size else name
        if tensor.dtype.kind not in "biu" and not is_statistic and place not in seen:
            names.append(name)
        seen.add(place)
    return names


def names_of_numbers(
    groups: Sequence[Sequence[int]],
    moments: Mapping[int, Shape],
    shapes: Mapping[str, Shape],
    order: Callable[[], ModelOrder],
    *,
    of_trainer: bool,
) -> dict[int, str]:
    """Return the name of every number that has moments.

    Args:
        groups: the numbers of each group, in its order.
        moments: number -> shape, of those that have a state.
        shapes: name -> shape, of all tensors that may be parameters.
        order: returns names of `shapes` in the order of the model, or raises a `ValueError` with
            the reason why it is not known.
        of_trainer: whether the Trainer of transformers made the groups.

    Raises:
        ValueError: a number cannot be told; the message is the reason.
    """
    alike = collections.defaultdict(list)
    for name, shape in shapes.items():
        alike[shape].append(name)
    found = {number: alike[shape] for number, shape in moments.items()}
    if _doubtful(found) is not None:
        ways = _Ways(groups, moments, shapes, order(), of_trainer).candidates()
        found = {number: ways[number] for number in moments}
    if (number := _doubtful(found)) is not None:
        names = " or ".join(map(shown, found[number][:2])) or "none"
        raise ValueError(f"number {number}, of shape {moments[number]}, may be {names}")
    return {number: names[0] for number, names in found.items()}


def _doubtful(found: Mapping[int, Sequence[str]]) -> int | None:
    """Return a number that has not one name of its own; None if all have."""
    counts = collections.Counter(name for names in found.values() for name in names)
    return next(
        (key for key, names in found.items() if len(names) != 1 or counts[names[0]] > 1), None
    )


@dataclasses.dataclass(frozen=True)
class _Ways:
    """The ways in which groups can take their parameters from a list of names."""

    groups: Sequence[Sequence[int]]
    moments: Mapping[int, Shape]
    shapes: Mapping[str, Shape]
    order: ModelOrder
    of_trainer: bool

    def candidates(self) -> dict[int, list[str]]:
        """Return the names that each number can have."""
        end = tuple(map(len, self.groups))
        spare = len(self.order.names) - sum(end)  # names that no group takes
        reached = [{(0,) * len(end)}]
        num_states = 0
        for index, name in enumerate(self.order.names):
            reached.append(
                {
                    after
                    for before in reached[-1]
                    for after, _ in self._moves(before, name)
                    if index + 1 - sum(after) <= spare
                }
            )
            num_states += len(reached[-1])
            if num_states > _MAX_STATES:
                raise ValueError("there are too many ways to match their shapes")
        if end not in reached[-1]:
            raise ValueError(
                "their shapes do not follow each other in the model, which may have "
                f"{len(self.order.names)} parameters"
            )
        found = collections.defaultdict(list)
        alive = {end}
        for name, befores in zip(self.order.names[::-1], reached[-2::-1], strict=True):
            moves = [(b, n) for b in befores for a, n in self._moves(b, name) if a in alive]
            alive = {before for before, _ in moves}
            for number in {number for _, number in moves if number is not None}:
                found[number].insert(0, name)
        return found

    def _moves(self, before: _Taken, name: str) -> Iterator[tuple[_Taken, int | None]]:
        """List what can follow when a name is left out, or taken by a group as its next."""
        yield before, None
        for index, group in enumerate(self.groups):
            taken = before[index]
            if taken == len(group) or not self._may_hold(index, name):
                continue
            if self.moments.get(group[taken], self.shapes[name]) == self.shapes[name]:
                yield (*before[:index], taken + 1, *before[index + 1 :]), group[taken]

    def _may_hold(self, group: int, name: str) -> bool:
        if not self.of_trainer or len(self.groups) != 2:
            return True
        if self.order.decayed is None:
            return group == 1 or "bias" not in name
        return (name in self.order.decayed) == (group == 0)
