"""Options of the compiler that the schedule needs, to be passed to `jax.jit`.

The pass decides what may overlap with what; XLA's scheduler decides whether it does. On
GPUs its defaults keep one collective under way at a time, and begin each as late as a guess
of its duration allows. Figures are of Llama-7B on 2 x 8 H200, compiled and not run
(`benchmarks/compiled/aot.py`). On CPUs XLA drops the pass's barriers before it schedules.

`_PLATFORMS` has one row for each platform; `register_compiler_options` adds or changes one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .._xla_of_jax import IS_BEFORE_0_11

Options = dict[str, bool | int | str]
_Changes = dict[str, bool | int | str | None]  # None takes an option out

_GPU: Options = {
    # How many collectives may be under way: a layer has the two hops of its gather and those
    # of its reduction, each for another layer, and each with one for every large leaf. With the
    # default of 1 each waits for the last (ZeRO-3: 0.20 s of a step waited for, then 0.17), and
    # with 8 some still do (Llama-7B at 12.5 GB/s into a node: a step of 1.77 s, then 1.76).
    "xla_gpu_experimental_parallel_collective_overlap_limit": 32,
    # Once XLA has scheduled, each collective is moved to where its operands exist. Otherwise it
    # begins a guessed time before its end, and messages between nodes take far longer (ZeRO-3:
    # 0.24 s of a step waited for, then 0.08; JAX 0.12.0). None begins earlier than the plan says,
    # since its message is encoded after a barrier ([Note: ties] in `_plan.ties`).
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    # The messages of the plan are buckets already. XLA's combiner would join those of a loop within
    # a layer with the next layer's, into one that waits for the last of its operands (8 experts in
    # each layer, ZeRO-3: 0.18 s of a step waited for, then 0.17; JAX 0.12.0). All-reduces are still
    # joined: a program may have many small ones of its own.
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
}
_GPU_BEFORE_0_11: Options = {
    # Durations from a model of the hardware, not the built-in guess, by which collectives
    # began when half of a layer had been computed (ZeRO-3: 0.23 s of a step waited for, then
    # 0.08; JAX 0.10.2). In JAX 0.11.2 and 0.12.0 it ends the
    # process ("Check failed: buffer != nullptr"), at any all-to-all that is asynchronous.
    "xla_gpu_enable_analytical_latency_estimator": True,
}
_GPU_OFFLOAD: _Changes = {
    # How many copies from and to host memory may be under way. With the default of 2, most of a
    # layer's seven copies end before its first matrix product (Llama-7B, both versions).
    "xla_gpu_experimental_parallel_async_compute_limit": 64,
    # With arrays in host memory it ends the process (JAX 0.10.2).
    "xla_gpu_enable_analytical_latency_estimator": None,
}
_GPU_NVLINK: _Changes = {
    # How many kernels that are exchanges may be under way. With the default of 2, of a layer's
    # seven half have ended before what could compute beside them begins (4 layers of Llama-7B on
    # 1 x 8: 4.3 ms of a step waited for, then 0.9; JAX 0.12.0).
    "xla_gpu_experimental_parallel_async_compute_limit": 64,
}
_GPU_LOCAL_STEPS: _Changes = {
    # XLA gives the collectives of a program to as many streams as this, in turn. One that shares
    # the stream of a fragment's message, which spans whole steps, would wait for it; so there must
    # be more streams than collectives in the program text (19 for scanned layers).
    "xla_gpu_experimental_parallel_collective_overlap_limit": 64,
    # Inside a node messages are short, and starting them early gains nothing (Llama-7B, both
    # versions): the predicted step differs by less than 0.3%.
    "xla_gpu_experimental_collective_start_as_early_as_possible": None,
    "xla_gpu_all_gather_combine_threshold_bytes": None,  # not tried
}
_GPU_STAGES: _Changes = {
    # At the conditionals of the first and last stage it ends the process (JAX 0.10.2).
    "xla_gpu_enable_analytical_latency_estimator": None,
}
_TPU: Options = {
    # By default the exchanges of gradients are synchronous. With it 91% of the bytes that a step
    # of ZeRO-3 receives have compute beside them (TinyLlama on a v5e:2x4, JAX 0.12.0;
    # `benchmarks/compiled/tpu.py`).
    "xla_tpu_enable_async_all_to_all": True,
}
_CPU_BEFORE_0_11: Options = {
    # The default scheduler goes breadth first, so all gathers come first and weights wait for
    # their layers: of 40M parameters in float32 and 12 layers each of four devices then has
    # 614 MB of temporary memory, with the other 105 MB, and takes longer, as memory that is new
    # has to be mapped (JAX 0.10.2). Later the default keeps the order: 147 MB, 119 MB.
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}


@dataclasses.dataclass(frozen=True)
class _Platform:
    """The XLA options of one platform, by version of JAX."""

    always: Options = dataclasses.field(default_factory=dict)
    before_0_11: Options = dataclasses.field(default_factory=dict)
    offload: _Changes = dataclasses.field(default_factory=dict)
    local_steps: _Changes = dataclasses.field(default_factory=dict)
    nvlink: _Changes = dataclasses.field(default_factory=dict)
    stages: _Changes = dataclasses.field(default_factory=dict)

    def options(self, *uses: str) -> _Changes:
        """The options for the installed version of JAX; None for one that a use takes out."""
        options: _Changes = {**self.always, **(self.before_0_11 if IS_BEFORE_0_11 else {})}
        for use in uses:
            options |= getattr(self, use)
        return options


_GPUS = _Platform(
    _GPU,
    _GPU_BEFORE_0_11,
    _GPU_OFFLOAD,
    _GPU_LOCAL_STEPS,
    _GPU_NVLINK,
    _GPU_STAGES,
)
_PLATFORMS: dict[str, _Platform] = {
    "cpu": _Platform(before_0_11=_CPU_BEFORE_0_11),
    "gpu": _GPUS,
    "cuda": _GPUS,
    # The scheduler is the same, its model of the hardware is not. Nothing has been compiled there.
    "rocm": _Platform(_GPU, offload=_GPU_OFFLOAD, local_steps=_GPU_LOCAL_STEPS),
    "tpu": _Platform(_TPU),
}
_registered: dict[str, _Changes] = {}


def register_compiler_options(
    platform: str, options: Mapping[str, bool | int | str | None]
) -> None:
    """Add options to those that `compiler_options` returns for a platform, or change some.

    Args:
        platform: a name like `jax.devices()[0].platform`; it may be new.
        options: names and values, which take precedence over those that are there. `None` takes an
            option out.

    Raises:
        ValueError: `platform` is not a name, or an option is not a bool, number or string.

    Example:
        >>> extend.register_compiler_options("cuda", {"xla_gpu_enable_triton_gemm": False})
    """
    if not isinstance(platform, str) or not platform:
        raise ValueError(f"`platform` must be a name such as 'cuda'; got {platform!r}.")
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, bool | int | str | None):
            raise ValueError(
                "`options` must map names of XLA's options to a bool, an int, a string or None; "
                f"got {name!r}: {value!r}."
            )
    _registered[platform] = _registered.get(platform, {}) | dict(options)


def compiler_options(
    platform: str,
    *,
    offload: bool = False,
    local_steps: bool = False,
    nvlink: bool = False,
    stages: bool = False,
) -> Options:
    """The options that let XLA carry out the schedule, for `jax.jit(compiler_options=...)`.

    Without them results are the same, but GPUs wait longer for collectives, and CPUs hold the
    weights of more layers at a time.

    Args:
        platform: the devices' `jax.devices()[0].platform`: "cpu", "gpu", "cuda", "rocm" or "tpu",
            or one that was given to `jaxzero.extend.register_compiler_options`. JAX may call AMD's
            GPUs "gpu" too: give "rocm" for them, which leaves out XLA's model of NVIDIA's hardware.
            Nothing has been compiled for them.
        offload: whether the program has arrays in host memory (`jz.Offload`).
        local_steps: whether the program is a round of `Zero.local_steps`.
        nvlink: whether exchanges inside a node are kernels (`implementation="nvlink"` of a codec).
        stages: whether the program has pipeline stages (`jz.pipeline`). It matters with JAX 0.10
            only, whose compiler for GPUs ends the process otherwise.

    Returns:
        Names and values, of the XLA in the installed version of JAX (0.10 to 0.12).

    Raises:
        ValueError: the platform is not known.

    Example:
        >>> options = jz.compiler_options(jax.devices()[0].platform)
        >>> step = jax.jit(train_step, compiler_options=options)
    """
    known = (*_PLATFORMS, *(name for name in _registered if name not in _PLATFORMS))
    if platform not in known:
        raise ValueError(
            f"`platform` must be one of {', '.join(map(repr, known))}; got {platform!r}. Use "
            "`jax.devices()[0].platform`, or add a platform with "
            "`jaxzero.extend.register_compiler_options`."
        )
    chosen = dict(local_steps=local_steps, nvlink=nvlink, stages=stages, offload=offload)
    uses = [use for use, is_chosen in chosen.items() if is_chosen]
    options = _PLATFORMS.get(platform, _Platform()).options(*uses)
    changed = options | _registered.get(platform, {})
    return {name: value for name, value in changed.items() if value is not None}
