"""Rules at work: tensors of a checkpoint as parameters, and parameters as tensors of a checkpoint.

Nothing is read here: both directions make views (`_tensor`) of what they are given. What a
checkpoint *must* hold is found by running the rules backwards on placeholders, so that names and
shapes are compared, and told to the user, as the file has them.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping

import numpy as np

from jaxzero.interop._tensors import Box, LazyTensor, some, stack

from .rule import Index, Rule, Shapes, Use, uses_of
from .steps import run, run_back

_NAME_EVERY_TENSOR = (
    "The rules must name every tensor; one that is no parameter of the model goes into `ignore`."
)


def to_theirs(rules: Iterable[Rule], ours: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Parameters as tensors of a checkpoint.

    Args:
        rules: the table.
        ours: every parameter, by its dotted path.

    Returns:
        Name of each tensor -> a view of the parameters, in the order of the rules.

    Raises:
        ValueError: the rules do not fit the parameters.
    """
    made: dict[str, LazyTensor] = {}
    for use in uses_of(rules, {path: tensor.shape for path, tensor in ours.items()}):
        for name, tensor in _theirs_of(use, ours):
            if name in made:
                raise ValueError(f"Two rules write the tensor {name!r}, one is {use.rule}.")
            made[name] = tensor
    return made


def to_ours(
    rules: Iterable[Rule],
    shapes: Shapes,
    source: Mapping[str, LazyTensor],
    *,
    where: str,
    ignore: Iterable[str] = (),
    remedy: str = _NAME_EVERY_TENSOR,
) -> dict[str, LazyTensor]:
    """Tensors of a checkpoint as parameters.

    Args:
        rules: the table.
        shapes: of every parameter, by its dotted path.
        source: the tensors of the checkpoint, by name.
        where: the checkpoint, for messages.
        ignore: names of tensors that are no parameters, with `*` for any text.
        remedy: what to do about missing and unknown tensors, for messages.

    Returns:
        Dotted path of each parameter -> a view of the tensors.

    Raises:
        ValueError: the rules do not fit the parameters, or a tensor is missing, unknown or of
            another shape than the parameters need. Tensors are named.
    """
    rules = tuple(rules)
    wanted = to_theirs(rules, {path: Placeholder(path, shape) for path, shape in shapes.items()})
    check_names(source.keys(), wanted.keys(), where=where, ignore=ignore, remedy=remedy)
    for name, tensor in wanted.items():
        if source[name].shape != tensor.shape:
            raise ValueError(
                f"Tensor {name!r} {where} has shape {source[name].shape}, but the model asks "
                f"for {tensor.shape} (its `{tensor.label}`). They belong to different models: "
                "check that sizes in the model's config are those of the checkpoint."
            )
    made: dict[str, LazyTensor] = {}
    for use in uses_of(rules, shapes):
        made |= _ours_of(use, source)
    return made


def check_names(
    given: Iterable[str],
    wanted: Iterable[str],
    *,
    where: str,
    ignore: Iterable[str] = (),
    remedy: str = _NAME_EVERY_TENSOR,
) -> None:
    """See that a checkpoint holds the tensors that are wanted, and no others.

    Raises:
        ValueError: some are missing, or unknown and not ignored.
    """
    given, wanted, ignore = set(given), set(wanted), tuple(ignore)
    missing = sorted(wanted - given)
    unknown = sorted(
        name
        for name in given - wanted
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
    )
    found = [f"lacks {some(missing)}"] if missing else []
    found += [f"holds unknown {some(unknown)}"] if unknown else []
    if found:
        raise ValueError(f"The checkpoint {where} {' and '.join(found)}. {remedy}")


@dataclasses.dataclass(frozen=True)
class Placeholder(LazyTensor):
    """A shape in the place of a tensor."""

    label: str
    shape: tuple[int, ...]
    dtype: np.dtype = np.dtype(np.float32)

    def _read_box(self, box: Box) -> np.ndarray:
        raise AssertionError(f"{self.label} is a placeholder, and was read: {box}")


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
                    f"{use.rule} names {len(names)} tensors of the checkpoint, its steps need "
                    f"{len(tensors)}."
                )
            elements[our_index] = tensors
        for number, name in enumerate(names):
            yield name, _stacked({each: tensors[number] for each, tensors in elements.items()})


def _ours_of(use: Use, source: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    made = {}
    for index, paths in use.ours.items():
        elements = {
            their_index: run(use.rule.steps, tuple(_element(source[name], index) for name in names))
            for their_index, names in use.theirs.items()
        }
        for number, path in enumerate(paths):
            made[path] = _stacked({each: ours[number] for each, ours in elements.items()})
    return made


def _element(tensor: LazyTensor, index: Index) -> LazyTensor:
    """One element of a stack, without the stacked dimensions."""
    for dim, number in enumerate(index):
        tensor = tensor.narrow(dim, number, number + 1)
    return tensor.reshape(tensor.shape[len(index) :])


def _stacked(elements: dict[Index, LazyTensor]) -> LazyTensor:
    """The stack of elements that are numbered in row-major order."""
    if () in elements:
        return elements[()]
    rows: dict[int, dict[Index, LazyTensor]] = {}
    for (first, *rest), tensor in elements.items():
        rows.setdefault(first, {})[tuple(rest)] = tensor
    return stack([_stacked(row) for row in rows.values()])
