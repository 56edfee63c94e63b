"""What a DeepSpeed configuration asks for, held to DeepSpeed's own schedules and scales."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from jaxzero import interop

DEEPSPEED = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"
SCHEDULES = json.loads((DEEPSPEED / "schedules.json").read_text())
LOSS_SCALES = json.loads((DEEPSPEED / "loss_scale.json").read_text())
OPTIMIZERS = json.loads((DEEPSPEED / "optimizers.json").read_text())
ADAM = {"type": "AdamW", "params": {"lr": 0.01}}

pytestmark = pytest.mark.standard_promotion  # optax


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jz.make_mesh(nodes=2)


def config(**keys: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "gradient_clipping": 0} | keys


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_are_those_of_deepspeed(mesh, name: str):
    asked = SCHEDULES[name]
    sgd = {"type": "SGD", "params": {"lr": 0.01}}
    scheduler = {"type": asked["type"], "params": asked["params"]}
    run = jz.from_deepspeed(config(optimizer=sgd, scheduler=scheduler), mesh)
    assert not run.unhonoured
    update = jax.jit(run.optimizer.update)
    state = run.optimizer.init(jnp.float32(0))
    rates = []
    for _ in asked["rates"]:
        step, state = update(jnp.float32(1), state, jnp.float32(0))
        rates.append(-float(step))
    # float32, near 0.02
    np.testing.assert_allclose(rates, asked["rates"], rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("asked", LOSS_SCALES, ids=lambda asked: str(asked["fp16"]))
def test_loss_scales_are_those_of_deepspeed(mesh, asked: dict):
    run = jz.from_deepspeed(config(fp16={"enabled": True} | asked["fp16"]), mesh)
    assert not run.unhonoured and run.compute_dtype == np.float16
    update = jax.jit(run.optimizer.update)
    params = jnp.ones(3)
    state = run.optimizer.init(params)
    scales = []
    for overflow in asked["overflows"]:
        scales.append(float(interop.loss_scale_of(state)))
        bad = jnp.array([1.0, jnp.inf, 1.0]) if overflow else jnp.ones(3)
        updates, new = update(bad, state, params)
        moved = bool(jnp.any(updates != 0))
        count, before = (optax.tree_utils.tree_get(each, "count") for each in (new, state))
        assert moved != overflow
        assert int(count) == int(before) + (not overflow)  # schedules wait too
        state = new
    assert scales == asked["scales"]
    assert len(set(scales)) > 3


def test_a_loss_scale_that_stays(mesh):
    run = jz.from_deepspeed(config(fp16={"enabled": True, "loss_scale": 128}), mesh)
    state = run.optimizer.init(jnp.ones(3))
    for bad in (1.0, jnp.nan):
        _, state = run.optimizer.update(jnp.full(3, bad), state, jnp.ones(3))
        assert float(interop.loss_scale_of(state)) == 128
    assert int(optax.tree_utils.tree_get(state, "count")) == 1
    assert float(interop.loss_scale_of(optax.adam(1e-3).init(jnp.ones(3)))) == 1


@pytest.mark.parametrize("scale", [0.0, -2.0, float("inf"), float("nan")])
def test_a_constant_scale_that_skips_every_step_is_refused(scale: float):
    with pytest.raises(
        ValueError, match="`scale` must be a `DynamicScale`, or positive and finite"
    ):
        interop.scale_loss(optax.sgd(1.0), scale)


def test_a_constant_scale_may_be_traced():
    def update(scale, gradient):
        tx = interop.scale_loss(optax.sgd(1.0), scale)
        return tx.update(gradient, tx.init(gradient))[0]

    np.testing.assert_array_equal(jax.jit(update)(4.0, jnp.full(3, 8.0)), np.full(3, -2.0))


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"bfloat16": {"enabled": True}}, jnp.bfloat16),
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}, None),
        ({"bfloat16": {"enabled": False}, "bf16": {"enabled": True}}, jnp.bfloat16),
        ({"bfloat16": {"enabled": True}, "bf16": {}}, None),
        ({"bfloat16": {"enabled": True}, "bf16": None}, jnp.bfloat16),
    ],
)
@pytest.mark.filterwarnings("ignore:These keys of the DeepSpeed configuration have no effect")
def test_the_older_name_of_bf16(mesh, keys: dict, dtype):
    """As in DeepSpeed's `get_bfloat16_config`: the newer name wins where it is there."""
    assert jz.from_deepspeed(config(**keys), mesh).compute_dtype == dtype


@pytest.mark.parametrize("enabled", ["fp16", "bf16"])
def test_losses_are_true_and_updates_free_of_the_scale(mesh, enabled: str):
    keys = {"gradient_accumulation_steps": 2, enabled: {"enabled": True}}
    keys |= {"fp16": {"enabled": True, "initial_scale_power": 8}} if enabled == "fp16" else {}
    run = jz.from_deepspeed(config(gradient_clipping=0.1, **keys), mesh)
    assert (run.batch_size, run.microbatches) == (32, 2)
    params = run.zero.shard({"w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)})
    batch = jax.random.normal(jax.random.key(0), (32, 8))

    def loss_fn(params, batch):
        assert params["w"].dtype == run.compute_dtype
        assert batch.shape == (2, 8)
        return jnp.mean((batch.astype(params["w"].dtype) @ params["w"]).astype(jnp.float32) ** 2)

    opt_state = run.zero.init_optimizer(run.optimizer, params)
    loss, grads = jax.jit(run.value_and_grad(loss_fn))(params, opt_state, batch)
    scale = float(interop.loss_scale_of(opt_state))
    assert scale == (2.0**8 if enabled == "fp16" else 1.0)

    def whole(params):
        w = params["w"].astype(run.compute_dtype)
        return jnp.mean((batch.astype(w.dtype) @ w).astype(jnp.float32) ** 2)

    expected, wanted = jax.value_and_grad(whole)({"w": run.zero.unshard(params)["w"]})
    resolution = 4 * float(jnp.finfo(run.compute_dtype).eps)
    np.testing.assert_allclose(float(loss), float(expected), rtol=resolution)
    given = np.asarray(grads["w"]) / scale
    reference = np.asarray(wanted["w"])
    assert np.abs(given - reference).max() < resolution * np.abs(reference).max()


@pytest.mark.parametrize("asked", OPTIMIZERS, ids=lambda asked: str(asked["optimizer"]))
def test_optimizers_are_those_of_torch(mesh, asked: dict):
    run = jz.from_deepspeed(config(optimizer=asked["optimizer"]), mesh)
    assert not run.unhonoured
    update = jax.jit(run.optimizer.update)
    params = jnp.linspace(-1, 1, 6)
    state = run.optimizer.init(params)
    for gradient, wanted in zip(asked["gradients"], asked["after"], strict=True):
        updates, state = update(jnp.array(gradient), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_torch_decays_where_the_file_is_silent(mesh, kind: str):
    for by_torch, decay in ((True, 0.01), (False, 0.0)):
        asked = {"type": kind, "params": {"lr": 0.5, "torch_adam": by_torch}}
        run = jz.from_deepspeed(config(optimizer=asked), mesh)
        update, _ = run.optimizer.update(jnp.zeros(2), run.optimizer.init(jnp.ones(2)), jnp.ones(2))
        np.testing.assert_allclose(update, -0.5 * decay, rtol=1e-6)


def test_clipping_is_that_of_torch(mesh):
    run = jz.from_deepspeed(
        config(gradient_clipping=0.5, optimizer={"type": "SGD", "params": {"lr": 1.0}}), mesh
    )
    for size in (0.1, 3.0):
        gradient = jnp.array([0.6, 0.8]) * size
        updates, _ = run.optimizer.update(gradient, run.optimizer.init(gradient), gradient)
        np.testing.assert_allclose(optax.tree.norm(updates), min(size, 0.5), rtol=1e-6)


def test_a_file_that_does_not_say_whether_to_clip(mesh):
    """DeepSpeed clips to 1.0 then, from 0.19.3 on (its `GRADIENT_CLIPPING_DEFAULT`)."""
    keys = config(optimizer={"type": "SGD", "params": {"lr": 1.0}})
    del keys["gradient_clipping"]
    gradient = jnp.array([6.0, 8.0])
    with pytest.warns(UserWarning, match=r"no `gradient_clipping`: .* 0.19.3 and later"):
        clipped = jz.from_deepspeed(keys, mesh)
    free = jz.from_deepspeed(keys, mesh, values={"gradient_clipping": 0.0})
    for run, norm in ((clipped, 1.0), (free, 10.0)):
        updates, _ = run.optimizer.update(gradient, run.optimizer.init(gradient), gradient)
        np.testing.assert_allclose(optax.tree.norm(updates), norm, rtol=1e-6)


def test_zero_is_set_up(mesh):
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e8,
        "stage3_prefetch_bucket_size": 0,
        "reduce_bucket_size": 5e8,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 4,
    }
    bf16 = {"enabled": True}
    made = jz.from_deepspeed(config(zero_optimization=zero, bf16=bf16), mesh).zero.config
    preset = jz.zeropp()
    assert (made.weights, made.gradients, made.hpz) == (
        preset.weights,
        preset.gradients,
        preset.hpz,
    )
    assert (made.stage, made.param_persistence_threshold) == (3, 10_000)
    assert made.schedule == jz.CommSchedule(
        prefetch=0, bucket_bytes=10**9, max_live_parameters=10**9, max_reuse_distance=10**8
    )
    assert jz.from_deepspeed(config(), mesh).zero.config.stage == 0
    mics = {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}
    mics |= {"communication_data_type": "bf16"}
    made = jz.from_deepspeed(config(**mics), mesh).zero.config
    cast = jz.Cast(jnp.bfloat16)
    assert (made.split, made.gradients) == ("local", jz.PerAxis(node=cast, local=cast))
    wide = config(bf16={"enabled": True}, communication_data_type="fp32")
    cast = jz.Cast(jnp.float32)
    made = jz.from_deepspeed(wide, mesh).zero.config
    assert made.gradients == jz.PerAxis(node=cast, local=cast)


def test_keys_without_effect_are_named(mesh):
    keys = {
        "steps_per_print": 10,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "fp16": {"enabled": False, "loss_scale_window": 5},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_min_mom": 0.8},
        },
    }
    wanted = (
        "steps_per_print",
        "zero_optimization.offload_optimizer.device",
        "scheduler.params.cycle_min_mom",
    )
    with pytest.warns(UserWarning, match="no effect here: " + ", ".join(wanted)):
        run = jz.from_deepspeed(config(**keys), mesh)
    assert run.unhonoured == wanted


def test_a_file_and_what_it_leaves_open(mesh, tmp_path: Path):
    path = tmp_path / "ds_config.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": "auto",
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
                "gradient_clipping": 1.0,
            }
        )
    )
    with pytest.raises(ValueError, match=r"`train_batch_size` is \"auto\".*`values=\{'train_batch"):
        jz.from_deepspeed(path, mesh)
    values = {"train_batch_size": 48}
    with pytest.raises(ValueError, match=r"`optimizer\.params\.lr` is \"auto\""):
        jz.from_deepspeed(path, mesh, values=values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = jz.from_deepspeed(path, mesh, values=values | {"optimizer.params.lr": 0.1})
    assert (run.batch_size, run.microbatches) == (48, 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train_micro_batch_size_per_gpu": None}, "neither `train_batch_size` nor `train_micro"),
        (
            {"train_micro_batch_size_per_gpu": 0, "train_batch_size": 16},
            "`train_micro_batch_size_per_gpu` in .* must be a positive integer.*; got 0",
        ),
        (
            {"train_batch_size": 17},
            r"more; got `train_batch_size` 17, `train_micro_batch_size_per_gpu` 2, and 8 devices",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}},
            r"asks for the optimizer 'OneBitAdam'.*`optimizer=",
        ),
        ({"optimizer": {}}, r"`optimizer\.type` in .* is missing; .*`optimizer="),
        ({"scheduler": {"type": "Mine"}}, r"the scheduler 'Mine'; known are LRRangeTest"),
        (
            {"scheduler": {"type": "WarmupDecayLR"}},
            r"`scheduler\.params\.total_num_steps` in .* is missing",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both enabled"),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 8}},
            r"is 8, but a node of the mesh has",
        ),
        (
            {"gradient_clipping": -1},
            "`gradient_clipping` in .* must be 0, or a finite number .*; got -1",
        ),
        ({"communication_data_type": "int8"}, r"must be one of fp32.*got 'int8'"),
        (
            {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}},
            r"`optimizer\.params\.bias_correction` in .* is false",
        ),
        *(
            (
                {"optimizer": {"type": kind, "params": {"lr": 0.1, "amsgrad": True}}},
                r"`optimizer\.params\.amsgrad` in .* is true.*`optax\.amsgrad`",
            )
            for kind in ("Adam", "AdamW")
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"momentum": 0.9, "dampening": 0.5}}},
            r"`optimizer\.params\.dampening` in .* is not 0.*`optimizer=`",
        ),
    ],
)
def test_mistakes(mesh, keys: dict, message: str):
    with pytest.raises(ValueError, match=message):
        jz.from_deepspeed(config(**keys), mesh)


@pytest.mark.parametrize("given", [{"train_batch_size": 4}, {"gradient_accumulation_steps": 2}])
def test_an_error_of_the_batch_has_the_numbers_of_the_file_only(mesh, given: dict):
    """The computed third of them was among them: 4 rows of 8 devices made 0 of accumulation."""
    keys = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2} | given
    if "gradient_accumulation_steps" in given:
        keys["train_micro_batch_size_per_gpu"] = None
    with pytest.raises(ValueError, match="each of them 1 or more; got") as raised:
        jz.from_deepspeed(config(**keys), mesh)
    for key, value in keys.items():
        assert (f"`{key}` {value}" in str(raised.value)) == (value is not None)
    assert " 0" not in str(raised.value)


def test_keys_of_an_optimizer_that_change_nothing(mesh):
    for optimizer in (
        {"type": "AdamW", "params": {"lr": 0.1, "amsgrad": False}},
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0}},
        {"type": "SGD", "params": {"lr": 0.1, "dampening": 0.5}},  # nor in torch, without momentum
    ):
        run = jz.from_deepspeed(config(optimizer=optimizer), mesh)
        assert not any(key.startswith("optimizer") for key in run.unhonoured)


def test_files_that_are_none(mesh, tmp_path: Path):
    for content, message in [
        ("[]", "must hold a JSON object; got list"),
        ("{", "cannot be read as JSON .*DeepSpeed configuration"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
    ]:
        (tmp_path / "c.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            jz.from_deepspeed(tmp_path / "c.json", mesh)
    with pytest.raises(ValueError, match="there is no file"):
        jz.from_deepspeed(tmp_path / "d.json", mesh)


def test_another_optimizer(mesh):
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 2}}
    made = []

    def optimizer(rate):
        made.append(rate)
        return optax.sgd(rate)

    keys = config(scheduler=scheduler)
    del keys["optimizer"]
    jz.from_deepspeed(keys, mesh, optimizer=optimizer)
    assert float(made[0](10)) == 0.5
    with pytest.raises(ValueError, match="neither `optimizer` nor `scheduler`"):
        jz.from_deepspeed({"train_batch_size": 8}, mesh, optimizer=optimizer)
