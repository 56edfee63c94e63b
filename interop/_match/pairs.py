"""Pair modules of a model with modules of a checkpoint by mutual best similarity.

A module of the checkpoint is a candidate for one of the model if both have the same roles, and
known steps convert its shapes into the model's. Flax stores kernels as `[in, out]` and `[*window,
in, out]` and names them `kernel`; PyTorch and Equinox store them as `[out, in]` and `[out, in,
*window]` and name them `weight`. Attention in Flax splits a dimension into heads. If a shape is
ambiguous (a square matrix may or may not be transposed), all possibilities are listed.

Two modules are paired when each is the other's best candidate and leads the second best by a
margin; this repeats with the remaining modules until nothing changes. A tie is resolved only when
one of its candidates has been paired with another module. A module fits only as a whole: if its
kernel has another shape, its bias is undecided too, so `misfits_of` finds the parameter that is to
blame.
"""

import collections
import dataclasses
import heapq
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from jaxzero._text import shown
from jaxzero.interop._rules import Step, Transpose, Unflatten

from .names import Module, Tensor, fuses_attention, say_the_same, shapes_of, similarity, words_of

Steps = tuple[Step, ...]
Shape = tuple[int, ...]
TRANSPOSED = re.compile(r"transpose|deconv|upconv|convt(?![a-z])|tconv", re.IGNORECASE)
_MARGIN = 0.05  # required lead in similarity of the best candidate over the second
Candidates = dict[int, dict[int, float]]  # number of ours -> number of theirs -> similarity
_MOST = 8  # modules whose misfit is explained, since each is compared with all of the checkpoint


def possible_steps(name: str, ours: Shape, theirs: Shape) -> list[Steps]:
    """List the sequences of steps that convert a tensor of shape `theirs` into a parameter.

    Args:
        name: last component of the parameter's path, such as "kernel".
        ours: shape of the parameter.
        theirs: shape of the tensor.

    Returns:
        The possible sequences, the usual one for this name first.
    """
    as_is: list[Steps] = [()] if ours == theirs else []
    turned: list[Steps] = []
    if len(theirs) >= 2 and name not in ("embedding", "scale", "bias"):
        # The dimensions of a convolution's window keep their order. A matrix is just transposed.
        window = tuple(range(2, len(theirs)))
        dims = (*window, 1, 0)
        step = Transpose(*dims) if window else Transpose()
        shape = tuple(theirs[dim] for dim in dims)
        turned = [(step,)] if shape == ours else _with_heads((step,), ours, shape)
    unturned = [*as_is, *_with_heads((), ours, theirs)]
    return [*turned, *unturned] if name == "kernel" else [*unturned, *turned]


def _with_heads(steps: Steps, ours: Shape, theirs: Shape) -> list[Steps]:
    """Return `steps`, each extended by an `Unflatten` of one dimension that gives shape `ours`.

    Args:
        steps: steps whose result has shape `theirs`.
        ours: the shape wanted, such as one with `[heads, size]` for a dimension.
        theirs: the shape to convert.
    """
    extended = []
    more = len(ours) - len(theirs)
    for dim in range(len(theirs)) if more > 0 else ():
        sizes = ours[dim : dim + more + 1]
        rest = (*theirs[:dim], *sizes, *theirs[dim + 1 :])
        if rest == ours and math.prod(sizes) == theirs[dim]:
            extended.append((*steps, Unflatten(dim, sizes)))
    return extended


@dataclasses.dataclass(frozen=True)
class Pair:
    """A module of the model and its counterpart in the checkpoint."""

    ours: Module
    theirs: Module
    ways: Mapping[str, list[Steps]]  # role -> possible sequences of steps
    num_rivals: int  # how many other modules of the checkpoint could be `theirs` at the beginning

    @property
    def doubt(self) -> str | None:
        """The reason why the pair may be wrong, as text; None if nothing speaks against it."""
        ours, theirs = self.ours.name, self.theirs.name
        if not words_of(ours) & words_of(theirs):
            return "by shape and number alone"
        if self.num_rivals and not say_the_same(ours, theirs):
            return "the most similar name"
        ranks = zip(self.ours.ranks, self.theirs.ranks, strict=False)
        if self.num_rivals and any(a != b for a, b in ranks):
            return "the names agree, their numbers do not"
        is_convolution = any(len(x.shape) > 2 for x in self.theirs.tensors.values())
        if is_convolution and (TRANSPOSED.search(ours) or TRANSPOSED.search(theirs)):
            return "a transposed convolution may exchange inputs and outputs, and flip its window"
        same_name = ours.rpartition(".")[2] == theirs.rpartition(".")[2]
        if self.theirs.part is None and fuses_attention(theirs) and not same_name:
            return "if both fuse query, key and value in the same layout (whole, or head by head)"
        return None


def pair(
    ours: Sequence[Module], theirs: Sequence[Module]
) -> tuple[list[Pair], dict[str, tuple[str, ...]]]:
    """Pair modules of the model with modules of the checkpoint, one to one.

    Args:
        ours: the modules of the model.
        theirs: the modules of the checkpoint.

    Returns:
        The pairs; and for the parameters of modules that have no pair a dict: path of the parameter
        -> names of the checkpoint's tensors that may be its counterpart.
    """
    candidates = _candidates(ours, theirs)
    num_rivals = {mine: len(scores) - 1 for mine, scores in candidates.items()}
    pairs: list[Pair] = []
    taken: set[tuple[str, int]] = set()
    while True:
        leaders = _mutual_leaders(candidates)
        if not leaders:
            break
        for _, mine, other in leaders:
            if _is_free(theirs[other], taken):  # not taken by an earlier pair of this round
                ways = _ways(ours[mine], theirs[other])
                pairs.append(Pair(ours[mine], theirs[other], ways, num_rivals[mine]))
                taken |= _claims(theirs[other])
                del candidates[mine]
        candidates = {
            mine: {
                other: score for other, score in scores.items() if _is_free(theirs[other], taken)
            }
            for mine, scores in candidates.items()
        }
    undecided = {
        tensor.name: tuple(theirs[other].tensors[role].name for other in scores)
        for mine, scores in candidates.items()
        for role, tensor in ours[mine].tensors.items()
    }
    return pairs, undecided


def _candidates(ours: Sequence[Module], theirs: Sequence[Module]) -> Candidates:
    by_sizes = collections.defaultdict(lambda: collections.defaultdict(list))
    for other, module in enumerate(theirs):
        by_sizes[_sizes(module)][module.stack, shapes_of(module)].append(other)
    candidates: Candidates = {}
    for mine, module in enumerate(ours):
        fitting = [  # modules of equal stacks and shapes fit alike, so the first is tried
            others
            for others in by_sizes[_sizes(module)].values()
            if all(_ways(module, theirs[others[0]]).values())
        ]
        candidates[mine] = {
            other: similarity(module, theirs[other]) for other in sorted(itertools.chain(*fitting))
        }
    return candidates


def _sizes(module: Module) -> tuple[tuple[str, int], ...]:
    sizes = (
        (role, math.prod((*module.stack, *tensor.shape))) for role, tensor in module.tensors.items()
    )
    return tuple(sorted(sizes))


def _ways(ours: Module, theirs: Module) -> dict[str, list[Steps]]:
    """List, for each role (`weight`, `bias`, ...), the sequences of steps from `theirs` to `ours`.

    The list of a role is empty if no sequence of steps gives the shape of our tensor.
    """
    return {
        role: ways_of(tensor, theirs.tensors[role], theirs.stack)
        for role, tensor in ours.tensors.items()
    }


def ways_of(ours: Tensor, theirs: Tensor, stack: tuple[int, ...]) -> list[Steps]:
    """List the sequences of steps that turn a tensor of the checkpoint into a parameter.

    Args:
        ours: the parameter.
        theirs: the tensor; in a stack, the tensor of one layer.
        stack: the lengths of the stack; empty without one.
    """
    lead = len(stack)
    if ours.shape[:lead] != stack:
        return []
    return possible_steps(ours.name.rpartition(".")[2], ours.shape[lead:], theirs.shape)


def _mutual_leaders(candidates: Candidates) -> list[tuple[float, int, int]]:
    """List the modules that are each other's best candidate, the most similar first.

    Returns:
        (similarity, index of the model's module, index of the checkpoint's module) of each.
    """
    rivals: Candidates = collections.defaultdict(dict)
    for mine, scores in candidates.items():
        for other, score in scores.items():
            rivals[other][mine] = score
    best = ((mine, _leader(scores)) for mine, scores in candidates.items())
    mutual = [
        (candidates[mine][other], mine, other)
        for mine, other in best
        if other is not None and _leader(rivals[other]) == mine
    ]
    return sorted(mutual, reverse=True)


def _leader(scores: Mapping[int, float]) -> int | None:
    """Return the best candidate; None if there is none, or it does not lead by `_MARGIN`."""
    ranked = heapq.nlargest(2, scores.items(), key=lambda item: item[1])
    if not ranked or (len(ranked) > 1 and ranked[0][1] - ranked[1][1] < _MARGIN):
        return None
    return ranked[0][0]


def _is_free(module: Module, taken: set[tuple[str, int]]) -> bool:
    return _claims(module).isdisjoint(taken)


def _claims(module: Module) -> set[tuple[str, int]]:
    """Return the thirds of tensors that a module uses, as (name of a tensor, number of a third).

    A query, key or value that is part of a fused tensor uses one third. Any other module uses all
    three thirds of its tensors. No third may be used twice.
    """
    parts = range(3) if module.part is None else (module.part,)
    return {(name, part) for name in module.members for part in parts}


def misfits_of(ours: Iterable[Module], theirs: Sequence[Module]) -> dict[str, str]:
    """Explain, for parameters of the model, why no tensor of the checkpoint fits them.

    Args:
        ours: modules of the model for which the checkpoint has no module that fits.
        theirs: modules of the checkpoint, single and stacked, that are not paired.

    Returns:
        Path of a parameter -> why no tensor fits it. Other parameters of the same module are left
        out.
    """
    misfits: dict[str, str] = {}
    for module in list(ours)[:_MOST]:
        words = words_of(module.name)
        alike = [other for other in theirs if words & words_of(other.name)]
        alike = alike or (theirs if len({x.members for x in theirs}) == 1 else [])
        if alike:
            misfits |= _differences(module, max(alike, key=lambda x: _nearness(module, x)))
    return misfits


def _nearness(ours: Module, theirs: Module) -> tuple[float, int, int]:
    shared = ours.tensors.keys() & theirs.tensors.keys()
    same_rank = sum(
        len(ours.tensors[role].shape) == len(theirs.stack) + len(theirs.tensors[role].shape)
        for role in shared
    )
    return similarity(ours, theirs), same_rank, len(shared)


def _differences(ours: Module, theirs: Module) -> dict[str, str]:
    reasons = {}
    names = [tensor.name for tensor in theirs.tensors.values()]
    for role, tensor in ours.tensors.items():
        if role not in theirs.tensors:
            reasons[tensor.name] = f"the checkpoint has no such tensor beside {shown(names[0])}"
            continue
        other = theirs.tensors[role]
        if not ways_of(tensor, other, theirs.stack):
            shape = (*theirs.stack, *other.shape)
            reasons[tensor.name] = (
                f"its shape is {shown(tensor.shape)}, and {shown(other.name)}, the nearest of the "
                f"tensors that are left, has {shown(shape)}"
            )
    if not reasons:
        more = [each.name for role, each in theirs.tensors.items() if role not in ours.tensors]
        first = next(iter(ours.tensors.values())).name
        reasons = {first: f"the model has nothing beside it for {shown(more[0])}"} if more else {}
    return reasons
