"""Describe the devices and clusters that plans are made for: their rates, links and memory."""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction

from jax.sharding import Mesh

from .._hlo import Rates
from .._mesh import LOCAL, NODE
from .measured import measure

_GIGA = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator; all rates are per second.

    Attributes:
        name: shown in tables.
        flops: operations in 16-bit matrix products that a program reaches.
        memory_bandwidth: bytes of device memory that a program reads or writes.
        memory: bytes of device memory.
        local_link: bytes that the device receives from other devices of its node.
        host_link: bytes between device memory and host memory, each way.
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


def _gpu(
    name: str,
    flops: float,
    bandwidth: float,
    memory: float,
    local: float,
    host: float,
    has_compiler: bool = True,
) -> Device:
    """Return a GPU's `Device` from its data sheet, with rates lowered to those of programs."""
    return Device(
        name=name,
        flops=0.71 * flops,
        memory_bandwidth=0.9 * bandwidth,
        memory=memory,
        local_link=0.89 * local,
        host_link=0.8 * host,
        target=name if has_compiler else None,
    )


# Dense 16-bit peak, memory bandwidth, memory, NVLink or Infinity Fabric in one direction (of AMD's
# GPUs all seven links), PCIe in one direction, of the SXM and OAM modules. Programs are taken to
# reach 71, 90, 89 and 80 percent of the rates. XLA's compiler for AMD's GPUs cannot be installed
# beside the one for CUDA.
DEVICES: dict[str, Device] = {
    "a100": _gpu("a100", 312e12, 2.039e12, 80e9, 300e9, 32e9),
    "h100": _gpu("h100", 989e12, 3.35e12, 80e9, 450e9, 64e9),
    "h200": _gpu("h200", 989e12, 4.8e12, 141e9, 450e9, 64e9),
    "b200": _gpu("b200", 2250e12, 8.0e12, 180e9, 900e9, 64e9),
    "mi300x": _gpu("mi300x", 1307e12, 5.3e12, 192e9, 448e9, 64e9, has_compiler=False),
    "mi355x": _gpu("mi355x", 2516e12, 8.0e12, 288e9, 538e9, 64e9, has_compiler=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, their devices, and the links between them.

    Attributes:
        nodes: number of nodes.
        local: devices of a node.
        device: "a100", "h100", "h200", "b200", "mi300x", "mi355x", or a `Device` of your own. Where
            nodes differ, a tuple with one for each node: `shares` then divides the micro-batches of
            a step among them; plans are made for one kind.
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
        kinds = self.device if isinstance(self.device, tuple) else (self.device,)
        are_kinds = (isinstance(x, Device) or (isinstance(x, str) and x in DEVICES) for x in kinds)
        is_for_each = not isinstance(self.device, tuple) or len(self.device) == self.nodes
        if not all(are_kinds) or not is_for_each:
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
        """Return the cluster that the devices of a mesh form, with rates that short programs reach.

        All processes of the mesh must call it. It takes a few seconds. `tune` compiles plans for
        the result if the devices are A100s, H100s, H200s or B200s. For others it ranks plans by
        bounds alone.

        Args:
            mesh: with the axes `node` and `local`, as from `jz.make_mesh`.
        """
        rates, name = measure(mesh), mesh.devices.flat[0].device_kind
        device = Device(
            name=name,
            flops=rates.flops,
            memory_bandwidth=rates.memory_bandwidth,
            memory=rates.memory,
            local_link=rates.local_link,
            host_link=rates.host_link,
            target=next(
                (x.target for gpu, x in DEVICES.items() if gpu.upper() in re.split(r"\W", name)),
                None,
            ),
        )
        return cls(
            nodes=mesh.shape[NODE],
            local=mesh.shape[LOCAL],
            device=device,
            link=rates.node_link,
            host_memory=rates.host_memory,
        )

    @property
    def kinds(self) -> tuple[Device, ...]:
        """The kind of device of each node."""
        each = self.device if isinstance(self.device, tuple) else (self.device,) * self.nodes
        return tuple(x if isinstance(x, Device) else DEVICES[x] for x in each)

    @property
    def kind(self) -> Device:
        """The kind of device that all nodes have.

        Raises:
            NotImplementedError: nodes have different kinds of devices.
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
        """Return each node's share of a batch, in proportion to its `flops`, as small integers.

        All nodes wait for the slowest at the end of a step. The chosen shares are those with which
        the nodes together compute most rows a second, if each computes whole micro-batches.

        Args:
            microbatches: the number of micro-batches of a device of the fastest node. The largest
                share divides it.

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
        # In each choice, a node has the most micro-batches, up to `most`, that it computes in the
        # time in which some node computes `num`.
        choices = [
            tuple(min(most, max(1, math.floor(num * speed / slow))) for speed in speeds)
            for most in range(1, microbatches + 1)
            if microbatches % most == 0
            for num in range(1, most + 1)
            for slow in sorted(set(speeds))
        ]

        def rows_a_second(shares: tuple[int, ...]) -> Fraction:
            slowest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
            return sum(shares) / slowest

        choices = [shares for shares in choices if microbatches % max(shares) == 0]
        return max(choices, key=rows_a_second)  # the first, with the smallest integers, of equals

    @property
    def num_devices(self) -> int:
        return self.nodes * self.local

    @property
    def one_node(self) -> Cluster:
        """This cluster with one node only."""
        return dataclasses.replace(self, nodes=1, device=self.kind)

    @property
    def rates(self) -> Rates:
        """The rates of devices and links from which a compiled program's time is predicted."""
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
