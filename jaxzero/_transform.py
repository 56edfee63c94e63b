"""From a user's function to a sharded program under `jit` and `shard_map`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from ._accumulate import REDUCTIONS, combine
from ._arguments import BATCH, Argument, Call, split_dim
from ._collectives import Wire
from ._config import ZeroConfig
from ._local import Parameters, run_on_device
from ._mesh import AXES, map_devices
from ._modules import mutated_leaf, nnx_leaves, rng_leaves
from ._paths import path_name, spread_prefix
from ._placement import constrain
from ._plan import Plan
from ._similarity import GradientHalves
from ._simulate import AnyMesh, physical
from ._traffic import Ledger, labelled, recording
from ._wire_state import Memory, specs_of


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked of `value_and_grad`, or (`has_gradients` False) of `apply`."""

    argnums: tuple[int, ...]
    has_aux: bool = False
    microbatches: int = 1
    weighted: bool = False
    reduce: tuple[tuple[str, ...], Any] | None = None  # how outputs are combined: a flat tree
    has_gradients: bool = True
    halves: bool = False  # of the devices are to be compared


class Transform:
    """One user function for one kind of call: the jitted program, and its plan once traced."""

    def __init__(
        self, function: Callable, call: Call, options: Options, mesh: AnyMesh, config: ZeroConfig
    ):
        self.function = function
        self.call = call
        self.options = options
        self.devices = mesh
        self.mesh = physical(mesh)
        self.config = config
        self.wire = Wire.of(mesh, config, options.halves)
        self.parameters = _parameters(call, options, config)
        self._plan: Plan | None = None  # of what was traced last

    def plan(self, arrays: list[list[Any]], memory: Memory) -> Plan:
        """What one call of `program` gathers, reduces and sends."""
        jax.eval_shape(lambda *args: self.program(*args), arrays, memory)
        assert self._plan is not None
        return self._plan

    def program(
        self, arrays: list[list[Array]], memory: Memory
    ) -> tuple[Any, list[Any], Any, Memory, GradientHalves | None]:
        """Loss, flat gradients, other outputs, the new memory and halves, from global arrays."""
        in_specs = [self._specs(argument) for argument in self.call.arguments]
        memory_specs = self._memory_specs(memory)
        if AxisType.Explicit in self.mesh.axis_types:
            arrays = [
                [constrain(x, self.mesh, spec) for x, spec in zip(leaves, specs, strict=True)]
                for leaves, specs in zip(arrays, in_specs, strict=True)
            ]
            memory = jax.tree.map(
                lambda x, spec: constrain(x, self.mesh, spec), memory, memory_specs
            )
        axes = self.config.axes if self.parameters.gradients_split else ()
        gradient_specs = [
            self.parameters.leaves[i].spec(axes, manual_only=True)
            for i in self.parameters.differentiated
        ]
        outputs = _Outputs(self.options, self._rows_per_microbatch(arrays))
        mapped = map_devices(
            lambda arrays, memory: self._on_device(arrays, memory, outputs),
            self.devices,
            in_specs=(in_specs, memory_specs),
            out_specs=(
                PartitionSpec(),
                gradient_specs,
                (PartitionSpec(), BATCH),
                memory_specs,
                PartitionSpec(),
            ),
        )
        loss, gradients, parts, memory, halves = mapped(arrays, memory)
        gradients = [
            constrain(x, self.mesh, self.parameters.leaves[i].spec(axes))
            if self.parameters.leaves[i].other_axes
            else x
            for x, i in zip(gradients, self.parameters.differentiated, strict=True)
        ]
        return loss, gradients, outputs.join(*parts), memory, halves

    def _specs(self, argument: Argument) -> list[PartitionSpec]:
        if argument.plan is None:
            return list(argument.specs)
        axes = self.config.axes if self.parameters.weights_split else ()
        return [leaf.spec(axes, manual_only=True) for leaf in argument.plan.leaves]

    def _memory_specs(self, memory: Memory) -> Memory:
        specs = specs_of(self.parameters.leaves, self.wire)
        return Memory(
            {i: specs.slices[i] for i in memory.slices}, {i: specs.errors[i] for i in memory.errors}
        )

    def _rows_per_microbatch(self, arrays: Sequence[Sequence[Array]]) -> int | None:
        """How many rows of the batch one device sees at a time."""
        for argument, leaves in zip(self.call.arguments, arrays, strict=True):
            for x, spec in zip(leaves, argument.specs, strict=True):
                dim = None if argument.plan else split_dim(spec)
                if dim is not None and spec[dim] == AXES:
                    return x.shape[dim] // self.wire.num_devices // self.options.microbatches
        return None

    def _on_device(self, arrays: list[list[Array]], memory: Memory, outputs: _Outputs) -> Any:
        stored, inputs, specs = [], [], []
        for argument, leaves in zip(self.call.arguments, arrays, strict=True):
            if argument.plan:
                stored += leaves
            else:
                inputs += leaves
                specs += argument.specs
        ledger = Ledger(self.wire.sizes)
        with recording(ledger):
            result = run_on_device(
                lambda stored, inputs: self._flat(stored, inputs, outputs),
                self.parameters,
                stored,
                memory,
                inputs,
                specs,
                self.options.microbatches,
                self.wire,
            )
            with labelled("other", "aux" if self.options.has_gradients else "output"):
                parts = outputs.part(result.others, self.wire)
        self._plan = dataclasses.replace(result.plan, transfers=tuple(ledger.transfers))
        return result.loss, result.gradients, parts, result.memory, result.halves

    def _flat(self, stored: list[Any], inputs: list[Any], outputs: _Outputs) -> Any:
        """The user's function and its gradients on flat lists of arrays."""
        options = self.options
        if not options.has_gradients:
            args, kwargs = self._rebuild(stored, inputs)
            return None, None, [], outputs.record(self._called(args, kwargs))

        def loss(differentiated):
            merged = list(stored)
            for i, x in zip(self.parameters.differentiated, differentiated, strict=True):
                merged[i] = x
            args, kwargs = self._rebuild(merged, inputs)
            value, aux = _split_aux(self._called(args, kwargs), options.has_aux)
            value, weight = _split_weight(value, options.weighted)
            _check_loss(value)
            return value, (weight, outputs.record(aux))

        differentiated = [stored[i] for i in self.parameters.differentiated]
        (value, (weight, others)), gradients = jax.value_and_grad(loss, has_aux=True)(
            differentiated
        )
        return value, weight, gradients, others

    def _called(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What the user's function returns.

        Raises:
            ValueError: it has changed an `nnx.Module` or `nnx.Rngs` and does not return that.
        """
        values = [*args, *kwargs.values()]
        before = [nnx_leaves(value) for value in values]
        output = self.function(*args, **kwargs)
        returned = {id(x) for x in jax.tree.leaves(output)}
        for argument, old, value in zip(self.call.arguments, before, values, strict=True):
            path = mutated_leaf(old, nnx_leaves(value), returned)
            if path is not None:
                raise ValueError(
                    f"The function changes {argument.name}, leaf `{path}`, and the change would be "
                    "lost: a function of sharded parameters gets a copy of the module. Return it "
                    "with `has_aux=True`, for example `nnx.state(model, nnx.BatchStat)`, and write "
                    "it back with `nnx.update`; or call a copy that may be lost, "
                    "`nnx.clone(model)`. Of `nnx.Rngs`, draw a key outside and pass it: "
                    "`key = rngs.dropout()`."
                )
        return output

    def _rebuild(self, stored: list[Any], inputs: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        remaining = {True: iter(stored), False: iter(inputs)}
        arrays = [
            [next(remaining[argument.plan is not None]) for s in argument.statics if s is None]
            for argument in self.call.arguments
        ]
        return self.call.rebuild(arrays)


def _parameters(call: Call, options: Options, config: ZeroConfig) -> Parameters:
    leaves, differentiated = [], []
    numbers = options.argnums if options.has_gradients else ()
    for number, argument in enumerate(call.arguments):
        if argument.plan is None:
            continue
        for leaf, is_trained in zip(argument.plan.leaves, argument.trained, strict=True):
            if number in numbers and is_trained:
                differentiated.append(len(leaves))
            leaves.append(leaf)
    return Parameters(tuple(leaves), tuple(differentiated), config.stage >= 3, config.stage >= 2)


def _split_aux(output: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return output, None
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        raise ValueError(
            "With `has_aux=True` the function must return `(loss, aux)`; got "
            f"{type(output).__name__}."
        )
    return output[0], output[1]


def _split_weight(value: Any, weighted: bool) -> tuple[Any, Array | None]:
    if not weighted:
        return value, None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(
            "With `weighted=True` the function must return `(sum, weight)` as its loss, such as "
            f"the summed loss and the number of tokens; got {type(value).__name__}."
        )
    total, weight = value[0], jnp.asarray(value[1])
    if weight.shape or jnp.iscomplexobj(weight):
        raise ValueError(
            "With `weighted=True` the weight must be a real scalar; got "
            f"{weight.dtype}{list(weight.shape)}. Sum it over the examples."
        )
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        weight = weight.astype(jnp.float32)
    return total, jax.lax.stop_gradient(weight)


def _check_loss(value: Any) -> None:
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, float)):
        shown = type(value).__name__
        hint = "If it also returns other things, pass `has_aux=True`."
    elif jnp.shape(value) != ():
        shown = f"{jnp.result_type(value)}{list(jnp.shape(value))}"
        hint = "Take the mean over the examples."
    elif not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        shown = str(jnp.result_type(value))
        hint = "Take the real part, or cast."
    else:
        return
    raise ValueError(f"The loss must be a real floating-point scalar; got {shown}. {hint}")


class _Outputs:
    """Outputs other than loss and gradients: how each is combined, and the tree they form."""

    def __init__(self, options: Options, rows: int | None):
        self.options = options
        self.rows = rows
        self.treedef: Any = None
        self.how: list[str] = []

    def record(self, tree: Any) -> list[Any]:
        """Flatten what the user returned; decide how each leaf is combined over devices."""
        paths_and_leaves, self.treedef = jax.tree_util.tree_flatten_with_path(tree)
        pairs = zip(self._asked(tree), rng_leaves(tree), strict=True)
        asked = [how or ("first" if is_rng else None) for how, is_rng in pairs]
        leaves = [jnp.asarray(leaf) for _, leaf in paths_and_leaves]
        self.how = [
            self._checked(how, path_name(path), leaf)
            if how
            else self._default(path_name(path), leaf)
            for how, (path, _), leaf in zip(asked, paths_and_leaves, leaves, strict=True)
        ]
        return leaves

    def _checked(self, how: str, path: str, leaf: Array) -> str:
        if how == "concat" and (not leaf.ndim or self.rows is None):
            why = "it is a scalar" if not leaf.ndim else "no argument is split as `batch_spec`"
            raise ValueError(
                f"`{self._argument}` asks to concatenate the leaf `{path}`, but {why}. Use "
                "'stack', or split the batch by `zero.batch_spec`."
            )
        return how

    def _asked(self, tree: Any) -> list[str | None]:
        if self.options.reduce is None:
            return [None] * len(jax.tree.leaves(tree))
        prefix = jax.tree.unflatten(*reversed(self.options.reduce))
        try:
            return spread_prefix(prefix, tree, str)
        except ValueError as error:
            raise ValueError(
                f"`{self._argument}` is not a tree prefix of what the function returns: {error}"
            ) from error

    @property
    def _argument(self) -> str:
        return "aux_reduce" if self.options.has_gradients else "out_reduce"

    def _default(self, path: str, leaf: Array) -> str:
        forward_only = not self.options.has_gradients
        if forward_only and leaf.ndim and leaf.shape[0] == self.rows:
            return "concat"
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        if is_float and not (forward_only and leaf.ndim):
            return "mean"
        kind = "output" if forward_only else "aux"
        raise ValueError(
            f"The {kind} leaf `{path}` ({leaf.dtype}{list(leaf.shape)}) may differ between devices "
            f"and has no mean. Say with `{self._argument}`, a tree prefix of "
            f"{', '.join(map(repr, REDUCTIONS))}, how it is combined: {_proposal(leaf)}."
        )

    def part(self, leaves: Sequence[Array], wire: Wire) -> tuple[list[Array], list[Array]]:
        """What this device contributes: values that are the same everywhere, and rows."""
        combined = [combine(x, how, wire) for x, how in zip(leaves, self.how, strict=True)]
        pairs = list(zip(combined, self.how, strict=True))
        rows = [x for x, how in pairs if how in ("stack", "concat")]
        return [x for x, how in pairs if how not in ("stack", "concat")], rows

    def join(self, whole: Sequence[Array], rows: Sequence[Array]) -> Any:
        """The tree that the user returned, of global arrays."""
        remaining = {False: iter(whole), True: iter(rows)}
        leaves = [next(remaining[how in ("stack", "concat")]) for how in self.how]
        return jax.tree.unflatten(self.treedef, leaves)


def _proposal(leaf: Array) -> str:
    """How an output that has no mean is most likely meant to be combined."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if is_key or (leaf.dtype == jnp.uint32 and leaf.shape in ((2,), (4,))):
        return "'first' for a random key, which is the same on every device"
    if leaf.dtype == jnp.bool_:
        return "'first' if it is the same on every device, else 'stack'"
    if leaf.ndim:
        return "'concat' if its dim 0 is the rows of the batch, 'sum' for counts"
    return "'sum' for a number of examples, 'first' for a counter that every device advances alike"


def flat_reductions(argument: str, reduce: Any) -> tuple[tuple[str, ...], Any] | None:
    """A tree of names as names and structure.

    Raises:
        ValueError: a name is not in `REDUCTIONS`.
    """
    if reduce is None:
        return None
    names, treedef = jax.tree.flatten(reduce)
    for name in names:
        if name not in REDUCTIONS:
            raise ValueError(
                f"`{argument}` must be a tree prefix of {', '.join(map(repr, REDUCTIONS))}; "
                f"it holds {name!r}."
            )
    return tuple(names), treedef
