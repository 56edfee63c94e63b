"""The choice of what is kept, against all choices there are."""

from __future__ import annotations

import dataclasses
import itertools
import types
from typing import Any

import jax
import numpy as np
import pytest

from jaxzero._activations.costs import RATES, bytes_of
from jaxzero._activations.min_cut import Choice, Cost, Part, cheapest
from jaxzero._program import Operation, Value


def _value(rng: np.random.Generator) -> Value:
    return Value(jax.ShapeDtypeStruct((int(rng.integers(1, 9)) * 1000,), np.float32))


def _part(seed: int) -> Part:
    """Operations of one or two results, each of one to three values before it."""
    rng = np.random.default_rng(seed)
    values = entering = [_value(rng) for _ in range(3)]
    operations: list[Operation] = []
    for _ in range(7):
        inputs = tuple(values[i] for i in rng.choice(len(values), rng.integers(1, 4)))
        outputs = tuple(_value(rng) for _ in range(rng.integers(1, 3)))
        name = str(rng.choice(["add", "gather", "reshape"]))
        primitive = types.SimpleNamespace(name=name)
        equation: Any = types.SimpleNamespace(primitive=primitive, params={}, effects=())
        operations.append(Operation(name, inputs, outputs, equation))
        values = [*values, *outputs]
    carried, loaded, _ = entering
    made = values[3:]
    wanted = [made[i] for i in rng.choice(len(made), 4, replace=False)]
    stored = [made[i] for i in rng.choice(len(made), 1)]
    never = [operations[i] for i in rng.choice(len(operations), 1)]
    inputs = {loaded: Cost(3000, 1e-9)}
    # What a loop stacks up is read and written twice.
    part = Part(operations, wanted, [carried], inputs, stored, never, trips=3)
    return dataclasses.replace(part, is_stacked=seed % 2 == 0)


def _seconds(part: Part, price: float, repeated: tuple[Operation, ...]) -> tuple[float, Any]:
    """What it costs to repeat these operations and to keep all that is read beside."""
    again = {x for operation in repeated for x in operation.outputs}
    read = {*part.wanted, *(x for operation in repeated for x in operation.values)} - again
    makers = {x for operation in part.operations for x in operation.outputs}
    kept = {x for x in read if x in makers or x in part.carried}
    seconds = sum(map(part.seconds_of, repeated))
    num_bytes = part.trips * sum(bytes_of(x) for x in kept - {*part.stored})
    seconds += (price + part.is_stacked * 4 / RATES.memory) * num_bytes
    for x in read & part.inputs.keys():
        seconds += price * part.inputs[x].bytes + part.inputs[x].seconds
    return seconds, kept


@pytest.mark.parametrize("price", [1e-14, 3e-13, 1e-11])
@pytest.mark.parametrize("seed", range(8))
def test_no_other_choice_costs_less(seed, price):
    part = _part(seed)
    may = [x for x in part.operations if x not in part.never]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(may, n) for n in range(len(may) + 1)
    )
    least = min(_seconds(part, price, subset)[0] for subset in subsets)
    choice = cheapest(part, price)
    seconds, kept = _seconds(part, price, tuple(choice.repeated))
    # Each of at most 40 capacities is rounded to a part in 2**30 of their sum, which is less than
    # 100 times the least.
    assert seconds == pytest.approx(least, rel=40 * 100 / 2**30)
    assert {*choice.kept} == kept
    assert not {*choice.repeated} & {*part.never}


def test_chains_of_elementwise_operations_are_written_once():
    """Where a product or a gather reads the last; what reductions read is not written at all."""

    def made(name: str, *inputs: Value) -> Operation:
        primitive = types.SimpleNamespace(name=name)
        equation: Any = types.SimpleNamespace(primitive=primitive, params={}, effects=())
        return Operation(
            name, inputs, (Value(jax.ShapeDtypeStruct((1000,), np.float32)),), equation
        )

    start = Value(jax.ShapeDtypeStruct((1000,), np.float32))
    first = made("exp", start)
    summed = made("reduce_sum", *first.outputs)
    second = made("div", *first.outputs, *summed.outputs)
    last = made("gather", *second.outputs)
    part = Part([first, summed, second, last], [], [], {}, [], [], trips=2)
    write = 4000 / RATES.memory
    seconds = [part.seconds_of(x) for x in part.operations]
    assert seconds == pytest.approx([0, 2 * write, 2 * write, 4 * write])


def test_values_that_are_kept_at_no_price_are_kept():
    part = _part(0)
    value = part.wanted[0]
    assert value in cheapest(part, 1e-11, keep=[value]).kept


def test_nothing_is_repeated_if_bytes_cost_nothing():
    part = _part(1)  # of no loop
    assert cheapest(part, 0.0) == Choice([*dict.fromkeys(_order(part))], [])


def _order(part: Part) -> list[Value]:
    return [x for op in part.operations for x in op.outputs if x in part.wanted]
