"""Options of the compiler that the schedule needs, to be passed to `jax.jit`.

The pass decides what may overlap with what; XLA's scheduler decides whether it does. On
GPUs its defaults keep one collective under way at a time, and begin each as late as a guess
of its duration allows. Figures are of Llama-7B on 2 x 8 H200, compiled and not run
(`benchmarks/aot.py`; README).
"""

from __future__ import annotations

_GPU: dict[str, bool | int | str] = {
    # Durations from a model of the hardware, not the built-in guess, by which collectives
    # began when half of a layer had been computed.
    "xla_gpu_enable_analytical_latency_estimator": True,
    # How many collectives may be under way: a layer has the two hops of its gather and those
    # of its reduction, each for another layer. With the default of 1 each waits for the last.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
}


def compiler_options(platform: str) -> dict[str, bool | int | str]:
    """The options that let XLA carry out the schedule, for `jax.jit(compiler_options=...)`.

    Without them programs are right, but wait for more of what is sent.

    Args:
        platform: of the devices, `jax.devices()[0].platform`: "cpu", "gpu", "cuda", "rocm" or
            "tpu". On CPUs nothing overlaps, and
            for TPUs no option has been measured: both get none.

    Returns:
        Names and values, of XLA as in JAX 0.10 to 0.12.

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
    return dict(_GPU) if platform in ("gpu", "cuda") else {}
