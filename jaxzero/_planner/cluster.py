"""Devices and clusters that plans are made for: rates, links, memory.

The rates of devices that are here are measured by a few short programs. All devices run each at the
same time, as they do in training, and the time of the slowest process is taken. These are rates
that programs reach, so no share of a peak rate is assumed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from .._collectives import all_gather
from .._hlo import Rates
from .._mesh import AXES, HOST, LOCAL, NODE, map_devices
from .._processes import exchange_json, process_count

_REPEATS = 5
_MEETING_SECONDS = 300.0
_SPLIT = PartitionSpec(AXES)
_GIGA = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Rates per second, and sizes in bytes.

    Attributes:
        flops: of one device, in 16-bit matrix products; on CPUs in 32-bit ones, which are faster.
        memory_bandwidth: of one device's memory.
        memory: of one device; on CPUs its share of the host's.
        local_link: what a device receives from the others of its node.
        node_link: what enters a node from the others.
        host_link: between a device and its host, each way.
        host_memory: of the host, for one device; 0 where devices have none beside their own.
    """

    flops: float
    memory_bandwidth: float
    memory: float
    local_link: float
    node_link: float
    host_link: float
    host_memory: float


def measure(mesh: Mesh) -> Measured:
    """Measure the devices of `mesh`, which has the axes `node` and `local`.

    All processes of the mesh must call it. It takes a few seconds, most of them to compile.
    """
    nodes, local = mesh.shape[NODE], mesh.shape[LOCAL]
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    size, num = (512, 2**20) if on_cpu else (8192, 2**27)  # of a matrix's side, of a vector
    sent = num // 4  # of the vectors that are gathered
    dtype = jnp.dtype(jnp.float32 if on_cpu else jnp.bfloat16)
    host_link = _host_link(mesh, num)
    bandwidth = 2 * 4 * num / _seconds(mesh, lambda x: x + 1, (num,), jnp.dtype(jnp.float32))
    rates = {
        "flops": 2 * size**3 / _seconds(mesh, _product, (size, size), dtype),
        "memory_bandwidth": bandwidth,
        "local_link": bandwidth,  # if a node has one device
        "host_link": host_link or bandwidth,
        "host_memory": _of_host() / max(local, len(mesh.local_devices)) if host_link else 0.0,
    }
    if local > 1:
        taken = _seconds(mesh, _gathered(LOCAL), (sent,), dtype)
        rates["local_link"] = (local - 1) * sent * dtype.itemsize / taken
    rates["node_link"] = local * rates["local_link"]
    if nodes > 1:
        taken = _seconds(mesh, _gathered(NODE), (sent,), dtype)
        rates["node_link"] = (nodes - 1) * local * sent * dtype.itemsize / taken
    return Measured(memory=_memory(mesh), **rates)


def _product(x: Array) -> Array:
    return x @ x


def _gathered(axis: str) -> Callable[[Array], Array]:
    """What every device receives along `axis`; of the result one number is kept."""
    return lambda x: jax.lax.optimization_barrier(all_gather(x, axis, 0))[:1]


def _seconds(
    mesh: Mesh, function: Callable[[Array], Array], shape: tuple[int, ...], dtype: Any
) -> float:
    """The time of `function` on an array of `shape` on every device, in the slowest process."""
    zeros = map_devices(lambda: jnp.zeros((1, *shape), dtype), mesh, (), _SPLIT)
    x = jax.jit(zeros, out_shardings=NamedSharding(mesh, _SPLIT))()
    run = jax.jit(map_devices(lambda x: function(x[0])[None], mesh, (_SPLIT,), _SPLIT))
    return _slowest(lambda: run(x))


def _host_link(mesh: Mesh, num: int) -> float | None:
    """Bytes per second to and from pinned host memory; None if it is the device's memory."""
    device = mesh.local_devices[0]
    if device.platform == "cpu" or HOST not in {x.kind for x in device.addressable_memories()}:
        return None
    memories = [jax.sharding.SingleDeviceSharding(device, memory_kind=x) for x in ("device", HOST)]
    here, there = (jax.device_put(jnp.zeros(num, jnp.float32), each) for each in memories)
    taken = [
        _slowest(lambda: jax.device_put(here, memories[1])),
        _slowest(lambda: jax.device_put(there, memories[0])),
    ]
    return 4 * num / max(taken)


def _slowest(run: Callable[[], Any]) -> float:
    """The median seconds of a call, in the process where that is largest."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    median = statistics.median(taken)
    if process_count() == 1:
        return median
    return max(exchange_json("measured rates", median, _MEETING_SECONDS))


def _memory(mesh: Mesh) -> float:
    limit = (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return float(limit)
    return _of_host() / len(mesh.local_devices)


def _of_host() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator; all rates are per second.

    Attributes:
        name: shown in tables.
        flops: operations in 16-bit matrix products that a program reaches.
        memory_bandwidth: bytes of its own memory that a program reaches.
        memory: bytes of its memory.
        local_link: bytes that it receives from other devices of the node.
        host_link: bytes between its memory and the host's, each way.
        target: the GPU that programs are compiled for: "a100", "h100", "h200" or "b200"; None if
            there is no compiler for it here, so that plans are ranked by bounds alone.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory: float
    local_link: float
    host_link: float
    target: str | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_rate = field.name not in ("name", "target")
            if is_rate and (isinstance(value, bool) or not value > 0):
                raise ValueError(f"`{field.name}` of `Device` must be above 0; got {value!r}.")


def _gpu(name: str, flops: float, memory: float, size: float, local: float, host: float) -> Device:
    """A GPU with the rates of its data sheet, of which programs reach a part."""
    return Device(
        name=name,
        flops=0.71 * flops,
        memory_bandwidth=0.9 * memory,
        memory=size,
        local_link=0.89 * local,
        host_link=0.8 * host,
        target=name,
    )


# Dense 16-bit peak, memory bandwidth, memory, NVLink in one direction, PCIe in one direction, of
# the SXM modules. Programs are taken to reach 71, 90, 89 and 80 percent of the rates.
DEVICES: dict[str, Device] = {
    "a100": _gpu("a100", 312e12, 2.039e12, 80e9, 300e9, 32e9),
    "h100": _gpu("h100", 989e12, 3.35e12, 80e9, 450e9, 64e9),
    "h200": _gpu("h200", 989e12, 4.8e12, 141e9, 450e9, 64e9),
    "b200": _gpu("b200", 2250e12, 8.0e12, 180e9, 900e9, 64e9),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, their devices, and the links between them.

    Attributes:
        nodes: number of nodes.
        local: devices of a node.
        device: "a100", "h100", "h200", "b200", or a `Device` of your own. Where nodes differ, a
            tuple with one for each node: `shares` then divides the micro-batches of a step among
            them; plans are made for one kind.
        link: bytes a second that enter a node from other nodes, over all its links.
        local_link: bytes a second that a device receives from its node; by default the device's.
        host_link: bytes a second between a device and its host, each way; by default the device's.
        host_memory: bytes of host memory for each device; 0: nothing is offloaded.

    Raises:
        ValueError: a number is not above 0, or the kind of a device is not known.
    """

    nodes: int
    local: int
    device: str | Device | tuple[str | Device, ...] = "h100"
    link: float = 50e9
    local_link: float | None = None
    host_link: float | None = None
    host_memory: float = 0.0

    def __post_init__(self):
        for name in ("nodes", "local"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"`{name}` of `Cluster` must be an integer of at least 1; got {value!r}."
                )
        each = self.device if isinstance(self.device, tuple) else (self.device,)
        known = (isinstance(x, Device) or (isinstance(x, str) and x in DEVICES) for x in each)
        is_for_each = not isinstance(self.device, tuple) or len(self.device) == self.nodes
        if not all(known) or not is_for_each:
            raise ValueError(
                f"`device` of `Cluster` must be one of {', '.join(DEVICES)}, or a `jz.Device(...)`,"
                f" or a tuple with one for each of {self.nodes} nodes; got {self.device!r}."
            )
        for name in ("link", "local_link", "host_link"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"`{name}` of `Cluster` is bytes a second, above 0; got {value!r}."
                )
        if self.link < 1e6:
            raise ValueError(
                f"`link` of `Cluster` is bytes a second; {self.link:g} is less than a megabyte. "
                "50 GB/s are `50e9`."
            )
        if not self.host_memory >= 0:
            raise ValueError(
                f"`host_memory` of `Cluster` must be at least 0 bytes; got {self.host_memory!r}."
            )

    @classmethod
    def measured(cls, mesh: Mesh) -> Cluster:
        """The cluster that a mesh of devices here is, with rates measured by short programs.

        All processes of the mesh must call it. It takes a few seconds. For A100s, H100s, H200s and
        B200s plans are then compiled; for other devices they are ranked by bounds alone.

        Args:
            mesh: with the axes `node` and `local`, as from `jz.make_mesh`.
        """
        found, name = measure(mesh), mesh.devices.flat[0].device_kind
        device = Device(
            name=name,
            flops=found.flops,
            memory_bandwidth=found.memory_bandwidth,
            memory=found.memory,
            local_link=found.local_link,
            host_link=found.host_link,
            target=next((gpu for gpu in DEVICES if gpu.upper() in re.split(r"\W", name)), None),
        )
        return cls(
            nodes=mesh.shape[NODE],
            local=mesh.shape[LOCAL],
            device=device,
            link=found.node_link,
            host_memory=found.host_memory,
        )

    @property
    def kinds(self) -> tuple[Device, ...]:
        """The device of each node."""
        each = self.device if isinstance(self.device, tuple) else (self.device,) * self.nodes
        return tuple(x if isinstance(x, Device) else DEVICES[x] for x in each)

    @property
    def kind(self) -> Device:
        """The device.

        Raises:
            NotImplementedError: nodes have different ones.
        """
        first, *others = self.kinds
        if any(x != first for x in others):
            names = ", ".join(dict.fromkeys(x.name for x in self.kinds))
            raise NotImplementedError(
                f"`cluster` has nodes of different devices ({names}), and a plan is made for one "
                "kind. Plan with `dataclasses.replace(cluster, device=...)` for the slowest."
            )
        return first

    def shares(self, microbatches: int) -> tuple[int, ...]:
        """Shares of the nodes in a batch, in proportion to their `flops`, as small integers.

        All nodes wait for the slowest at the end of a step. So the shares are those with which the
        nodes compute most rows a second, as far as whole micro-batches allow.

        Args:
            microbatches: of a device of the fastest node. The largest share divides it.

        Returns:
            A share for each node, for `zero.value_and_grad(..., shares=)` and `jz.pad_batch`.

        Raises:
            ValueError: `microbatches` is not an integer of at least 1.

        Example:
            >>> jz.Cluster(nodes=2, local=8, device=("h100", "a100")).shares(microbatches=16)
            (16, 5)

        References:
            Whale (https://arxiv.org/abs/2011.09208), hardware-aware load balance.
        """
        if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
            raise ValueError(
                f"`microbatches` must be an integer of at least 1; got {microbatches!r}."
            )
        rates = [Fraction(device.flops) for device in self.kinds]
        speeds = [rate / max(rates) for rate in rates]
        # Each is the largest that takes no longer than a whole number of micro-batches on a node.
        found = [
            tuple(min(most, max(1, math.floor(num * speed / slow))) for speed in speeds)
            for most in range(1, microbatches + 1)
            if microbatches % most == 0
            for num in range(1, most + 1)
            for slow in sorted(set(speeds))
        ]

        def rows_a_second(shares: tuple[int, ...]) -> Fraction:
            slowest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
            return sum(shares) / slowest

        found = [shares for shares in found if microbatches % max(shares) == 0]
        return max(found, key=rows_a_second)  # the first, with the smallest integers, of equals

    @property
    def num_devices(self) -> int:
        return self.nodes * self.local

    @property
    def one_node(self) -> Cluster:
        """One of the nodes."""
        return dataclasses.replace(self, nodes=1, device=self.kind)

    @property
    def rates(self) -> Rates:
        """The rates that a compiled program is walked with."""
        device = self.kind
        return Rates(
            flops=device.flops,
            memory=device.memory_bandwidth,
            local=self.local_link or device.local_link,
            node=self.link,
            num_local=self.local,
            host=self.host_link or device.host_link,
        )

    def __str__(self) -> str:
        link = f"{self.link / _GIGA:g} GB/s into a node"
        names = " and ".join(dict.fromkeys(device.name for device in self.kinds))
        return f"{self.nodes} x {self.local} {names}, {link}"
