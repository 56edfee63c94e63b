"""Lists of instructions, proved without collectives (`walk`), and beside the traced program."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import jaxzero as jz
from jaxzero._plan import BlockPlan, Pipeline, instructions_of
from jaxzero._plan import instructions as kinds
from jaxzero._plan.instructions import Instruction
from tests import zoo

from . import test_schedule
from .walk import Walk, Wrong, pipelines, walk_loop

_SHALLOW = jz.CommSchedule(prefetch=2, bucket_bytes=2**12)
_CONFIGS = {
    "zero3": jz.zero3(),
    "zeropp": zoo.PRESETS["zeropp"],
    "two ahead": dataclasses.replace(jz.zero3(), schedule=_SHALLOW),
    "none ahead": dataclasses.replace(jz.zero3(), schedule=jz.CommSchedule(prefetch=0)),
}


def _plan_of(name: str, config: str, num_layers: int | None = None) -> BlockPlan:
    case = zoo.CASES[name]
    zero = jz.Zero(zoo.make_mesh("2x4-auto"), _CONFIGS[config])
    trees = case.init(jax.random.key(0))
    if num_layers is not None:
        trees = jax.tree.map(lambda x: np.resize(x, (num_layers, *x.shape[1:])), trees)
    trees = [zero.abstract(lambda tree=tree: tree) for tree in trees]
    batch = jax.tree.map(np.asarray, case.batch(jax.random.key(1), 24))
    return zero.plan(case.loss, *trees, batch, argnums=case.argnums, has_aux=case.has_aux).top


_NAMES = [*list(zoo.CASES)[::12], "scanned_layers_of_divisible_width", "unrolled_with_remat"]


@pytest.mark.parametrize("config", _CONFIGS)
@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.one_in(2)
def test_every_reader_finds_what_it_reads(name, config):
    plan = _plan_of(name, config)
    Walk(plan).run_block()
    for pipeline in pipelines(plan):
        walk_loop(pipeline)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("config", ["zero3", "zeropp", "two ahead", "none ahead"])
@pytest.mark.one_in(2)
def test_loops_of_any_length(config, length):
    loops = list(pipelines(_plan_of("scanned_layers_of_divisible_width", config, length)))
    assert all(loop.length == length for loop in loops)
    assert len(loops) >= 4
    is_pipelined = length > 1 and config != "none ahead"
    assert any(loop.plan.updates for loop in loops) == is_pipelined
    for loop in loops:
        walk_loop(loop)


# These decide about memory and time only.
_HARMLESS = {
    kinds.Delay,
    kinds.Drop,
    kinds.FinishLoss,
    kinds.Hold,
    kinds.HoldStates,
    kinds.JoinCopies,
    kinds.PinGradients,
}


def _is_noticed(walk: Callable[[], None]) -> bool:
    try:
        walk()
    except (Wrong, KeyError, IndexError, ValueError):
        return True
    return False


def test_a_block_without_one_instruction_is_wrong():
    """So the walk notices what it is there to notice."""
    plan = _plan_of("unrolled_with_remat", "two ahead")
    listed = instructions_of(plan)
    survivors = []
    for i, each in enumerate(listed):
        mutant = (*listed[:i], *listed[i + 1 :])
        if not _is_noticed(functools.partial(Walk(plan).run_block, mutant)):
            survivors.append(type(each))
    assert set(survivors) <= _HARMLESS


def _with(loop: Pipeline, i: int, *others: Instruction) -> Pipeline:
    """A loop with other instructions in the place of one."""
    listed = (*loop.instructions[:i], *others, *loop.instructions[i + 1 :])
    return dataclasses.replace(loop, instructions=listed)


def test_a_tick_without_one_instruction_is_wrong():
    survivors = []
    for loop in pipelines(_plan_of("scanned_layers_of_divisible_width", "zeropp")):
        for i, each in enumerate(loop.instructions):
            if not _is_noticed(functools.partial(walk_loop, _with(loop, i), loop)):
                survivors.append(each)
    # The shards that an iteration takes for itself may have no reader.
    takes = (kinds.TakeShards, kinds.TakeSlices)
    assert {type(x) for x in survivors if x.lag or not isinstance(x, takes)} <= _HARMLESS


def test_what_is_carried_follows_from_the_lags():
    """A message may cross an axis in another tick; what has a tick of its own may not move."""
    moved = []
    for loop in pipelines(_plan_of("scanned_layers_of_divisible_width", "two ahead")):
        for i, each in enumerate(loop.instructions):
            if isinstance(each, kinds.Send) and each.axis:
                # A group is decoded before it is sent for a later iteration.
                listed = [*loop.instructions[:i], *loop.instructions[i + 1 :]]
                decodes = [isinstance(x, kinds.Decode) and x.group == each.group for x in listed]
                later = dataclasses.replace(each, lag=each.lag + 1)
                listed.insert(min(i, decodes.index(True)), later)
                walk_loop(dataclasses.replace(loop, instructions=tuple(listed)), loop)
                moved.append(each)
            elif isinstance(each, (kinds.Decode, kinds.EncodeGradients)):
                later = dataclasses.replace(each, lag=each.lag + 1)
                assert _is_noticed(functools.partial(walk_loop, _with(loop, i, later), loop))
    assert moved


def test_two_messages_that_change_places_are_noticed():
    plan = _plan_of("unrolled_with_remat", "two ahead")
    listed = list(instructions_of(plan))
    sends = [i for i, x in enumerate(listed) if isinstance(x, kinds.Send | kinds.Encode)]
    chosen = random.Random(0).sample(sends, min(8, len(sends)))
    for i in chosen:
        each = listed[i]
        assert isinstance(each, kinds.Send | kinds.Encode)
        wrong = dataclasses.replace(each, group=(each.group + 1) % len(plan.gather_groups))
        mutant = (*listed[:i], wrong, *listed[i + 1 :])
        assert _is_noticed(functools.partial(Walk(plan).run_block, mutant))


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


@pytest.mark.parametrize("hpz", [None, jz.HpZ()], ids=["", "hpZ"])
@pytest.mark.parametrize("schedule", ["one ahead", "units", "two ahead, small units"])
def test_the_program_has_the_collectives_of_the_list_in_its_order(schedule, hpz):
    zero = test_schedule._zero("zero3", test_schedule.SCHEDULES[schedule])
    zero = jz.Zero(zero.mesh, dataclasses.replace(zero.config, hpz=hpz))
    params = zero.abstract(test_schedule._init, jax.random.key(0))
    tokens = np.zeros((16, 3), np.int32)
    plan = zero.plan(test_schedule._unrolled, params, tokens).top
    traced = jax.make_jaxpr(zero.value_and_grad(test_schedule._unrolled))(params, tokens)
    found = list(_collectives(traced.jaxpr))
    assert len(found) > 4 * test_schedule.LAYERS and found == list(_sent(plan))


def test_gradients_are_sent_on_where_no_weights_are_sent():
    """Backward holds all weights, so no gather has a tie there: each bucket sends others on."""
    plan = test_schedule._plan(
        "unrolled", "zero3", jz.CommSchedule(live_bytes=10**9, bucket_bytes=5000)
    )
    assert plan.top.last_forward is not None
    listed = [x for x in instructions_of(plan.top) if x.at > plan.top.last_forward]
    made = [(i, x.group) for i, x in enumerate(listed) if isinstance(x, kinds.EncodeGradients)]
    assert len(made) > test_schedule.LAYERS and not any(isinstance(x, kinds.Send) for x in listed)
    for (_, group), (third, _) in zip(made, made[3:], strict=False):
        _, node = [x for x in listed[:third] if isinstance(x, kinds.Reduce) and x.group == group]
        assert node.after is not None
