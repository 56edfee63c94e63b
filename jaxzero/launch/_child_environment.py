"""Environment of a launched process: its rank, the coordinator's address and its devices."""

import contextlib
import dataclasses
import os
import socket

_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Slot:
    """Rank, node and devices of one process."""

    process: int  # rank
    node: int
    devices: tuple[int, ...] | None  # device ids on this machine; None for all devices

    def __str__(self) -> str:
        return f"process {self.process} (node {self.node})"


def slots(nodes: list[int], procs_per_node: int, devices_per_proc: int | None) -> list[Slot]:
    """Assign ranks and devices to the processes on `nodes`.

    Nodes are renumbered from 0, but keep the devices of their original numbers, which are in
    `nodes`. Without `devices_per_proc` a process gets one device, as under SLURM and MPI; a single
    process gets all devices.
    """
    alone = devices_per_proc is None and len(nodes) == procs_per_node == 1
    count = devices_per_proc or 1
    places = []
    for node, number in enumerate(nodes):
        for local in range(procs_per_node):
            first = (number * procs_per_node + local) * count
            devices = None if alone else tuple(range(first, first + count))
            places.append(Slot(node * procs_per_node + local, node, devices))
    return places


def environment(
    slot: Slot, *, processes: int, port: int, restarts: int, cpu_devices: int | None
) -> dict[str, str]:
    """Return the environment of the process in `slot`.

    It is this process's environment with the variables that `jaxzero.distributed.initialize`
    (JAXZERO_*) and JAX (JAX_*) read.
    """
    variables = {
        "JAXZERO_COORDINATOR": f"{_HOST}:{port}",
        "JAXZERO_NUM_PROCESSES": str(processes),
        "JAXZERO_PROCESS_ID": str(slot.process),
        "JAXZERO_NODE": str(slot.node),
        "JAXZERO_RESTARTS": str(restarts),
    }
    if cpu_devices is not None:
        variables["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
    if slot.devices is not None:  # GPU ids; JAX ignores the variable on the CPU
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, slot.devices))
    # Output goes through a pipe, which Python would otherwise buffer in blocks.
    return {"PYTHONUNBUFFERED": "1"} | os.environ | variables


def reserve_port() -> int:
    """Find a free port for the coordination service, which no other program gets for a minute.

    A connection whose server side closes first leaves the port in TIME_WAIT: the kernel does not
    assign it to others, but a server that uses SO_REUSEADDR, like gRPC's, can bind it.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((_HOST, 0))
        server.listen(1)
        client = stack.enter_context(socket.create_connection(server.getsockname()))
        accepted, _ = server.accept()
        accepted.close()  # the server side closes first, so its port enters TIME_WAIT
        client.recv(1)  # wait until the close has arrived at the client
        return server.getsockname()[1]
