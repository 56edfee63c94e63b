"""What a launched process is told: who it is, where process 0 is, which devices are its own."""

import contextlib
import dataclasses
import os
import socket

_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one process, and its devices by their numbers on this machine; None: all."""

    process: int
    node: int
    devices: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"process {self.process} (node {self.node})"


def slots(nodes: list[int], procs_per_node: int, devices_per_proc: int | None) -> list[Slot]:
    """The places on `nodes`, which are numbered anew from 0; devices stay with the old numbers.

    Without `devices_per_proc` a process has one device, as under SLURM and MPI, and the only
    process has all.
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
    """The environment of the process in `slot`: this one's, and what is read from it by
    `jaxzero.distributed.initialize` (JAXZERO_*) and by JAX (JAX_*)."""
    told = {
        "JAXZERO_COORDINATOR": f"{_HOST}:{port}",
        "JAXZERO_NUM_PROCESSES": str(processes),
        "JAXZERO_PROCESS_ID": str(slot.process),
        "JAXZERO_NODE": str(slot.node),
        "JAXZERO_RESTARTS": str(restarts),
    }
    if cpu_devices is not None:
        told["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
    if slot.devices is not None:  # of GPUs; JAX takes no notice of it where there are none
        told["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, slot.devices))
    # Output goes through a pipe, where Python would hold it back in blocks.
    return {"PYTHONUNBUFFERED": "1"} | os.environ | told


def reserve_port() -> int:
    """A free port for the coordination service, which no other program is given for a minute.

    A connection that this end closes first leaves the port in TIME_WAIT: the kernel does not hand
    it out, and a server that binds it with SO_REUSEADDR, as gRPC's does, may have it.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((_HOST, 0))
        server.listen(1)
        client = stack.enter_context(socket.create_connection(server.getsockname()))
        accepted, _ = server.accept()
        accepted.close()  # first: this end waits, and this end has the port
        client.recv(1)  # until that end is closed too
        return server.getsockname()[1]
