"""Compile a candidate's step for absent devices, and keep its schedule and memory on disk.

Only the schedule and the memory of a compiled program are read; nothing is run. So a full compile
leaves out autotuning, for which there is no device, and LLVM's optimization of kernels. A proxy is
a faster compile, which also leaves out the fusion of softmax and RMS norm into Triton kernels. That
fusion takes about half of a compile. Without it, steps get longer by about the same share in all
plans, and memory stays almost the same.

XLA compiles the kernels too, though they never run. It keeps compiled kernels in a file, and takes
many from there when it compiles the next program. Compiles that run at the same time use different
files.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import queue
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from .._hlo import Rates, Timeline, compile_with_host_memory, on_abstract_mesh, timeline
from .._sharding import compiler_options
from .candidates import Candidate
from .cluster import Cluster
from .job import Job, Shapes, placed
from .target import absent_mesh, target_config

_PACKAGES = ("jax", "jaxlib") + tuple(
    f"jax-cuda{version}-{part}" for version in (12, 13) for part in ("plugin", "pjrt")
)
AT_ONCE = 2  # programs that may be compiled at the same time
# No kernel runs, so none is tuned, and LLVM need not optimize any.
_EVERY = {"xla_gpu_autotune_level": 0, "xla_backend_optimization_level": 0}
_PROXY = {"xla_disable_hlo_passes": "triton-softmax-rewriter"}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program that computes gradients, as text, and the memory that it needs.

    Attributes:
        text: its scheduled HLO.
        temporary: bytes of temporaries in the device's memory.
        host_temporary: bytes of temporaries in host memory.
        seconds_to_compile: how long the compile took; 0 if the program was read from disk.
    """

    text: str
    temporary: int
    host_temporary: int
    seconds_to_compile: float

    def timeline(self, rates: Rates) -> Timeline:
        """Predict when each instruction of the program runs, from rates of devices and links."""
        return timeline(self.text, rates)


@runtime_checkable
class Compiles(Protocol):
    """A protocol: the methods of `Compiler` that `Search` calls."""

    def key(self, candidate: Candidate) -> str: ...

    def compile(self, candidate: Candidate, *, is_proxy: bool) -> Compiled: ...


class Compiler:
    """Compiles candidates' programs for the devices of a cluster, and keeps the results on disk.

    Args:
        job: what is trained.
        cluster: the absent devices, whose `Device.target` is not None.
        folder: where results are kept on disk; None: they are not kept.
    """

    def __init__(self, job: Job, cluster: Cluster, folder: Path | None):
        assert cluster.kind.target is not None
        self._job = job
        self._cluster = cluster
        self._target = target_config(cluster.kind.target)
        self._folder = folder
        self._known: dict[Candidate, Any] = {}  # lowered programs
        scratch = Path(tempfile.mkdtemp(prefix="jaxzero-plan-"))
        weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        self._kernel_files: queue.LifoQueue[str] = queue.LifoQueue()
        for number in range(AT_ONCE):
            self._kernel_files.put(str(scratch / f"kernels-{number}"))

    def key(self, candidate: Candidate) -> str:
        """Return a hash of the lowered program, equal for candidates whose programs are equal."""
        return hashlib.sha256(self._lowered(candidate).as_text().encode()).hexdigest()

    def file_name(self, candidate: Candidate, *, is_proxy: bool) -> str:
        """Return the name of a compile's file: a hash of the program, options and versions."""
        options = _options(candidate, is_proxy)
        versions = {name: _version(name) for name in _PACKAGES}
        _, cluster = placed(self._job, self._cluster, candidate)
        devices = [cluster.nodes, cluster.local, self._target]
        described = json.dumps([self.key(candidate), options, versions, devices])
        return hashlib.sha256(described.encode()).hexdigest()[:32]

    def _step(self, candidate: Candidate) -> Any:
        """Return the jitted function of a candidate's gradients, and its arguments as structs.

        The result is the function, a tuple of positional arguments, and a dict of keyword
        arguments.
        """
        job, cluster = placed(self._job, self._cluster, candidate)
        shapes = Shapes.of(job, candidate, absent_mesh(cluster, **candidate.axes))
        params = on_abstract_mesh(shapes.params) if candidate.has_host_arrays else shapes.params
        return jax.jit(shapes.step), (params, job.batch), shapes.arguments

    def _mesh(self, candidate: Candidate) -> Mesh:
        cluster = placed(self._job, self._cluster, candidate)[1]
        return absent_mesh(cluster, **candidate.axes)

    def _lowered(self, candidate: Candidate) -> Any:
        if candidate not in self._known:
            step, arguments, keywords = self._step(candidate)
            with jax.set_mesh(self._mesh(candidate)):
                self._known[candidate] = step.lower(*arguments, **keywords)
        return self._known[candidate]

    def compile(self, candidate: Candidate, *, is_proxy: bool) -> Compiled:
        """Compile a candidate's program of gradients, or read an earlier result from disk.

        After `key` was called for the candidate, `compile` may run in another thread. But a program
        with arrays in host memory is traced again here, which must happen in the thread of `key`.
        """
        name = self.file_name(candidate, is_proxy=is_proxy)
        on_disk = self._read(name)
        if on_disk is not None:
            return on_disk
        kernels = self._kernel_files.get()
        try:
            compiled = self._compile(candidate, is_proxy, kernels)
        finally:
            self._kernel_files.put(kernels)
        self._write(name, compiled)
        return compiled

    def _compile(self, candidate: Candidate, is_proxy: bool, kernels: str) -> Compiled:
        options = {**_options(candidate, is_proxy), "xla_gpu_kernel_cache_file": kernels}
        start = time.perf_counter()
        if candidate.has_host_arrays:
            step, arguments, keywords = self._step(candidate)
            compiled = compile_with_host_memory(
                step, arguments, self._mesh(candidate), options=options, **keywords
            )
        else:
            compiled = self._lowered(candidate).compile(compiler_options=options)
        memory: Any = compiled.memory_analysis()
        return Compiled(
            compiled.as_text() or "",
            memory.temp_size_in_bytes,
            memory.host_temp_size_in_bytes,
            time.perf_counter() - start,
        )

    def _read(self, name: str) -> Compiled | None:
        if self._folder is None:
            return None
        path = self._folder / f"{name}.json.gz"
        try:
            fields = json.loads(gzip.decompress(path.read_bytes()))
        except (OSError, ValueError, EOFError):  # not there, or cut off: compile again
            return None
        return Compiled(**{**fields, "seconds_to_compile": 0.0})

    def _write(self, name: str, compiled: Compiled) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        data = gzip.compress(json.dumps(dataclasses.asdict(compiled)).encode())
        partial = self._folder / f"{name}.partial"
        partial.write_bytes(data)
        partial.replace(self._folder / f"{name}.json.gz")


def _options(candidate: Candidate, is_proxy: bool) -> dict[str, Any]:
    options = compiler_options(
        "cuda", offload=candidate.has_host_arrays, stages=candidate.stages > 1
    )
    return {**options, **_EVERY, **(_PROXY if is_proxy else {})}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
