"""Compile a program for GPUs with a scheduler that knows how long its instructions take."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from .._hlo import durations, timeline
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
    meanwhile. From JAX 0.11 on it guesses them: its own model of the hardware, which
    `jz.compiler_options` switches on before, ends the process. The first compilation says which
    instructions there are; a cost model gives each a duration, from the rates of `cluster`; the
    second compilation reads them as XLA reads a profile (profile-guided latency estimation).
    Results are the same, up to what XLA rounds differently in another schedule. Of the two
    programs, the one whose predicted step is shorter is returned.

    It takes twice the time of a compilation, and JAX's persistent cache holds only the first
    program. Where the program can be run, JAX can measure durations instead of predicting them
    (`jax_enable_pgle`).

    Args:
        lowered: from `jax.jit(...).lower(...)`, for the GPUs of a mesh, present or absent.
        cluster: whose rates are used. Its nodes and devices are those of the mesh.
        compiler_options: as for `lowered.compile`, such as `jz.compiler_options("cuda")`, if
            `jax.jit` was given none.

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
    text = _text(first)
    with tempfile.TemporaryDirectory(prefix="jaxzero-") as folder:
        profile = Path(folder, "durations.pbtxt")
        profile.write_text(durations(text, cluster.rates))
        second = lowered.compile(compiler_options={**options, _PROFILE: str(profile)})
    before, after = (timeline(x, cluster.rates).seconds for x in (text, _text(second)))
    return second if after < before else first


def _text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    assert text is not None  # for GPUs
    return text


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
