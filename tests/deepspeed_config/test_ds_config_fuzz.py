"""Mutated `ds_config.json`: refused by file and key, or a run whose updates are finite."""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from tests.interop.fuzzing import bounds
from tests.mutate_json import dumped, mutations

pytestmark = pytest.mark.standard_promotion  # optax

_COMMON = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e8,
        "stage3_max_live_parameters": 1e9,
        "stage3_param_persistence_threshold": 1e4,
        "zero_quantized_weights": False,
        "zero_hpz_partition_size": 4,
    },
}
_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
_FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 4,
    "loss_scale_window": 100,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "consecutive_hysteresis": False,
}


def _base(kind: str, params: dict[str, Any], schedule: str, **scheduler: Any) -> dict[str, Any]:
    return _COMMON | {
        "optimizer": {"type": kind, "params": params},
        "scheduler": {"type": schedule, "params": scheduler},
    }


BASES = {
    "adamw": _base("AdamW", _ADAM, "WarmupLR", warmup_max_lr=1e-3, warmup_num_steps=5),
    "adam-fp16": _base(
        "Adam",
        _ADAM | {"adam_w_mode": False},
        "WarmupDecayLR",
        total_num_steps=9,
        warmup_num_steps=2,
    )
    | {"fp16": _FP16},
    "sgd": _base(
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        "OneCycle",
        cycle_min_lr=0.1,
        cycle_max_lr=0.2,
        cycle_first_step_size=2,
        decay_step_size=2,
        decay_lr_rate=0.1,
    )
    | {"bf16": {"enabled": True}},
    "lion": _base(
        "Lion",
        {"lr": 1e-3, "betas": [0.9, 0.99]},
        "WarmupCosineLR",
        total_num_steps=9,
        warmup_num_steps=2,
        cos_min_ratio=0.1,
    ),
    "range": _base(
        "AdamW",
        _ADAM,
        "LRRangeTest",
        lr_range_test_min_lr=1e-3,
        lr_range_test_step_size=2,
        lr_range_test_step_rate=1.0,
        lr_range_test_staircase=True,
    ),
}
MORE = [
    "train_batch_size", "fp16", "fp16.enabled", "bf16", "bf16.enabled", "optimizer", "scheduler",
    "optimizer.params", "scheduler.params", "zero_optimization", "communication_data_type",
    "zero_optimization.mics_shard_size", "zero_optimization.stage3_prefetch_bucket_size",
    "scheduler.params.warmup_type", "scheduler.params.warmup_min_lr", "steps_per_print",
    "scheduler.params.cycle_second_step_size", "optimizer.params.torch_adam", "data_types",
    "optimizer.params.bias_correction", "gradient_allreduce_op",
]  # fmt: skip


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jz.make_mesh(nodes=2)


def run_of(content: dict[str, Any], path: Path, mesh: Any) -> Any:
    """The run of a content, or None: it is refused, with an error that names file and key."""
    path.write_text(dumped(content))
    started = time.process_time()
    try:
        with bounds(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = jz.from_deepspeed(path, mesh)
        assert all(str(warning.message).isprintable() for warning in caught)
        return run
    except ValueError as error:
        message = str(error)
        assert re.search(r"`[\w.]+`", message), message
        assert "file" in message or "mesh" in message or repr(str(path)) in message, message
        assert len(message) < len(str(path)) + 500 and message.isprintable(), message
        return None
    finally:
        assert time.process_time() - started < 5


def check_updates(run: Any, what: str) -> None:
    """Updates and state are finite after gradients of every usual size, zero included."""
    params = {"w": jnp.array([0.0, 1.0, -3.0])}
    state = run.optimizer.init(params)
    for gradient in ([0.0, 0.0, 0.0], [0.0, 1e-3, -10.0]):
        updates, state = run.optimizer.update({"w": jnp.array(gradient)}, state, params)
        for leaf in jax.tree.leaves((updates, state)):
            assert np.isfinite(np.asarray(leaf, np.float64)).all(), f"{what}: {updates}"


def _fuzz(path: Path, mesh: Any, *, count: int, seed: int) -> dict[str, int]:
    found = {"refused": 0, "accepted": 0}
    for name, key, content in mutations(BASES, more=MORE, count=count, seed=seed):
        run = run_of(content, path, mesh)
        found["accepted" if run else "refused"] += 1
        if run and not key.startswith(("zero", "train", "steps", "comm", "data")):
            check_updates(run, f"{name}: {key} of {content}")
    return found


def test_mutated_files_are_refused_or_make_finite_updates(mesh, tmp_path: Path):
    found = _fuzz(tmp_path / "ds_config.json", mesh, count=20, seed=0)
    assert min(found.values()) > 2, found


@pytest.mark.ci
def test_five_hundred_mutated_files(mesh, tmp_path: Path):
    found = _fuzz(tmp_path / "ds_config.json", mesh, count=500, seed=1)
    assert min(found.values()) > 50, found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.params.eps", float("nan")),
        ("optimizer.params.eps", 0.0),  # a gradient of 0 is divided by it
        ("optimizer.params.eps", 1e-50),  # 0 in float32
        ("optimizer.params.betas", [0.9, 1.0]),  # the correction of the bias divides by 1 - 1
        ("optimizer.params.betas", [0.9, 1 - 1e-12]),  # 1 in float32
        ("optimizer.params.betas", ["0.9", 0.999]),
        ("optimizer.params.betas", [0.9]),
        ("optimizer.params.betas", 0.9),
        ("optimizer.params.lr", 1e39),  # infinite in float32
        ("optimizer.params.lr", "1e-3"),
        ("optimizer.params.weight_decay", True),
        ("fp16.enabled", "false"),
        ("fp16.initial_scale_power", 1000),
        ("fp16.initial_scale_power", 16.5),
        ("fp16.loss_scale_window", 0),
        ("fp16.hysteresis", "2"),
        ("fp16.min_loss_scale", 0),
        ("fp16", True),
        ("optimizer.type", {"a": 1}),
        ("zero_optimization.stage", True),
        ("zero_optimization.stage", 7),
        ("zero_optimization.reduce_bucket_size", 0.5),
        ("zero_optimization.zero_hpz_partition_size", -1),
        ("zero_optimization.offload_optimizer", "cpu"),
        ("zero_optimization.offload_param", [1]),
        ("scheduler.params.warmup_num_steps", -1),
        ("scheduler.params.warmup_type", "cubic"),
        ("gradient_clipping", float("inf")),
        ("gradient_clipping", 1e-60),  # 0 in float32
        ("fp16.loss_scale", 1e-60),
    ],
)
def test_what_a_key_may_hold(mesh, tmp_path: Path, key: str, value: Any):
    content = json.loads(json.dumps(BASES["adam-fp16"]))
    *sections, last = key.split(".")
    place = content
    for section in sections:
        place = place[section]
    place[last] = value
    path = tmp_path / "ds_config.json"
    path.write_text(dumped(content))
    with pytest.raises(ValueError, match=rf"`{key}` in .*ds_config\.json' must be .*; got "):
        jz.from_deepspeed(path, mesh)
    with pytest.raises(ValueError, match=rf"`{key}` in the DeepSpeed configuration must be "):
        jz.from_deepspeed(content, mesh)


def test_a_dotted_name_is_not_the_key_that_it_looks_like(mesh):
    with pytest.warns(UserWarning, match=r"no effect here: 'fp16\.enabled'"):
        run = jz.from_deepspeed(BASES["adamw"] | {"fp16.enabled": True}, mesh)
    assert run.compute_dtype is None


def test_values_are_checked_as_the_file_is(mesh):
    with pytest.raises(
        ValueError, match=r"`optimizer\.params\.lr` in `values` must be .*; got nan"
    ):
        jz.from_deepspeed(BASES["adamw"], mesh, values={"optimizer.params.lr": float("nan")})
    rate = {"optimizer.params.lr": np.float64(0.5)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = jz.from_deepspeed(BASES["adamw"], mesh, values=rate)
    check_updates(run, "a rate as a numpy number")


def test_files_that_hang_or_nest(mesh, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "deep").write_text('{"a":' * 100_000)
    for name, message in (
        ("pipe", "a named pipe"),
        ("zero", "a device"),
        ("deep", "deeper than 64 levels"),
    ):
        with pytest.raises(ValueError, match=message):
            jz.from_deepspeed(tmp_path / name, mesh)
    shared: dict[str, Any] = {"x": 1}
    for _ in range(40):
        shared = {"a": shared, "b": shared}
    looped: dict[str, Any] = {}
    looped["a"] = looped
    started = time.process_time()
    for content, message in ((shared, "more than 10000 keys"), (looped, "deeper than 64 levels")):
        with pytest.raises(ValueError, match=message):
            jz.from_deepspeed(content, mesh)
    assert time.process_time() - started < 5
