"""Read the inputs of a loop, and hold the state that one tick of it passes to the next."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._collectives import CommSpec, EncodedShards
from .._mesh import in_host
from .._plan import BlockPlan, Pipeline, ShardedParam, Stack, instructions, pipeline, pipeline_of
from .._program import Loop, Value, is_zero
from .._xla_of_jax import PRODUCTS_MAY_BE_READ_TWICE
from .buckets import GradientBuckets, on_shard

# The arrays of the iterations under way, by lag, then by `Value` or `pipeline.Key`.
ByLag = dict[int, dict[Any, Any]]


@dataclasses.dataclass
class LoopState:
    """The arrays that one tick of a loop passes to the next.

    Attributes:
        by_lag: the arrays of the iterations under way, by lag.
        stacks: carried arrays with one element for each iteration, by kind and number: node slices,
            outputs, and for each updated leaf a list of its stacks.
        slices: for each weight whose node slices are kept, one slice, of which only the codec and
            the layout are read.
        early: node slices made by gathers before the loop: weight, index in the stack, and data.
            They are written into the stack when the loop begins. Until then, slices of the previous
            step are read from the stack, and XLA would copy it for an earlier write.
    """

    by_lag: ByLag = dataclasses.field(default_factory=dict)
    stacks: dict[pipeline.Key, Any] = dataclasses.field(default_factory=dict)
    slices: dict[ShardedParam, EncodedShards] = dataclasses.field(default_factory=dict)
    early: list[tuple[ShardedParam, Array, Array]] = dataclasses.field(default_factory=list)

    def copy(self) -> LoopState:
        by_lag = {lag: {**there} for lag, there in self.by_lag.items()}
        return LoopState(by_lag, {**self.stacks}, {**self.slices})


@dataclasses.dataclass(frozen=True)
class LeafUpdate:
    """The update of one leaf on one device, layer by layer.

    Attributes:
        stacks: this device's shards of the parameter, then those of each array of its optimizer
            state, all in host memory.
        names: the paths of the stacks.
        reads: for each stack, whether the update reads it.
        new_layers: a function of the mean gradient of a layer and of that layer of each stack (None
            for stacks that are not read). It returns the new layer of each stack; None: unchanged.
    """

    stacks: Sequence[Shaped[Array, ...]]
    names: Sequence[str]
    reads: Sequence[bool]
    new_layers: Callable[[Array, list[Array | None]], list[Array | None]]


@runtime_checkable
class Runner(Protocol):
    """The part of `BlockRunner` that the modules of loops use, for a block around a loop or a tick.

    `block` imports the modules of loops, so they cannot import `BlockRunner` itself.
    """

    plan: BlockPlan
    comm: CommSpec
    gradients: GradientBuckets
    by_lag: ByLag
    updates: Mapping[int, LeafUpdate]
    updated: dict[int, list[Array]]
    starts: dict[int, LoopState]

    def execute(self, listed: Iterable[instructions.Instruction]) -> None: ...

    def read(self, atom: Any, lag: int = 0) -> Any: ...

    def output(self, i: int, lag: int) -> Any: ...

    def tie_loop(self, carry: list[Any]) -> list[Any]: ...

    def tie_to(self, value: Value | None, arrays: list[Any]) -> list[Any]: ...

    def inside(self, body: BlockPlan, by_lag: ByLag, tick: Any) -> Runner: ...


class LoopInputs:
    """The inputs of a loop, where the loop is operation `index` of the block that `outer` runs."""

    def __init__(self, outer: Runner, index: int):
        loop = outer.plan.block.operations[index]
        assert isinstance(loop, Loop)
        self.outer = outer
        self.index = index
        self.loop = loop
        self.plan = outer.plan.loops[index]
        self.uses = outer.plan.uses.loops[index]
        stacks = {x.layer: self._stack(x) for x in self.uses.stacks}
        self.stacks: dict[ShardedParam, EncodedShards] = stacks
        self.constants = {x: outer.by_lag[0][pipeline.shards(x)] for x in self.uses.constants}
        self.updates: dict[int, LeafUpdate] = {
            number: outer.updates[leaf] for number, leaf in self.plan.updates.items()
        }
        self.inputs: list[Any] = []  # constants of the program's loop; None for weights
        self.rows: list[Any] = []  # stacks that the program's loop scans; None for weights
        self.pipeline = self._pipeline()

    def _pipeline(self) -> Pipeline:
        # On CPUs nothing is gained by waiting, and before JAX 0.11 it changes how a product is
        # rounded.
        wait = PRODUCTS_MAY_BE_READ_TWICE or not self.outer.comm.on_cpus
        return pipeline_of(
            self.plan,
            self.loop,
            self.uses,
            goes_on=any(x.continues == self.index for x in self.outer.plan.loops.values()),
            in_host=[x for x, stack in self.stacks.items() if in_host(stack.data)],
            host_rows=tuple(i for i, x in enumerate(self.rows) if _is_copied(x)),
            copies_wait=bool(self.updates) and wait,
        )

    def _stack(self, stack: Stack) -> EncodedShards:
        """Return the shards of a stack of layers, after the operations of the stack's view."""
        view, sources = stack.view, self.outer.by_lag[0]
        key = pipeline.shards(view.weight)
        shards = sources[key]
        # A stack of vectors is stored as one message, of which no layer can be cut out.
        is_message = shards.codec is not None and not shards.lead
        if not view.ops and not is_message:
            return shards
        # XLA would merge the copies that several loops make, since nothing ties them.
        shards = sources[key] = shards.on_device(view.weight.name, windowed=False)
        if not view.ops:
            return shards.encode(None, ())
        return on_shard(shards, view.ops, view.weight)[0]

    def read_inputs(self) -> list[Any]:
        """Read all inputs of the program's loop; return the carry before the first iteration."""
        loop, num = self.loop, self.loop.num_constants
        first = num + loop.num_carry
        pairs = zip(loop.inputs, loop.body.inputs, strict=True)
        inputs = [self._input(outside, inside) for outside, inside in pairs]
        carry = self.outer.tie_loop(inputs[num:first])
        self.inputs, self.rows = inputs[:num], inputs[first:]
        self.pipeline = self._pipeline()  # it is known now which rows lie in host memory
        return carry

    def _input(self, outside: Any, inside: Any) -> Any:
        """Return the array for an input of the program's loop; None for a weight.

        Args:
            outside: the loop's operand.
            inside: the same input as a value of the body.
        """
        body = self.plan.body
        if inside in body.gradients.sums and is_zero(outside, self.outer.plan.block.makers):
            return self.outer.gradients.zeros(inside, body.gradients.sums[inside])
        return None if inside in body.uses.views else self.outer.read(outside)

    def layer_index(self, iteration: Any) -> Array:
        """Return the index in the stacks of an iteration, which may lie outside of the loop.

        Before the start, return the index of the first iteration. Past the end, return the index of
        the last iteration. But if the backward loop goes on with this loop's gathers, the first
        iteration past the end stands for the first iteration of the backward loop, the second for
        its second, and so on: then return the index of that iteration.
        """
        length, iteration = self.loop.length, jnp.asarray(iteration)
        after = 2 * length - 1 - iteration if self.pipeline.goes_on else length - 1
        iteration = jnp.where(iteration < length, jnp.maximum(iteration, 0), jnp.maximum(after, 0))
        return length - 1 - iteration if self.loop.is_reversed else iteration

    @functools.cached_property
    def device_rows(self) -> list[Any]:
        """The stacks that the program scans; None for stacks in host memory, and for weights."""
        return [None if _is_copied(x) else x for x in self.rows]

    def rows_at(self, number: Any) -> list[Any]:
        """Return the elements of `device_rows` for iteration `number`; None for other stacks."""
        i = self.layer_index(number)
        return [None if x is None else at(x, i) for x in self.device_rows]


def at(stack: Any, index: Array) -> Array:
    """Return element `index` of a stack; zeros for a stack without elements."""
    if not len(stack):
        return jnp.zeros(stack.shape[1:], stack.dtype)
    return lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)


def _is_copied(row: Any) -> bool:
    """Return whether a stack that the program scans is copied from host memory, layer by layer."""
    return row is not None and in_host(row) and len(row) > 0
