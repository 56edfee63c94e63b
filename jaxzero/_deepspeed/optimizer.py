"""Translate optimizers and learning rate schedules of DeepSpeed to optax, with equal updates.

A schedule gives the learning rate of update t = 0, 1, 2, ... DeepSpeed steps its schedulers after
an update, so at update t their iteration is t - 1. The warm-up schedules use this iteration, and
the lowest rate for update 0; `OneCycle` and `LRRangeTest` add 1 to the iteration, which gives t.

References:
    https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/lr_schedules.py
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array

from .._checked_json import shown
from .keys import DeepSpeedKeys

Rate = optax.ScalarOrSchedule
MakeOptimizer = Callable[[Rate], optax.GradientTransformation]


def read_optimizer(
    keys: DeepSpeedKeys, given: MakeOptimizer | None, mask: Any
) -> optax.GradientTransformation:
    """Build the optimizer of a configuration, with its learning rate or schedule.

    Args:
        keys: the configuration.
        given: makes another optimizer from the learning rate or schedule; None for the one that
            the configuration names.
        mask: parameters with weight decay, as for `optax.adamw`; not used with `given`.

    Raises:
        ValueError: the optimizer or the scheduler is missing or not supported.
    """
    kind = keys.get("optimizer.type")
    rate = keys.get("optimizer.params.lr", None if kind is None else 1e-3)
    schedule = _read_schedule(keys, rate)
    if given is not None:
        if schedule is None and rate is None:
            raise ValueError(
                "The file has neither `optimizer` nor `scheduler`, so `optimizer` has no learning "
                "rate. Give one in `values`: {'optimizer.params.lr': 1e-4}."
            )
        return given(rate if schedule is None else schedule)
    name = "" if kind is None else str(kind).lower()
    if name not in _OPTIMIZERS:
        what = "is missing" if kind is None else f"asks for the optimizer {shown(kind)}"
        raise keys.error(
            "optimizer.type",
            f"{what}; known are {', '.join(sorted(_OPTIMIZERS))}",
            remedy="Pass another as `optimizer=`: a function of the learning rate, such as "
            "`optax.adamw`.",
        )
    return _OPTIMIZERS[name](keys, rate if schedule is None else schedule, mask)


def _adam(
    keys: DeepSpeedKeys, rate: Rate, mask: Any, *, decoupled: bool = False
) -> optax.GradientTransformation:
    # `adam_w_mode: false` makes an "Adam" add the decay to the gradient; for "AdamW" DeepSpeed
    # ignores it.
    decoupled = keys.get("optimizer.params.adam_w_mode", True) or decoupled
    # `torch.optim.AdamW` has the same updates, but its own default weight decay.
    by_torch = keys.get("optimizer.params.torch_adam", False)
    if not keys.get("optimizer.params.bias_correction", True):
        raise keys.error(
            "optimizer.params.bias_correction",
            "is false, which optax's Adam does not support",
            remedy="Pass an `optimizer=` without bias correction.",
        )
    if keys.get("optimizer.params.amsgrad", False):
        raise keys.error(
            "optimizer.params.amsgrad",
            "is true, which is another optimizer than Adam",
            remedy="Pass `optimizer=`: a function of the learning rate, such as `optax.amsgrad`.",
        )
    b1, b2 = keys.get("optimizer.params.betas", (0.9, 0.999))
    eps = keys.get("optimizer.params.eps", 1e-8)
    decay = keys.get("optimizer.params.weight_decay", 0.01 if by_torch and decoupled else 0.0)
    if decoupled:
        return optax.adamw(rate, b1, b2, eps, weight_decay=decay, mask=mask)
    return optax.chain(optax.add_decayed_weights(decay, mask), optax.adam(rate, b1, b2, eps))


def _sgd(keys: DeepSpeedKeys, rate: Rate, mask: Any) -> optax.GradientTransformation:
    momentum = keys.get("optimizer.params.momentum", 0.0)
    nesterov = keys.get("optimizer.params.nesterov", False)
    if nesterov and not momentum:
        raise keys.error("optimizer.params.nesterov", "is true without `momentum`")
    if keys.get("optimizer.params.dampening", 0.0) and momentum:
        raise keys.error(
            "optimizer.params.dampening",
            "is not 0, which optax's SGD does not support",
            remedy="Pass an `optimizer=` that scales the gradients it adds to the momentum.",
        )
    decay = keys.get("optimizer.params.weight_decay", 0.0)
    return optax.chain(
        optax.add_decayed_weights(decay, mask), optax.sgd(rate, momentum or None, nesterov)
    )


def _lion(keys: DeepSpeedKeys, rate: Rate, mask: Any) -> optax.GradientTransformation:
    b1, b2 = keys.get("optimizer.params.betas", (0.9, 0.99))
    decay = keys.get("optimizer.params.weight_decay", 0.0)
    return optax.lion(rate, b1, b2, weight_decay=decay, mask=mask)


_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adam": _adam,
    "adamw": functools.partial(_adam, decoupled=True),
    "lion": _lion,
    "sgd": _sgd,
}


def _read_schedule(keys: DeepSpeedKeys, rate: Any) -> optax.Schedule | None:
    kind = keys.get("scheduler.type")
    if kind is None:
        return None
    if kind not in _SCHEDULES:
        raise keys.error(
            "scheduler.type",
            f"asks for the scheduler {shown(kind)}; known are {', '.join(sorted(_SCHEDULES))}",
            remedy="Remove it from the file, and pass an `optimizer=` with its own schedule.",
        )
    return _SCHEDULES[kind](keys, rate)


def _param(keys: DeepSpeedKeys, name: str, default: Any = None) -> Any:
    value = keys.get(f"scheduler.params.{name}", default)
    if value is None:
        raise keys.error(f"scheduler.params.{name}", "is missing", remedy="Add it.")
    return value


def _number(count: Any) -> Array:
    return jnp.asarray(count, jnp.float32)


def _warmup(keys: DeepSpeedKeys) -> tuple[float, optax.Schedule]:
    """Read how the learning rate rises.

    Returns:
        The number of warm-up steps; and the share of the rise at iteration `i`, from 0 to 1.
    """
    # At least 2, as in DeepSpeed: the logarithm of 1 is 0, by which the fraction would be divided.
    steps = max(2, _param(keys, "warmup_num_steps", 1000))
    if _param(keys, "warmup_type", "log") == "linear":
        return float(steps), lambda i: i / steps
    return float(steps), lambda i: jnp.log(i + 1) / jnp.log(jnp.float32(steps))


def _warmup_lr(keys: DeepSpeedKeys, rate: Any) -> optax.Schedule:
    return _warmup_then(keys, rate, lambda i, steps: jnp.ones_like(i))


def _warmup_decay_lr(keys: DeepSpeedKeys, rate: Any) -> optax.Schedule:
    total = _param(keys, "total_num_steps")
    # Unlike `WarmupLR`, DeepSpeed's class does not take the optimizer's rate for a missing maximum.
    return _warmup_then(
        keys, 1e-3, lambda i, steps: jnp.maximum(0.0, (total - i) / max(1.0, total - steps))
    )


def _warmup_then(keys: DeepSpeedKeys, rate: Any, after: Callable[..., Any]) -> optax.Schedule:
    """Return a schedule that rises from the minimum to the maximum, and then follows `after`.

    Args:
        keys: the configuration.
        rate: the maximum, if the file has none.
        after: maps (iteration, warm-up steps) to the share of the way from minimum to maximum.
    """
    low = _param(keys, "warmup_min_lr", 0.0)
    high = _param(keys, "warmup_max_lr", rate)
    steps, risen = _warmup(keys)

    def schedule(count: Any) -> Array:
        i = _number(count) - 1
        share = jnp.where(i < steps, risen(jnp.maximum(i, 0.0)), after(i, steps))
        return jnp.where(i < 0, low, low + (high - low) * share)

    return schedule


def _warmup_cosine_lr(keys: DeepSpeedKeys, rate: Any) -> optax.Schedule:
    total = _param(keys, "total_num_steps")
    low = _param(keys, "warmup_min_ratio", 0.0)
    end = _param(keys, "cos_min_ratio", 1e-4)
    steps, risen = _warmup(keys)
    if rate is None:
        raise keys.error("optimizer.params.lr", "is missing; WarmupCosineLR scales it")

    def schedule(count: Any) -> Array:
        i = _number(count) - 1
        rising = low + (1 - low) * risen(jnp.maximum(i, 0.0))
        progress = jnp.minimum(1.0, (i - steps + 1) / max(1, total - steps))
        falling = jnp.maximum(0.0, end + (1 - end) * (1 + jnp.cos(jnp.pi * progress)) / 2)
        return rate * jnp.where(i < 0, 0.0, jnp.where(i < steps, rising, falling))

    return schedule


def _one_cycle(keys: DeepSpeedKeys, rate: Any) -> optax.Schedule:
    low, high = _param(keys, "cycle_min_lr"), _param(keys, "cycle_max_lr")
    first = float(_param(keys, "cycle_first_step_size", 2000))
    second = keys.get("scheduler.params.cycle_second_step_size")
    second = first if second is None else float(second)
    decay_steps = _param(keys, "decay_step_size", 0)
    decay = _param(keys, "decay_lr_rate", 0.0) if decay_steps else 0.0
    keys.get("scheduler.params.decay_lr_rate")  # honoured: without steps it has no effect there too
    keys.honours("scheduler.params.cycle_momentum", False)

    def schedule(count: Any) -> Array:
        t = _number(count)
        share = jnp.where(t <= first, t / first, (first + second - t) / second)
        cycling = low + (high - low) * jnp.maximum(share, 0.0)
        later = (t - (first + second)) / max(decay_steps, 1)
        return jnp.where(t <= first + second, cycling, low / (1 + decay * later))

    return schedule


def _lr_range_test(keys: DeepSpeedKeys, rate: Any) -> optax.Schedule:
    low = _param(keys, "lr_range_test_min_lr", 1e-3)
    size = _param(keys, "lr_range_test_step_size", 2000)
    step_rate = _param(keys, "lr_range_test_step_rate", 1.0)
    stairs = _param(keys, "lr_range_test_staircase", False)

    def schedule(count: Any) -> Array:
        intervals = _number(count) / size
        return low * (1 + step_rate * (jnp.floor(intervals) if stairs else intervals))

    return schedule


_SCHEDULES: dict[str, Callable[[DeepSpeedKeys, Any], optax.Schedule]] = {
    "LRRangeTest": _lr_range_test,
    "OneCycle": _one_cycle,
    "WarmupCosineLR": _warmup_cosine_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupLR": _warmup_lr,
}
