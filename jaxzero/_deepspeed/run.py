"""Set up training from a DeepSpeed configuration: `from_deepspeed("ds_config.json", mesh)`."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._checked_json import shown
from .._codecs import Cast, Int8
from .._mesh import AXES, LOCAL, AnyMesh
from .._sharding import CommSchedule, HpZ, PerAxis, ZeroConfig, zeropp
from .._zero import Zero
from .keys import DeepSpeedKeys, read_keys
from .loss_scale import DynamicScale, loss_scale_of, scale_loss
from .optimizer import MakeOptimizer, read_optimizer

_DTYPES = {
    "fp32": jnp.float32,
    "float32": jnp.float32,
    "fp16": jnp.float16,
    "float16": jnp.float16,
    "bf16": jnp.bfloat16,
    "bfp16": jnp.bfloat16,  # spelling of DeepSpeed's documentation
    "bfloat16": jnp.bfloat16,
}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpeedRun:
    """A DeepSpeed configuration, translated to objects of this library.

    Attributes:
        zero: shards parameters, gradients and optimizer state by the ZeRO stage of the file.
        optimizer: clipping, optimizer, schedule and loss scaling, as one optax transformation.
        batch_size: rows per step, over all devices and micro-batches.
        microbatches: micro-batches per device and step.
        compute_dtype: dtype to which parameters are cast in the forward pass; None for no cast.
        unhonoured: keys of the file that have no effect here.
    """

    zero: Zero
    optimizer: optax.GradientTransformationExtraArgs
    batch_size: int
    microbatches: int
    compute_dtype: np.dtype | None
    unhonoured: tuple[str, ...]

    def value_and_grad(self, loss_fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Apply `zero.value_and_grad` with the dtype, micro-batches and loss scale of the file.

        Args:
            loss_fn: `loss_fn(params, batch, ...) -> loss`, written for one device.
            options: keyword arguments of `Zero.value_and_grad`.

        Returns:
            A function `(params, opt_state, batch, ...) -> (loss, grads)`. The loss is unscaled;
            the gradients are scaled, and `optimizer` divides them by the scale.
        """

        def scaled(params, *arguments):
            *arguments, scale = arguments
            result = loss_fn(_cast(params, self.compute_dtype), *arguments)
            loss, *aux = result if options.get("has_aux") else (result,)
            if options.get("weighted"):
                loss = (_times(loss[0], scale), loss[1])
            else:
                loss = _times(loss, scale)
            return (loss, *aux) if aux else loss

        # The scale is the last argument, not a captured constant: it changes from step to step.
        options = {"microbatches": self.microbatches, **options}
        differentiate = self.zero.value_and_grad(scaled, **options)

        def value_and_grad(params, opt_state, batch, *rest):
            scale = loss_scale_of(opt_state)
            value, grads = differentiate(params, batch, *rest, scale)
            if options.get("has_aux"):
                return (value[0] / scale, value[1]), grads
            return value / scale, grads

        return value_and_grad


def from_deepspeed(
    config: Path | str | Mapping[str, Any],
    mesh: AnyMesh,
    *,
    optimizer: MakeOptimizer | None = None,
    weight_decay_mask: Any = None,
    values: Mapping[str, Any] | None = None,
) -> DeepSpeedRun:
    """Set up the run that a DeepSpeed configuration describes.

    Supported are batch sizes, stage and quantization of ZeRO, precision, loss scaling, clipping,
    the optimizer and the scheduler; `docs/howto/pytorch_checkpoints.md` lists the keys. Other keys
    are listed in a warning. A file without `gradient_clipping` also gives a warning: this meant no
    clipping before DeepSpeed 0.19.3 and a norm of 1.0 since, which is used here.

    Args:
        config: path of a `ds_config.json`, or its content.
        mesh: from `jz.make_mesh`. Its number of devices is DeepSpeed's world size.
        optimizer: replaces the optimizer of the file: a function of the learning rate or schedule,
            such as `optax.adamw`. Required if the file has no optimizer, or one that is not
            supported.
        weight_decay_mask: parameters with weight decay, as for `optax.adamw`; it replaces
            PyTorch's parameter groups.
        values: dotted path -> value, for keys that are "auto" in the file or are to be overridden:
            `{"optimizer.params.lr": 1e-4}`.

    Raises:
        ValueError: a value is missing, "auto", or contradicts others or the mesh.

    Example:
        >>> run = jz.from_deepspeed("ds_config.json", jz.make_mesh(nodes=2))
        >>> params = run.zero.init(init_fn, key)
        >>> opt_state = run.zero.init_optimizer(run.optimizer, params)
        >>> loss, grads = run.value_and_grad(loss_fn)(params, opt_state, batch)
    """
    keys = read_keys(config, dict(values or {}))
    batch_size, microbatches = _read_batch(keys, mesh)
    compute_dtype = _read_dtype(keys)
    zero_config = _read_zero(keys, mesh, compute_dtype)
    chain = read_optimizer(keys, optimizer, weight_decay_mask)
    if clip := _read_clipping(keys):
        chain = optax.chain(optax.clip_by_global_norm(clip), chain)
    if compute_dtype == jnp.float16:
        chain = scale_loss(chain, _read_loss_scale(keys))
    keys.honours("gradient_allreduce_op", "mean")
    keys.honours("data_types.grad_accum_dtype", "fp32")
    if unhonoured := keys.unhonoured():
        warnings.warn(
            f"These keys of the DeepSpeed configuration have no effect here: "
            f"{', '.join(key if key.isprintable() else shown(key) for key in unhonoured)}.",
            stacklevel=2,
        )
    return DeepSpeedRun(
        zero=Zero(mesh, zero_config),
        optimizer=optax.with_extra_args_support(chain),
        batch_size=batch_size,
        microbatches=microbatches,
        compute_dtype=compute_dtype,
        unhonoured=unhonoured,
    )


def _read_batch(keys: DeepSpeedKeys, mesh: AnyMesh) -> tuple[int, int]:
    """Return the rows per step and the number of micro-batches.

    DeepSpeed has three numbers: rows per step, rows per micro-batch, micro-batches. Two of them
    give the third.
    """
    devices = int(np.prod([mesh.shape[axis] for axis in AXES]))
    total, rows, steps = given = [keys.get(name) for name in _BATCH]
    if total is None and rows is None:
        raise ValueError(
            "The file has neither `train_batch_size` nor `train_micro_batch_size_per_gpu`. Give "
            "one in `values`."
        )
    if steps is None:
        steps = 1 if rows is None or total is None else total // (rows * devices)
    if total is None:
        total = (rows or 0) * steps * devices
    if rows is None:
        rows = total // (devices * max(steps, 1))
    if total != rows * steps * devices or total < 1:
        texts = [f"`{key}` {x}" for key, x in zip(_BATCH, given, strict=True) if x is not None]
        raise ValueError(
            "`train_batch_size` must be micro-batch x accumulation x devices, each of them 1 or "
            f"more; got {', '.join(texts)}, and {devices} devices of the mesh. Change one in "
            "`values`."
        )
    return total, steps


def _read_dtype(keys: DeepSpeedKeys) -> np.dtype | None:
    # DeepSpeed reads the older name only where the newer is absent.
    name = "bf16" if keys.holds("bf16") else "bfloat16"
    bfloat16, float16 = keys.is_enabled(name), keys.is_enabled("fp16")
    if bfloat16 and float16:
        raise ValueError(f"`{name}` and `fp16` are both enabled. Disable one.")
    if bfloat16:
        return np.dtype(jnp.bfloat16)
    return np.dtype(jnp.float16) if float16 else None


def _read_clipping(keys: DeepSpeedKeys) -> float:
    """Return the gradient norm to clip to; 0 for no clipping."""
    clip = keys.get("gradient_clipping")
    if clip is None:
        warnings.warn(
            "The DeepSpeed configuration has no `gradient_clipping`: gradients are clipped to a "
            "norm of 1.0, as in DeepSpeed 0.19.3 and later. Earlier versions did not clip; to "
            "disable it, pass `values={'gradient_clipping': 0.0}`.",
            stacklevel=3,
        )
        return 1.0
    return clip


def _read_loss_scale(keys: DeepSpeedKeys) -> DynamicScale | float:
    static = keys.get("fp16.loss_scale", 0)
    dynamic = DynamicScale(
        initial=2.0 ** keys.get("fp16.initial_scale_power", 16),
        window=keys.get("fp16.loss_scale_window", 1000),
        hysteresis=keys.get("fp16.hysteresis", 2),
        consecutive=keys.get("fp16.consecutive_hysteresis", False),
        minimum=keys.get("fp16.min_loss_scale", 1.0),
    )
    return static or dynamic


def _read_zero(keys: DeepSpeedKeys, mesh: AnyMesh, compute_dtype: np.dtype | None) -> ZeroConfig:
    def get(name: str, default: Any = None) -> Any:
        return keys.get(f"zero_optimization.{name}", default)

    stage = get("stage", 0)
    itemsize = np.dtype(compute_dtype or np.float32).itemsize
    buckets = [get(name) for name in ("reduce_bucket_size", "allgather_bucket_size")]
    buckets = [size for size in buckets if size is not None]
    bounds = {
        name: size
        for name in ("max_live_parameters", "max_reuse_distance")
        if (size := get(f"stage3_{name}")) is not None
    }
    if get("stage3_prefetch_bucket_size") == 0:
        bounds["prefetch"] = 0
    if buckets:
        bounds["bucket_bytes"] = max(buckets) * itemsize
    quantized = get("zero_quantized_weights", False)
    weights = PerAxis(node=Int8(block=256), local=Int8(block=256)) if quantized else PerAxis()
    split = "local" if _is_node(keys, "mics_shard_size", mesh) else "all"
    has_hpz = _is_node(keys, "zero_hpz_partition_size", mesh)
    gradients = _read_gradients(keys)
    threshold = get("stage3_param_persistence_threshold", 0)
    try:
        return ZeroConfig(
            stage=stage,
            split=split,
            weights=weights,
            gradients=gradients,
            hpz=HpZ(codec=Int8(block=256) if quantized else None) if has_hpz else None,
            param_persistence_threshold=threshold,
            schedule=CommSchedule(**bounds),
        )
    except ValueError as error:
        text = str(error).removesuffix(".")
        raise keys.error("zero_optimization", f"makes no `ZeroConfig`: {text}") from error


def _is_node(keys: DeepSpeedKeys, name: str, mesh: AnyMesh) -> bool:
    """Return whether `zero_optimization.<name>` asks for groups that are the devices of one node.

    Raises:
        ValueError: the group size is above 1 and not the number of devices in a node of `mesh`.
    """
    size = keys.get(f"zero_optimization.{name}", 1)
    if size <= 1:
        return False
    if size != mesh.shape[LOCAL]:
        raise ValueError(
            f"`zero_optimization.{name}` is {size}, but a node of the mesh has "
            f"{mesh.shape[LOCAL]} devices. Make a mesh in which they agree: "
            "`jz.make_mesh(nodes=...)`."
        )
    return True


def _read_gradients(keys: DeepSpeedKeys) -> PerAxis:
    if keys.get("zero_optimization.zero_quantized_gradients", False):
        return zeropp().gradients
    name = keys.get("communication_data_type", None)
    if name is None:
        return PerAxis()
    if name not in _DTYPES:
        raise keys.error(
            "communication_data_type", f"must be one of {', '.join(_DTYPES)}; got {shown(name)}"
        )
    return PerAxis(node=Cast(_DTYPES[name]), local=Cast(_DTYPES[name]))


def _times(loss: Any, scale: Any) -> Any:
    """Multiply the loss by the scale, in float32 or wider, since float16 ends at 65504."""
    dtype = jnp.promote_types(loss.dtype, jnp.float32)
    return loss.astype(dtype) * scale.astype(dtype)


def _cast(params: Any, dtype: np.dtype | None) -> Any:
    if dtype is None:
        return params

    def cast(x: Any) -> Any:
        floating = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if floating else x

    return jax.tree.map(cast, params)
