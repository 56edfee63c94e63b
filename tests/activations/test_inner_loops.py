"""What is kept of loops inside of layers: a part of what they stack up, not all or nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxzero as jz
from tests import zoo

from .test_activations import LAYERS, ROWS, WIDTH, batch, bytes_of, head, zero_of

EXPERTS = 3
WIDE, TOKENS_OF_WIDE = 4096, 128  # of a model in which a product takes longer than to keep it
# As in `test_activations`: sums of at most 128 terms are rounded apart.
_TOLERANCE = 1e-13


def _shapes(width: int) -> Any:
    hidden = 6 * width
    experts = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    layers = {name: (LAYERS, EXPERTS, *shape) for name, shape in experts.items()}
    layers["mix"] = (LAYERS, width, width)
    return {"embed": (32, width), "layers": layers, "head": (width, 32)}


def _parameters() -> Any:
    rng = np.random.default_rng(2)
    draw = lambda shape: rng.standard_normal(shape) / 8  # noqa: E731
    return jax.tree.map(draw, _shapes(WIDTH), is_leaf=lambda x: isinstance(x, tuple))


def _experts(x: jax.Array, w: Any) -> jax.Array:
    """A layer that sums up experts, as `[tokens, hidden]` of each."""

    def expert(total: jax.Array, one: Any) -> tuple[jax.Array, None]:
        gate, up, down = one
        return total + (jax.nn.silu(x @ gate) * (x @ up)) @ down / EXPERTS, None

    return lax.scan(expert, x, (w["gate"], w["up"], w["down"]))[0]


def _recurrence(x: jax.Array, w: Any) -> jax.Array:
    """A layer whose state goes from token to token, in both directions one after the other."""

    def step(state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(state @ w["mix"] + jax.nn.gelu(token @ w["gate"][0]) @ w["down"][0])
        return state, state

    for reverse in (False, True):
        made = lax.scan(step, x[:, 0], jnp.moveaxis(x, 1, 0), reverse=reverse)[1]
        x = x + jnp.moveaxis(made, 0, 1)
    return x


def _experts_by_token(x: jax.Array, w: Any) -> jax.Array:
    """Experts of one token after the other: a loop in a loop in the layer."""

    def step(state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(state + _experts(token, w))
        return state, state

    return jnp.moveaxis(lax.scan(step, x[:, 0], jnp.moveaxis(x, 1, 0))[1], 0, 1)


LAYERS_WITH_LOOPS = {"experts": _experts, "recurrence": _recurrence, "both": _experts_by_token}


def _loss_of(name: str) -> Any:
    def loss(p: Any, ids: jax.Array) -> jax.Array:
        body = lambda x, w: (LAYERS_WITH_LOOPS[name](x, w), None)  # noqa: E731
        return head(p, lax.scan(body, p["embed"][ids], p["layers"])[0], ids)

    return loss


def _residuals(name: str, budget: int) -> Any:
    """Of a wide model in float32, which is planned alone."""
    zero, is_shape = zero_of(budget), lambda x: isinstance(x, tuple)
    params = zero.abstract(lambda: jax.tree.map(jnp.zeros, _shapes(WIDE), is_leaf=is_shape))
    ids = jax.ShapeDtypeStruct((ROWS, TOKENS_OF_WIDE), jnp.int32)
    return zero.plan(_loss_of(name), params, ids).residuals


def _kept(residuals: Any) -> int:
    return bytes_of(x for x in residuals if x.action == "keep")


def test_no_budget_keeps_less_than_zero():
    """Of layers that are loops over many tokens: a trip's state is small, its turn takes long."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            def step(state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
                state = jnp.tanh(state @ w["state"] + token @ w["token"])
                return state, state

            made = lax.scan(step, jnp.zeros((len(x), 16)), x.swapaxes(0, 1))[1]
            return x + made.swapaxes(0, 1), None

        return jnp.mean(lax.scan(layer, x, p)[0] ** 2)

    def plan(budget: int) -> jz.Plan:
        zero = zero_of(budget)
        params = zero.abstract(lambda: dict.fromkeys(("state", "token"), jnp.zeros((4, 16, 16))))
        return zero.plan(loss, params, jax.ShapeDtypeStruct((16, 256, 16), jnp.float32))

    at_zero = _kept(plan(0).residuals)
    with pytest.raises(ValueError, match=f"is less than the {at_zero} bytes"):
        plan(1)


@pytest.mark.parametrize(
    ("name", "kind", "budget"),
    [*((name, "auto", 10**9) for name in LAYERS_WITH_LOOPS), ("experts", "explicit", 0)],
)
def test_a_step_is_that_of_one_device(name, kind, budget):
    """With everything kept that is worth it, which repeats a part of each loop inside.

    With as little as possible, experts run again in backward's loop over them.
    """
    mesh = zoo.make_mesh(f"2x2-{kind}")
    zero = jz.Zero(mesh, zero_of(budget).config)
    loss = _loss_of(name)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        params, ids = _parameters(), batch()
        want = jax.jit(jax.value_and_grad(loss))(params, ids)
        value, grads = jax.jit(zero.value_and_grad(loss))(zero.shard(params), ids)
        zoo.assert_close((value, zero.unshard(grads)), want, _TOLERANCE, "step")
    again = {x.layers for x in _residuals(name, budget) if x.action == "recompute"}
    assert max(again) > LAYERS  # inside of a loop inside


# Of one product of all experts and layers: `[tokens of a device, hidden]` in float32.
PRODUCT = LAYERS * EXPERTS * (ROWS // 4) * TOKENS_OF_WIDE * 6 * WIDE * 4


def test_experts_keep_their_products_alone():
    """Two values of `[tokens, hidden]` for each expert and layer, where `jax.grad` keeps six."""
    residuals = _residuals("experts", 10**12)
    stacks = [x for x in residuals if x.action == "keep" and x.shape[-1:] == (6 * WIDE,)]
    assert bytes_of(stacks) == 2 * PRODUCT
    assert not any(x.flops for x in residuals)


def test_a_budget_between_keeps_a_part():
    """Where one product fits, the other is computed again; and never the third, nor the loop."""
    everything, nothing = (_residuals("experts", x) for x in (10**12, 0))
    between = _residuals("experts", _kept(everything) - PRODUCT // 2)
    assert PRODUCT <= _kept(between) <= _kept(everything) - PRODUCT // 2
    flops = [sum(x.flops for x in residuals) for residuals in (everything, between, nothing)]
    assert flops == [n * 2 * WIDE * PRODUCT // 4 for n in (0, 1, 2)]
