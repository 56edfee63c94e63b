"""Read the keys of a DeepSpeed configuration, check their values, and record which were used.

Ranges exclude values with which updates are infinite or NaN in float32: an `eps` or a clipping norm
that rounds to 0, by which a gradient of 0 would be divided; a `beta` that rounds to 1, with which
bias correction divides by 0.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._checked_json import (
    FLAG,
    OBJECT,
    TEXT,
    JsonKeys,
    Kind,
    integer,
    list_of,
    number,
    one_of,
    read_json,
    whole,
    zero_or,
)

COUNT = integer(1)
STEPS = whole(1, 2**31 - 1)  # optax counts steps in int32
STEPS_OR_0 = whole(0, 2**31 - 1)
SIZE = whole(0, 2**60)  # elements; files write 5e8
BUCKET = whole(1, 2**60)  # elements
HPZ_GROUP = integer(0)  # number of devices; 0 and 1 turn hpZ off
MICS_GROUP = integer(-1)  # number of devices; 1 and less turn MiCS off, and -1 is the default
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


_MOST_LEVELS, _MOST_KEYS = 64, 10_000  # far more than configurations have
_REMEDY = "Correct it in the file, or give it in `values`."


class DeepSpeedKeys(JsonKeys):
    """The keys of a configuration by dotted path, with a record of which were used ("honoured").

    Args:
        content: the configuration.
        values: dotted path -> value; these override the configuration.
        where: the name of the configuration, for messages.
    """

    def __init__(self, content: Mapping[str, Any], values: Mapping[str, Any], where: str):
        self._sections, self._values = content, dict(values)
        self._honoured: set[str] = set()
        flat = {}
        super().__init__(flat, KINDS, where=where, remedy=_REMEDY, missing=_REMEDY)
        for key, value in _flatten(content):
            if len(flat) >= _MOST_KEYS:
                raise ValueError(f"There are more than {_MOST_KEYS} keys in {where}. Remove some.")
            flat[key] = value
            if KINDS.get(key) is OBJECT and value is not None:
                self._checked(key, value)
        flat |= self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key and mark it as honoured; `default` if it is absent or null.

        Raises:
            ValueError: the value is "auto", which DeepSpeed expects its caller to replace, or it is
                not what the key may hold.
        """
        self._honoured.add(key)
        value = self._content.get(key)
        if isinstance(value, str) and value == "auto":
            raise ValueError(
                f'`{key}` is "auto" in the file, which the caller of DeepSpeed replaces. Give its '
                f"value: `values={{{key!r}: ...}}`."
            )
        value = value.item() if isinstance(value, np.generic) else value
        return default if value is None else self._checked(key, value)

    def honours(self, key: str, value: Any) -> None:
        """Mark a key as honoured if it is absent or equals `value`, the only supported value."""
        given = self._content.get(key, value)
        if type(given) is type(value) and given == value:
            self._honoured.add(key)

    def holds(self, name: str) -> bool:
        """Return whether the file or `values` has the section `name`; a null does not count."""
        given = any(self._values.get(key) is not None for key in self._keys_of(name))
        return given or self._sections.get(name) is not None

    def is_enabled(self, name: str) -> bool:
        """Return whether a section is enabled; if it is not, mark all its keys as honoured."""
        enabled = self.get(f"{name}.enabled", False)
        if not enabled:
            self._honoured.update(self._keys_of(name))
        return enabled

    def _keys_of(self, name: str) -> list[str]:
        return [key for key in self._content if key.startswith(f"{name}.")]

    def unhonoured(self) -> tuple[str, ...]:
        """List the keys that were never used, in the order of the file.

        Known keys whose value is null are left out.
        """
        unused = (key for key in self._content if key not in self._honoured)
        return tuple(key for key in unused if not (key in KINDS and self._content[key] is None))

    def error(self, key: str, what: str, *, remedy: str | None = None) -> ValueError:
        """Return the error "`key` in 'path' {what}. {remedy}"."""
        where = "`values`" if key in self._values else self._where
        return ValueError(f"`{key}` in {where} {what}. {remedy or self._remedy}")


def read_keys(config: Path | str | Mapping[str, Any], values: Mapping[str, Any]) -> DeepSpeedKeys:
    """Read a configuration from a file or a dict; `values` override it, as in `DeepSpeedKeys`.

    Raises:
        ValueError: the configuration is no JSON object, or nests too deeply.
    """
    if isinstance(config, Mapping):
        return DeepSpeedKeys(config, values, "the DeepSpeed configuration")
    if not isinstance(config, Path | str) or not Path(config).exists():
        raise ValueError(
            f"`config` must be a JSON file, or a dict; there is no file {str(config)!r}."
        )
    path = Path(config)
    content = read_json(path, remedy="Give the JSON file of a DeepSpeed configuration.")
    return DeepSpeedKeys(content, values, repr(str(path)))


def _flatten(
    content: Mapping[str, Any], prefix: str = "", level: int = 1
) -> Iterator[tuple[str, Any]]:
    if level > _MOST_LEVELS:
        raise ValueError(f"The DeepSpeed configuration nests deeper than {_MOST_LEVELS} levels.")
    for name, value in content.items():
        # DeepSpeed knows no dotted paths: such a name is not the key that it looks like.
        key = f"{prefix}{name!r}" if "." in str(name) else f"{prefix}{name}"
        is_value = key in KINDS and KINDS[key] is not OBJECT
        if isinstance(value, Mapping) and not is_value:
            yield from _flatten(value, f"{key}.", level + 1)
        else:
            yield key, value
