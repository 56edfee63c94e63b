"""Apply rules: turn tensors of a checkpoint into parameters, and parameters into tensors.

Both directions return views (`_tensors`) and read nothing. To find the tensors that a checkpoint
must hold, the rules are run backwards on placeholders of the parameters. The names and shapes of
the results are compared with the file's, and errors report names and shapes of the file.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from jaxzero._text import first_names, matches, shown
from jaxzero.interop._tensors import Box, LazyTensor, as_lazy, other_names, stack

from .rule import TWO_NAMES, Index, Rule, Shapes, Use, patterns_in, rules_in, uses_of
from .steps import run, run_back

_NAME_EVERY_TENSOR = (
    "The rules must name every tensor; list tensors that are not parameters in `ignore`."
)
_COPY = (
    "save a copy with `interop.save_tensors({name.removeprefix(...): tensor for name, tensor in "
    "interop.open_checkpoint(...).items()}, directory)`."
)
_DDP = "module."  # what `DistributedDataParallel` puts before all names


def to_theirs(rules: Iterable[Rule], ours: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Turn parameters, given by dotted path, into tensors of a checkpoint, by name."""
    tensors: dict[str, LazyTensor] = {}
    for use in uses_of(rules, {path: tensor.shape for path, tensor in ours.items()}):
        for name, tensor in _theirs_of(use, ours):
            if name in tensors:
                raise ValueError(
                    f"Two rules write the tensor {shown(name)}, one is {use.rule}. If two "
                    "parameters come from it, give it a second name, and load from "
                    "`{**checkpoint, other: checkpoint[name]}`."
                )
            tensors[name] = tensor
    return tensors


def to_ours(
    rules: Iterable[Rule],
    shapes: Shapes,
    source: Mapping[str, LazyTensor],
    *,
    where: str,
    ignore: Iterable[str] = (),
    remedy: str = _NAME_EVERY_TENSOR,
) -> dict[str, LazyTensor]:
    """Turn tensors of a checkpoint into parameters.

    Args:
        rules: rules for all parameters.
        shapes: dotted path -> shape, for every parameter.
        source: tensors of the checkpoint by name.
        where: description of the checkpoint for messages, such as `in 'model.safetensors'`.
        ignore: patterns (with `*`) for names of tensors that are not parameters.
        remedy: advice about missing and unknown tensors, for messages.

    Returns:
        Dotted path -> view of the tensors.
    """
    rules = rules_in(rules)
    wanted = to_theirs(rules, {path: Placeholder(path, shape) for path, shape in shapes.items()})
    given = source.keys() - set(other_names(source, wanted))
    check_names(given, wanted.keys(), where=where, ignore=ignore, remedy=remedy)
    held = {name: as_lazy(source[name], name, where) for name in wanted}
    for name, tensor in wanted.items():
        if held[name].shape != tensor.shape:
            raise ValueError(
                f"Tensor {shown(name)} {where} has shape {held[name].shape}, but the model asks "
                f"for {tensor.shape} (its `{tensor.label}`). They belong to different models: "
                "check that the model's config has the sizes of the checkpoint."
            )
    parameters: dict[str, LazyTensor] = {}
    for use in uses_of(rules, shapes):
        parameters |= _ours_of(use, held)
    return parameters


def check_names(
    given: Iterable[str],
    wanted: Iterable[str],
    *,
    where: str,
    ignore: Iterable[str] = (),
    remedy: str = _NAME_EVERY_TENSOR,
) -> None:
    """Raise `ValueError` unless a checkpoint has all tensors that the rules need, and no others.

    Args:
        given: names of the checkpoint's tensors.
        wanted: names that the rules need.
        where, ignore, remedy: as for `to_ours`.
    """
    given, wanted, ignore = set(given), set(wanted), patterns_in(ignore)
    missing = sorted(wanted - given)
    unknown = sorted(name for name in given - wanted if not matches(name, ignore))
    prefix = _prefix(missing, unknown) if missing else ""
    if prefix:
        if remedy == _NAME_EVERY_TENSOR:
            remedy = f"Write it in the rules, or {_COPY}"
        elif prefix == _DDP:  # another prefix may be that of a submodule of a larger model
            remedy = f"To remove it, {_COPY}"
        remedy = f"It has these names with {shown(prefix)} before them. {remedy}"
    problems = [f"lacks {first_names(missing)}"] if missing else []
    problems += [f"holds unknown {first_names(unknown)}"] if unknown else []
    if problems:
        raise ValueError(f"The checkpoint {where} {' and '.join(problems)}. {remedy}")


def _prefix(missing: list[str], unknown: list[str]) -> str:
    """Return a prefix that turns every missing name into an unknown one; "" if there is none.

    Args:
        missing: names that the rules need and the checkpoint lacks.
        unknown: names that the checkpoint has and the rules do not need.
    """
    ends = [name for name in unknown if name.endswith(f".{missing[0]}")]
    prefixes = (name.removesuffix(missing[0]) for name in ends)
    unknown_names = set(unknown)
    prefix = next((p for p in prefixes if unknown_names.issuperset(p + x for x in missing)), "")
    if prefix or not all(name.startswith(_DDP) for name in unknown):
        return prefix
    # `module.` may stand before a prefix of the model's own, as in `module.model.norm.weight`.
    inner = {end for name in unknown for end in _ends(name.removeprefix(_DDP))}
    return _DDP if inner.issuperset(missing) else ""


def _ends(name: str) -> list[str]:
    """Return a name, and the name without its first component and without its first two."""
    parts = name.split(".", 2)
    return [".".join(parts[number:]) for number in range(len(parts))]


@dataclasses.dataclass(frozen=True, repr=False)
class Placeholder(LazyTensor):
    """A tensor without data, used to compute names and shapes."""

    label: str
    shape: tuple[int, ...]
    dtype: np.dtype = np.dtype(np.float32)

    def _read_box(self, box: Box) -> np.ndarray:
        raise AssertionError(f"{self.label} is a placeholder without data; box {box} was read")


def _theirs_of(use: Use, ours: Mapping[str, LazyTensor]) -> Iterable[tuple[str, LazyTensor]]:
    for index, names in use.theirs.items():
        elements = {}
        for our_index, paths in use.ours.items():
            parameters = tuple(_element(ours[path], index) for path in paths)
            try:
                tensors = run_back(use.rule.steps, parameters)
            except ValueError as error:
                raise ValueError(f"{use.rule} does not fit the tree: {error}") from error
            if len(tensors) != len(names):
                raise ValueError(
                    f"{use.rule} names {len(names)} tensors of the checkpoint, but its steps need "
                    f"{len(tensors)}. If they are names of one tensor (tied weights), {TWO_NAMES}"
                )
            elements[our_index] = tensors
        for number, name in enumerate(names):
            yield name, _stacked({each: tensors[number] for each, tensors in elements.items()})


def _ours_of(use: Use, source: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    leaves = {}
    for index, paths in use.ours.items():
        elements = {
            their_index: run(use.rule.steps, tuple(_element(source[name], index) for name in names))
            for their_index, names in use.theirs.items()
        }
        for number, path in enumerate(paths):
            leaves[path] = _stacked({each: ours[number] for each, ours in elements.items()})
    return leaves


def _element(tensor: LazyTensor, index: Index) -> LazyTensor:
    """Select the element `index` of a stack, as a tensor without the stacked dimensions."""
    for dim, number in enumerate(index):
        tensor = tensor.narrow(dim, number, number + 1)
    return tensor.reshape(tensor.shape[len(index) :])


def _stacked(elements: dict[Index, LazyTensor]) -> LazyTensor:
    """Stack tensors along new leading dimensions, one for each component of their indices.

    `elements` must be sorted by index. If the only index is `()`, its tensor is returned as it is.
    """
    if () in elements:
        return elements[()]
    rows: dict[int, dict[Index, LazyTensor]] = {}
    for (first, *rest), tensor in elements.items():
        rows.setdefault(first, {})[tuple(rest)] = tensor
    return stack([_stacked(row) for row in rows.values()])
