"""Meshes of devices that are absent, for which XLA can compile.

Needs the `aot` extra, which brings XLA's compiler for CUDA; no GPU. The compiler's message that
`cuInit` has found none can be ignored.
"""

from __future__ import annotations

import functools
import importlib.util

from jax.experimental import topologies
from jax.sharding import Mesh

from .._mesh import make_mesh
from .cluster import Cluster

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")

# What XLA has to know of each GPU: compute capability, cores, bytes of shared memory of a core and
# of a block, bytes of the cache, GHz.
_GPUS = {
    "a100": ("8, minor: 0", 108, 64, 167936, 166912, 41943040, 1.41, 2.039e12, 85e9),
    "h100": ("9, feature_extension: ACCELERATED_FEATURES", 132, 128, 233472, 232448, 52428800)
    + (1.98, 3.35e12, 85e9),
    "h200": ("9, feature_extension: ACCELERATED_FEATURES", 132, 128, 233472, 232448, 52428800)
    + (1.98, 4.8e12, 151397597184),
    "b200": ("10, feature_extension: ACCELERATED_FEATURES", 148, 128, 233472, 232448, 132644864)
    + (1.965, 8.0e12, 192e9),
}


def why_no_compiler(cluster: Cluster) -> str | None:
    """Why programs cannot be compiled for the devices of `cluster` here; None if they can."""
    device = cluster.kind
    if device.target is None:
        return f"XLA has no compiler for {device.name} here (`Device.target` is None)"
    if device.target not in _GPUS:
        return f"`Device.target` must be one of {', '.join(_GPUS)}; it is {device.target!r}"
    if not any(_is_there(name) for name in _PLUGINS):
        return "XLA's compiler for CUDA is not installed (`pip install jaxzero[aot]`)"
    try:
        absent_mesh(cluster)
    except NotImplementedError:  # JAX has found no GPU, and dropped its compiler
        return "JAX has dropped XLA's compiler, finding no GPU: start Python with JAX_PLATFORMS=cpu"
    return None


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


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
    capability, cores, fpus, shared, block, cache, clock, bandwidth, memory = _GPUS[name]
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(bandwidth)}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {int(memory)}
  shared_memory_per_block_optin: {block}
  cuda_compute_capability {{ major: {capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
  name: "{name}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
