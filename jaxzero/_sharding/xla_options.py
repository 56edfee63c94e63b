"""Options of the compiler that the schedule needs, to be passed to `jax.jit`.

The pass decides what may overlap with what; XLA's scheduler decides whether it does. On
GPUs its defaults keep one collective under way at a time, and begin each as late as a guess
of its duration allows. Figures are of Llama-7B on 2 x 8 H200, compiled and not run
(`benchmarks/compiled/aot.py`). On CPUs it drops the pass's barriers first.
"""

from __future__ import annotations

import jax

_GPU: dict[str, bool | int | str] = {
    # How many collectives may be under way: a layer has the two hops of its gather and those
    # of its reduction, each for another layer. With the default of 1 each waits for the last
    # (ZeRO-3: 0.20 s of a step waited for, then 0.17; JAX 0.12.0).
    "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
}
_GPU_BEFORE_0_11: dict[str, bool | int | str] = {
    # Durations from a model of the hardware, not the built-in guess, by which collectives
    # began when half of a layer had been computed (ZeRO-3: 0.23 s of a step waited for, then
    # 0.08; JAX 0.10.2). In JAX 0.11.2 and 0.12.0 it ends the
    # process ("Check failed: buffer != nullptr"), at any all-to-all that is asynchronous.
    "xla_gpu_enable_analytical_latency_estimator": True,
}
_CPU_BEFORE_0_11: dict[str, bool | int | str] = {
    # The default scheduler goes breadth first, so all gathers come first and weights wait for
    # their layers: of 40M parameters in float32 and 12 layers each of four devices then has
    # 614 MB of temporary memory, with the other 105 MB, and takes longer, as memory that is new
    # has to be mapped (JAX 0.10.2). Later the default keeps the order: 147 MB, 119 MB.
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}


def compiler_options(platform: str) -> dict[str, bool | int | str]:
    """The options that let XLA carry out the schedule, for `jax.jit(compiler_options=...)`.

    Without them programs are right, but on GPUs wait for more of what is sent, and on CPUs hold
    the weights of more layers at a time.

    Args:
        platform: of the devices, `jax.devices()[0].platform`: "cpu", "gpu", "cuda", "rocm" or
            "tpu". For TPUs and AMD's GPUs no option has been measured: they get none.

    Returns:
        Names and values, of the XLA in the installed version of JAX (0.10 to 0.12).

    Raises:
        ValueError: the platform is not known.

    Example:
        >>> options = jz.compiler_options(jax.devices()[0].platform)
        >>> step = jax.jit(train_step, compiler_options=options)
    """
    if platform not in ("cpu", "gpu", "cuda", "rocm", "tpu"):
        raise ValueError(
            f"`platform` must be 'cpu', 'gpu', 'cuda', 'rocm' or 'tpu'; got {platform!r}. "
            "Use `jax.devices()[0].platform`."
        )
    before_0_11 = jax.__version_info__ < (0, 11)
    if platform == "cpu":
        return dict(_CPU_BEFORE_0_11) if before_0_11 else {}
    if platform not in ("gpu", "cuda"):
        return {}
    return _GPU | _GPU_BEFORE_0_11 if before_0_11 else dict(_GPU)
