"""Handle sharding requests in the user's program, such as `with_sharding_constraint`.

Under plain `jit` a program may request over which mesh axes an array is split. Here the program
runs on every device, with that device's rows and with parameters that this package gathers. So
`node` and `local` in a request have no effect and are removed from it; other axes stay. A request
that a per-device program cannot fulfil, such as a `shard_map` over `node` or `local`, raises an
error.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .._mesh import (
    NODE,
    axes_of_dims,
    equations_inside,
    exchange_of,
    inner_jaxprs,
    is_one_node,
    is_simulating,
    rewrite,
)
from .._warnings import warn
from .ir import Barrier, Block, Loop, Operation

_OURS = ("node", "local")
_REQUEST = "sharding_constraint"
CALLBACKS = {"debug_callback", "debug_print", "io_callback", "pure_callback"}
_RUNS = (
    "A function given to `zero.value_and_grad` or `zero.apply` runs once on every device, inside a "
    f"`shard_map` over {_OURS}, on that device's rows of the batch and on full parameters."
)
_OF_SHARDINGS = f"{_RUNS} Remove its requests for shardings over these axes."
_OF_SHARD_MAP = (
    f"{_RUNS} It cannot call `jax.shard_map` over these axes, or over another mesh. Call the "
    "function itself instead: collectives over these axes work in it unchanged."
)
_OF_CLOSURES = (
    f"{_RUNS} An array that lies on a mesh with explicit axes cannot be closed over, nor made in "
    "it by `jax.device_put` or `jax.sharding.reshard`. Pass it as an argument, or `jax.device_get` "
    "it."
)
_OF_STEPS = (
    "Inside `zero.local_steps`, a function given to `zero.value_and_grad` or `zero.apply` cannot "
    "close over arrays of the step: parameters, optimizer state, the batch, or what is computed "
    "from them. Pass each as an argument: `zero.value_and_grad(loss)(params, batch, key)`."
)
# Fragments of the errors that JAX raises for such requests while tracing, with our explanation.
_SAID = {
    "should match the mesh passed to shard_map": _OF_SHARD_MAP,
    "shard_map applied to the function": _OF_SHARD_MAP,
    "to enter into a mesh context": _OF_SHARD_MAP,
    "should match the aval mesh": _OF_CLOSURES,
    "Mesh for all inputs should be equal": _OF_CLOSURES,
    "Closing over inputs to shard_map": _OF_CLOSURES,
    "should match the mesh of sharding": _OF_SHARDINGS,
    "passed to with_sharding_constraint": _OF_SHARDINGS,
    "with_sharding_constraint requires": _OF_SHARDINGS,
    "cannot contain axis names": _OF_SHARDINGS,
    "implies that array axis": _OF_SHARDINGS,
    "implies that the global size": _OF_SHARDINGS,
    "is not found in mesh": _OF_SHARDINGS,
}


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Add an explanation and a remedy to JAX's errors about sharding requests while tracing."""
    try:
        yield
    except Exception as error:  # JAX's `ShardingTypeError` is a plain `Exception`
        said = str(error)
        for fragment, remedy in _SAID.items():
            if fragment in said:
                if remedy is _OF_CLOSURES and is_one_node():
                    remedy = _OF_STEPS
                if remedy not in said:
                    raise ValueError(f"{remedy} JAX said: {said}") from error
        raise


def asks_to_split_over(block: Block, axis: str) -> bool:
    """Return whether a program has a sharding request that splits an array over `axis`."""
    equations = (x for op in block.operations for x in equations_inside(op.equation))
    requests = (x.params["sharding"] for x in equations if x.primitive.name == _REQUEST)
    specs = [x.spec for x in requests if isinstance(x, NamedSharding)]
    return any(axis in axes for spec in specs for axes in axes_of_dims(spec))


def token_exchanges(block: Block) -> Iterator[tuple[str, Any, int]]:
    """Yield the arrays that a program exchanges over the axis `tokens` by `exchange_over_tokens`.

    These are the keys and values of attention, for instance, in forward and backward.

    Yields:
        `(collective, array, trips)`: the name of the collective, the shape and dtype of the full
        array, and how often it is sent. All branches of a `lax.cond` count, and one iteration of a
        `lax.while_loop`.
    """
    for equation, trips in _equations(block.operations):
        collective = exchange_of(equation)
        if collective is not None:
            yield collective, equation.outvars[0].aval, trips


def _equations(operations: Iterable[Operation]) -> Iterator[tuple[Any, int]]:
    """Yield the equations of operations, with how often each runs."""
    for operation in operations:
        if isinstance(operation, Loop):
            inner = _equations(operation.body.operations)
            yield from ((x, trips * operation.length) for x, trips in inner)
        elif not isinstance(operation, Barrier):  # a barrier has the equation of `jax.checkpoint`
            yield from _equations_inside(operation.equation)


def _equations_inside(equation: Any) -> Iterator[tuple[Any, int]]:
    yield equation, 1
    length = equation.params["length"] if equation.primitive.name == "scan" else 1
    for jaxpr in inner_jaxprs(equation):
        for inner in jaxpr.eqns:
            yield from ((x, trips * length) for x, trips in _equations_inside(inner))


def without_our_axes(closed: Any) -> Any:
    """Remove `node` and `local` from every sharding in the jaxpr of the user's function.

    Raises:
        ValueError: the function calls `jax.shard_map` over these axes, or has ordered prints.
        NotImplementedError: it has a Python callback that JAX does not support here.
    """
    return rewrite(closed, _checked)


def _checked(equation: Any) -> Any:
    name, params = equation.primitive.name, equation.params
    if name == "shard_map":
        axes = {*params.get("newly_manual_axes", _OURS)}
        if is_simulating() or not axes.isdisjoint(_OURS):
            raise ValueError(f"{_OF_SHARD_MAP} It is over {tuple(sorted(axes))}.")
    elif name in CALLBACKS:
        _check_callback(equation)
    elif is_one_node():
        _check_stays_in_node(name, params)
    new = {}
    for key in ("sharding", "in_shardings", "out_shardings", "devices"):
        requested = params.get(key)
        if isinstance(requested, NamedSharding):
            new[key] = _without(requested, name)
        elif isinstance(requested, tuple) and any(isinstance(x, NamedSharding) for x in requested):
            new[key] = tuple(
                _without(x, name) if isinstance(x, NamedSharding) else x for x in requested
            )
    return equation.replace(params={**params, **new}) if new else equation


def _check_stays_in_node(name: str, params: Mapping[str, Any]) -> None:
    """Raise `ValueError` if an equation of a one-node program is a collective over `node`.

    `name` is the name of the equation's primitive, and `params` are its parameters.
    """
    axes = params.get("axes", params.get("axis_name", ()))
    if NODE in (axes if isinstance(axes, tuple | list) else (axes,)) and name != "axis_index":
        raise ValueError(
            f"The function runs `{name}` over the axis `node`, inside `zero.local_steps`, where "
            "every node trains by itself. Run it over `local` only, so that it is about the rows "
            "of one node."
        )


def _check_callback(equation: Any) -> None:
    """Raise unless JAX can run a callback on each device, and in order if it asks for order."""
    name = equation.primitive.name
    others = set(jax.sharding.get_abstract_mesh().axis_names) - {*_OURS}
    if name in ("io_callback", "pure_callback") and others:
        raise NotImplementedError(
            f"`{name}` inside a function given to `zero.value_and_grad` or `zero.apply` needs a "
            f"mesh of {_OURS} alone; this one also has {tuple(sorted(others))}. Return what it "
            "needs with `has_aux=True`, and call it outside."
        )
    # JAX keeps the order of `io_callback` on each of several devices, but that of prints only on
    # a single device.
    is_ordered = any("Ordered" in type(effect).__name__ for effect in equation.effects)
    if is_ordered and (name != "io_callback" or is_simulating()) and _num_devices() > 1:
        raise ValueError(
            f"`{name}` with `ordered=True` inside a function given to `zero.value_and_grad` or "
            "`zero.apply`: what several devices print has no order. Leave out `ordered=True`; "
            f"`jax.lax.axis_index({_OURS})` tells the devices apart."
        )


def _num_devices() -> int:
    return math.prod(jax.lax.axis_size(axis) for axis in _OURS)


def _without(sharding: NamedSharding, name: str) -> NamedSharding:
    """Remove `node` and `local` from `sharding`, which the operation `name` requests.

    Warn if one of them splits another dim than 0. On dim 0 they change nothing, as its rows are
    split over devices already.
    """
    entries = []
    for dim, axes in enumerate(axes_of_dims(sharding.spec)):
        rest = tuple(axis for axis in axes if axis not in _OURS)
        if dim and len(rest) < len(axes):
            warn(
                f"`{name}` asks to split dim {dim} as {sharding.spec} says. {_RUNS} So this "
                f"changes nothing over {_OURS}: every device has the full array. Split over a "
                "third axis of the mesh, or leave it out."
            )
        entries.append(sharding.spec[dim] if len(rest) == len(axes) else rest or None)
    spec = PartitionSpec(*entries)
    return sharding if spec == sharding.spec else sharding.update(spec=spec)
