"""Start JAX over several processes, wherever they were started from."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from .._coordination import detect_cluster, has_backend, process_count, set_hosts
from ._rendezvous import Hello, meet, split_address

_PACKAGES = ("jax", "jaxlib", "optax", "flax", "orbax-checkpoint")
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Which of how many processes this is."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None
    host: str


def initialize(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    start_seconds: int = 300,
    heartbeat_seconds: int = 100,
) -> bool:
    """Join the processes of this run. Call it before anything else of JAX.

    It is `jax.distributed.initialize`, found by the same signs (SLURM, Kubernetes, Open MPI, TPU)
    or by those that `jaxzero launch` leaves, with two things before it: all processes meet and are
    compared, so that one that is missing, a wrong address and different code are said in words on
    all of them; and where nothing says that there are several processes, it does nothing. A script
    that calls it runs everywhere, alone too. A second call does nothing.

    Args:
        coordinator_address: `host:port` of process 0; found out if left out, as are the next three.
        num_processes: of the run.
        process_id: of this process, from 0.
        local_device_ids: devices of this machine that are this process's.
        start_seconds: how long processes wait for each other.
        heartbeat_seconds: a process that JAX does not hear for so long counts as dead, and the
            others are ended. `Watchdog` is quicker and says more.

    Returns:
        Whether there are several processes.

    Raises:
        ValueError: an argument is wrong, or the processes differ in versions of Python, JAX and
            jaxzero, or in the script that they run.
        TimeoutError: not all came within `start_seconds`.
        RuntimeError: JAX had started already.
    """
    if jax.distributed.is_initialized():
        return process_count() > 1
    given = (coordinator_address, num_processes, process_id)
    if start_seconds <= 0 or heartbeat_seconds <= 0:
        raise ValueError(
            "`start_seconds` and `heartbeat_seconds` must be positive; got "
            f"{start_seconds} and {heartbeat_seconds}."
        )
    place = _launched(local_device_ids) if given == (None, None, None) else None
    place = place or _detected(*given, local_device_ids, start_seconds)
    if place is None:
        return False
    if has_backend():  # found out later by JAX, when the others wait already
        raise RuntimeError(
            "JAX has started already: something asked for devices or made an array before "
            "`distributed.initialize()`. Call it first."
        )
    hello = Hello(
        process_id=place.process_id,
        num_processes=place.num_processes,
        host=place.host,
        pid=os.getpid(),
        facts=_facts(),
    )
    hosts = meet(place.coordinator_address, hello, float(start_seconds))
    jax.distributed.initialize(
        place.coordinator_address,
        place.num_processes,
        place.process_id,
        place.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=start_seconds,
        heartbeat_timeout_seconds=heartbeat_seconds,
        shutdown_timeout_seconds=heartbeat_seconds,
    )
    set_hosts(hosts)
    return place.num_processes > 1


def _launched(local_device_ids: Sequence[int] | None) -> _Place | None:
    """What `jaxzero launch` says."""
    address = os.environ.get("JAXZERO_COORDINATOR")
    if address is None:
        return None
    return _Place(
        coordinator_address=address,
        num_processes=int(os.environ["JAXZERO_NUM_PROCESSES"]),
        process_id=int(os.environ["JAXZERO_PROCESS_ID"]),
        local_device_ids=local_device_ids,
        host=f"node {os.environ['JAXZERO_NODE']} of {socket.gethostname()}",
    )


def _detected(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
    seconds: int,
) -> _Place | None:
    """What is given, and what JAX finds out. None: nothing says that there are others."""
    given = (coordinator_address, num_processes, process_id)
    address, number, index, devices = detect_cluster(*given, local_device_ids, seconds)
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if given == (None, None, None) and None in (address, number, index):
        return None
    found = {"coordinator_address": address, "num_processes": number, "process_id": index}
    for name, value in found.items():
        if value is None:
            raise ValueError(f"`{name}` is not given, and nothing here says it. Give all three.")
    assert address is not None and number is not None and index is not None
    split_address(address)
    if not 0 <= index < number:
        raise ValueError(f"`process_id` must be from 0 to {number - 1}; got {index}.")
    return _Place(
        coordinator_address=address,
        num_processes=number,
        process_id=index,
        local_device_ids=devices,
        host=socket.gethostname(),
    )


def _facts() -> dict[str, str]:
    """What must be the same in all processes."""
    installed = {}
    for package in _PACKAGES:
        try:
            installed[f"version of {package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[f"version of {package}"] = "none"
    sources = sorted(_PACKAGE_ROOT.rglob("*.py"))
    return {
        "version of Python": platform.python_version(),
        **installed,
        "source code of jaxzero": _digest(sources),
        "script": _script(),
    }


def _script() -> str:
    """The file that is run, by what it holds; where it lies may differ."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    path = None if file is None else Path(file)
    return "none" if path is None or not path.is_file() else f"{path.name} {_digest([path])}"


def _digest(paths: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
