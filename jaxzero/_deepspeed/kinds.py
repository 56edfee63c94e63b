"""What each key of a DeepSpeed configuration may hold, by its dotted path.

Ranges exclude what makes updates infinite or NaN in float32: an `eps` or a clipping norm that
rounds to 0, for which a gradient of 0 is divided by 0; a `beta` that rounds to 1, so that the
correction of its bias divides by 0.
"""

from .._checked_json import (
    FLAG,
    OBJECT,
    TEXT,
    Kind,
    integer,
    list_of,
    number,
    one_of,
    whole,
    zero_or,
)

COUNT = integer(1)
STEPS = whole(1, 2**31 - 1)
STEPS_OR_0 = whole(0, 2**31 - 1)
SIZE = whole(0, 2**60)  # elements; files write 5e8
BUCKET = whole(1, 2**60)  # elements
HPZ_GROUP = integer(0)  # devices; at most 1 for none
MICS_GROUP = integer(-1)  # the same; -1 is what DeepSpeed takes for a missing key
RATE = number(0, 1e6)
SHARE = number(0, 1)
SCALE = number(2.0**-24, 2.0**64)
BETAS = list_of(number(0, 0.999999), length=2)

_OPTIMIZER = {
    "lr": RATE,
    "betas": BETAS,
    "eps": number(1e-30, 1e3),
    "weight_decay": number(0, 1e3),
    "momentum": SHARE,
    "nesterov": FLAG,
    "dampening": number(0, 1e3),
    "torch_adam": FLAG,
    "adam_w_mode": FLAG,
    "bias_correction": FLAG,
    "amsgrad": FLAG,
}
_SCHEDULER = {
    "warmup_min_lr": RATE,
    "warmup_max_lr": RATE,
    "warmup_num_steps": STEPS_OR_0,
    "warmup_type": one_of("log", "linear"),
    "total_num_steps": STEPS,
    "warmup_min_ratio": SHARE,
    "cos_min_ratio": SHARE,
    "cycle_min_lr": RATE,
    "cycle_max_lr": RATE,
    "cycle_first_step_size": STEPS,
    "cycle_second_step_size": STEPS_OR_0,
    "decay_step_size": STEPS_OR_0,
    "decay_lr_rate": RATE,
    "lr_range_test_min_lr": RATE,
    "lr_range_test_step_size": STEPS,
    "lr_range_test_step_rate": RATE,
    "lr_range_test_staircase": FLAG,
}
_FP16 = {
    "enabled": FLAG,
    "loss_scale": zero_or(SCALE),
    "initial_scale_power": integer(0, 64),
    "loss_scale_window": COUNT,
    "hysteresis": COUNT,
    "consecutive_hysteresis": FLAG,
    "min_loss_scale": SCALE,
}
_ZERO = {
    "stage": integer(0, 3),
    "reduce_bucket_size": BUCKET,
    "allgather_bucket_size": BUCKET,
    "stage3_max_live_parameters": SIZE,
    "stage3_max_reuse_distance": SIZE,
    "stage3_prefetch_bucket_size": SIZE,
    "stage3_param_persistence_threshold": SIZE,
    "zero_quantized_weights": FLAG,
    "zero_quantized_gradients": FLAG,
    "zero_hpz_partition_size": HPZ_GROUP,
    "mics_shard_size": MICS_GROUP,
}
_SECTIONS: dict[str, dict[str, Kind]] = {
    "optimizer.params": _OPTIMIZER,
    "scheduler.params": _SCHEDULER,
    "fp16": _FP16,
    "bf16": {"enabled": FLAG},
    "bfloat16": {"enabled": FLAG},  # the older name
    "zero_optimization": _ZERO,
}

KINDS: dict[str, Kind] = {
    "train_batch_size": COUNT,
    "train_micro_batch_size_per_gpu": COUNT,
    "gradient_accumulation_steps": COUNT,
    "gradient_clipping": zero_or(number(1e-30, 1e30)),
    "optimizer.type": TEXT,
    "scheduler.type": TEXT,
    "communication_data_type": TEXT,
    **{f"{name}.{key}": kind for name, keys in _SECTIONS.items() for key, kind in keys.items()},
    **{name: OBJECT for name in ("optimizer", "scheduler", "data_types", *_SECTIONS)},
    **{f"zero_optimization.{name}": OBJECT for name in ("offload_optimizer", "offload_param")},
}
