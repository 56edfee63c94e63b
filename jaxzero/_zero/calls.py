"""One call of a transformed function: check its options and arguments, and build its results.

A wire state holds what hops keep from step to step (see `Zero.init_wire_state`). Users hold it as
trees; a program takes it as a flat `DeviceWireState`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._execute import (
    GRADIENT_REDUCTIONS,
    DeviceWireState,
    WireState,
    check_microbatches,
    from_tree,
    specs_of,
    to_tree,
)
from .._mesh import AXES, NODE, AnyMesh
from .._sharding import (
    LeafSpec,
    Static,
    ZeroConfig,
    is_array,
    is_stored,
    named_leaves,
    plain_arrays,
    rebuild,
    stored_leaf,
    trained_leaves,
)
from .._simigrad import GradientHalves
from .._warnings import warn
from .arguments import (
    Argument,
    Options,
    argument_numbers,
    check_meshes,
    check_rows,
    resolve,
)
from .batch_choice import BatchArgnums
from .optimizer_state import trained_tree
from .outputs import flat_reductions
from .rows import check_share_nodes, check_shares, known_shares
from .sharded_trees import ShardedTrees
from .stages import on_stages
from .transform import Transform


def prepare(
    zero: ShardedTrees,
    f: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: Options,
    batch_argnums: BatchArgnums,
    in_specs: Sequence[Any] | None,
) -> tuple[Transform, list[list[Any]]]:
    """Classify the arguments of a call of `f`, check them, and build its `Transform`.

    Returns:
        The transform, and the stored arrays of each argument.

    Raises:
        ValueError: an argument does not fit; see `resolve`, `check_meshes`, `check_rows`
            and `check_share_nodes`.
    """
    numbers = tuple(i + len(args) if i < 0 else i for i in options.argnums)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"`argnums` names an argument twice; got {numbers}.")
    options = on_stages(dataclasses.replace(options, argnums=numbers), zero.config)
    here = zero._here
    call, arrays = resolve(
        f,
        args,
        kwargs,
        argnums=numbers,
        batch_argnums=batch_argnums,
        in_specs=in_specs,
        registry=here._registry,
        states=here._states,
        num_devices=here.num_devices,
    )
    check_meshes(call, arrays, here.mesh)
    check_share_nodes(here._devices, options.shares)
    check_rows(call, arrays, here._devices, options.microbatches)
    return Transform(f, call, options, here._devices, zero.config), arrays


def check_differentiable(argument: Argument, leaves: Sequence[Any], allow_int: bool) -> None:
    """Raise `ValueError` if a leaf of a differentiated argument cannot have a gradient.

    Args:
        argument: the differentiated argument.
        leaves: the arrays of the argument.
        allow_int: whether integer leaves are allowed; their gradient has dtype `float0`.
    """
    for leaf in argument.layout.leaves if argument.layout else ():
        if leaf.codec is not None:
            raise ValueError(
                f"{argument.name}, leaf `{leaf.path}`: it is stored as messages of "
                f"{leaf.codec}, which cannot be trained. Pass it in an argument that is not in "
                "`argnums`."
            )
    value = argument.rebuild(leaves)
    _check_is_trained(argument, plain_arrays(value))
    for (path, leaf), kind in zip(named_leaves(value), trained_leaves(value), strict=True):
        if kind is not None:  # in a module: leaves that it does not train get None as gradient
            continue
        if is_array(leaf) and (allow_int or jnp.issubdtype(leaf.dtype, jnp.inexact)):
            continue
        shown = leaf.dtype if is_array(leaf) else type(leaf).__name__
        raise ValueError(
            f"{argument.name}, leaf `{path}`: cannot differentiate with respect to "
            f"{shown}. Pass it in an argument that is not in `argnums`, or use "
            "`allow_int=True`."
        )


def _check_is_trained(argument: Argument, plain: Sequence[str]) -> None:
    """Raise `ValueError` if a module trains none of its leaves; warn if it holds plain arrays.

    Args:
        argument: the differentiated argument.
        plain: the paths of arrays that `nnx.Module`s in it hold outside of any `nnx.Variable`.
    """
    kinds = argument.module_trains
    is_trained = not kinds or any(kind is not False for kind in kinds)
    if is_trained and not plain:
        return
    of_plain = (
        f" Among them are plain arrays, `{plain[0]}` the first of {len(plain)}: make those to be "
        "trained `nnx.Param(array)`, and others `nnx.Variable(array)`."
    )
    if not is_trained:
        raise ValueError(
            f"{argument.name} holds no leaf that its module trains, so nothing would get a "
            "gradient. Of an `nnx.Module` each `nnx.Param` of floats is trained, of an "
            f"`eqx.Module` each array of floats.{of_plain if plain else ''}"
        )
    warn(
        f"{argument.name}: an `nnx.Module` trains its `nnx.Param`s, and the gradient of other "
        f"leaves is None.{of_plain}"
    )


def checked_row_statistics(row_statistics: str | None) -> str | None:
    """Check the argument `row_statistics`, and return it.

    Raises:
        ValueError: it is neither None nor "device".
    """
    if row_statistics not in (None, "device"):
        raise ValueError(
            "`row_statistics` must be 'device', if what each device computes of its own rows is "
            f"meant, or None, to be warned of it; got {row_statistics!r}."
        )
    return row_statistics


def gradient_options(
    mesh: AnyMesh,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    microbatches: int = 1,
    weighted: bool = False,
    aux_reduce: Any = None,
    halves: bool = False,
    shares: Sequence[int] | None = None,
    gradient_reduce: Any = None,
    row_statistics: str | None = None,
) -> Options:
    """Check the arguments of `value_and_grad`, and return them as `Options`.

    Raises:
        ValueError: `argnums` holds a value that is no integer; `microbatches` is not an integer of
            at least 1; `aux_reduce` or `gradient_reduce` names an unknown reduction; `halves` is
            set on a mesh with one device; `shares` does not fit the mesh or `microbatches`; or
            `row_statistics` is neither None nor "device".
        NotImplementedError: `shares` does not work with another option.
    """
    check_microbatches(microbatches)
    if halves and all(mesh.shape[axis] == 1 for axis in AXES):
        raise ValueError(
            "`halves=True` compares two halves of the devices that have other rows, and there is "
            "one. Leave it out: `jz.simigrad` compares micro-batches, if it is given two or more."
        )
    numbers = argument_numbers(argnums)
    reduce = flat_reductions("aux_reduce", aux_reduce)
    node_shares = known_shares(shares, mesh.shape[NODE], microbatches)
    check_shares(node_shares, halves, mesh)
    if gradient_reduce is not None and isinstance(argnums, int):
        gradient_reduce = (gradient_reduce,)
    reductions = flat_reductions("gradient_reduce", gradient_reduce, GRADIENT_REDUCTIONS)
    return Options(
        numbers,
        has_aux,
        microbatches,
        weighted,
        reduce,
        shares=node_shares,
        halves=halves,
        gradient_reduce=reductions,
        row_statistics=checked_row_statistics(row_statistics),
    )


def returned(
    transform: Transform, outputs: tuple[Any, ...], is_one: bool, has_state: bool
) -> tuple[Any, ...]:
    """Build the return value of `value_and_grad` from the outputs of the compiled program.

    Args:
        transform: the transform that made the program.
        outputs: the results of `Transform.program`.
        is_one: whether `argnums` is an int, so that gradients are not returned in a tuple.
        has_state: whether the caller passed a wire state.

    Returns:
        The loss or `(loss, aux)`, and the gradients; then a `GradientHalves` if the option `halves`
        is set; then the next wire state if `has_state`.
    """
    loss, gradients, aux, device_state, halves, _ = outputs
    options = transform.options

    def as_given(trees: list[Any]) -> Any:
        return trees[0] if is_one else tuple(trees)

    def no_gradient(leaf: LeafSpec) -> np.ndarray:
        return np.zeros(leaf.stored_shape, jax.dtypes.float0)

    gradients = as_given(_as_trees(transform, gradients, stored_leaf, no_gradient))
    result = [(loss, aux) if options.has_aux else loss, gradients]
    if halves is not None:
        *parts, share = halves
        nothing = jnp.zeros([], jnp.float32)
        trees = (_as_trees(transform, x, lambda _, x: x, lambda _: nothing) for x in parts)
        # The trees that an optimizer gets: None for leaves that it does not update.
        first, second, cross = (trained_tree(as_given(tree)) for tree in trees)
        result.append(GradientHalves(first, second, cross, share))
    if has_state:
        states = {
            number: to_tree(layout, device_state, start)
            for number, start, _, layout in transform.call.sharded()
        }
        result.append(as_given([states[number] for number in options.argnums]))
    return tuple(result)


def _as_trees(
    transform: Transform,
    values: Sequence[Any],
    as_leaf: Callable[[LeafSpec, Any], Any],
    other: Callable[[LeafSpec], Any],
) -> list[Any]:
    """Build one tree for each entry of `argnums`, from one value for each differentiated leaf.

    Args:
        transform: the transform of the call, which has the structures of the trees.
        values: one value for each differentiated leaf, in the order of arguments.
        as_leaf: makes a leaf of the tree from a value.
        other: makes the value of an array that is not differentiated. But an array that its
            `eqx.Module` or `nnx.Module` does not train becomes None, and so does a leaf that is not
            an array.
    """
    remaining = iter(values)  # in the order of arguments, not of `argnums`
    trees = {}
    for number in sorted(transform.options.argnums):
        argument = transform.call.arguments[number]
        layout = argument.layout
        if layout is None:
            trees[number] = argument.rebuild([])
            continue
        entries = []
        for leaf, is_trained, kind in zip(
            layout.leaves, argument.trained, argument.module_trains, strict=True
        ):
            if is_trained:
                entries.append(as_leaf(leaf, next(remaining)))
            else:
                entries.append(None if kind is False else as_leaf(leaf, other(leaf)))
        # An empty `StoredArray` stays, so that gradients have the structure of the parameters.
        nothing = [s if s is None or is_stored(s.value) else Static(None) for s in argument.statics]
        trees[number] = rebuild(argument.treedef, nothing, entries)
    return [trees[number] for number in transform.options.argnums]


def wire_state_of(transform: Transform, wire_state: Any) -> DeviceWireState:
    """Merge the wire states of a call's arguments into one `DeviceWireState`, indexed by leaf.

    Args:
        transform: the transform of the call.
        wire_state: one state for each argument in `argnums`; None if the caller passed none.

    Raises:
        ValueError: a gradient codec needs a state and none was passed, or a state does not fit its
            parameters.
    """
    call, config, comm = transform.call, transform.config, transform.comm
    numbers = transform.options.argnums
    if wire_state is None and config.needs_wire_state and transform.options.has_gradients:
        raise ValueError(
            "`wire_state` is missing: the codecs of this config keep state from step to step "
            f"(weights {config.weights.node}, gradients {config.gradients.node}). "
            "Make it with `wire_state = zero.init_wire_state(params)`, pass it as "
            "`wire_state=`, and take the next one as the last result."
        )
    if wire_state is None:
        return DeviceWireState()
    states = (wire_state,) if isinstance(wire_state, WireState) else wire_state
    if not isinstance(states, (tuple, list)) or len(states) != len(numbers):
        raise ValueError(
            "`wire_state` must be one state for each argument in `argnums` "
            f"({len(numbers)}); got {type(wire_state).__name__}. Make each with "
            "`zero.init_wire_state(params)`."
        )
    device_state = DeviceWireState()
    for number, start, argument, layout in call.sharded():
        if number in numbers:
            state = states[list(numbers).index(number)]
            part = from_tree(layout, state, comm, argument.name, start)
            device_state = device_state.joined(part)
    return device_state


def reads_kept_slices(transform: Transform) -> bool:
    """Return whether a training step reads weight slices that the wire state keeps."""
    layouts = [transform.call.arguments[number].layout for number in transform.options.argnums]
    leaves = [leaf for layout in layouts if layout is not None for leaf in layout.leaves]
    return bool(specs_of(leaves, transform.comm).slices)


def warn_of_full_weights(config: ZeroConfig) -> None:
    """Warn that `apply` reads full weights, which differ a little from a step's slices."""
    assert config.hpz is not None
    how = "" if config.hpz.codec is None else f" as {config.hpz.codec}"
    warn(
        f"`zero.apply` reads the weights in full{how}, as there is no `wire_state`. A training "
        f"step reads the slices that it keeps (weights {config.weights.node}), which differ a "
        "little: a ratio of probabilities of the two (PPO) is not that of equal weights. Pass "
        "`wire_state=`, the state that the next training step gets, to read what it reads."
    )
