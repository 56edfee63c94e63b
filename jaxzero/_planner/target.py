"""Make meshes of absent GPUs, for which XLA can compile but not run programs.

Such a mesh needs no GPU. It needs the `aot` extra, which brings XLA's compiler for CUDA. The
compiler prints that `cuInit` has found no GPU, which can be ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from importlib.machinery import ModuleSpec

from jax.experimental import topologies
from jax.sharding import Mesh

from .._mesh import make_mesh
from .cluster import Cluster

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gpu:
    """A GPU as XLA's compiler describes it; sizes are in bytes, rates are per second."""

    name: str
    capability: str = "9 feature_extension: ACCELERATED_FEATURES"
    cores: int = 132
    fpus: int = 128  # of a core
    core_memory: int = 233472  # shared memory of a core
    block_memory: int = 232448  # shared memory of a block
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
    """Return why no program can be compiled here for the devices of `cluster`; None if one can."""
    device = cluster.kind
    if device.target is None:
        return f"XLA has no compiler for {device.name} here (`Device.target` is None)"
    if device.target not in _GPUS:
        return f"`Device.target` must be one of {', '.join(_GPUS)}; it is {device.target!r}"
    if not any(find_module(name) for name in _PLUGINS):
        return 'XLA\'s compiler for CUDA is not installed (`pip install "jaxzero[aot]"`)'
    try:
        absent_mesh(cluster)
    except NotImplementedError:  # JAX has found no GPU, and dropped its compiler
        return "JAX has dropped XLA's compiler, finding no GPU: start Python with JAX_PLATFORMS=cpu"
    return None


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module, without importing it; None if it is not installed."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


@functools.cache
def absent_mesh(cluster: Cluster, stages: int | None = None, tokens: int | None = None) -> Mesh:
    """Return a mesh of the absent devices of `cluster`, on which programs can only be compiled.

    Each node is one host.

    Without a GPU, JAX must be told to use CPUs before its first use (`JAX_PLATFORMS=cpu`).

    Args:
        cluster: the devices.
        stages: pipeline stages of the mesh, as `make_mesh` takes them.
        tokens: devices that share a row, as `make_mesh` takes them.
    """
    assert cluster.kind.target is not None
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x{cluster.nodes}x{cluster.local}",
        target_config=target_config(cluster.kind.target),
    )
    return make_mesh(cluster.nodes, devices=topology.devices, stages=stages, tokens=tokens)


def target_config(name: str) -> str:
    """Return XLA's description of GPU `name`, in the text format of protocol buffers."""
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
