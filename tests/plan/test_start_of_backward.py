"""The loss is computed before backward."""

import jax
import jax.numpy as jnp
import pytest

import jaxzero as jz

ROWS, WIDTH, CLASSES = 16, 8, 40
BATCH = (
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((ROWS,), jnp.int32),
)


def _init():
    return {"body": jnp.zeros((WIDTH, WIDTH)), "head": jnp.zeros((WIDTH, CLASSES))}


def _cross_entropy(params, batch):
    x, labels = batch
    logits = jnp.tanh(x @ params["body"]) @ params["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -jnp.mean(picked)


def _scanned(params, batch):
    x, labels = batch

    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, jnp.broadcast_to(params["body"], (3, WIDTH, WIDTH)))
    return _cross_entropy({**params, "body": jnp.eye(WIDTH)}, (x, labels))


@pytest.fixture
def zero():
    return jz.Zero(jz.make_mesh(2))


@pytest.mark.parametrize("loss", [_cross_entropy, _scanned])
def test_the_loss_comes_before_the_product_with_the_cotangent_of_logits(zero, loss):
    """And not before the scatter of its labels, which XLA fuses with that cotangent."""
    top = zero.plan(loss, zero.abstract(_init), BATCH).top
    index, value = top.loss_before
    operations = top.block.operations
    assert operations[index].name == "dot_general"
    assert value in operations[index].inputs
    assert value.shape == (ROWS // 8, CLASSES)
    scatters = [i for i, x in enumerate(operations) if x.name.startswith("scatter")]
    assert top.last_forward < scatters[0] < index


def test_a_barrier_joins_the_two(zero):
    step = jax.jit(zero.value_and_grad(_cross_entropy))
    lines = step.lower(zero.abstract(_init), BATCH).as_text().splitlines()
    barriers = [x for x in lines if "stablehlo.optimization_barrier" in x]
    assert any(f"tensor<f32>, tensor<{ROWS // 8}x{CLASSES}xf32>" in x for x in barriers)


def test_a_program_without_such_an_operation_has_no_such_place(zero):
    def loss(params, batch):
        return jnp.sum(params["body"])

    top = zero.plan(loss, zero.abstract(_init), BATCH).top
    assert top.loss_before is None
