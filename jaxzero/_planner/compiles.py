"""Compile a candidate's step for absent devices, and keep on disk what the prediction needs.

Needs the `aot` extra, which brings XLA's compiler for CUDA; no GPU. The compiler's message that
`cuInit` has found none can be ignored.

Only the schedule and the memory of a compiled program are read; nothing is run. A full compile
leaves out autotuning alone, for which there is no device. A proxy also leaves out the fusion of
softmax and RMS norm into Triton kernels, about half of a compile: steps get longer by about the
same share in all plans, and memory stays almost the same.

XLA compiles kernels, too, though they never run. It keeps them in a file, for the next program of
the search, which has many of them. Of two compiles that run at once, each has its own file.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import queue
import shutil
import tempfile
import time
import weakref
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from .._hlo import Rates, Timeline, compile_with_host_memory, on_abstract_mesh, timeline
from .._mesh import make_mesh
from .._sharding import compiler_options
from .candidates import Candidate
from .cluster import Cluster
from .job import Job, Shapes, placed

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_PACKAGES = ("jax", "jaxlib") + tuple(
    f"jax-cuda{version}-{part}" for version in (12, 13) for part in ("plugin", "pjrt")
)
AT_ONCE = 2  # programs that may be compiled at the same time
_EVERY = {"xla_gpu_autotune_level": 0, "xla_backend_optimization_level": 0}
_PROXY = {"xla_disable_hlo_passes": "triton-softmax-rewriter"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gpu:
    """What XLA has to know of a GPU; sizes in bytes, rates per second."""

    name: str
    capability: str = "9 feature_extension: ACCELERATED_FEATURES"
    cores: int = 132
    fpus: int = 128  # of a core
    core_memory: int = 233472  # shared memory of a core
    block_memory: int = 232448  # and of a block
    cache: int = 52428800
    gigahertz: float = 1.98
    bandwidth: int
    memory: int


_GPUS = {
    "a100": _Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability="8 minor: 0",
        cores=108,
        fpus=64,
        core_memory=167936,
        block_memory=166912,
        cache=41943040,
        gigahertz=1.41,
        bandwidth=2_039_000_000_000,
        memory=85_000_000_000,
    ),
    "h100": _Gpu(name="NVIDIA H100 80GB HBM3", bandwidth=3_350_000_000_000, memory=85_000_000_000),
    "h200": _Gpu(
        name="NVIDIA H200 141GB HBM3e", bandwidth=4_800_000_000_000, memory=151_397_597_184
    ),
    "b200": _Gpu(
        name="NVIDIA B200",
        capability="10 feature_extension: ACCELERATED_FEATURES",
        cores=148,
        cache=132644864,
        gigahertz=1.965,
        bandwidth=8_000_000_000_000,
        memory=192_000_000_000,
    ),
}


def why_no_compiler(cluster: Cluster) -> str | None:
    """Why programs cannot be compiled for the devices of `cluster` here; None if they can."""
    device = cluster.kind
    if device.target is None:
        return f"XLA has no compiler for {device.name} here (`Device.target` is None)"
    if device.target not in _GPUS:
        return f"`Device.target` must be one of {', '.join(_GPUS)}; it is {device.target!r}"
    if not any(find_module(name) for name in _PLUGINS):
        return (
            "XLA's compiler for CUDA is not installed "
            '(`pip install -e ".[aot]"` in a checkout of jaxzero)'
        )
    try:
        absent_mesh(cluster)
    except NotImplementedError:  # JAX has found no GPU, and dropped its compiler
        return "JAX has dropped XLA's compiler, finding no GPU: start Python with JAX_PLATFORMS=cpu"
    return None


def find_module(name: str) -> ModuleSpec | None:
    """Where a module is; None if it, or a package that it is in, is not installed."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


@functools.cache
def absent_mesh(cluster: Cluster) -> Mesh:
    """A mesh of the devices of `cluster`, each node one host, for compiling only.

    Without a GPU, JAX must be told to use CPUs before its first use (`JAX_PLATFORMS=cpu`).
    """
    assert cluster.kind.target is not None
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x{cluster.nodes}x{cluster.local}",
        target_config=target_config(cluster.kind.target),
    )
    return make_mesh(cluster.nodes, devices=topology.devices)


def target_config(name: str) -> str:
    """XLA's description of a GPU, in the text format of protocol buffers."""
    gpu = _GPUS[name]
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.core_memory}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.cache}
  clock_rate_ghz: {gpu.gigahertz}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.block_memory}
  cuda_compute_capability {{ major: {gpu.capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
  name: "{gpu.name}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What is known of a compiled step.

    Attributes:
        text: its scheduled HLO.
        temporary: bytes of temporaries in the device's memory.
        host_temporary: bytes of temporaries in host memory.
        seconds_to_compile: 0 if it was on disk.
    """

    text: str
    temporary: int
    host_temporary: int
    seconds_to_compile: float

    def timeline(self, rates: Rates) -> Timeline:
        """The walk of the program with these rates."""
        return timeline(self.text, rates)


@runtime_checkable
class Compiles(Protocol):
    """The methods of `Compiler` that the search calls."""

    def key(self, candidate: Candidate) -> str: ...

    def compile(self, candidate: Candidate, *, is_proxy: bool) -> Compiled: ...


class Compiler:
    """Compiles candidates for the devices of a cluster, and remembers them on disk.

    Args:
        job: what is trained.
        cluster: of absent devices, with a `Device.target`.
        folder: where compiled programs are kept; None: nowhere.
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
        """Equal for candidates whose emitted programs are equal."""
        return hashlib.sha256(self._lowered(candidate).as_text().encode()).hexdigest()

    def file_name(self, candidate: Candidate, *, is_proxy: bool) -> str:
        """A hash of all that the compiled program depends on."""
        options = _options(candidate, is_proxy)
        versions = {name: _version(name) for name in _PACKAGES}
        _, cluster = placed(self._job, self._cluster, candidate)
        devices = [cluster.nodes, cluster.local, self._target]
        described = json.dumps([self.key(candidate), options, versions, devices])
        return hashlib.sha256(described.encode()).hexdigest()[:32]

    def _step(self, candidate: Candidate) -> Any:
        """The step that a candidate's nodes run, and its arguments."""
        job, cluster = placed(self._job, self._cluster, candidate)
        shapes = Shapes.of(job, candidate, absent_mesh(cluster))
        params = on_abstract_mesh(shapes.params) if candidate.has_host_arrays else shapes.params
        return jax.jit(shapes.step), (params, job.batch), shapes.arguments

    def _mesh(self, candidate: Candidate) -> Mesh:
        return absent_mesh(placed(self._job, self._cluster, candidate)[1])

    def _lowered(self, candidate: Candidate) -> Any:
        if candidate not in self._known:
            step, arguments, keywords = self._step(candidate)
            with jax.set_mesh(self._mesh(candidate)):
                self._known[candidate] = step.lower(*arguments, **keywords)
        return self._known[candidate]

    def compile(self, candidate: Candidate, *, is_proxy: bool) -> Compiled:
        """The compiled gradients of a candidate, from disk if they were compiled before.

        After `key` it may be called in another thread, unless something is in host memory.
        """
        name = self.file_name(candidate, is_proxy=is_proxy)
        known = self._read(name)
        if known is not None:
            return known
        kernels = self._kernel_files.get()
        try:
            found = self._compile(candidate, is_proxy, kernels)
        finally:
            self._kernel_files.put(kernels)
        self._write(name, found)
        return found

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
    options = compiler_options("cuda", offload=candidate.has_host_arrays)
    return {**options, **_EVERY, **(_PROXY if is_proxy else {})}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
