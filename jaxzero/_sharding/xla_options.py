"""Choose options of XLA's compiler that let it carry out the schedule, for `jax.jit`.

The plan of a program decides which collectives may overlap with which computation; XLA's scheduler
decides whether they do. On GPUs its defaults keep one collective under way at a time, and begin
each as late as a guess of its duration allows. Figures in this file are of Llama-7B on 2 x 8 H200,
compiled and not run (`benchmarks/compiled/aot.py`). On CPUs XLA drops the plan's barriers before it
schedules.

`_PLATFORMS` has one row for each platform; `register_compiler_options` adds or changes one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .._xla_of_jax import IS_BEFORE_0_11

Options = dict[str, bool | int | str]
_Changes = dict[str, bool | int | str | None]  # None takes an option out

_GPU: Options = {
    # The most collectives in flight at once. While a layer computes, the two hops of a gather and
    # of a reduction are in flight, each for another layer, and each with one collective for every
    # large leaf. With the default of 1, each collective waits for the one before it (a ZeRO-3 step
    # waits 0.20 s for collectives, with 32 0.17 s); with 8 some still wait (Llama-7B at 12.5 GB/s
    # into a node: a step of 1.77 s, with 32 1.76 s).
    "xla_gpu_experimental_parallel_collective_overlap_limit": 32,
    # After scheduling, XLA moves the start of each collective to where its operands exist. Without
    # this it starts a guessed time before its end, too late for messages between nodes (a ZeRO-3
    # step waits 0.24 s for collectives without, 0.08 s with it; JAX 0.12.0). None starts earlier
    # than planned, since its message is encoded after a barrier ([Note: ties] in `_plan.ties`).
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    # The plan's messages are buckets already. XLA's combiner would join messages of a loop inside a
    # layer with those of the next layer, and start only when the last operand exists (ZeRO-3 with 8
    # experts in each layer: a step waits 0.18 s for collectives, without the combiner 0.17 s; JAX
    # 0.12.0). All-reduces are still joined: a program may have many small ones of its own.
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
    # XLA would merge matrix products that share an operand. All rotations of codecs multiply by one
    # matrix, and a product of messages of two iterations waits for both: ZeRO++ then takes 0.77 s
    # at 12.5 GB/s into a node, and 0.69 s without (JAX 0.12.0). Small products of a model, such as
    # queries, keys and values, stay apart too: ZeRO-3 steps change by -1.5% to +0.9%.
    "xla_gpu_dot_merger_threshold_mb": 0,
}
_GPU_BEFORE_0_11: Options = {
    # Durations from a model of the hardware. With the built-in guess collectives start when half of
    # a layer has been computed (a ZeRO-3 step waits 0.23 s for collectives, with the model 0.08 s;
    # JAX 0.10.2). In JAX 0.11.2 and 0.12.0 the option ends the process ("Check failed: buffer !=
    # nullptr") at any asynchronous all-to-all.
    "xla_gpu_enable_analytical_latency_estimator": True,
}
_GPU_OFFLOAD: _Changes = {
    # The most copies from and to host memory in flight at once. With the default of 2, XLA lets
    # most of a layer's seven copies end before its first matrix product, so they overlap with
    # nothing (Llama-7B, JAX 0.10.2 and 0.12.0).
    "xla_gpu_experimental_parallel_async_compute_limit": 64,
    # With arrays in host memory the option ends the process (JAX 0.10.2).
    "xla_gpu_enable_analytical_latency_estimator": None,
}
_GPU_NVLINK: _Changes = {
    # The most exchange kernels in flight at once. With the default of 2, half of a layer's seven
    # end before the compute starts that could hide them (4 layers of Llama-7B on 1 x 8: a step
    # waits 4.3 ms for exchanges, with 64 0.9 ms; JAX 0.12.0).
    "xla_gpu_experimental_parallel_async_compute_limit": 64,
}
_GPU_LOCAL_STEPS: _Changes = {
    # XLA distributes the collectives of a program over as many streams as this. A fragment's
    # message is in flight for whole steps, and a collective on its stream would wait for it; so
    # there must be more streams than collectives in the program text (19 for scanned layers).
    "xla_gpu_experimental_parallel_collective_overlap_limit": 64,
    # Inside a node messages are short, and starting them early gains nothing (Llama-7B, both
    # versions): the predicted step differs by less than 0.3%.
    "xla_gpu_experimental_collective_start_as_early_as_possible": None,
    "xla_gpu_all_gather_combine_threshold_bytes": None,  # not tried
}
_GPU_STAGES: _Changes = {
    # At the conditionals of the first and last stage the option ends the process (JAX 0.10.2).
    "xla_gpu_enable_analytical_latency_estimator": None,
}
_TPU: Options = {
    # By default XLA exchanges gradients synchronously. With the option 91% of the bytes that a
    # ZeRO-3 step receives have compute beside them (TinyLlama on a v5e:2x4, JAX 0.12.0;
    # `benchmarks/compiled/tpu.py`).
    "xla_tpu_enable_async_all_to_all": True,
}
_CPU_BEFORE_0_11: Options = {
    # The default scheduler goes breadth first: all gathers run first, and gathered weights wait for
    # their layers. For 40M parameters in float32, in 12 layers, each of four devices needs 614 MB
    # of temporary memory with it, and 105 MB with this scheduler; steps are slower too, since the
    # system has to map new memory (JAX 0.10.2). From JAX 0.11 on the default keeps the order too:
    # 147 MB against 119 MB.
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}


@dataclasses.dataclass(frozen=True)
class _Platform:
    """The XLA options of one platform.

    Attributes:
        always: options of every program.
        before_0_11: further options before JAX 0.11.
        offload, local_steps, nvlink, stages: changes of these options for a program, if the
            argument of `compiler_options` with the same name is true. None removes an option.
    """

    always: Options = dataclasses.field(default_factory=dict)
    before_0_11: Options = dataclasses.field(default_factory=dict)
    offload: _Changes = dataclasses.field(default_factory=dict)
    local_steps: _Changes = dataclasses.field(default_factory=dict)
    nvlink: _Changes = dataclasses.field(default_factory=dict)
    stages: _Changes = dataclasses.field(default_factory=dict)

    def options(self, *uses: str) -> _Changes:
        """Return the options for the installed JAX and the given uses, which are names of fields.

        An option that a use removes has the value None.
        """
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
        options: names and values. They take precedence over existing options; the value `None`
            removes an option.

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
    """Return options that let XLA carry out the schedule, for `jax.jit(compiler_options=...)`.

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
    platforms = (*_PLATFORMS, *(name for name in _registered if name not in _PLATFORMS))
    if platform not in platforms:
        raise ValueError(
            f"`platform` must be one of {', '.join(map(repr, platforms))}; got {platform!r}. Use "
            "`jax.devices()[0].platform`, or add a platform with "
            "`jaxzero.extend.register_compiler_options`."
        )
    chosen = dict(local_steps=local_steps, nvlink=nvlink, stages=stages, offload=offload)
    uses = [use for use, is_chosen in chosen.items() if is_chosen]
    options = _PLATFORMS.get(platform, _Platform()).options(*uses)
    changed = options | _registered.get(platform, {})
    return {name: value for name, value in changed.items() if value is not None}
