"""Separate a distributed checkpoint into tensors of the model and of optimizers; read moments.

The dict that is saved, such as `{"model": {...}, "optim": {"state": {NAME: {"exp_avg": ...}}}}`, is
flattened to names such as `optim.state.NAME.exp_avg`. `NAME` has dots of its own, so the paths in
`planner_data` say where it begins. A model too may have modules called `state` and buffers called
`sum`. So where `state` is not a key of its own in a path, tensors are an optimizer's only if
`param_groups` name their parameter, or if their dict holds nothing but Adam's state.

The keys above a model's state dict, such as `model`, are dropped from the names of its tensors.
These keys lead to the dict that holds every parameter with optimizer state; or, if no dict does, to
the only dict at the top.

Numbers and lists, such as a step that is no tensor or the parameters of a group, are pickled
objects in the files.
"""

import bisect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxzero._text import first_names, shown
from jaxzero.interop._tensors import AdamMoments, LazyTensor, plain_name

from .moments import moments_of

Path = tuple[str | int, ...]  # keys of nested dicts and lists
# What optimizers of PyTorch keep for each element; a state without any of these is no optimizer's.
_KEPT = frozenset({"exp_avg", "exp_inf", "momentum_buffer", "square_avg", "sum"})
_MAX_KEYS_ABOVE = 3  # above the model's state dict
States = Mapping[Path, Mapping[str, Mapping[str, Any]]]


class StateEntry(NamedTuple):
    """The path of an entry of an optimizer's state, divided into its parts."""

    above: Path  # path of the optimizer's state dict
    name: str  # of the parameter
    key: str  # such as exp_avg
    flat: bool  # True if `state.NAME.KEY` is one key, as with `flatten_optimizer_state_dict`


def path_text(path: Path) -> str:
    """Join the keys of a path by dots, as in the name of a tensor."""
    return ".".join(map(str, path))


def paths_of(names: Iterable[str], planned: Mapping[Any, Any]) -> dict[str, Path]:
    """Map each name to its path: the keys that lead to the tensor in the saved dict.

    If the dict was not flattened, the path is the whole name as one key.

    Args:
        names: flat names.
        planned: `planner_data` of the metadata: flat name -> path.

    Raises:
        TypeError: a path is not a tuple of strings and integers that, joined by dots, are the name.
    """
    paths = {name: planned.get(name, (name,)) for name in names}
    for name, path in paths.items():
        keys = path if type(path) is tuple else ()
        whole = all(type(each) in (str, int) for each in keys)
        if not whole or path_text(keys) != name:
            raise TypeError(f"the path {shown(path)} of {shown(name)}")
    return paths


def state_entry(path: Path) -> StateEntry | None:
    """Divide the path of an entry of an optimizer's state; None if it cannot be such an entry."""
    if len(path) >= 3 and path[-3] == "state":
        return StateEntry(path[:-3], str(path[-2]), str(path[-1]), flat=False)
    return _flat_entry(path, "state")


def _flat_entry(path: Path, part: str) -> StateEntry | None:
    """Divide a path whose last key is `PART.NAME.KEY`; return None for any other path.

    `part` is PART: "state" or "param_groups". If the saved dict was not flattened, the path is one
    key, the name `ABOVE.PART.NAME.KEY`.
    """
    last = str(path[-1]) if path else ""
    begin = re.search(r"(?:^|\.)(state|param_groups)\.", last)
    if begin is None or begin[1] != part or (begin.start() and len(path) > 1):
        return None
    name, _, key = last[begin.end() :].rpartition(".")
    if not name or re.fullmatch(r"\w+", key) is None:
        return None
    above = (last[: begin.start()],) if begin.start() else path[:-1]
    return StateEntry(above, name, key, flat=True)


def sort_tensors(
    tensors: Mapping[str, LazyTensor], paths: Mapping[str, Path]
) -> tuple[dict[str, LazyTensor], dict[Path, dict[str, dict[str, Any]]]]:
    """Separate the tensors of optimizers from all other tensors.

    Returns:
        `{name: tensor}` of the other tensors; and `{path of an optimizer: {name of a parameter:
        state}}`, where a state is `{"exp_avg": tensor, ...}`.
    """
    nested: dict[Path, dict[str, dict[str, Any]]] = {}
    flat: dict[Path, dict[str, dict[str, Any]]] = {}
    for full, tensor in tensors.items():
        entry = state_entry(paths[full])
        if entry is not None:
            states = flat if entry.flat else nested
            states.setdefault(entry.above, {}).setdefault(entry.name, {})[entry.key] = tensor
    nested = {above: state for above, state in nested.items() if _is_kept(state)}
    flat = _of_optimizers(flat, paths)

    def is_of_optimizer(path: Path) -> bool:
        if any(
            path[length] in ("state", "param_groups") and path[:length] in nested
            for length in range(len(path))
        ):
            return True
        entry = _flat_entry(path, "state")
        if entry is not None:
            return entry.name in flat.get(entry.above, ())
        group = _flat_entry(path, "param_groups")
        return group is not None and group.above in flat

    kept = {full: tensor for full, tensor in tensors.items() if not is_of_optimizer(paths[full])}
    return kept, flat | nested


def _of_optimizers(
    flat: Mapping[Path, dict[str, dict[str, Any]]], paths: Mapping[str, Path]
) -> dict[Path, dict[str, dict[str, Any]]]:
    """Return those candidates that surely are optimizer states: path -> parameter -> entries.

    Args:
        flat: the candidates, found by a name `ABOVE.state.NAME.KEY`: path `ABOVE` -> `NAME` ->
            entries by `KEY`. A model may have such names too.
        paths: the paths of all names.
    """
    groups: dict[Path, set[str]] = {}
    for path in paths.values():
        group = _flat_entry(path, "param_groups")
        if group is not None:
            groups.setdefault(group.above, set()).add(group.name)
    ordered = sorted(paths)
    states: dict[Path, dict[str, dict[str, Any]]] = {}
    for above, state in flat.items():
        of_adam = all("exp_avg" in held for held in state.values())
        if not (of_adam and _holds_only_state(above, ordered)):
            named = groups.get(above, set())
            state = {name: held for name, held in state.items() if name in named}
        if _is_kept(state):
            states[above] = state
    return states


def _is_kept(state: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether any parameter's state has an entry that optimizers write, such as a moment."""
    return any(_KEPT & held.keys() for held in state.values())


def _holds_only_state(above: Path, ordered: Sequence[str]) -> bool:
    """Return whether all names below the path `above` begin with `state.` or `param_groups`.

    `ordered` has all names, sorted.
    """
    top = "".join(f"{key}." for key in above)

    def count(prefix: str) -> int:  # names that begin with it, which are adjacent in order
        ends = (prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)) if prefix else ("", "\U0010ffff")
        first, last = (bisect.bisect_left(ordered, end) for end in ends)
        return last - first

    return count(top) == count(f"{top}state.") + count(f"{top}param_groups")


def model_names(
    paths: Mapping[str, Path], trained: Collection[str], key: str | None, where: str
) -> dict[str, str]:
    """Map the full name of each tensor to its name in the model.

    Args:
        paths: full name -> path, of the tensors that are no optimizer's.
        trained: names of the parameters that an optimizer has trained.
        key: dotted path of the model's state dict; or, if no dict of tensors was saved inside
            another, what the names of the model begin with. None to find the state dict.
        where: the checkpoint, for messages.
    """
    below: dict[Path, dict[str, str]] = {}  # dict that may be the model's -> full name -> name
    for full, path in paths.items():
        for length in range(min(len(path), _MAX_KEYS_ABOVE + 1)):
            below.setdefault(path[:length], {})[full] = path_text(path[length:])
    if key is not None:
        models = {path_text(path): names for path, names in below.items() if path}
        models = models or _beginnings(paths)
        if key not in models:
            raise ValueError(
                f"`key` must be one of {first_names(sorted(models)) or 'none'}, which are the "
                f"dicts of tensors in {where}; got {key!r}."
            )
        return models[key]
    wanted = {plain_name(name) for name in trained}
    fitting = [path for path in below if wanted and _fits(wanted, path, below)]
    tops = {path[:1] if len(path) > 1 else () for path in paths.values()}
    above = fitting[0] if len(fitting) == 1 else ()
    if not fitting and len(tops) == 1:
        above = tops.pop()
    names = {full: below.get(above, {}).get(full, full) for full in paths}
    distinct = {plain_name(name) for name in names.values()}
    return names if len(distinct) == len(names) else {full: full for full in paths}


def _beginnings(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Group names by beginning, such as `model`: beginning -> full name -> rest of the name."""
    models: dict[str, dict[str, str]] = {}
    for full in names:
        keys = full.split(".", _MAX_KEYS_ABOVE)
        for length in range(1, len(keys)):
            top = ".".join(keys[:length])
            models.setdefault(top, {})[full] = full.removeprefix(f"{top}.")
    return models


def _fits(trained: set[str], above: Path, below: Mapping[Path, Mapping[str, str]]) -> bool:
    """Return whether the dict at path `above` may hold all `trained` parameters.

    Names in the dict may have a prefix `module.` that `trained` names lack:
    `DistributedDataParallel` adds it to a model's names, and PyTorch's functions for optimizer
    states drop it.

    Args:
        trained: plain names of the trained parameters.
        above: path of the dict.
        below: path of each dict -> full name -> name inside the dict.
    """
    plain = {plain_name(name) for name in below[above].values()}
    if trained <= plain:
        return True
    bare = {name.removeprefix("module.") for name in plain}
    return (*above, "module") not in below and trained <= bare


def read_moments(
    states: States,
    objects: Mapping[Path, Callable[[], Any]],
    tensors: Mapping[str, LazyTensor],
    where: str,
    names: Sequence[str] | None,
    *,
    in_order: bool,
) -> AdamMoments:
    """Combine the states of all optimizers in a checkpoint into Adam's moments.

    Args:
        states: path of each optimizer -> parameter -> its state.
        objects: path -> function that reads the pickled object at this path.
        tensors: tensors of the model by name.
        where: the directory, for messages.
        names: names of the parameters in the optimizer's order, if it identifies them by number.
        in_order: whether `tensors` are in the order of the model's state dict.
    """
    state_of: dict[str, dict[str, Any]] = {}
    owner: dict[str, tuple[Path, str]] = {}
    for above, state in states.items():
        for name, held in state.items():
            plain = plain_name(name)
            if plain in owner:
                raise _two_states(where, owner[plain], (above, name))
            owner[plain], state_of[plain] = (above, name), dict(held)
    for path, read in objects.items():
        entry = state_entry(path)
        if entry and entry.key == "step" and entry.name in states.get(entry.above, {}):
            state_of[plain_name(entry.name)].setdefault("step", read())
    if all(name.isdecimal() for name in state_of):  # an `optimizer.state_dict()`, without names
        numbered = {int(name): state_of[name] for name in sorted(state_of, key=int)}
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
    if tensors and tensors.keys().isdisjoint(state_of):
        raise ValueError(
            f"The optimizer in {where} has a state for {shown(next(iter(state_of)))}, but no "
            f"tensor of the model has this name: there are {shown(next(iter(tensors)))} and "
            "others. Say with `key=` which of the saved state dicts is the model's, such as "
            "'model', or save both with `get_state_dict` of PyTorch, which names them alike."
        )
    return moments_of({"state": state_of, "param_groups": []}, tensors, where, names)


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
    """Return the parameter groups of the optimizer at `above`; None if they are not saved.

    Each group has the numbers of its parameters (`params`), and their names if they are saved.
    """
    path = (*above, "param_groups")
    for whole in (path, (path_text(path),)):  # the second: not flattened
        if whole in objects:
            return objects[whole]()
    groups: list[dict] = []
    while (read := objects.get((*path, len(groups), "params"))) is not None:
        named = objects.get((*path, len(groups), "param_names"))
        groups.append({"params": read()} | ({"param_names": named()} if named else {}))
    return groups or None
