"""Numbers of steps of Adam, which PyTorch counts for each parameter, and optax for each Adam.

The count corrects the bias of the means: an update after t steps is multiplied by
`sqrt(1 - beta2**t) / (1 - beta1**t)`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import optax

from jaxzero.interop._rules import Rule, Shapes, uses_of
from jaxzero.interop._tensors import AdamMoments, named_leaves


def steps_of_names(
    rules: Iterable[Rule], shapes: Shapes, steps_of: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Yield the name of each tensor, and the steps that its parameters have taken.

    Raises:
        ValueError: they have taken different steps.
    """
    for use in uses_of(rules, {path: shapes[path] for path in steps_of}):
        steps = {steps_of[path]: path for path in chain(*use.ours.values())}
        if len(steps) > 1:
            raise ValueError(
                f"The Adams in `opt_state` have taken different steps: {steps}, and {use.rule} "
                "makes one tensor of these parameters. Pass the part of `opt_state` that is meant."
            )
        yield from ((name, next(iter(steps))) for name in chain(*use.theirs.values()))


def steps_of_paths(
    rules: Iterable[Rule], shapes: Shapes, moments: AdamMoments
) -> dict[str, set[int]]:
    """Map the path of each parameter to the steps that its tensors have taken."""
    return {
        path: {moments.steps.get(name, moments.step) for name in chain(*use.theirs.values())}
        for use in uses_of(rules, shapes)
        for path in chain(*use.ours.values())
    }


def counts_of(
    states: Sequence[optax.ScaleByAdamState],
    steps_of: Mapping[str, set[int]],
    moments: AdamMoments,
    given: int | None,
) -> dict[int, int]:
    """Map the `id` of each Adam state to its count.

    Args:
        states: all Adam states of an optimizer.
        steps_of: path of each parameter -> the steps that its tensors have taken.
        moments: what is loaded into the states.
        given: the count for an Adam whose parameters have taken different numbers of steps.

    Raises:
        ValueError: there is such an Adam, and none is given; or one is given, and there is none.
    """
    if given is not None and (type(given) is not int or not 0 < given < 2**31):
        raise ValueError(f"`steps` must be a positive number of steps; got {given!r}.")
    counts, differing = {}, []
    for state in states:
        found = {n: path for path in named_leaves(state.mu).leaves for n in steps_of[path]}
        differing += [found] if len(found) > 1 else []
        counts[id(state)] = next(iter(found), moments.step) if len(found) < 2 else given
    if differing and given is None:
        raise ValueError(_different_steps(differing[0], moments.betas))
    if given is not None and not differing:
        raise ValueError(
            f"`steps` is {given}, but all parameters of each Adam have taken as many steps as the "
            "others. Leave it out."
        )
    return counts


def _different_steps(found: Mapping[int, str], betas: tuple[float, float]) -> str:
    """Say what one count would change, given number of steps -> a parameter."""
    least, most = min(found), max(found)

    def factor(count: int, steps: int) -> float:  # of the next update
        ours, theirs = (
            math.sqrt(1 - betas[1] ** (n + 1)) / (1 - betas[0] ** (n + 1)) for n in (count, steps)
        )
        return ours / theirs

    def changes(count: int) -> str:
        steps = max(found, key=lambda each: abs(math.log(factor(count, each))))
        return f"`steps={count}` multiplies the next update of `{found[steps]}` by " + (
            f"{factor(count, steps):.4g}"
        )

    return (
        f"An Adam in `opt_state` has one count of steps, but `{found[most]}` took {most}, and "
        f"`{found[least]}` {least}. Give parameters with different counts an Adam each, with "
        "`optax.partition`, which is exact; or choose one count with `steps=`, which changes the "
        f"correction of bias: {changes(most)}, and {changes(least)} (betas {betas}); the factors "
        "tend to 1."
    )
