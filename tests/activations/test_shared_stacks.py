"""Stacks that a scan returns and that backward reads: they are held once, and count once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxzero as jz
from jaxzero._activations import Chosen, choose_activations
from jaxzero._program import Block, Loop, trace

from .test_activations import (
    LAYERS,
    ROWS,
    TOKENS,
    WIDTH,
    _check,
    _layer,
    batch,
    bytes_of,
    head,
    init,
    residuals,
    zero_of,
)
from .test_activations import _copies_are_free as _copies_are_free  # used by all tests here


@pytest.mark.parametrize("is_held", [True, False])
def test_what_a_scan_stacks_up_for_others_too(is_held):
    """A stack that backward reads outside of loops counts once. One that only forward reads does
    not let the layers keep more than the budget."""

    def loss(p: Any, ids: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(x @ w["up"])
            return x + h @ w["down"], h

        x, stack = lax.scan(body, p["embed"][ids], p["layers"])
        scale = jnp.sum(p["head"]) if is_held else 1.0
        return head(p, x, ids) + jnp.mean(scale * (stack if is_held else lax.stop_gradient(stack)))

    hidden, stack = (ROWS // 4, TOKENS, 4 * WIDTH), LAYERS * ROWS // 4 * TOKENS * 4 * WIDTH * 4
    zero = zero_of(stack // 2 + is_held * stack)
    found = residuals(zero, loss), residuals(zero, loss, "recompute")
    kept, repeated = ([x for x in of_action if x.shape == hidden] for of_action in found)
    products = [x for x in repeated if x.flops]
    assert [bytes_of(kept), len(kept), len(products)] == [0, is_held, not is_held]
    held = [x for x in found[0] if x.shape == (LAYERS, *hidden)]
    assert bytes_of(held) == is_held * stack
    if is_held:
        _check(zero_of(3 * stack), loss)


@pytest.mark.parametrize("budget", [0, pytest.param(10**9, marks=pytest.mark.exhaustive)])
def test_cross_attention_to_an_encoder(budget):
    """Two loops, of which the second reads what the first returns, also layer by layer."""

    def loss(p, ids):
        first, states = lax.scan(lambda x, w: (_layer(x, w),) * 2, p["embed"][ids], p["layers"])

        def layer(x, given):
            w, state = given
            mixed = jnp.einsum("btd,bsd->bts", x @ w["mix"], first)
            return _layer(x + jnp.einsum("bts,bsd->btd", jnp.tanh(mixed), state), w), None

        x, _ = lax.scan(layer, p["embed"][ids], (p["layers"], states))
        return head(p, x, ids)

    _check(zero_of(budget), loss)


def _encode(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
    """A layer that returns its hidden values, which are a residual of its `tanh` as well."""
    hidden = jnp.tanh(x @ w["up"])
    return x + hidden @ w["down"], hidden


def _decode(x: jax.Array, given: Any) -> tuple[jax.Array, jax.Array]:
    w, hidden = given
    return x + (jax.nn.gelu(x @ w["up"]) * jnp.sin(hidden)) @ w["down"], jnp.mean(hidden)


def _two_decoders(p: Any, ids: jax.Array, is_reversed: bool = False) -> jax.Array:
    x, states = lax.scan(_encode, p["embed"][ids], p["layers"])
    for _ in range(2):
        x, _ = lax.scan(_decode, x, (p["layers"], states), reverse=is_reversed)
    return head(p, x, ids)


def _decoder_of_reversed_states(p: Any, ids: jax.Array) -> jax.Array:
    """The scan returns its states twice: one is read upside down, one as a whole."""

    def encode(x: jax.Array, w: Any) -> tuple[jax.Array, Any]:
        x, hidden = _encode(x, w)
        return x, (hidden, hidden, x)

    x, (first, second, third) = lax.scan(encode, p["embed"][ids], p["layers"])
    x, sums = lax.scan(_decode, x, (p["layers"], first[::-1]))
    whole = jnp.mean(jnp.sin(second)) + jnp.mean(third**3)
    return head(p, x, ids) + whole + jnp.mean(sums)


def _states_of_a_scan_inside(p: Any, ids: jax.Array) -> jax.Array:
    def encode(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
        def one(total: jax.Array, token: jax.Array) -> tuple[jax.Array, Any]:
            token, hidden = _encode(token, w)
            return total + token, (token, hidden)

        _, (x, hidden) = lax.scan(one, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
        return x.swapaxes(0, 1), hidden.swapaxes(0, 1)

    x, states = lax.scan(encode, p["embed"][ids], p["layers"])
    return head(p, lax.scan(_decode, x, (p["layers"], states))[0], ids)


def _returned(p: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, states = lax.scan(_encode, p["embed"][ids], p["layers"])
    return head(p, lax.scan(_decode, x, (p["layers"], states))[0], ids), states


def _returned_by_a_cheap_scan(p: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Its last state is cheaper to compute again than to keep; what it returns is there anyway."""
    x = jax.nn.one_hot(ids, WIDTH)
    x, states = lax.scan(lambda x, _: (jnp.sin(x), x), x, length=LAYERS)
    return head(p, x, ids) + 0 * jnp.sum(lax.stop_gradient(states)), states


LOSSES = {
    "two decoders": _two_decoders,
    "decoders in reverse": lambda p, ids: _two_decoders(p, ids, is_reversed=True),
    "reversed states": _decoder_of_reversed_states,
    "a scan inside": _states_of_a_scan_inside,
    "returned": _returned,
}


def _chosen(loss: Any, budget: int) -> Chosen:
    """The choice for loss and gradients of one device; a loss may have other results."""
    flat, treedef = jax.tree.flatten(init())

    def step(ids: jax.Array, *flat: jax.Array) -> Any:
        params = jax.tree.unflatten(treedef, flat)
        has_aux = loss in (_returned, _returned_by_a_cheap_scan)
        return jax.value_and_grad(loss, has_aux=has_aux)(params, ids)

    with jax.enable_x64(True):
        block, _ = trace(step, batch(), *flat)
    results, activations = block.outputs[: -len(flat)], jz.Activations(budget_bytes=budget)
    return choose_activations(block, block.inputs[-len(flat) :], results, activations)


def _held_bytes(block: Block) -> int:
    """What backward reads of forward up to its last loop, but for results.

    What is made behind that loop is there in any case when backward begins.
    """
    end = block.positions[block.outputs[0]] + 1
    last = max(i for i, x in enumerate(block.operations[:end]) if isinstance(x, Loop))
    made = {x for operation in block.operations[: last + 1] for x in operation.outputs}
    read = {x for operation in block.operations[end:] for x in operation.values}
    return sum(x.num_bytes for x in made & read - {*block.outputs})


@pytest.mark.parametrize("name", LOSSES)
def test_a_plan_counts_what_the_program_holds(name):
    """A value that a scan returns and that its own backward reads has one stack."""
    all_that_is_worth_it, least = (_chosen(LOSSES[name], budget) for budget in (10**9, 0))
    half = _chosen(LOSSES[name], (all_that_is_worth_it.num_bytes + least.num_bytes) // 2)
    for chosen in (all_that_is_worth_it, half, least):
        assert chosen.num_bytes == _held_bytes(chosen.block)


def test_results_are_those_of_forward():
    chosen = _chosen(_returned_by_a_cheap_scan, 0)
    loss, states = chosen.block.outputs[:2]
    assert any(choice.repeated for _, choice in chosen.choices)
    assert chosen.block.positions[states] < chosen.block.positions[loss]


@pytest.mark.parametrize("budget", [0, pytest.param(10**9, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", [x for x in LOSSES if x != "returned"])
@pytest.mark.one_in(4)
def test_a_step_is_that_of_one_device(name, budget):
    _check(zero_of(budget), LOSSES[name])


def _transposed_weights(p: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A scan returns them, and a second scan reads them."""

    def first(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(x @ w.T), w.T

    x, stack = lax.scan(first, p["embed"][ids], p["layers"]["mix"])
    x, _ = lax.scan(lambda x, w: (x + jnp.sin(x @ w) @ w, None), x, stack)
    return head(p, x, ids), stack


@pytest.mark.parametrize("returned", [True, False])
def test_stacks_of_views_of_weights_are_no_activations(returned):
    """At no budget: backward computes a layer of them where it reads it."""

    def loss(p: Any, ids: jax.Array) -> Any:
        value, stack = _transposed_weights(p, ids)
        return (value, stack) if returned else value + jnp.mean(stack**2)

    def kept(budget: int) -> int:
        zero = zero_of(budget)
        found = zero.plan(loss, zero.abstract(init), batch(), has_aux=returned).residuals
        assert found and (WIDTH, WIDTH) not in {x.shape[-2:] for x in found}
        return bytes_of(x for x in found if x.action == "keep")

    least = kept(0)
    assert kept(least) == least < kept(10**9)
