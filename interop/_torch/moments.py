"""Find Adam's moments by the names of parameters, in an optimizer's state dict.

`optimizer.state_dict()` identifies parameters by number, in the order in which the optimizer got
them, group after group. A moment has the shape of its parameter. If only one tensor of the model
has that shape, the name is known. Otherwise each group must be in the order of
`model.parameters()`. The groups may leave out names of the model (frozen parameters, buffers), so
there can be several ways in which they take names from the model's list in order. All ways are
followed. A number is known if it gets the same name in all of them.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from jaxzero._text import escaped, first_names, shown
from jaxzero.interop._tensors import (
    AdamMoments,
    FileTensor,
    LazyTensor,
    by_plain_name,
    called,
    plain_name,
)

Shape = tuple[int, ...]
_Taken = tuple[int, ...]  # how many of its parameters each group has taken so far
_MAX_STATES = 2**20  # ways to match that are followed side by side: a bound on memory
_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")
MOMENTS = ("exp_avg", "exp_avg_sq")


class ModelOrder(NamedTuple):
    """The order of a model's parameters, and how the Trainer of transformers groups them.

    Attributes:
        names: in the order of `model.parameters()`.
        decayed: names in the first of the Trainer's two groups, which has weight decay. None if
            these names are not known; then the first group may hold any name without "bias".
    """

    names: Sequence[str]
    decayed: Collection[str] | None = None


class Origin(NamedTuple):
    """What is known of the program that wrote an optimizer's state.

    Attributes:
        order: returns the order of the model's parameters, or raises a `ValueError` with the reason
            why it is not known.
        of_trainer: True if the Trainer of transformers made the optimizer's groups.
    """

    order: Callable[[], ModelOrder]
    of_trainer: bool = False


def parameters_in(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """Return the names in a model's state dict that may be names of parameters.

    Integers and statistics of batch normalization are left out. Of the names of a tied weight,
    which share one place in the file, only the first is returned. Other buffers cannot be told from
    parameters, and are returned too.
    """
    seen, names = set(), []
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        stem = f"{layer}." if layer else ""
        is_statistic = last in _BATCH_NORM and all(stem + each in tensors for each in _BATCH_NORM)
        # Empty tensors may have one place without being tied.
        place = tensor.place if isinstance(tensor, FileTensor) and tensor.size else name
        if tensor.dtype.kind not in "biu" and not is_statistic and place not in seen:
            names.append(name)
        seen.add(place)
    return names


def _names_of_numbers(
    groups: Sequence[Sequence[int]],
    moments: Mapping[int, Shape],
    shapes: Mapping[str, Shape],
    origin: Origin,
) -> dict[int, str]:
    """Map each number that has moments to the name of its parameter.

    Args:
        groups: the numbers in each group of the optimizer.
        moments: number -> shape of its moments; absent if the parameter has no state.
        shapes: name -> shape, of all tensors that may be parameters.
        origin: what is known of the order of names and of the groups.

    Raises:
        ValueError: the name of a number cannot be told; the message is the reason.
    """
    alike = collections.defaultdict(list)
    for name, shape in shapes.items():
        alike[shape].append(name)
    candidates_of = {number: alike[shape] for number, shape in moments.items()}
    if _doubtful(candidates_of) is not None:
        ways = _Ways(groups, moments, shapes, origin.order(), origin.of_trainer).candidates()
        candidates_of = {number: ways[number] for number in moments}
    if (number := _doubtful(candidates_of)) is not None:
        names = " or ".join(map(shown, candidates_of[number][:2])) or "none"
        raise ValueError(f"number {number}, of shape {moments[number]}, may be {names}")
    return {number: names[0] for number, names in candidates_of.items()}


def _doubtful(candidates_of: Mapping[int, Sequence[str]]) -> int | None:
    """Return a number whose name is not certain; None if all names are certain.

    A name is not certain if the number has no candidate or several, or if its only candidate is
    also that of another number. `candidates_of` maps numbers to candidates.
    """
    counts = collections.Counter(name for names in candidates_of.values() for name in names)
    return next(
        (key for key, names in candidates_of.items() if len(names) != 1 or counts[names[0]] > 1),
        None,
    )


@dataclasses.dataclass(frozen=True)
class _Ways:
    """The ways in which the groups can take parameters, in order, from the model's list of names.

    Attributes: see `_names_of_numbers`; `order` has the list of names.
    """

    groups: Sequence[Sequence[int]]
    moments: Mapping[int, Shape]
    shapes: Mapping[str, Shape]
    order: ModelOrder
    of_trainer: bool

    def candidates(self) -> dict[int, list[str]]:
        """Map each number to the names that it gets in any of the ways."""
        end = tuple(map(len, self.groups))
        spare = len(self.order.names) - sum(end)  # names that no group takes
        # Forward: which counts `_Taken` can be reached after each name. Backward, below: which of
        # them lead to `end`, so that only names on complete ways are candidates.
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
        names = collections.defaultdict(list)
        alive = {end}
        for name, befores in zip(self.order.names[::-1], reached[-2::-1], strict=True):
            moves = [
                (before, number)
                for before in befores
                for after, number in self._moves(before, name)
                if after in alive
            ]
            alive = {before for before, _ in moves}
            for number in {number for _, number in moves if number is not None}:
                names[number].insert(0, name)
        return names

    def _moves(self, before: _Taken, name: str) -> Iterator[tuple[_Taken, int | None]]:
        """Yield the possible moves from a state: one group takes the next name, or none does.

        A state says for each group how many of its numbers have got names.

        Args:
            before: the state.
            name: the next name in the model's list.

        Yields:
            (state afterwards, number that takes the name); or (`before`, None) if no group does.
        """
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


def moments_of(
    optimizer: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    where: str,
    names: Sequence[str] | None = None,
    origin: Origin | None = None,
) -> AdamMoments:
    """Extract Adam's moments from an optimizer's state dict.

    Args:
        optimizer: result of `optimizer.state_dict()`, with `state` and `param_groups`. It
            identifies parameters by number, or by name if FSDP wrote it.
        tensors: tensors of the model by name.
        where: file name, for messages.
        names: names of the parameters in the optimizer's order. If None, the names that the
            optimizer recorded are used; without these, the names that follow from shapes and the
            order of the model.
        origin: gives the order of the model; if None, `tensors` are in the order of a state dict.
    """
    state = dict(optimizer["state"])
    if not state:
        raise ValueError(
            f"The optimizer in {where} has no state of any parameter: it took no step, or is not "
            "Adam or AdamW, and no other optimizer is read. Start with a new optimizer state; "
            "weights can be loaded without it."
        )
    groups = optimizer["param_groups"]
    if not all(isinstance(each, str) for each in state):
        origin = origin or Origin(lambda: ModelOrder(parameters_in(tensors)))
        state = _by_name(state, groups, tensors, where, names, origin)
    state = by_plain_name(state, where)
    state = {
        name: {key: called(f"{name}.{key}", value) for key, value in held.items()}
        for name, held in state.items()
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    betas = groups[0].get("betas") if groups else None
    return gather_moments(state, shapes, where, betas)


def _by_name(
    state: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, LazyTensor],
    where: str,
    names: Sequence[str] | None,
    origin: Origin,
) -> dict[str, Any]:
    numbers = [number for group in groups for number in group["params"]]
    kept = [name for group in groups for name in group.get("param_names", ())]
    if names is None and len(kept) == len(numbers):
        names = [plain_name(name) for name in kept]
    if names is None:
        return _matched(state, groups, tensors, where, origin)
    if len(names) != len(numbers):
        raise ValueError(
            f"`names` must name the {len(numbers)} parameters of the optimizer in {where}; got "
            f"{len(names)}. Leave out buffers, frozen parameters, and the second name of tied ones."
        )
    pairs = zip(names, numbers, strict=True)
    return {name: state[number] for name, number in pairs if number in state}


def _matched(
    state: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, LazyTensor],
    where: str,
    origin: Origin,
) -> dict[str, Any]:
    def ordered() -> ModelOrder:
        # The Trainer's first group decays.
        known = origin.of_trainer and len(groups) == 2 and groups[1].get("weight_decay") == 0
        if len(groups) != 1 and not known:
            raise ValueError(f"nothing says how they were divided into {len(groups)} groups")
        return origin.order()

    for held in state.values():
        if "exp_avg" not in held:
            check_is_adam(held, f"The optimizer in {where}, whose parameters are numbers,")
    names = parameters_in(tensors)
    try:
        name_of = _names_of_numbers(
            [group["params"] for group in groups],
            {number: tuple(held["exp_avg"].shape) for number, held in state.items()},
            {name: tensors[name].shape for name in names},
            Origin(ordered, origin.of_trainer),
        )
    except ValueError as error:
        count = sum(len(group["params"]) for group in groups)
        raise ValueError(
            f"The optimizer in {where} identifies its {count} parameters by number, and they "
            f"cannot be matched to the {len(tensors)} tensors of the model: {error}. Pass "
            "`names=`, the names in the order of the optimizer, which its program gives: "
            "`[n for g in optimizer.param_groups for p in g['params'] for n, each in "
            "model.named_parameters() if each is p]`."
        ) from error
    return {name: state[number] for number, name in name_of.items()}


def gather_moments(
    state: Mapping[str, Mapping],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    betas: object = None,
) -> AdamMoments:
    """Convert an optimizer state that is grouped by the names of parameters to `AdamMoments`.

    Args:
        state: name of a parameter -> its entries, such as "exp_avg" -> tensor or number.
        shapes: name -> shape of the model's tensors; a moment must have the shape of its parameter.
        where: the file, for messages.
        betas: the betas in the file; None if it has none.
    """
    means, squares, steps = {}, {}, {}
    for name, held in state.items():
        check_is_adam(held, f"The optimizer state of {shown(name)} in {where}")
        for key in MOMENTS:
            if name in shapes and tuple(held[key].shape) != tuple(shapes[name]):
                raise ValueError(
                    f"`{key}` of {shown(name)} in {where} has shape {tuple(held[key].shape)}, but "
                    f"the parameter has {tuple(shapes[name])}. Model and optimizer state belong to "
                    "different runs, or `names` is in another order than the optimizer's."
                )
        means[name], squares[name] = held["exp_avg"], held["exp_avg_sq"]
        steps[name] = read_step(held["step"])
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
    """Raise `ValueError` if an optimizer state has entries that Adam's does not have.

    Adam's own entries may be missing. `what` begins the message, as in `check_is_adam`.
    """
    check_is_adam(dict.fromkeys((*(*MOMENTS, "step"), *entries)), what)


def check_is_adam(held: Mapping, what: str) -> None:
    """Raise `ValueError` unless the optimizer state of a parameter has exactly Adam's entries.

    `what` names the state, and is the beginning of the message.
    """
    if held.keys() == set((*MOMENTS, "step")):
        return
    keys = sorted(key if isinstance(key, str) else shown(key) for key in held)
    others = [key for key in keys if key not in (*MOMENTS, "step")]
    missing = [key for key in (*MOMENTS, "step") if key not in held]
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
