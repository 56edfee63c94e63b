"""Pairing modules of a model with those of a checkpoint, without guessing.

Candidates are modules with the same roles and shapes that known steps join. A pair is made when
each is the other's best by a margin of similarity; then the rest are looked at again, until nothing
changes. So a tie is broken when one of the two has found another partner, and never otherwise.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jaxzero.interop._match_names import Module, similarity, words_of
from jaxzero.interop._match_steps import Steps, possible_steps

_MARGIN = 0.05  # of similarity, by which the best must lead


@dataclasses.dataclass(frozen=True)
class Pair:
    """A module of the model, that of the checkpoint, and the possible steps for each role."""

    ours: Module
    theirs: Module
    ways: Mapping[str, list[Steps]]

    @property
    def without_words(self) -> bool:
        """Whether the two names have not a word in common."""
        return not words_of(self.ours.name) & words_of(self.theirs.name)


def pair(
    ours: Sequence[Module], theirs: Sequence[Module]
) -> tuple[list[Pair], dict[str, tuple[str, ...]]]:
    """Pair modules one to one.

    Returns:
        The pairs; and for each parameter that has none, the tensors that it may be.
    """
    candidates = _candidates(ours, theirs)
    made: list[Pair] = []
    while True:
        best = {mine: _leader(scores) for mine, scores in candidates.items()}
        rivals = collections.defaultdict(dict)
        for mine, scores in candidates.items():
            for other, score in scores.items():
                rivals[other][mine] = score
        accepted = [
            (candidates[mine][other], mine, other)
            for mine, other in best.items()
            if other is not None and _leader(rivals[other]) == mine
        ]
        if not accepted:
            break
        for _, mine, other in sorted(accepted, reverse=True):
            if other in candidates.get(mine, {}):  # not taken by another in this round
                made.append(Pair(ours[mine], theirs[other], _ways(ours[mine], theirs[other])))
                _take(candidates, mine, _claims(theirs[other]), theirs)
    undecided = {
        tensor.name: tuple(theirs[other].tensors[role].name for other in scores)
        for mine, scores in candidates.items()
        for role, tensor in ours[mine].tensors.items()
    }
    return made, undecided


Candidates = dict[int, dict[int, float]]  # number of ours -> number of theirs -> similarity


def _candidates(ours: Sequence[Module], theirs: Sequence[Module]) -> Candidates:
    by_sizes = collections.defaultdict(list)
    for other, module in enumerate(theirs):
        by_sizes[_sizes(module)].append(other)
    return {
        mine: {
            other: similarity(module, theirs[other])
            for other in by_sizes[_sizes(module)]
            if all(_ways(module, theirs[other]).values())
        }
        for mine, module in enumerate(ours)
    }


def _sizes(module: Module) -> tuple[tuple[str, int], ...]:
    sizes = (
        (role, math.prod((*module.stack, *tensor.shape))) for role, tensor in module.tensors.items()
    )
    return tuple(sorted(sizes))


def _ways(ours: Module, theirs: Module) -> dict[str, list[Steps]]:
    """For each role, the steps from theirs to ours; none if they do not fit."""
    lead = len(theirs.stack)
    ways = {}
    for role, tensor in ours.tensors.items():
        name = tensor.name.rpartition(".")[2]
        fits = tensor.shape[:lead] == theirs.stack
        shapes = tensor.shape[lead:], theirs.tensors[role].shape
        ways[role] = possible_steps(name, *shapes) if fits else []
    return ways


def _leader(scores: Mapping[int, float]) -> int | None:
    ranked = sorted(scores.items(), key=lambda item: -item[1])
    if not ranked or (len(ranked) > 1 and ranked[0][1] - ranked[1][1] < _MARGIN):
        return None
    return ranked[0][0]


def _claims(module: Module) -> set[tuple[str, int]]:
    """What of the checkpoint a module takes: a third of a tensor, or all three."""
    parts = range(3) if module.part is None else (module.part,)
    return {(name, part) for name in module.members for part in parts}


def _take(
    candidates: Candidates, mine: int, claims: Iterable[tuple[str, int]], theirs: Sequence[Module]
) -> None:
    claims = set(claims)
    del candidates[mine]
    for scores in candidates.values():
        for other in [other for other in scores if claims & _claims(theirs[other])]:
            del scores[other]
