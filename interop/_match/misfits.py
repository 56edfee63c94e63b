"""Say why no tensor fits a parameter, from the module of the checkpoint with the nearest name.

A module fits or not as a whole: where its kernel has another shape, its bias is undecided too. Here
the leaf is found that is to blame.
"""

from collections.abc import Iterable, Sequence

from jaxzero._text import shown

from .names import Module, similarity, words_of
from .pairs import ways_of

_MOST = 8  # modules that are looked up, each among all of the checkpoint


def misfits_of(ours: Iterable[Module], theirs: Sequence[Module]) -> dict[str, str]:
    """Map path -> why nothing fits, for the leaves to blame.

    Args:
        ours: modules of the model that nothing fits.
        theirs: modules of the checkpoint that are left, also stacked ones.
    """
    found: dict[str, str] = {}
    for module in list(ours)[:_MOST]:
        words = words_of(module.name)
        alike = [other for other in theirs if words & words_of(other.name)]
        alike = alike or (theirs if len({x.members for x in theirs}) == 1 else [])
        if alike:
            found |= _differences(module, max(alike, key=lambda x: _nearness(module, x)))
    return found


def _nearness(ours: Module, theirs: Module) -> tuple[float, int, int]:
    shared = ours.tensors.keys() & theirs.tensors.keys()
    same_rank = sum(
        len(ours.tensors[role].shape) == len(theirs.stack) + len(theirs.tensors[role].shape)
        for role in shared
    )
    return similarity(ours, theirs), same_rank, len(shared)


def _differences(ours: Module, theirs: Module) -> dict[str, str]:
    found = {}
    names = [tensor.name for tensor in theirs.tensors.values()]
    for role, tensor in ours.tensors.items():
        if role not in theirs.tensors:
            found[tensor.name] = f"the checkpoint has no such tensor beside {shown(names[0])}"
            continue
        other = theirs.tensors[role]
        if not ways_of(tensor, other, theirs.stack):
            shape = (*theirs.stack, *other.shape)
            found[tensor.name] = (
                f"its shape is {shown(tensor.shape)}, and {shown(other.name)}, the nearest of the "
                f"tensors that are left, has {shown(shape)}"
            )
    if not found:
        more = [each.name for role, each in theirs.tensors.items() if role not in ours.tensors]
        first = next(iter(ours.tensors.values())).name
        found = {first: f"the model has nothing beside it for {shown(more[0])}"} if more else {}
    return found
