"""Batch rules that are defined outside of the package: what they may return, and what not."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxzero as jz
from jaxzero import extend

_PARAMS = {"w": jnp.ones((4, 3))}


@dataclasses.dataclass(frozen=True)
class _Says(extend.BatchRule):
    """Asks for `number` micro-batches; remembers nothing."""

    number: Any

    def wanted(self, similarity, steps, weight, target, memory):
        return self.number, memory


def _steps(rule, num=8):
    """The sizes of the batches that `num` micro-batches fill."""
    tx = jz.simigrad(
        optax.sgd(0.1), target_similarity=0.5, initial=2, min_steps=2, max_steps=16, rule=rule
    )
    state, found = tx.init(_PARAMS), []
    update = jax.jit(lambda gradient, state: tx.update(gradient, state)[1])
    for i in range(num):
        state = update(jax.tree.map(lambda x, i=i: x * (i + 1), _PARAMS), state)
        if int(state.count) == 0:
            found.append(int(state.steps))
    return found


@pytest.mark.parametrize(
    ("number", "steps"), [(3, 3), (jnp.float32(4.9), 4), (jnp.inf, 16), (-5.0, 2), (jnp.nan, 2)]
)
def test_numbers_are_bounded_and_rounded_down(number, steps):
    assert _steps(_Says(number), num=2) == [steps]


def test_a_rule_without_memory_needs_no_init():
    assert _Says(1).init() == ()


def test_any_object_with_the_two_methods_is_a_rule():
    class Other:
        def init(self):
            return jnp.float32(0)

        def wanted(self, similarity, steps, weight, target, memory):
            return steps + memory, memory + 1

    assert _steps(Other()) == [2, 3, 5]


def test_memory_keeps_its_type():
    class Counter(_Says):
        def init(self):
            return jnp.zeros([], jnp.int32)

        def wanted(self, similarity, steps, weight, target, memory):
            return steps, memory.astype(jnp.float32) + 1

    tx = jz.simigrad(optax.sgd(0.1), target_similarity=0.5, initial=1, max_steps=4, rule=Counter(0))
    state = tx.init(_PARAMS)
    after: Any = tx.update(_PARAMS, state)[1]
    assert after.memory.dtype == jnp.int32


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (jnp.float32(3), r"must return `\(steps, memory\)`; got an array of shape \(\)"),
        (("many", ()), "must return a real scalar, the number of micro-batches; got str 'many'"),
        ((jnp.ones(2), ()), r"must return a real scalar.*got an array of shape \(2,\)"),
        ((jnp.complex64(1), ()), "must return a real scalar.*complex64"),
        ((3.0, (1.0,)), r"must return a memory like that of `init`.*got tuple"),
    ],
)
def test_an_odd_result_is_refused(result, message):
    class Odd(_Says):
        def wanted(self, similarity, steps, weight, target, memory):
            return result

    with pytest.raises(ValueError, match=message):
        _steps(Odd(0))


def test_a_memory_of_arrays_is_refused():
    class Odd(_Says):
        def init(self):
            return {"history": jnp.zeros(5)}

    with pytest.raises(ValueError, match=r"tree of scalars; got an array of shape \(5,\).*history"):
        _steps(Odd(0))


def test_a_rule_without_wanted_cannot_be_made():
    class Incomplete(extend.BatchRule):
        pass

    with pytest.raises(TypeError, match="abstract method '?wanted'?"):
        Incomplete()  # pyright: ignore[reportAbstractUsage]
