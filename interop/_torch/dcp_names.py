"""Which tensors of a distributed checkpoint are a model's, and which an optimizer's.

The dict that is saved, such as `{"model": {...}, "optim": {"state": {NAME: {"exp_avg": ...}}}}`, is
flattened to names such as `optim.state.NAME.exp_avg`. `NAME` has dots of its own, so the paths in
`planner_data` say where it begins. A model's names go without the keys above its state dict: those
under which lies all that an optimizer has trained, or the only key at the top.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from jaxzero._text import first_names, shown
from jaxzero.interop._tensors import LazyTensor

Path = tuple[str | int, ...]  # keys of nested dicts and lists
# What optimizers of PyTorch keep for each element.
_KEPT = frozenset({"exp_avg", "exp_inf", "momentum_buffer", "square_avg", "sum"})
_MAX_KEYS_ABOVE = 3


class StateEntry(NamedTuple):
    """What the path of a part of an optimizer's state is composed of."""

    above: Path  # of the optimizer
    name: str  # of the parameter
    key: str  # such as exp_avg


def paths_of(names: Iterable[str], planned: Mapping[Any, Any]) -> dict[str, Path]:
    """Return the path of each name; the name alone if the dict was not flattened.

    Raises:
        TypeError: a path is no tuple of texts and numbers that make up the name.
    """
    paths = {name: planned.get(name, (name,)) for name in names}
    for name, path in paths.items():
        keys = path if type(path) is tuple else ()
        whole = all(type(each) in (str, int) for each in keys)
        if not whole or ".".join(map(str, keys)) != name:
            raise TypeError(f"the path {shown(path)} of {shown(name)}")
    return paths


def state_entry(path: Path) -> StateEntry | None:
    """Return what a path says of an optimizer's state; None if it cannot be of one."""
    if len(path) >= 3 and path[-3] == "state":
        return StateEntry(path[:-3], str(path[-2]), str(path[-1]))
    above, last = path[:-1], str(path[-1]) if path else ""
    rest = last.removeprefix("state.")
    if rest == last and not above:  # not flattened: a whole name
        head, found, rest = last.partition(".state.")
        above, rest = (head,), rest if found else last
    name, _, key = rest.rpartition(".")
    if rest == last or not name or re.fullmatch(r"\w+", key) is None:
        return None
    return StateEntry(above, name, key)


def sort_tensors(
    tensors: Mapping[str, LazyTensor], paths: Mapping[str, Path]
) -> tuple[dict[str, LazyTensor], dict[Path, dict[str, dict[str, Any]]]]:
    """Separate the tensors that are no optimizer's from the states of each optimizer.

    Returns:
        Name -> tensor, for the first; and path of the optimizer -> name of the parameter -> its
        state.
    """
    states: dict[Path, dict[str, dict[str, Any]]] = {}
    for full, tensor in tensors.items():
        entry = state_entry(paths[full])
        if entry is not None:
            of_name = states.setdefault(entry.above, {}).setdefault(entry.name, {})
            of_name[entry.key] = tensor
    optimizers = {
        above: {name: held for name, held in state.items() if above or _KEPT & held.keys()}
        for above, state in states.items()
        if any(_KEPT & held.keys() for held in state.values())
    }

    def is_of_optimizer(full: str) -> bool:
        path, entry = paths[full], state_entry(paths[full])
        if entry is not None and entry.name in optimizers.get(entry.above, ()):
            return True
        if () in optimizers and str(path[0]).split(".")[0] == "param_groups":
            return True
        tops = {path[:length] for length in range(1, len(path))}
        if len(path) == 1:  # not flattened
            tops |= {(full.partition(part)[0],) for part in (".state.", ".param_groups.")}
        return not optimizers.keys().isdisjoint(tops)

    kept = {full: tensor for full, tensor in tensors.items() if not is_of_optimizer(full)}
    return kept, optimizers


def model_names(
    paths: Mapping[str, Path], trained: Collection[str], key: str | None, where: str
) -> dict[str, str]:
    """Return full name -> name in the model.

    Args:
        paths: paths of the tensors that are no optimizer's.
        trained: names of the parameters that an optimizer has trained.
        key: dotted path of the model's state dict; None to find it.
        where: the checkpoint, for messages.

    Raises:
        ValueError: nothing lies at `key`.
    """
    below: dict[Path, dict[str, str]] = {}
    for full, path in paths.items():
        for length in range(min(len(path), _MAX_KEYS_ABOVE + 1)):
            short = ".".join(map(str, path[length:]))
            below.setdefault(path[:length], {})[full] = short
    if key is not None:
        found = {".".join(map(str, path)): path for path in below if path}
        if key not in found:
            raise ValueError(
                f"`key` must be one of {first_names(sorted(found)) or 'none'}, which are the dicts "
                f"of tensors in {where}; got {key!r}."
            )
        return below[found[key]]
    fitting = [path for path in below if trained and set(trained) <= set(below[path].values())]
    tops = {path[:1] if len(path) > 1 else () for path in paths.values()}
    above = fitting[0] if len(fitting) == 1 else tops.pop() if len(tops) == 1 else ()
    names = {full: below.get(above, {}).get(full, full) for full in paths}
    return names if len(set(names.values())) == len(names) else {full: full for full in paths}
