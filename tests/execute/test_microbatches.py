"""Micro-batches: `microbatches=k` gives what one big batch gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from tests import zoo

_MESHES = ("2x4-auto", "2x3-explicit")
_NUM_EXAMPLES = 48  # 6 or 8 on each device
_CASES = (
    "mlp_of_odd_widths",
    "scanned_layers",
    "decoder_in_a_scan_with_remat",
    "unused_parameters",
    "embedding_tied_to_the_output",
    "several_argnums_out_of_order",
)


def _run(name, mesh, **options):
    case = zoo.CASES[name]
    zero = jz.Zero(zoo.make_mesh(mesh))
    trees = [zero.shard(jax.tree.map(np.asarray, t)) for t in case.init(jax.random.key(0))]
    batch = case.batch(jax.random.key(1), _NUM_EXAMPLES)
    step = zero.value_and_grad(case.loss, case.argnums, has_aux=case.has_aux, **options)
    return zero, jax.device_get(step(*trees, batch))


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.one_in(2)
def test_microbatches_equal_one_batch(name):
    mesh = _MESHES[_CASES.index(name) % 2]
    with jax.default_matmul_precision("highest"):
        _, (want_loss, want) = _run(name, mesh)
        _, (loss, grads) = _run(name, mesh, microbatches=2)
    zoo.assert_close(loss, want_loss, 1e-5, "loss")
    zoo.assert_close(grads, want, 1e-5, "grads")


@pytest.mark.parametrize("num", [1, 2, 4])
def test_microbatches_of_any_number_and_stage(num):
    case = zoo.CASES["mlp"]
    trees = case.init(jax.random.key(0))
    batch = case.batch(jax.random.key(1), _NUM_EXAMPLES)
    want_loss, want = jax.device_get(jax.value_and_grad(case.loss)(*trees, batch))
    zero = jz.Zero(zoo.make_mesh("3x2-auto"), jz.ZeroConfig(stage=(1, 2, 3)[num // 2]))
    params = zero.shard(trees[0])
    loss, grads = zero.value_and_grad(case.loss, microbatches=num)(params, batch)
    zoo.assert_close(jax.device_get(loss), want_loss, 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), want, 1e-5, "grads")


def _table(key):
    return {"embed": zoo.normal(key, 0, 13, 8), "out": zoo.normal(key, 1, 8, 5)}


def _sum_and_weight(params, batch):
    """The sum over tokens greater than two, and how many there are: uneven over devices."""
    ids = batch["tokens"]
    x = jnp.tanh(params["embed"][ids]) @ params["out"]
    mask = (ids > 2).astype(x.dtype)
    return jnp.sum(jnp.mean(x**2, -1) * mask), jnp.sum(mask)


def _weighted_mean(params, batch):
    total, weight = _sum_and_weight(params, batch)
    return total / weight


def _tokens():
    ids = np.arange(_NUM_EXAMPLES * 6, dtype=np.int32).reshape(_NUM_EXAMPLES, 6) % 13
    ids[: _NUM_EXAMPLES // 8] = 1  # the first device of eight has nothing to learn
    return {"tokens": ids}


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("mesh", _MESHES)
@pytest.mark.one_in(2)
def test_weighted_mean_over_devices_and_microbatches(mesh, num):
    params = _table(jax.random.key(0))
    want_loss, want = jax.device_get(jax.value_and_grad(_weighted_mean)(params, _tokens()))
    zero = jz.Zero(zoo.make_mesh(mesh))
    step = zero.value_and_grad(_sum_and_weight, microbatches=num, weighted=True)
    loss, grads = step(zero.shard(params), _tokens())
    zoo.assert_close(jax.device_get(loss), want_loss, 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), want, 1e-5, "grads")


def test_weighted_by_integer_counts():
    params = _table(jax.random.key(0))

    def loss(params, batch):
        total, weight = _sum_and_weight(params, batch)
        return total, weight.astype(jnp.int32)

    want_loss, want = jax.device_get(jax.value_and_grad(_weighted_mean)(params, _tokens()))
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    got, grads = zero.value_and_grad(loss, weighted=True)(zero.shard(params), _tokens())
    zoo.assert_close(jax.device_get(got), want_loss, 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), want, 1e-5, "grads")


@pytest.mark.parametrize(
    ("weighted", "config"), [(False, jz.zero3()), (True, jz.zero3()), (False, jz.zeropp())]
)
def test_aux_over_microbatches(weighted, config):
    params, batch = _table(jax.random.key(0)), _tokens()

    def loss(params, batch):
        total, weight = _sum_and_weight(params, batch)
        aux = {
            "mean": batch["tokens"].astype(jnp.float32).mean(),
            "rows": len(batch["tokens"]),
            "stack": batch["tokens"][0],
            "key": jz.fold_in_device(jax.random.key(7)),
        }
        return ((total, weight) if weighted else total / (weight + 1)), aux

    zero = jz.Zero(zoo.make_mesh("2x4-auto"), config)
    step = zero.value_and_grad(
        loss,
        has_aux=True,
        weighted=weighted,
        row_statistics="device",
        microbatches=3,
        aux_reduce={"mean": "mean", "rows": "sum", "stack": "stack", "key": "first"},
    )
    (_, aux), _ = step(zero.shard(params), batch)
    np.testing.assert_allclose(aux["mean"], batch["tokens"].mean(), rtol=1e-6)
    assert int(aux["rows"]) == _NUM_EXAMPLES
    rows = batch["tokens"].reshape(8, 3, -1, 6)  # of each device and micro-batch
    np.testing.assert_array_equal(aux["stack"].reshape(8, 3, 6), rows[:, :, 0])
    first = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 0), 0)
    assert aux["key"] == first


def test_random_numbers_differ_over_microbatches():
    size, num_devices, microbatches = 4096, 8, 3

    def loss(params, batch):
        key = jz.fold_in_device(jax.random.key(7))
        return params[jax.random.randint(key, (), 0, size, jnp.int32)] + 0.0 * batch.sum()

    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard(np.ones(size, np.float32))
    batch = np.zeros((num_devices * microbatches, 1), np.float32)
    _, grads = zero.value_and_grad(loss, microbatches=microbatches)(params, batch)
    touched = np.flatnonzero(np.asarray(grads))
    assert len(touched) == num_devices * microbatches
