"""Functions of stacks in two parts equal the same functions of the whole stacks."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import source_info_util

from jaxzero._program import SplitStack, run_on_split_stacks
from tests import zoo

NUM, WIDTH = 5, 4


def _scan(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def _reversed(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w, reverse=True)[0]


def _unrolled(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w, unroll=NUM)[0]


def _with_outputs(w, x):
    def layer(x, scanned):
        w, i = scanned
        y = jnp.tanh(x @ w) * (i + 1).astype(x.dtype) / NUM
        return y, jnp.sum(y)

    x, sums = jax.lax.scan(layer, x, (w, jnp.arange(NUM)))
    return x + jnp.mean(sums * jnp.arange(NUM, dtype=x.dtype) / NUM)


def _scan_of_outputs(w, x):
    _, ys = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, w)
    return jax.lax.scan(lambda x, y: (x * 0.5 + y, None), x, ys)[0]


def _cast(w, x):
    w = jnp.swapaxes(w.astype(jnp.bfloat16), 1, 2)
    return _scan(w, x.astype(jnp.bfloat16)).astype(jnp.float32)


def _checkpointed(w, x):
    return jax.checkpoint(jax.jit(_scan))(w, x)


def _indexed(w, x):
    for i in range(NUM):
        x = jnp.tanh(x @ w[i])
    return x


def _elementwise(w, x):
    return _scan(jnp.tanh(w * 0.5 + w * w), x)


SILENT = [
    *(_scan, _reversed, _unrolled, _with_outputs, _scan_of_outputs, _cast, _checkpointed),
    *(_indexed, _elementwise),
]


def _inputs():
    w = jax.random.normal(jax.random.key(0), (NUM, WIDTH, WIDTH)) / 2
    return w, jax.random.normal(jax.random.key(1), (3, WIDTH))


def _value_and_grads(function, cut):
    """Gradients of the second part and of `x`, and the jaxpr of both."""
    w, x = _inputs()

    def loss(second, x):
        stack = SplitStack((w[:cut], second), "w")
        return jnp.sum(run_on_split_stacks(lambda leaves: function(*leaves), [stack, x]) ** 2)

    run = jax.value_and_grad(loss, (0, 1))
    return jax.jit(run)(w[cut:], x), str(jax.make_jaxpr(run)(w[cut:], x))


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("function", SILENT)
@pytest.mark.one_in(2)
def test_values_and_gradients(function, cut):
    w, x = _inputs()
    oracle = jax.jit(jax.value_and_grad(lambda w, x: jnp.sum(function(w, x) ** 2), (0, 1)))
    want = oracle(w, x)
    (value, (second, of_x)), program = _value_and_grads(function, cut)
    zoo.assert_close((value, second, of_x), (want[0], want[1][0][cut:], want[1][1]), 1e-5, "")
    joined = [line for line in program.splitlines() if "concatenate" in line]
    assert not any(f"[{NUM},{WIDTH},{WIDTH}]" in line for line in joined), program


def test_a_stack_of_any_other_use_is_joined_with_a_warning():
    w, x = _inputs()

    def whole(w, x):
        return _scan(w, x) + jnp.sum(w)

    with pytest.warns(UserWarning, match=r"`reduce_sum` uses the whole stack of `w`.*2 layers"):
        (value, (second, _)), _ = _value_and_grads(whole, 2)
    want = jax.value_and_grad(lambda w: jnp.sum(whole(w, x) ** 2))(w)
    zoo.assert_close((value, second), (want[0], want[1][2:]), 1e-5, "")


def test_errors_name_the_line_of_the_user():
    """A plan says in which line an operation is; here it is this file, not the pass."""
    w, x = _inputs()
    stack = SplitStack((w[:2], w[2:]), "w")
    closed = jax.make_jaxpr(
        lambda x: run_on_split_stacks(lambda leaves: _scan(*leaves), [stack, x])
    )(x)
    (first, _) = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    assert "test_split_stacks.py" in source_info_util.summarize(first.source_info)
