"""Find the leaves of the first layers by tree paths, and decide how many to freeze in each epoch.

A path names where the layers are. `"layers"` is a stack, whose arrays have a leading dim of layers.
In `"layers.*"` the `*` stands for the number of a layer: a list of layers (`layers.0.kernel`), or
names with numbers (`"block_*"`).

[Note: when to freeze] After each epoch, PipeTransformer freezes a share `alpha` of the layers that
still train. With L layers, this many are frozen in epoch T:

    frozen(T) = ceil(L (1 - (1 - alpha)^T)),  T = 0, 1, 2, ...

Its released code has `ceil((1 - a)^T [a L / (1 - a) + sum_t a L / (1 - a)^t])`, t from 2 to T,
which is the same. Each number of frozen layers is another program to compile. So here layers are
frozen only when the number of active layers can be halved: L, L // 2, L // 4, ..., 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._sharding import LeafSpec
from .tree_cuts import Rows

Names = str | Sequence[str]


def freeze_schedule(num_layers: int, alpha: float = 1 / 3) -> Callable[[int], int]:
    """Return a schedule for `Zero.freeze`: a function from epoch to number of frozen layers.

    Epochs are counted from 0. The schedule never freezes more layers than PipeTransformer's
    formula, and never all of them. It changes at most `log2(num_layers)` times, and each change
    compiles the step again.

    Args:
        num_layers: layers of the model.
        alpha: the share of the active layers that the formula freezes in each epoch, in (0, 1).

    Raises:
        ValueError: an argument is out of range; or the schedule is called with a negative epoch.

    Example:
        >>> [jz.freeze_schedule(12)(epoch) for epoch in range(6)]
        [0, 0, 6, 9, 9, 11]

    References:
        PipeTransformer (https://proceedings.mlr.press/v139/he21a.html).
    """
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"`num_layers` must be an integer of at least 1; got {num_layers!r}.")
    if not 0 < alpha < 1:
        raise ValueError(f"`alpha` must be between 0 and 1; got {alpha!r}.")

    def prefix(epoch: int) -> int:
        if epoch < 0:
            raise ValueError(f"`epoch` must be at least 0; got {epoch!r}.")
        rest = num_layers * (1 - alpha) ** epoch
        # Rounding errors must not cost a layer: 6 (2/3) is just below or above 4.
        active = max(math.floor(rest + 1e-9 * num_layers), 1)
        allowed = num_layers
        while allowed // 2 >= active:
            allowed //= 2
        return num_layers - allowed

    return prefix


class Prefix(NamedTuple):
    """Which part of each array of a model is frozen, and the number of layers of the model."""

    num_layers: int  # of the whole model
    rows: tuple[Rows, ...]  # for each array: its first rows, 0 for nothing, None for all of it


def find_prefix(leaves: Sequence[LeafSpec], prefix: int, layers: Names, before: Names) -> Prefix:
    """Find which part of each array is frozen: in the first `prefix` layers, or used before them.

    Args:
        leaves: the layouts of the arrays, with their paths.
        prefix: the number of layers to freeze.
        layers: paths of stacks or lists of layers, all of one length.
        before: paths of parameters that are used before layer 0, such as embeddings.

    Returns:
        The number of layers of the model, and for each leaf how much of it is frozen.

    Raises:
        ValueError: a path fits no leaf, or too many; the lengths differ; or `prefix` is out of
            range.
    """
    numbers: dict[str, int | None] = {}  # of a leaf's layer; None: it has rows of all layers
    lengths: dict[str, int] = {}
    for name in _names("layers", layers):
        by_path = _numbers_in(name, leaves)
        numbers |= by_path
        lengths[name] = _length(name, by_path, leaves)
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"`layers` must name stacks or lists of layers, all of one length; got {lengths}."
        )
    num_layers = next(iter(lengths.values()))
    if isinstance(prefix, bool) or not isinstance(prefix, int) or not 0 <= prefix <= num_layers:
        raise ValueError(
            f"`prefix` must be a number of layers from 0 to {num_layers}; got {prefix!r}."
        )
    first = _leaves_before(_names("before", before), leaves, numbers)

    def rows_of(path: str) -> Rows:
        if path not in numbers:
            return None if path in first and prefix else 0
        number = numbers[path]
        if number is not None:
            return None if number < prefix else 0
        return None if prefix == num_layers else prefix

    return Prefix(num_layers, tuple(rows_of(leaf.path) for leaf in leaves))


def _names(argument: str, names: Names) -> tuple[str, ...]:
    is_several = isinstance(names, Sequence) and not isinstance(names, str)
    paths: tuple[Any, ...] = tuple(names) if is_several else (names,)
    if not all(isinstance(name, str) and name for name in paths):
        raise ValueError(
            f"`{argument}` must be a path of the parameter tree, such as 'encoder.layers', or "
            f"several of them; got {names!r}."
        )
    if argument == "layers" and not paths:
        raise ValueError("`layers` must name the layers of the model; got none.")
    return paths


def _numbers_in(name: str, leaves: Sequence[LeafSpec]) -> dict[str, int | None]:
    """Find the leaves at or below the path `name`, and the number of the layer of each.

    Returns:
        For the path of each leaf, the number that stands in it where `name` has `*`; None if `name`
        has no `*`.
    """
    if name.count("*") > 1:
        raise ValueError(f"`layers` may have one `*`, for the number of a layer; got {name!r}.")
    pattern = re.compile(re.escape(name).replace(r"\*", r"(\d+)") + r"(\.|$)")
    matches = {leaf.path: pattern.match(leaf.path) for leaf in leaves}
    numbers = {
        path: int(match.group(1)) if "*" in name else None
        for path, match in matches.items()
        if match is not None
    }
    if not numbers:
        raise ValueError(f"`layers` names {name!r}, and no leaf is there. {_known(leaves)}")
    return numbers


def _length(name: str, by_path: dict[str, int | None], leaves: Sequence[LeafSpec]) -> int:
    """Return the number of layers at `name`, a stack or a list. `by_path` is from `_numbers_in`."""
    numbers = {number for number in by_path.values() if number is not None}
    if numbers:
        if numbers != set(range(len(numbers))):
            raise ValueError(
                f"`layers` names {name!r}, and the numbers there are {sorted(numbers)}, where they "
                f"should be those from 0 to {len(numbers) - 1}."
            )
        return len(numbers)
    _check_is_no_list(name, tuple(by_path))
    shapes = {leaf.path: leaf.shape for leaf in leaves if leaf.path in by_path}
    sizes = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(sizes) != 1 or 0 in sizes:
        shown = ", ".join(f"`{path}` {list(shape)}" for path, shape in list(shapes.items())[:4])
        raise ValueError(
            f"`layers` names {name!r} as a stack of layers, whose arrays have one leading dim of "
            f"layers; got {shown}. Name a list of layers {name + '.*'!r}."
        )
    return sizes.pop()


def _check_is_no_list(name: str, paths: Sequence[str]) -> None:
    """Raise `ValueError` if `name` is a list of layers of one structure, not a stack."""
    entries: dict[str, set[str]] = {}
    for path in paths:
        number, _, rest = path[len(name) + 1 :].partition(".")
        entries.setdefault(number, set()).add(rest)
    equal = len({frozenset(rest) for rest in entries.values()}) == 1
    if len(entries) > 1 and equal and all(number.isdecimal() for number in entries):
        raise ValueError(
            f"`layers` names {name!r} as one stack of layers, and it can be a list of "
            f"{len(entries)} layers. Write {name + '.*'!r} for the list; or, if its entries are "
            f"stacks, name them: {tuple(f'{name}.{number}' for number in list(entries)[:2])}."
        )


def _leaves_before(
    names: Sequence[str], leaves: Sequence[LeafSpec], in_layers: dict[str, int | None]
) -> set[str]:
    first = set()
    for name in names:
        paths = {x.path for x in leaves if x.path == name or x.path.startswith(f"{name}.")}
        if not paths:
            raise ValueError(f"`before` names {name!r}, and no leaf is there. {_known(leaves)}")
        if shared := sorted(paths & in_layers.keys()):
            raise ValueError(
                f"`before` names {name!r}, which holds `{shared[0]}`, a leaf of `layers`. Name "
                "only what is computed before layer 0."
            )
        first |= paths
    return first


def _known(leaves: Sequence[LeafSpec]) -> str:
    paths = [leaf.path for leaf in leaves]
    return f"The leaves are {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}."
