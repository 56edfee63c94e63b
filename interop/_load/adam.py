"""Convert the state of Adam between PyTorch and optax.

Both libraries keep two running means per parameter (the moments) and a number of steps. A moment
has the shape of its parameter, so the rules that map the parameter also map the moment. A run that
moves to JAX continues without a new warm-up.

PyTorch counts steps for each parameter, and optax for each `ScaleByAdamState`. The count corrects
the bias of the means: after t steps, it multiplies an update by
`sqrt(1 - beta2**t) / (1 - beta1**t)`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxzero._sharding import data_of
from jaxzero.interop._match import settled
from jaxzero.interop._rules import Rule, Shapes, check_moves, rules_in, to_ours, to_theirs, uses_of
from jaxzero.interop._tensors import AdamMoments, Checkpoint, LazyTensor, named_leaves

from .load_into import lazy_leaf

# Types of states that hold arrays beside a counter; the field that counts all updates of the run.
_COUNTER_OF: dict[type, str] = {
    optax.MultiStepsState: "gradient_step",
    optax.InjectHyperparamsState: "count",
    optax.InjectStatefulHyperparamsState: "count",
    optax.ConditionallyMaskState: "step",
    optax.ConditionallyTransformState: "step",
}
_FROZEN = (
    "The rules must name every parameter that has moments; list others in `ignore`. A parameter "
    "that PyTorch did not train has none: leave it out of Adam here too, with `optax.masked` or "
    "`optax.multi_transform`."
)


def load_adam(
    opt_state: Any,
    tree: Any,
    source: Checkpoint | AdamMoments,
    *,
    rules: Iterable[Rule] | None = None,
    ignore: Iterable[str] = (),
    accept: str | Rule | Iterable[str | Rule] = (),
    steps: int | None = None,
) -> Any:
    """Load the moments of a PyTorch run into an optax state, to continue that run.

    The state of every Adam in the chain is replaced, also inside masks, partitions and other
    wrappers. Counters of updates are set, so that schedules continue: the counters of
    `optax.MultiSteps` and `optax.inject_hyperparams`, `step` of conditional transformations, and
    `count` of a state without arrays of floats, such as `scale_by_schedule`. All other state of the
    chain begins anew, with its counters, since the checkpoint has nothing for it: an `optax.ema`,
    other optimizers of a partition, and gradients that `optax.MultiSteps`, `optax.apply_every` or
    `jz.simigrad` have gathered since the last update. Each process reads only the shards of its
    devices.

    A parameter may have taken fewer steps than others, such as one of a layer that was added late.
    An Adam of optax has one count of steps for all its parameters. If the parameters have taken
    different numbers of steps, pass `steps`, or use `optax.partition` to give the parameters with
    equal numbers an Adam of their own. Counters of schedules get the largest number.

    The states of `optax.radam`, `optax.yogi` and `optax.adamax` are of Adam's type and are replaced
    as well; `nu` of `adamax` is a maximum, so do not load Adam's into it.

    Args:
        opt_state: from `zero.init_optimizer(tx, params)`, or `tx.init(params)`.
        tree: the parameters without padding, as given to `load_into`: arrays,
            `jax.ShapeDtypeStruct`s, or the result of `load_into`.
        source: from `open_checkpoint`, or its `adam(names)`.
        rules: rules that map the checkpoint's names to the tree's; if left out, `match` proposes
            them, for which `source` must be a `Checkpoint`.
        ignore: names of parameters of the checkpoint that the tree does not have.
        accept: proposed rules that you have checked, as in `load_into`.
        steps: the count for an Adam whose parameters have taken different numbers of steps.

    Returns:
        A state with the structure and shardings of `opt_state`.

    Raises:
        ValueError: `opt_state` or `source` has no Adam state, or their parameters differ; or a
            proposed rule has to be confirmed or chosen; or parameters of one Adam have taken
            different numbers of steps, and `steps` is left out.
    """
    if not isinstance(source, Checkpoint | AdamMoments):
        raise ValueError(
            "`source` must be what `interop.open_checkpoint` returns, or its `adam(names)`; got "
            f"{source!r}."
        )
    given = rules_in(rules or ()) or None
    if given is None and not isinstance(source, Checkpoint):
        raise ValueError("`rules` are required unless `source` is a `Checkpoint`. Pass them.")
    settled_rules, ignore = settled(tree, source, rules=given, accept=accept, ignore=ignore)
    check_moves(settled_rules)
    moments = source.adam() if isinstance(source, Checkpoint) else source
    shapes = {path: tuple(leaf.shape) for path, leaf in named_leaves(tree).leaves.items()}
    states = _adam_states(opt_state)
    wanted = {path: shapes[path] for path in _paths_of(states, shapes)}
    counts = _counts_of(states, _steps_of_paths(settled_rules, wanted, moments), moments, steps)
    kinds = {
        kind: to_ours(
            settled_rules, wanted, held, where=f"(`{name}`)", ignore=ignore, remedy=_FROZEN
        )
        for kind, name, held in (
            ("mu", "exp_avg", moments.exp_avg),
            ("nu", "exp_avg_sq", moments.exp_avg_sq),
        )
    }
    return _moved(opt_state, moments.step, counts, kinds)


def _moved(
    state: Any, step: int, counts: Mapping[int, int], kinds: Mapping[str, Mapping[str, LazyTensor]]
) -> Any:
    """Return `state` with the moments of every Adam replaced, and with its counters of updates set.

    Args:
        state: an optax state, or a part of one.
        step: the number of updates that counters get.
        counts: `id` of each Adam state -> its number of steps.
        kinds: "mu" and "nu" -> path of a parameter -> its moment in the checkpoint.
    """
    if _is_adam(state):
        moved = {kind: _filled(state, kind, tensors) for kind, tensors in kinds.items()}
        return state._replace(count=_counter(counts[id(state)], state.count), **moved)

    def stops(x: Any) -> bool:
        return x is not state and (_is_adam(x) or _is_counting(x))

    def within(x: Any) -> Any:
        return _moved(x, step, counts, kinds) if stops(x) else x

    moved = jax.tree.map(within, state, is_leaf=stops)
    field = _counts_updates(state, stops) if _is_counting(state) else None
    if field is None:
        return moved
    value = _counter(step, getattr(state, field))
    replace = getattr(moved, "_replace", None) or functools.partial(dataclasses.replace, moved)
    return replace(**{field: value})


def _is_counting(state: Any) -> bool:
    """Return whether an optax state has a counter: a field `count`, or one in `_COUNTER_OF`.

    The counter may count all updates of the run, or only some; `_counts_updates` tells which.
    """
    fields = getattr(type(state), "_fields", None)
    if fields is None and dataclasses.is_dataclass(type(state)):
        fields = [field.name for field in dataclasses.fields(state)]
    return bool(fields) and (type(state) in _COUNTER_OF or "count" in fields)


def _counts_updates(state: Any, stops: Callable[[Any], bool]) -> str | None:
    """Return the field of a state that counts the updates of the run; None if there is none.

    A state that accumulates arrays, such as a mean with its own correction of bias, counts what it
    has accumulated. Those arrays are not in the checkpoint and begin anew, so the counter must too.

    Args:
        state: a state for which `_is_counting` is true.
        stops: returns True for an object inside `state` that is a state of its own; arrays in such
            an object are not looked for.
    """
    if type(state) in _COUNTER_OF:
        return _COUNTER_OF[type(state)]
    if not _is_counter(state.count):
        return None
    held = [x for x in jax.tree.leaves(state, is_leaf=stops) if not stops(x)]
    inexact = any(jnp.issubdtype(getattr(x, "dtype", np.float32), jnp.inexact) for x in held)
    return None if inexact else "count"


def _is_counter(x: Any) -> bool:
    return hasattr(x, "dtype") and np.issubdtype(x.dtype, np.integer) and x.shape == ()


def adam_from(opt_state: Any, tree: Any, *, rules: Iterable[Rule]) -> AdamMoments:
    """Return the moments of an optax state by checkpoint names: the inverse of `load_adam`.

    Moments are lazy: each is gathered when it is read.

    Args:
        opt_state: optimizer state of a chain that contains Adam.
        tree: the parameters without padding, arrays or `jax.ShapeDtypeStruct`s.
        rules: the rules given to `load_into`.

    Raises:
        ValueError: `opt_state` has no Adam state, or two Adam states for one parameter; its
            parameters are not those of `tree`; or a tensor of the checkpoint comes from parameters
            that have taken different numbers of steps.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in named_leaves(tree).leaves.items()}
    states = _adam_states(opt_state)
    paths = _paths_of(states, shapes)
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(
            f"Two Adams in `opt_state` have moments of `{twice}`, and PyTorch has one. Pass the "
            "part of `opt_state` that is meant."
        )
    steps_of = {
        path: int(np.asarray(state.count))
        for state in states
        for path in named_leaves(state.mu).leaves
    }
    rules = tuple(rules)
    check_moves(rules)
    means, squares = (
        to_theirs(
            rules,
            {
                path: lazy_leaf(leaf, shapes[path], path)
                for state in states
                for path, leaf in named_leaves(getattr(state, kind)).leaves.items()
            },
        )
        for kind in ("mu", "nu")
    )
    last = max(steps_of.values(), default=0)
    return AdamMoments(
        step=last,
        exp_avg=means,
        exp_avg_sq=squares,
        steps={name: n for name, n in _steps_of_names(rules, shapes, steps_of) if n != last},
    )


def _adam_states(opt_state: Any) -> list[optax.ScaleByAdamState]:
    states = [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=_is_adam) if _is_adam(leaf)]
    if not states:
        raise ValueError(
            "`opt_state` has no state of Adam (`optax.ScaleByAdamState`). Build the chain with "
            "`optax.adam`, `optax.adamw` or `optax.scale_by_adam`."
        )
    return states


def _is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def _paths_of(states: list[optax.ScaleByAdamState], shapes: Mapping[str, Any]) -> list[str]:
    paths = [path for state in states for path in named_leaves(state.mu).leaves]
    unknown = sorted(set(paths) - shapes.keys())
    if unknown:
        raise ValueError(
            f"Adam in `opt_state` has moments of `{unknown[0]}` ({len(unknown)} such paths), which "
            "is not a parameter of `tree`. Pass the tree that `opt_state` was made for."
        )
    return paths


def _filled(state: Any, kind: str, tensors: Mapping[str, LazyTensor]) -> Any:
    named = named_leaves(getattr(state, kind))
    for path, leaf in named.leaves.items():
        if tuple(leaf.shape) != tensors[path].shape:
            raise ValueError(
                f"Adam in `opt_state` has moments of shape {tuple(leaf.shape)} for `{path}`, whose "
                f"shape in `tree` is {tensors[path].shape}. Pass the tree that `opt_state` was "
                "made for."
            )
    return named.rebuild(
        {path: _read_like(tensors[path], leaf) for path, leaf in named.leaves.items()}
    )


def _counter(step: int, like: Any) -> Any:
    value = np.asarray(step, like.dtype)
    return jax.device_put(value, like.sharding) if isinstance(like, jax.Array) else value


def _read_like(tensor: LazyTensor, like: Any) -> Any:
    """Read a tensor into the shape, dtype and sharding of `like`; its padding is zeros."""
    like = data_of(like)
    tensor = tensor.astype(like.dtype)
    if not isinstance(like, jax.Array):
        return tensor.read()

    def read(index: Any) -> np.ndarray:
        data = tensor[index]  # without the padding: slices are clipped to the tensor's shape
        bounds = (part.indices(size) for part, size in zip(index, like.shape, strict=True))
        sizes = [stop - start for start, stop, _ in bounds]
        padding = [(0, n - held) for n, held in zip(sizes, data.shape, strict=True)]
        return np.pad(data, padding) if padding else data  # numpy pads no scalar

    return jax.make_array_from_callback(like.shape, like.sharding, read)


def _steps_of_names(
    rules: Iterable[Rule], shapes: Shapes, steps_of: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Yield (name, steps) for each tensor of the checkpoint, given the steps of each parameter.

    Args:
        rules: the rules between parameters and tensors.
        shapes: path -> shape of each parameter.
        steps_of: path -> number of steps that the parameter has taken.

    Raises:
        ValueError: a rule makes one tensor from parameters with different numbers of steps.
    """
    for use in uses_of(rules, {path: shapes[path] for path in steps_of}):
        steps = {steps_of[path]: path for path in chain(*use.ours.values())}
        if len(steps) > 1:
            raise ValueError(
                f"The Adams in `opt_state` have taken different steps: {steps}, and {use.rule} "
                "makes one tensor of these parameters. Pass the part of `opt_state` that is meant."
            )
        yield from ((name, next(iter(steps))) for name in chain(*use.theirs.values()))


def _steps_of_paths(
    rules: Iterable[Rule], shapes: Shapes, moments: AdamMoments
) -> dict[str, set[int]]:
    """Return path -> set of step counts, over the tensors that each parameter is made from."""
    return {
        path: {moments.steps.get(name, moments.step) for name in chain(*use.theirs.values())}
        for use in uses_of(rules, shapes)
        for path in chain(*use.ours.values())
    }


def _counts_of(
    states: Sequence[optax.ScaleByAdamState],
    steps_of: Mapping[str, set[int]],
    moments: AdamMoments,
    given: int | None,
) -> dict[int, int]:
    """Choose the number of steps of each Adam state.

    Args:
        states: the Adam states inside an optax state.
        steps_of: path of a parameter -> the numbers of steps that its tensors have taken.
        moments: the moments of the checkpoint.
        given: the number for an Adam whose parameters have taken different numbers of steps; it is
            required if there is such an Adam, and an error if there is none.

    Returns:
        `id` of each Adam state -> its number of steps.
    """
    # The count of an Adam of optax is an int32.
    if given is not None and (type(given) is not int or not 0 < given < 2**31):
        raise ValueError(f"`steps` must be a positive number of steps; got {given!r}.")
    counts, differing = {}, []
    for state in states:
        path_of = {n: path for path in named_leaves(state.mu).leaves for n in steps_of[path]}
        differing += [path_of] if len(path_of) > 1 else []
        counts[id(state)] = next(iter(path_of), moments.step) if len(path_of) < 2 else given
    if differing and given is None:
        raise ValueError(_different_steps(differing[0], moments.betas))
    if given is not None and not differing:
        raise ValueError(
            f"`steps` is {given}, but all parameters of each Adam have taken as many steps as the "
            "others. Leave it out."
        )
    return counts


def _different_steps(path_of: Mapping[int, str], betas: tuple[float, float]) -> str:
    """Return an error message: the parameters of one Adam have taken different numbers of steps.

    For the least and the greatest of these numbers, the message says by which factor choosing it
    would multiply a parameter's next update.

    Args:
        path_of: number of steps -> path of a parameter that has taken them.
        betas: the betas of Adam.
    """
    least, most = min(path_of), max(path_of)

    def factor(count: int, steps: int) -> float:  # by which the next update would be multiplied
        ours, theirs = (
            math.sqrt(1 - betas[1] ** (n + 1)) / (1 - betas[0] ** (n + 1)) for n in (count, steps)
        )
        return ours / theirs

    def changes(count: int) -> str:
        steps = max(path_of, key=lambda taken: abs(math.log(factor(count, taken))))
        return f"`steps={count}` multiplies the next update of `{path_of[steps]}` by " + (
            f"{factor(count, steps):.4g}"
        )

    return (
        f"An Adam in `opt_state` has one count of steps, but `{path_of[most]}` took {most}, and "
        f"`{path_of[least]}` {least}. Give parameters with different counts an Adam each, with "
        "`optax.partition`, which is exact; or choose one count with `steps=`, which changes the "
        f"correction of bias: {changes(most)}, and {changes(least)} (betas {betas}); the factors "
        "tend to 1."
    )
