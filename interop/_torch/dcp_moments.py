"""Read the moments of Adam from a distributed checkpoint.

Tensors of an optimizer's state were found by `dcp_names`. Numbers and lists, such as a step that is
no tensor or the parameters of a group, are pickled objects in the files.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxzero._text import shown
from jaxzero.interop._tensors import AdamMoments, LazyTensor, plain_name

from .dcp_names import Path, path_text, state_entry
from .moments import moments_of

States = Mapping[Path, Mapping[str, Mapping[str, Any]]]


def read_moments(
    states: States,
    objects: Mapping[Path, Callable[[], Any]],
    tensors: Mapping[str, LazyTensor],
    where: str,
    names: Sequence[str] | None,
    *,
    in_order: bool,
) -> AdamMoments:
    """Combine the states of all optimizers in a checkpoint.

    Args:
        states: path of each optimizer -> parameter -> its state.
        objects: path -> reads the object there.
        tensors: tensors of the model by name.
        where: the directory, for messages.
        names: names of the parameters, if the optimizer has numbers in their place.
        in_order: whether `tensors` are in the order of the model's state dict.

    Raises:
        ValueError: there are two states for one parameter; it is not clear which parameters of the
            model they are; or the state is not Adam's.
    """
    found: dict[str, dict[str, Any]] = {}
    owner: dict[str, tuple[Path, str]] = {}
    for above, state in states.items():
        for name, held in state.items():
            plain = plain_name(name)
            if plain in owner:
                raise _two_states(where, owner[plain], (above, name))
            owner[plain], found[plain] = (above, name), dict(held)
    for path, read in objects.items():
        entry = state_entry(path)
        if entry and entry.key == "step" and entry.name in states.get(entry.above, {}):
            found[plain_name(entry.name)].setdefault("step", read())
    if all(name.isdecimal() for name in found):  # an `optimizer.state_dict()`, without names
        numbered = {int(name): found[name] for name in sorted(found, key=int)}
        groups = _groups(next(iter(states)), objects)
        named = groups is not None and all("param_names" in group for group in groups)
        if names is None and not named and (groups is None or not in_order):
            lost = "its groups were not" if groups is None else "the order of the model's was not"
            raise ValueError(
                f"The optimizer in {where} identifies its {len(numbered)} parameters by number, "
                f"and {lost} saved. Pass `names=`: the names in the order of the optimizer, group "
                "after group."
            )
        groups = groups or [{"params": list(numbered)}]
        return moments_of({"state": numbered, "param_groups": groups}, tensors, where, names)
    if tensors and tensors.keys().isdisjoint(found):
        raise ValueError(
            f"The optimizer in {where} has a state for {shown(next(iter(found)))}, but no tensor "
            f"of the model has this name: there are {shown(next(iter(tensors)))} and others. Say "
            "with `key=` which of the saved state dicts is the model's, such as 'model', or save "
            "both with `get_state_dict` of PyTorch, which names them alike."
        )
    return moments_of({"state": found, "param_groups": []}, tensors, where, names)


def _two_states(where: str, first: tuple[Path, str], second: tuple[Path, str]) -> ValueError:
    (above, name), (beside, other) = first, second
    if above == beside:
        return ValueError(
            f"The optimizer {shown(path_text(above))} in {where} has a state for {shown(name)} and "
            f"one for {shown(other)}, which are one name without the wrappers of PyTorch. Save the "
            "state of one model only."
        )
    both = f"{shown(name)} each" if name == other else f"{shown(name)} and {shown(other)}"
    return ValueError(
        f"{where} holds two optimizers, {shown(path_text(above))} and {shown(path_text(beside))}, "
        f"with a state for {both}. Save each model with its optimizer in a directory of its own."
    )


def _groups(above: Path, objects: Mapping[Path, Callable[[], Any]]) -> list[dict] | None:
    """Return the groups of an optimizer that has numbers; None if they were not saved."""
    path = (*above, "param_groups")
    for whole in (path, (path_text(path),)):  # the second: not flattened
        if whole in objects:
            return objects[whole]()
    groups: list[dict] = []
    while (read := objects.get((*path, len(groups), "params"))) is not None:
        named = objects.get((*path, len(groups), "param_names"))
        groups.append({"params": read()} | ({"param_names": named()} if named else {}))
    return groups or None
