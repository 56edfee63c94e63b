"""Lists of instructions, proved without collectives: each array is a tag that its readers check.

The tag of a weight is its layer, so a loop that decodes the weights of another layer is found too.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import jaxzero as jz
from jaxzero._plan import BlockPlan, instructions_of
from jaxzero._plan import instructions as kinds
from jaxzero._plan.instructions import Instruction
from jaxzero._program import Barrier, Value
from tests import zoo

from . import test_schedule

_SHALLOW = jz.CommSchedule(prefetch=2, bucket_bytes=2**12)
_CONFIGS = {
    "zero3": jz.zero3(),
    "zeropp": zoo.PRESETS["zeropp"],
    "two ahead": dataclasses.replace(jz.zero3(), schedule=_SHALLOW),
    "none ahead": dataclasses.replace(jz.zero3(), schedule=jz.CommSchedule(prefetch=0)),
}


class _Wrong(Exception):
    """A list that reads what is not there."""


def _check(condition: object, message: str) -> None:
    if not condition:
        raise _Wrong(message)


class _Walk:
    """Executes a list for one iteration of a block, with tags in place of arrays."""

    def __init__(self, plan: BlockPlan, layer: int, in_flight: dict[int, list[int]]):
        self.plan, self.layer = plan, layer
        self.in_flight = in_flight  # of each group, the layer whose messages are there, by axis
        self.sent: dict[int, list[int]] = {}  # likewise for the next iteration
        self.encoded: dict[int, int] = {}
        self.full: dict[object, int] = {}
        self.known: set[Value] = set(plan.block.inputs)
        self.made: set[Value] = set(plan.block.inputs)  # gradients too, before they are reduced
        self.buckets: dict[int, int] = {}  # groups of gradients, and the axes that are done
        self.reduced: set[Value] = set()
        self.begun: set[int] = set()  # loops whose first gathers are under way

    def run(self, listed: Sequence[Instruction]) -> None:
        for each in itertools.chain.from_iterable(x.parts for x in listed):
            tie = getattr(each, "tie", None)
            value = tie.value if isinstance(tie, kinds.Tie) else tie
            for needed in (value, getattr(each, "pin", None)):
                _check(needed is None or needed in self.known, f"{each} waits for nothing")
            getattr(self, f"_{type(each).__name__.lower()}", lambda _: None)(each)
        groups = self.plan.reduce_groups
        deferred = {i for i, group in enumerate(groups) if group.deferred}
        _check(self.buckets.keys() == deferred and not self.reduced, "gradients are left over")
        late = self.plan.deferred_values() | self.plan.uses.views.keys()
        outputs = {x for x in self.plan.block.outputs if isinstance(x, Value) and x not in late}
        _check(outputs <= self.known, "an output is not there")
        _check(not self.full, "weights are not dropped")

    def _encode(self, each: kinds.Encode) -> None:
        ahead = self.plan.num_hops if self.plan.gather_groups[each.group].prefetched else 0
        self.encoded[each.group] = self.layer + ahead

    def _send(self, each: kinds.Send) -> None:
        prefetched = self.plan.gather_groups[each.group].prefetched
        sent = self.sent if prefetched else self.in_flight
        _check(len(sent.setdefault(each.group, [])) == each.axis, "axes are out of order")
        _check(each.axis or each.group in self.encoded, "nothing is encoded")
        before = self.in_flight[each.group][each.axis - 1] if each.axis else None
        sent[each.group].append(self.encoded.pop(each.group) if before is None else before)

    def _decode(self, each: kinds.Decode) -> None:
        found = self.in_flight.get(each.group, [])
        _check(len(found) == self.plan.num_hops, "a weight is decoded on its way")
        _check(found[-1] == self.layer, f"layer {found[-1]} is decoded for {self.layer}")
        for gather in self.plan.gather_groups[each.group].gathers:
            self.full[gather.weight, gather.ops] = found[-1]

    def _drop(self, each: kinds.Drop) -> None:
        for key in each.weights:
            _check(key in self.full, "a weight is dropped twice")
            del self.full[key]

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

    def _encodegradients(self, each: kinds.EncodeGradients) -> None:
        values = self.plan.reduce_groups[each.group].values
        _check(self.made.issuperset(values), "a gradient is sent that is not made")
        self.buckets[each.group] = 0

    def _reduce(self, each: kinds.Reduce) -> None:
        _check(self.buckets.get(each.group) == each.axis, "a bucket skips an axis")
        self.buckets[each.group] = each.axis + 1

    def _finish(self, each: kinds.Finish) -> None:
        group = self.plan.reduce_groups[each.group]
        _check(self.buckets.pop(each.group, None) == len(group.axes), "a sum is not complete")
        self.reduced.update(group.values)

    def _store(self, each: kinds.Store) -> None:
        _check(each.value in self.reduced, "a gradient is stored that is not reduced")
        self.reduced.remove(each.value)
        self.known.add(each.value)


def _plans(plan: BlockPlan, in_pipeline: bool = False) -> Iterator[tuple[BlockPlan, bool]]:
    yield plan, in_pipeline
    for loop in plan.loops.values():
        yield from _plans(loop.body, loop.is_pipelined)


def _walk(plan: BlockPlan, in_pipeline: bool, listed: Sequence[Instruction]) -> None:
    """Execute a block once, or three iterations of a loop's body."""
    hops = plan.num_hops
    in_flight = {
        i: [hops - 1 - axis for axis in range(hops)]  # as the prologue leaves them
        for i, group in enumerate(plan.gather_groups)
        if group.prefetched
    }
    for layer in range(3 if in_pipeline else 1):
        walk = _Walk(plan, layer, in_flight)
        walk.run(listed)
        in_flight = walk.sent


def _plan_of(name: str, config: str) -> BlockPlan:
    case = zoo.CASES[name]
    zero = jz.Zero(zoo.make_mesh("2x4-auto"), _CONFIGS[config])
    trees = [zero.abstract(lambda tree=tree: tree) for tree in case.init(jax.random.key(0))]
    batch = jax.tree.map(np.asarray, case.batch(jax.random.key(1), 24))
    return zero.plan(case.loss, *trees, batch, argnums=case.argnums, has_aux=case.has_aux).top


_NAMES = [*list(zoo.CASES)[::12], "scanned_layers_of_divisible_width", "unrolled_with_remat"]


@pytest.mark.parametrize("config", _CONFIGS)
@pytest.mark.parametrize("name", _NAMES)
def test_every_reader_finds_what_it_reads(name, config):
    for plan, in_pipeline in _plans(_plan_of(name, config)):
        _walk(plan, in_pipeline, instructions_of(plan, in_pipeline=in_pipeline))


@pytest.mark.parametrize("name", ["scanned_layers_of_divisible_width", "unrolled_with_remat"])
def test_a_list_without_one_instruction_is_wrong(name):
    """So the walk notices what it is there to notice."""
    survivors = []
    for plan, in_pipeline in _plans(_plan_of(name, "two ahead")):
        listed = instructions_of(plan, in_pipeline=in_pipeline)
        for i, each in enumerate(listed):
            mutant = [*listed[:i], *listed[i + 1 :]]
            try:
                _walk(plan, in_pipeline, mutant)
                survivors.append(type(each))
            except (_Wrong, KeyError, IndexError):
                pass
    # These decide about memory and time only.
    harmless = {kinds.Delay, kinds.Drop, kinds.FinishLoss, kinds.ReducePrevious, kinds.PinGradients}
    assert set(survivors) <= harmless


def test_two_messages_that_change_places_are_noticed():
    (plan, in_pipeline), *_ = _plans(_plan_of("unrolled_with_remat", "two ahead"))
    listed = list(instructions_of(plan, in_pipeline=in_pipeline))
    sends = [i for i, x in enumerate(listed) if isinstance(x, kinds.Send | kinds.Encode)]
    chosen = random.Random(0).sample(sends, min(8, len(sends)))
    for i in chosen:
        each = listed[i]
        assert isinstance(each, kinds.Send | kinds.Encode)
        wrong = dataclasses.replace(each, group=(each.group + 1) % len(plan.gather_groups))
        with pytest.raises((_Wrong, KeyError, IndexError)):
            _walk(plan, in_pipeline, [*listed[:i], wrong, *listed[i + 1 :]])


def _collectives(jaxpr: Any) -> Iterator[tuple[str, str]]:
    """The collectives of a traced program in its order, those of a loop's body once."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in ("all_gather", "reduce_scatter"):
            axes = params.get("axis_name", params.get("axes"))
            yield name, axes if isinstance(axes, str) else "+".join(axes)
        for x in jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(getattr(x, "jaxpr", x), "eqns"):
                yield from _collectives(getattr(x, "jaxpr", x))


def _sent(plan: BlockPlan) -> Iterator[tuple[str, str]]:
    """The collectives that a list says a block without loops has, in its order."""
    for each in itertools.chain.from_iterable(x.parts for x in instructions_of(plan)):
        if isinstance(each, kinds.Send):
            yield "all_gather", plan.gather_axes[each.axis]
        elif isinstance(each, kinds.Reduce):
            yield "reduce_scatter", plan.reduce_groups[each.group].axes[each.axis]


@pytest.mark.parametrize("schedule", ["one ahead", "units", "two ahead, small units"])
def test_the_program_has_the_collectives_of_the_list_in_its_order(schedule):
    zero = test_schedule._zero("zero3", test_schedule.SCHEDULES[schedule])
    params = zero.abstract(test_schedule._init, jax.random.key(0))
    tokens = np.zeros((16, 3), np.int32)
    plan = zero.plan(test_schedule._unrolled, params, tokens).top
    traced = jax.make_jaxpr(zero.value_and_grad(test_schedule._unrolled))(params, tokens)
    found = list(_collectives(traced.jaxpr))
    assert len(found) > 4 * test_schedule.LAYERS and found == list(_sent(plan))
