"""Compile a program for GPUs with a scheduler that knows how long its instructions take."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from .._hlo import Program, durations, parse, timeline
from .cluster import Cluster

_PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
_GPUS = ("cuda", "gpu", "rocm")


def compile_for(
    lowered: jax.stages.Lowered,
    cluster: Cluster,
    *,
    compiler_options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compile a lowered program for GPUs twice, the second time with predicted durations.

    XLA's scheduler decides from durations which collective to start when, and what to compute
    meanwhile. Before JAX 0.11, `jz.compiler_options` switches on XLA's own model of the hardware.
    Later versions crash with that model, so there XLA guesses. This function predicts the duration
    of each instruction of the first program from the rates of `cluster`. The second compilation
    reads the durations as XLA reads a profile (profile-guided latency estimation). The program's
    results are the same, up to what XLA rounds differently in another schedule.

    It takes twice the time of a compilation. JAX's persistent cache finds the first program only:
    the second is stored under a new key at each call. Where the program can be run, JAX can measure
    durations instead of predicting them (`jax_enable_pgle`).

    With several processes, all must compile the same program, since each predicts durations from
    the program that it compiled. This function has been tried with one process only.

    Args:
        lowered: from `jax.jit(...).lower(...)`, for the GPUs of a mesh, present or absent.
        cluster: the mesh's devices, with the rates that durations are predicted from.
        compiler_options: as for `lowered.compile`, such as `jz.compiler_options("cuda")`, if
            `jax.jit` was given none.

    Returns:
        The program whose predicted step is shorter: that of the first or the second compilation.

    Raises:
        ValueError: the program is not for GPUs or for another number of devices, or the trip count
            of a loop with collectives is not known.

    Example:
        >>> step = jax.jit(step, compiler_options=jz.compiler_options("cuda"))
        >>> compiled = jz.compile_for(step.lower(params, opt_state, batch), cluster)
        >>> params, opt_state, loss = compiled(params, opt_state, batch)
    """
    options = dict(compiler_options or {})
    first = lowered.compile(compiler_options=options)
    _check_devices(first, cluster)
    program = _program(first)
    with tempfile.TemporaryDirectory(prefix="jaxzero-") as folder:
        profile = Path(folder, "durations.pbtxt")
        profile.write_text(durations(program, cluster.rates))
        second = lowered.compile(compiler_options={**options, _PROFILE: str(profile)})
    before, after = (timeline(x, cluster.rates).seconds for x in (program, _program(second)))
    return second if after < before else first


def _program(compiled: jax.stages.Compiled) -> Program:
    text = compiled.as_text()
    assert text is not None  # JAX types it as optional; XLA for GPUs has it
    return parse(text)


def _check_devices(compiled: jax.stages.Compiled, cluster: Cluster) -> None:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = set().union(*(x.device_set for x in shardings))
    platforms = {x.platform for x in devices}
    if not platforms <= set(_GPUS):
        raise ValueError(
            f"`lowered` must be a program for GPUs; it is for {', '.join(sorted(platforms))}, "
            "where XLA's scheduler reads no durations. Use `lowered.compile()`."
        )
    if len(devices) != cluster.num_devices:
        raise ValueError(
            f"`cluster` has {cluster.num_devices} devices ({cluster.nodes} x {cluster.local}); "
            f"`lowered` is for {len(devices)}. Give the cluster of the program's mesh."
        )
