"""Values made of weights alone: no stack of them is held, nor of their gradients.

Masks, norms, sums and concatenations of a whole stack outside of its scan are computed in the scan,
layer by layer, forward and backward; a regularizer of a stack too. Results are those of one device.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxzero as jz
from tests import zoo

LAYERS, WIDTH = 4, 24  # eight devices would divide neither the layers nor nine columns
MASK = np.tril(np.ones((WIDTH, WIDTH), np.float32))
MASKS = np.random.default_rng(0).random((LAYERS, WIDTH, WIDTH)) > 0.3


def _stacks(*names):
    shapes = {
        **dict.fromkeys("wqkv", (LAYERS, WIDTH, WIDTH)),
        "gain": (LAYERS, 1, WIDTH),
        "bias": (LAYERS, WIDTH),
        "a": (LAYERS, WIDTH, 4),
        "b": (LAYERS, 4, WIDTH),
    }
    return lambda key: ({name: zoo.normal(key, i, *shapes[name]) for i, name in enumerate(names)},)


def _scan(stack, x, layer=lambda x, w: jnp.tanh(x @ w), **options):
    return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, stack, **options)[0] ** 2)


def _normalized(p):
    return p["gain"] * p["w"] / jnp.sqrt(jnp.sum(p["w"] ** 2, axis=-2, keepdims=True))


def _mask_of_each_layer(p, x):
    return _scan(p["w"] * MASKS.astype(np.float32), x)


def _select(p, x):
    return _scan(jnp.where(MASKS, p["w"], 0), x, reverse=True)


def _one_mask(p, x):
    return _scan(p["w"] * MASK[None], x)


def _norm_outside(p, x):
    return _scan(_normalized(p), x)


def _norm_inside(p, x):
    return _scan(p, x, lambda x, p: jnp.tanh(x @ _normalized(p)))


def _norm_outside_of_a_checkpoint(p, x):
    return _scan(_normalized(p), x, jax.checkpoint(lambda x, w: jnp.tanh(x @ w)))


def _concatenation(p, x):
    def layer(x, w):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        return jnp.tanh(q * k + v)

    return _scan(jnp.concatenate([p["q"], p["k"], p["v"]], axis=-1), x, layer)


def _low_rank_sum(p, x):
    return _scan(p["w"] + p["a"] @ p["b"], x)


def _regularized(p, x):
    """Matrices and vectors."""
    loss = _scan(p, x, lambda x, p: jnp.tanh(x @ p["w"] + p["bias"][None]))
    return loss + 0.01 * (jnp.sum(p["w"] ** 2) + jnp.sum(p["bias"] ** 2))


def _regularized_before(p, x):
    penalty = 0.01 * jnp.sum(jnp.abs(p["w"]))
    return penalty + _scan(p["w"], x)


def _norms_of_layers(p, x):
    return _scan(p["w"], x) + jnp.sum(jnp.sqrt(jnp.sum(p["w"] ** 2, axis=(1, 2))))


def _straight_through(p, x):
    rounded = jnp.round(p["w"] * 8) / 8
    return _scan(p["w"] + lax.stop_gradient(rounded - p["w"]), x)


def _global_norm(p, x):
    squares = sum(jnp.sum(w**2) for w in jax.tree.leaves(p))
    return _scan(p, x, lambda x, p: jnp.tanh(x @ p["w"] + p["gain"])) + 0.1 * jnp.sqrt(squares)


def _in_two_scans(p, x):
    return _scan(p["w"] * MASK[None], x) + _scan(p["w"] * MASK.T[None], x)


def _case(loss, *names):
    def batch(key, n):
        return zoo.normal(key, 0, n, WIDTH, scale=1.0)

    init = _stacks(*names)
    return zoo.Case(name=loss.__name__, loss=loss, init=init, batch=batch, oracle=loss)


CASES = [
    (_case(_mask_of_each_layer, "w"), "2x4-auto"),
    (_case(_select, "w"), "2x3-auto"),
    (_case(_one_mask, "w"), "2x4-explicit"),
    (_case(_norm_outside, "w", "gain"), "1x8-explicit"),
    (_case(_norm_inside, "w", "gain"), "2x4-auto"),
    (_case(_norm_outside_of_a_checkpoint, "w", "gain"), "4x2-auto"),
    (_case(_concatenation, "q", "k", "v"), "2x3-explicit"),
    (_case(_low_rank_sum, "w", "a", "b"), "2x4-explicit"),
    (_case(_regularized, "w", "bias"), "2x3-auto"),
    (_case(_regularized_before, "w"), "2x4-explicit"),
    (_case(_norms_of_layers, "w"), "2x3-explicit"),
    (_case(_straight_through, "w"), "2x4-explicit"),
    (_case(_global_norm, "w", "gain"), "2x4-auto"),
    (_case(_in_two_scans, "w"), "8x1-auto"),
]
BY_NAME = {case.name: case for case, _ in CASES}


@pytest.mark.parametrize(("case", "mesh"), CASES, ids=lambda x: getattr(x, "name", x))
@pytest.mark.one_in(2)
def test_no_stack_is_whole_and_results_are_those_of_one_device(case, mesh):
    zero = jz.Zero(zoo.make_mesh(mesh))
    (tree,), batch = zoo.arguments(case, "float32")
    params = zero.shard(tree)
    plan = zero.plan(case.loss, params, batch)
    assert not plan.held_whole
    layer = max(x.nbytes for x in tree.values()) // LAYERS
    assert max(step.num_bytes for step in plan.steps) <= layer
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(zero.value_and_grad(case.loss)).lower(params, batch).compile()
        loss, grads = compiled(params, batch)
        want, want_grads = jax.jit(jax.value_and_grad(case.loss))(tree, batch)
    wide = zoo.hlo.floats_of_at_least(compiled.as_text(), LAYERS * WIDTH * WIDTH)
    # A mask for each layer is an array of the program, and not made of weights.
    assert not wide or case.loss is _mask_of_each_layer, "\n".join(wide)
    zoo.assert_close(jax.device_get(loss), np.asarray(want), 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want_grads), 1e-5, "grads")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("_norm_outside", "zeropp"),
        ("_low_rank_sum", "zeropp4"),
        ("_global_norm", "zeropp"),
        pytest.param("_norm_outside", "zeropp4", marks=pytest.mark.exhaustive),
        pytest.param("_low_rank_sum", "zeropp", marks=pytest.mark.exhaustive),
        pytest.param("_global_norm", "zeropp4", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.one_in(2)
def test_quantized_gradients_are_within_the_codecs_error(name, preset):
    zoo.check_quantised(BY_NAME[name], jz.Zero(zoo.make_mesh("2x4-auto"), zoo.PRESETS[preset]))


@pytest.mark.parametrize("name", ["_norm_inside", "_regularized_before"])
def test_in_float64(name):
    """With several micro-batches, where nothing can hide behind rounding."""
    case = BY_NAME[name]
    with jax.enable_x64(True):
        (tree,), batch = zoo.arguments(case, "float64")
        zero = jz.Zero(zoo.make_mesh("2x3-auto"))
        loss, grads = zero.value_and_grad(case.loss, microbatches=2)(zero.shard(tree), batch)
        want, want_grads = jax.jit(jax.value_and_grad(case.loss))(tree, batch)
        zoo.assert_close(jax.device_get(loss), np.asarray(want), 1e-12, "loss")
        got = jax.device_get(zero.unshard(grads))
        zoo.assert_close(got, jax.device_get(want_grads), 1e-12, "grads")


def test_forward_alone():
    (tree,), batch = zoo.arguments(BY_NAME["_norm_outside"], "float32")
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    got = zero.apply(_norm_outside, out_reduce="mean")(zero.shard(tree), batch)
    np.testing.assert_allclose(got, _norm_outside(tree, batch), rtol=1e-5)


def _scaled_by_its_norm(p, x):
    return _scan(p["w"], x * jnp.sqrt(jnp.sum(p["w"] ** 2)))


def test_what_a_scan_reads_is_not_reduced_in_it():
    (tree,), batch = zoo.arguments(BY_NAME["_one_mask"], "float32")
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    loss, grads = zero.value_and_grad(_scaled_by_its_norm)(zero.shard(tree), batch)
    want, want_grads = jax.jit(jax.value_and_grad(_scaled_by_its_norm))(tree, batch)
    zoo.assert_close(jax.device_get(loss), np.asarray(want), 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want_grads), 1e-5, "grads")


def _unrolled(params, x):
    for p in params:
        x = jnp.tanh(x @ _normalized(p))
    return jnp.mean(x**2)


def test_normalized_weights_of_unrolled_layers_are_computed_again_in_backward():
    init = _stacks("w", "gain")(jax.random.key(0))[0]
    tree = [{name: w[i] for name, w in init.items()} for i in range(LAYERS)]
    batch = zoo.normal(jax.random.key(1), 0, 24, WIDTH, scale=1.0)
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard(tree)
    plan = zero.plan(_unrolled, params, batch)
    assert not plan.held_whole
    gathers = [step for step in plan.steps if step.action == "gather"]
    again = {step.name for step in gathers if step.region == "backward"}
    assert {f"{i}.w" for i in range(LAYERS - 1)} <= again
    loss, grads = zero.value_and_grad(_unrolled)(params, batch)
    want, want_grads = jax.jit(jax.value_and_grad(_unrolled))(tree, batch)
    zoo.assert_close(jax.device_get(loss), np.asarray(want), 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want_grads), 1e-5, "grads")


def _indexed(p, x):
    def layer(x, i):
        return jnp.tanh(x @ p["w"][i]), None

    order = jnp.argsort(x[0, :LAYERS])  # not known in advance
    return jnp.mean(lax.scan(layer, x, order)[0] ** 2)


def _sorted(p, x):
    return _scan(p["w"], x) + jnp.sum(jnp.sort(p["w"], axis=0)[0])


def _orthogonal(p, x):
    return _scan(p["w"], x, lambda x, w: jnp.tanh(x @ jnp.linalg.qr(w)[0]))


def _one_mask_for_two_scans(p, x):
    masked = p["w"] * MASK[None]
    return _scan(masked, x) + _scan(masked, x[:, ::-1])


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (_indexed, "w float32[4, 24, 24], 9.00 KiB: `scan` reads it from its start to its end"),
        (_sorted, "w float32[4, 24, 24], 9.00 KiB: `sort` needs all layers at once"),
        (_orthogonal, "float32[4, 24, 24], 9.00 KiB: made of weights by `qr` and kept"),
        (
            _one_mask_for_two_scans,
            "w float32[4, 24, 24], 9.00 KiB: `mul` makes its gradient for all layers at once",
        ),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_the_plan_says_what_is_held_whole_and_why(loss, why):
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    (tree,) = _stacks("w")(jax.random.key(0))
    plan = zero.plan(loss, zero.shard(tree), np.ones((8, WIDTH), np.float32))
    assert f"held whole: {why}, " in str(plan)
    assert os.path.basename(__file__) in str(plan.held_whole[0])


def test_a_product_that_mixes_the_layers_is_that_of_one_device():
    """Layer by layer it cannot be computed, but it looks like a product of a stack and a matrix."""
    mix = np.random.default_rng(1).normal(size=(LAYERS, LAYERS)).astype(np.float32)

    def loss(p, x):
        return _scan(jnp.tensordot(mix, p["w"], (0, 0)) + jnp.tensordot(p["w"], mix, (0, 0)).T, x)

    zoo.check(_case(loss, "w"), jz.Zero(zoo.make_mesh("2x4-auto")))
