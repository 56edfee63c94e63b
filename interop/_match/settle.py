"""Rules that a caller has not given: those proposed, once the doubtful ones are confirmed."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxzero.interop._rules import Rule
from jaxzero.interop._tensors import LazyTensor, named_leaves

from .proposal import Proposal, matches
from .propose import match


def settled(
    tree: Any,
    source: Mapping[str, LazyTensor],
    *,
    accept: str | Rule | Iterable[str | Rule],
    ignore: Iterable[str],
) -> Proposal:
    """Propose rules, and raise unless they cover everything and the assumed ones are accepted.

    Args:
        tree: parameters of the model.
        source: tensors of the checkpoint, by name.
        accept: rules to use as they are, and patterns (with `*`) for paths of parameters whose
            assumed rules are right.
        ignore: patterns (with `*`) for names of tensors that are not parameters.

    Raises:
        ValueError: something is undecided, unused, or assumed and not accepted; or `accept` has
            something else than rules and patterns, or one that matches no parameter.
    """
    several = isinstance(accept, Iterable) and not isinstance(accept, str)
    given = tuple(accept) if several else (accept,)
    rules = [each for each in given if isinstance(each, Rule)]
    patterns = [each for each in given if isinstance(each, str)]
    if len(rules) + len(patterns) != len(given):
        raise ValueError(
            "`accept` takes rules, and patterns for paths of parameters such as 'layers.*' ('*' "
            f"for all); got {accept!r}."
        )
    paths = named_leaves(tree).leaves
    for pattern in patterns:
        if not any(matches(path, [pattern]) for path in paths):
            raise ValueError(
                f"{pattern!r} in `accept` matches no parameter. Paths are such as "
                f"{next(iter(paths), '(the tree is empty)')!r}."
            )
    proposal = match(tree, source, rules=rules, ignore=ignore)
    proposal.raise_if_undecided(accept=patterns)
    return proposal
