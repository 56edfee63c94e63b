"""Lists of instructions, executed with tags in place of arrays: each reader checks what it reads.

The tag is the iteration that a value belongs to, so a loop that decodes the weights of another
layer, or adds up the gradients of another, is found.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxzero._plan import BlockPlan, LoopPlan, Pipeline, instructions_of, pipeline_of
from jaxzero._plan import instructions as kinds
from jaxzero._plan.instructions import Instruction
from jaxzero._plan.param_uses import LoopUses
from jaxzero._program import Barrier, Loop, Value


class Wrong(Exception):
    """A list that reads what is not there."""


def _check(condition: object, message: str) -> None:
    if not condition:
        raise Wrong(message)


class Walk:
    """Executes a list with tags in place of arrays: of each, the iteration that it belongs to.

    Args:
        plan: of the block, or of the body of a loop.
        pipeline: of the loop; None for a block that is none.
    """

    def __init__(self, plan: BlockPlan, pipeline: Pipeline | None = None):
        self.plan, self.pipeline = plan, pipeline
        self.tick = 0
        self.layers: dict[int, dict[Any, Any]] = {}  # by lag
        self.taken: set[Any] = set()  # outputs, and the iterations that they are of
        # For each stack, the iteration whose element is in each place.
        self.stacks: dict[Any, dict[int, int | None]] = {}
        self._new_tick()

    def _new_tick(self) -> None:
        self.full: dict[object, Any] = {}
        self.known = set() if self.pipeline else set(self.plan.block.inputs)
        self.made = set(self.known)  # gradients too, before they are reduced
        self.begun: set[int] = set()  # loops whose first gathers are under way

    def run(self, listed: Sequence[Instruction]) -> None:
        self._new_tick()
        for each in itertools.chain.from_iterable(x.parts for x in listed):
            tie = getattr(each, "tie", None)
            value = tie.value if isinstance(tie, kinds.Tie) else tie
            for needed in (value, getattr(each, "pin", None), getattr(each, "after", None)):
                late = self.pipeline is not None and self.tick not in range(self.pipeline.length)
                _check(needed is None or late or needed in self.known, f"{each} waits for nothing")
            getattr(self, f"_{type(each).__name__.lower()}", lambda _: None)(each)
        _check(not self.full, "weights are not dropped")

    def run_block(self, listed: Sequence[Instruction] | None = None) -> None:
        """Execute the list of a block, or another."""
        self.run(instructions_of(self.plan) if listed is None else listed)
        left = {x for x in self.layers.get(0, {}) if x[0] in ("gradient", "reduced")}
        _check(not left, "gradients are left over")
        views = self.plan.uses.views
        outputs = {x for x in self.plan.block.outputs if isinstance(x, Value) and x not in views}
        _check(outputs <= self.known, "an output is not there")

    def run_loop(self) -> dict[Any, dict[int, int | None]]:
        """Execute all ticks; return what is in the stacks."""
        loop = self.pipeline
        assert loop is not None
        for tick in range(loop.first_tick, 0):
            self._one_tick(tick, range(tick, tick + 1), loop.first_gathers)
        for start, stop in itertools.pairwise(loop.cuts):
            entries = set(loop.carried(range(start, stop)))
            for tick in range(start, stop):
                self._enter(entries)
                listed = list(loop.in_ticks(range(start, stop)))
                self._one_tick(tick, range(start, stop), listed, entries)
            left = loop.found_by(stop)
            self.layers = {
                lag: {key: x for key, x in layer.items() if (key, lag) in left}
                for lag, layer in self.layers.items()
            }
        for tick in range(loop.length, loop.last_tick):
            ticks = range(tick, tick + 1)
            self._one_tick(tick, ticks, [x for x in loop.in_ticks(ticks) if x.lag > 0])
        return self.stacks

    def _enter(self, entries: set[Any]) -> None:
        """Fill what a loop carries, and is not there, with zeros, which belong to no iteration."""
        for key, lag in entries:
            copies = self.pipeline and self.pipeline.copies.get(key)
            if key in self.layers.get(lag, {}):
                continue
            if copies and (self.tick < lag or self._found(key, lag)):
                getattr(self, f"_{type(copies).__name__.lower()}")(
                    dataclasses.replace(copies, lag=lag)
                )
            else:
                self.layers.setdefault(lag, {})[key] = (None, 0)

    def _found(self, key: Any, lag: int) -> bool:
        assert self.pipeline is not None
        return (key, lag) in self.pipeline.found_by(self.tick)

    def _one_tick(
        self,
        tick: int,
        ticks: range,
        listed: Sequence[Instruction],
        entries: set[Any] | None = None,
    ) -> None:
        loop = self.pipeline
        assert loop is not None
        self.tick = tick
        self._at_start = {(k, lag): x for lag, y in self.layers.items() for k, x in y.items()}
        self.run([x for x in listed if isinstance(x, kinds.Hold) or loop.has_iteration(x, ticks)])
        carried = loop.found_by(tick + 1) if entries is None else entries
        before, self.layers = self.layers, {}
        for key, lag in carried:
            made = before.get(lag - 1, {}).get(key)
            # In a loop, what nothing replaces stays in its place.
            value = made or (self._at_start.get((key, lag)) if entries else None)
            if value is not None:
                self.layers.setdefault(lag, {})[key] = value
        self.tick = tick + 1

    def _iteration(self, each: Instruction) -> int | None:
        """The iteration that an instruction works on; None if there is none in this tick."""
        if self.pipeline is None:
            return 0
        iteration = self.tick - each.lag
        return iteration if iteration in self.pipeline.iterations(each) else None

    def _read(self, each: Instruction, key: Any) -> Any:
        """What is there of the value `key`, which must belong to the iteration of `each`."""
        found, detail = self.layers.get(each.lag, {})[key]
        iteration = self._iteration(each)
        _check(iteration is None or found == iteration, f"{key} of {found}, not of {iteration}")
        return detail

    def _write(self, each: Instruction, key: Any, detail: Any = 0) -> None:
        self.layers.setdefault(each.lag, {})[key] = self._iteration(each), detail

    def _place(self, each: Instruction) -> int:
        """The place in the stacks: without an iteration, the first or the last."""
        length = self.pipeline.length if self.pipeline else 1
        return min(max(self.tick - each.lag, 0), length - 1)

    def _take(self, each: Instruction, key: Any) -> None:
        """Take an element out of a stack that belongs to the iteration of its place."""
        iteration = self._iteration(each)
        tag = self._place(each) if iteration is None else iteration
        self.layers.setdefault(each.lag, {})[key] = tag, 0

    def _put(self, each: Instruction, key: Any) -> None:
        """Put an element into its stack."""
        there, place = self.layers[each.lag][key][0], self._place(each)
        length = self.pipeline.length if self.pipeline else 1
        if there is not None and there >= length:  # of the loop that goes on, in reverse
            there = place = 2 * length - 1 - there
        self.stacks.setdefault(key, {})[place] = there

    # Weights.

    def _takeshards(self, each: kinds.TakeShards) -> None:
        for weight in each.weights:
            self._take(each, ("shards", weight))

    def _fetchshards(self, each: kinds.FetchShards) -> None:
        self._take(each, ("shards", each.weight))

    def _keepslices(self, each: kinds.KeepSlices) -> None:
        for weight in each.weights:
            self._read(each, ("shards", weight))
            self._put(each, ("shards", weight))

    def _takeslices(self, each: kinds.TakeSlices) -> None:
        for weight in each.weights:
            there = self.stacks["shards", weight][self._place(each)]
            _check(there == self._iteration(each), "a node slice is not there")

    def _encode(self, each: kinds.Encode) -> None:
        if self.pipeline is not None:
            for gather in self.plan.gather_groups[each.group].gathers:
                self._read(each, ("shards", gather.weight))
        group = self.plan.gather_groups[each.group]
        in_node = group.from_slices and not any(x.keeps for x in group.gathers)
        self._write(
            each, ("message", each.group), sum(x == "node" for x in self.plan.gather_axes) * in_node
        )

    def _send(self, each: kinds.Send) -> None:
        done = self._read(each, ("message", each.group))
        _check(done == each.axis or self._iteration(each) is None, "axes are out of order")
        self._write(each, ("message", each.group), each.axis + 1)

    def _decode(self, each: kinds.Decode) -> None:
        axes = self._read(each, ("message", each.group))
        _check(axes == self.plan.num_hops, "a weight is decoded on its way")
        for gather in self.plan.gather_groups[each.group].gathers:
            self.full[gather.weight, gather.ops] = axes

    def _drop(self, each: kinds.Drop) -> None:
        for key in each.weights:
            _check(key in self.full, "a weight is dropped twice")
            del self.full[key]

    # Operations.

    def _begin(self, each: kinds.Begin) -> None:
        for i in each.rows:
            self._read(each, ("row", i))
        self.known = set(self.plan.block.inputs)
        self.made = set(self.known)

    def _fetchrow(self, each: kinds.FetchRow) -> None:
        self._take(each, ("row", each.stack))

    def _run(self, each: kinds.Run) -> None:
        operation, views = self.plan.block.operations[each.at], self.plan.uses.views
        for x in operation.inputs:
            if not isinstance(x, Value):
                continue
            if x in views:
                is_full = any(key[0] is views[x].weight for key in self.full)
                _check(is_full or isinstance(operation, Barrier), "a weight is not there")
            else:
                _check(x in self.known, f"{operation.name} reads what is not there")
        self._make(operation.outputs)

    def _runloop(self, each: kinds.RunLoop) -> None:
        operation = self.plan.block.operations[each.at]
        loop = self.plan.loops[each.at]
        is_begun = not loop.is_pipelined or loop.continues is not None or each.at in self.begun
        _check(is_begun, "a loop runs whose first gathers are not begun")
        self._make(operation.outputs)

    def _startloop(self, each: kinds.StartLoop) -> None:
        self.begun.add(each.loop)

    def _make(self, values: Sequence[Value]) -> None:
        self.made.update(values)
        gradients = {x for group in self.plan.reduce_groups for x in group.values}
        self.known.update(x for x in values if x not in gradients)

    def _zeros(self, each: kinds.Zeros) -> None:
        self.known.add(each.value)

    def _delay(self, each: kinds.Delay) -> None:
        _check(each.value in self.known, "a scatter's update is not there")

    def _runonshards(self, each: kinds.RunOnShards) -> None:
        operation = self.plan.block.operations[each.operation]
        inputs = {x for x in operation.inputs if isinstance(x, Value)}
        _check(inputs <= self.known, "an operation on shards reads what is not reduced")
        self.known.update(operation.outputs)

    # Gradients.

    def _encodegradients(self, each: kinds.EncodeGradients) -> None:
        values = self.plan.reduce_groups[each.group].values
        _check(self.made.issuperset(values), "a gradient is sent that is not made")
        self._write(each, ("gradient", each.group))

    def _reduce(self, each: kinds.Reduce) -> None:
        done = self._read(each, ("gradient", each.group))
        _check(done == each.axis or self._iteration(each) is None, "a bucket skips an axis")
        self._write(each, ("gradient", each.group), each.axis + 1)

    def _finish(self, each: kinds.Finish) -> None:
        group = self.plan.reduce_groups[each.group]
        done = self._read(each, ("gradient", each.group))
        is_complete = done == len(group.axes) or self._iteration(each) is None
        _check(is_complete, "a sum is not complete")
        del self.layers[each.lag]["gradient", each.group]
        for value in group.values:
            self._write(each, ("reduced", value))

    def _store(self, each: kinds.Store) -> None:
        self._read(each, ("reduced", each.value))
        del self.layers[each.lag]["reduced", each.value]
        self.known.add(each.value)

    # Outputs of loops.

    def _output(self, each: kinds.Output) -> None:
        output = self.plan.block.outputs[each.output]
        there = not isinstance(output, Value) or output in self.known
        _check(there or output in self.plan.uses.views, "an output is not there")
        self._write(each, ("output", each.output))
        self.taken.add((each.output, self._iteration(each)))

    def _collect(self, each: kinds.Collect) -> None:
        self._read(each, ("output", each.output))
        self._put(each, ("output", each.output))

    def _fetchstate(self, each: kinds.FetchState) -> None:
        self._take(each, ("state", each.output))

    def _update(self, each: kinds.Update) -> None:
        self._read(each, ("output", each.output))
        self._read(each, ("state", each.output))
        if self._iteration(each) is not None:  # it is masked where there is none
            done = self.stacks.setdefault(("state", each.output), {})
            _check(self._place(each) not in done, "a layer is updated twice")
            self._put(each, ("state", each.output))


def _loops(plan: BlockPlan) -> Iterator[tuple[LoopPlan, Loop, LoopUses, bool]]:
    """The loops of a block and of the loops in it, and whether another goes on with its gathers."""
    for index, loop in plan.loops.items():
        operation = plan.block.operations[index]
        assert isinstance(operation, Loop)
        goes_on = any(x.continues == index for x in plan.loops.values())
        yield loop, operation, plan.uses.loops[index], goes_on
        yield from _loops(loop.body)


def pipelines(plan: BlockPlan) -> Iterator[Pipeline]:
    """Those of all loops: as they are, cut, with copies from host memory and with updates."""
    for loop, operation, uses, goes_on in _loops(plan):
        make = functools.partial(pipeline_of, loop, operation, uses, goes_on=goes_on)
        yield make()
        yield make(host_rows=(0,))
        if not loop.is_pipelined or loop.continues is not None:
            continue
        layers, hops = [x.layer for x in uses.stacks], loop.body.num_hops
        for window in (1, 2) if layers else ():
            ahead = dataclasses.replace(loop, window=window)
            yield pipeline_of(
                ahead, operation, uses, goes_on=goes_on, in_host=layers, host_rows=(0,)
            )
        if operation.length > 2 * hops and not goes_on:
            cut = dataclasses.replace(loop, num_first=hops, num_last=hops)
            yield pipeline_of(cut, operation, uses)
        late = loop.body.deferred_values()
        outputs = [i for i, x in enumerate(loop.body.block.outputs) if x in late]
        for num_last in (0, 1) if outputs and not goes_on else ():
            yield pipeline_of(
                dataclasses.replace(loop, updates={outputs[-1]: 0}, num_last=num_last),
                operation,
                uses,
            )


def walk_loop(pipeline: Pipeline, expected: Pipeline | None = None) -> None:
    """Execute all ticks, and check that each place in the stacks has what belongs there.

    `expected` is the pipeline that this one is a mutant of.
    """
    walk = Walk(pipeline.plan.body, pipeline)
    stacks = walk.run_loop()
    for name, places in stacks.items():
        for place in range(pipeline.length):
            there = places.get(place)
            _check(there == place, f"{name} of {there} is at {place}")
    for each in (expected or pipeline).instructions:
        match each:
            case kinds.Output(output=number):
                found = {(number, i) for i in range(pipeline.length)}
                _check(found <= walk.taken, "an output is not taken")
            case kinds.Collect(output=number):
                _check(("output", number) in stacks, "an output is not collected")
            case kinds.Update(output=number):
                _check(("state", number) in stacks, "a leaf is not updated")
            case kinds.KeepSlices(weights=weights):
                _check(all(("shards", x) in stacks for x in weights), "slices are not kept")
