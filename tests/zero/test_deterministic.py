"""`CommSchedule(deterministic="mesh")`: the same bits on every mesh of as many devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from tests.zoo import CASES, arguments, hlo, make_mesh, normal

MESHES = ("1x8", "2x4", "4x2", "8x1")
SCHEDULE = jz.CommSchedule(deterministic="mesh")


def _bits(result):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(result))]


def _case_bits(case, mesh, schedule, **options):
    """The bits of loss and gradients of a model of the zoo."""
    zero = jz.Zero(make_mesh(mesh), jz.ZeroConfig(schedule=schedule))
    (params,), batch = arguments(case, "float32")
    value, grads = zero.value_and_grad(case.loss, **options)(zero.shard(params), batch)
    return _bits((value, zero.unshard(grads)))


def _same(bits):
    return all(x == bits[0] for x in bits)


@pytest.mark.parametrize(
    ("name", "kind", "microbatches"),
    [
        ("mlp", "explicit", 1),
        ("scanned_layers", "auto", 1),
        ("unrolled_over_slices", "auto", 1),
        ("scanned_stack_of_bfloat16", "explicit", 1),
        # Stored in parts of the dim that is scanned: its gradient moves to another dim.
        ("scanned_over_a_stack_on_dim_one", "auto", 3),
    ],
)
@pytest.mark.one_in(3)
def test_losses_and_gradients_have_the_same_bits(name, kind, microbatches):
    options = dict(microbatches=microbatches)
    bits = [_case_bits(CASES[name], f"{x}-{kind}", SCHEDULE, **options) for x in MESHES]
    assert _same(bits)


def test_no_sum_is_left_to_an_all_reduce():
    """Its order is the platform's: on CPUs that of the devices, on GPUs another on each mesh."""
    case, zero = CASES["mlp"], jz.Zero(make_mesh("2x4-auto"), jz.ZeroConfig(schedule=SCHEDULE))
    (params,), batch = arguments(case, "float32")
    step = jax.jit(zero.value_and_grad(case.loss))
    text = step.lower(zero.shard(params), batch).compile().as_text()
    operations = {x.op for x in hlo.collectives(text)}
    assert operations and not operations & {"all-reduce", "reduce-scatter"}


def test_without_it_bits_differ():
    case = CASES["scanned_layers"]
    bits = [_case_bits(case, f"{x}-auto", jz.CommSchedule()) for x in MESHES[:2]]
    assert not _same(bits)


def _weighted(params, batch):
    """A sum and a weight that no two devices have alike, and values beside them."""
    error = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
    aux = {
        "of 16 bits": jnp.mean(error).astype(jnp.bfloat16),
        "of many elements": jnp.ravel(batch["x"].T @ batch["x"]),
    }
    return (jnp.sum(error), jnp.sum(jnp.abs(batch["y"]))), aux


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.one_in(2)
def test_weighted_means_and_aux_have_the_same_bits(stage):
    key, bits = jax.random.key(0), []
    params = {"w": normal(key, 0, 40, 40), "b": normal(key, 1, 1, 40)}  # `w` takes an exchange
    batch = {name: normal(key, seed, 32, 40, scale=1.0) for seed, name in enumerate("xy")}
    for mesh in MESHES:
        zero = jz.Zero(make_mesh(f"{mesh}-auto"), jz.ZeroConfig(stage=stage, schedule=SCHEDULE))
        step = zero.value_and_grad(
            _weighted,
            has_aux=True,
            weighted=True,
            microbatches=2,
            aux_reduce={"of 16 bits": "mean", "of many elements": "sum"},
        )
        value, grads = step(zero.shard(params), batch)
        bits.append(_bits((value, zero.unshard(grads))))
    assert _same(bits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(gradients=jz.PerAxis(node=jz.Int8())), "codecs of `gradients`"),
        (dict(weights=jz.PerAxis(local=jz.Int8())), "codecs of `weights`"),
        (dict(hpz=jz.HpZ(codec=None)), "`hpz` keeps slices"),
        (dict(split="local"), '`split="local"`'),
    ],
)
def test_what_depends_on_the_mesh_is_refused(change, message):
    config = jz.ZeroConfig(schedule=SCHEDULE)
    with pytest.raises(ValueError, match=f"{message}.*Leave out one of the two"):
        dataclasses.replace(config, **change)


@pytest.mark.parametrize("options", [dict(halves=True), dict(shares=(3, 1), microbatches=3)])
def test_options_that_depend_on_the_mesh_are_refused(options):
    zero = jz.Zero(make_mesh("2x4-auto"), jz.ZeroConfig(schedule=SCHEDULE))
    (params,), batch = arguments(CASES["mlp"], "float32")
    with pytest.raises(ValueError, match="`halves`.*`shares`.*Leave it out"):
        zero.value_and_grad(CASES["mlp"].loss, **options)(zero.shard(params), batch)


def test_local_steps_are_refused():
    zero = jz.Zero(make_mesh("2x4-auto"), jz.ZeroConfig(schedule=SCHEDULE))
    with pytest.raises(ValueError, match="results depend on the number of nodes"):
        zero.local_steps(lambda *state_and_batch: state_and_batch, every=2)


def test_another_value_is_refused():
    with pytest.raises(ValueError, match='`deterministic` .* must be "mesh" or None; got .node.'):
        jz.CommSchedule(deterministic="node")
