"""Initialize JAX in several processes under any launcher.

The rank of a process and the coordinator's address are read from the environment, as JAX does. No
other module reads variables that change what a run computes.
"""

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

from .._processes import detect_cluster, has_backend, process_count, set_hosts
from ._rendezvous import Hello, meet, split_address

_PACKAGES = ("jax", "jaxlib", "optax", "flax", "orbax-checkpoint")
_VARIABLES = ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID", "NODE")  # after JAXZERO_
_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_SHUTDOWN_SECONDS = 300  # how long processes wait for each other at exit; JAX's default
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """The place of this process in the run: its rank, the coordinator, and its devices."""

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
    cluster_detection_method: str | None = None,
    start_seconds: int = 300,
    heartbeat_seconds: int = 100,
) -> bool:
    """Connect the processes of this run. Call it before any other JAX function.

    It calls `jax.distributed.initialize`, and detects the cluster like it (SLURM, Kubernetes, Open
    MPI, TPU) or from the variables of `jaxzero launch`. Before that, all processes connect and
    compare versions and code, so that a missing process, a wrong address or different code is
    reported on all of them. If no cluster is detected it does nothing, so a script that calls it
    also runs as a single process. A second call does nothing.

    Args:
        coordinator_address: `host:port` of process 0. It and the next three arguments are detected
            if they are None.
        num_processes: number of processes of the run.
        process_id: rank of this process, from 0.
        local_device_ids: ids of the local devices that this process uses.
        cluster_detection_method: name of a method of `jax.distributed.initialize`, such as
            "mpi4py", which is not detected automatically.
        start_seconds: how long processes wait for each other to connect.
        heartbeat_seconds: after this many seconds of silence, JAX considers a process dead and ends
            the others. `Watchdog` is faster and reports more.

    Returns:
        True if there are several processes.

    Raises:
        ValueError: an argument is wrong, or the processes differ in versions of Python, JAX and
            jaxzero, or in the script that they run.
        TimeoutError: not all processes connected within `start_seconds`.
        RuntimeError: JAX has already been initialized.
    """
    if jax.distributed.is_initialized():
        return process_count() > 1
    given = (coordinator_address, num_processes, process_id)
    if start_seconds <= 0 or heartbeat_seconds <= 0:
        raise ValueError(
            f"`start_seconds` and `heartbeat_seconds` must be positive; got {start_seconds} and "
            f"{heartbeat_seconds}. Leave them out for 300 and 100."
        )
    place = _launched(local_device_ids) if given == (None, None, None) else None
    place = place or _detected(*given, local_device_ids, cluster_detection_method, start_seconds)
    if place is None:
        return False
    if has_backend():  # JAX would notice this only while the other processes already wait
        raise RuntimeError(
            "JAX has started already: something asked for devices or made an array before "
            "`distributed.initialize()`. Call it first."
        )
    hello = Hello(
        process_id=place.process_id,
        num_processes=place.num_processes,
        host=place.host,
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
        shutdown_timeout_seconds=max(_SHUTDOWN_SECONDS, heartbeat_seconds),
    )
    set_hosts(hosts)
    return place.num_processes > 1


def _launched(local_device_ids: Sequence[int] | None) -> _Place | None:
    """Read the environment variables `JAXZERO_*`, which `jaxzero launch` sets; None if not set."""
    variables = {name: os.environ.get(f"JAXZERO_{name}") for name in _VARIABLES}
    if variables["COORDINATOR"] is None:
        return None
    numbers = {}
    for name in _VARIABLES[1:]:
        text = variables[name]
        if text is None or not text.isdecimal():
            raise ValueError(
                f"`JAXZERO_{name}` must be a number, since `JAXZERO_COORDINATOR` is set; got "
                f"{text!r}. Set all of {', '.join(f'JAXZERO_{name}' for name in _VARIABLES)}."
            )
        numbers[name] = int(text)
    return _checked(
        _Place(
            coordinator_address=variables["COORDINATOR"],
            num_processes=numbers["NUM_PROCESSES"],
            process_id=numbers["PROCESS_ID"],
            local_device_ids=local_device_ids,
            host=f"node {numbers['NODE']} of {socket.gethostname()}",
        )
    )


def _detected(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
    method: str | None,
    seconds: int,
) -> _Place | None:
    """Combine arguments, JAX's variables and JAX's cluster detection, in JAX's order of precedence.

    Returns None if nothing says that there are other processes.
    """
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    devices = _listed_devices() if local_device_ids is None else local_device_ids
    place = (address, num_processes, process_id, devices)
    try:
        if method != "deactivate" and any(value is None for value in place):
            place = detect_cluster(*place, method, seconds)
    # Raised for a pod without a Job or without permissions, and for a method that is not available
    # (no mpi4py, no SLURM).
    except (RuntimeError, TypeError, ImportError, KeyError) as error:
        raise ValueError(
            f"JAX could not detect the processes of this cluster ({error}). Give "
            "`coordinator_address`, `num_processes` and `process_id`, or set the JAXZERO_* "
            "variables (docs/howto/several_hosts.md)."
        ) from error
    address, number, index, devices = place
    if (address, number, index) == (None, None, None):
        _refuse_unseen_processes(method)
        return None
    required = {"coordinator_address": address, "num_processes": number, "process_id": index}
    for name, value in required.items():
        if value is None:
            raise ValueError(f"`{name}` is not given and was not detected. Give all three.")
    assert address is not None and number is not None and index is not None
    return _checked(
        _Place(
            coordinator_address=address,
            num_processes=number,
            process_id=index,
            local_device_ids=devices,
            host=socket.gethostname(),
        )
    )


def _listed_devices() -> list[int] | None:
    """Parse `JAX_LOCAL_DEVICE_IDS`; None if it is not set."""
    text = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    try:
        return [int(word) for word in text.split(",")] if text else None
    except ValueError:
        raise ValueError(
            f"`JAX_LOCAL_DEVICE_IDS` must be device ids separated by commas; got {text!r}. Set it, "
            "for example, to '0,1,2,3', or unset it."
        ) from None


def _refuse_unseen_processes(method: str | None) -> None:
    """Raise `ValueError` if MPI started several processes that JAX did not detect.

    Otherwise each process would train on its own, and all would write to one directory. Raise also
    if the user named a `method` of detection, and it has found nothing.
    """
    if method not in (None, "deactivate"):
        raise ValueError(
            f"`cluster_detection_method` {method!r} finds nothing here. Give another that "
            "`jax.distributed.initialize` knows, or leave it out."
        )
    for variable in _SIZES_OF_MPI:
        if os.environ.get(variable, "1") != "1":
            raise ValueError(
                f"`{variable}` says that there are {os.environ[variable]} processes, but there is "
                "no coordinator address. Set JAXZERO_COORDINATOR, JAXZERO_NUM_PROCESSES, "
                "JAXZERO_PROCESS_ID and JAXZERO_NODE (docs/howto/several_hosts.md, MPI), or give "
                'the arguments, `cluster_detection_method="mpi4py"` among them.'
            )


def _checked(place: _Place) -> _Place:
    split_address(place.coordinator_address)
    if not 0 <= place.process_id < place.num_processes:
        raise ValueError(
            f"`process_id` must be from 0 to {place.num_processes - 1}, one less than "
            f"`num_processes`; got {place.process_id}."
        )
    return place


def _facts() -> dict[str, str]:
    """Collect the versions and digests that must be equal in all processes."""
    installed = {}
    for package in _PACKAGES:
        try:
            installed[f"version of {package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[f"version of {package}"] = "none"
    return {
        "version of Python": platform.python_version(),
        **installed,
        "source code of jaxzero": _digest_of_sources(),
        "script": _script(),
    }


def _script() -> str:
    """Return the name and digest of the script, but not its folder, which may differ."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not Path(file).is_file():
        return "none"
    text = Path(file).read_bytes()
    if text.startswith(b"#!"):  # scripts that pip installs name the environment's path here
        text = text.partition(b"\n")[2]
    return f"{Path(file).name} {hashlib.sha256(text).hexdigest()[:12]}"


def _digest_of_sources() -> str:
    """Return a digest of the names and contents of the package's sources; follow links."""
    sources = {}
    for folder, _, names in os.walk(_PACKAGE_ROOT, followlinks=True):
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            sources[path.relative_to(_PACKAGE_ROOT).as_posix()] = path.read_bytes()
    parts = (part for name in sorted(sources) for part in (name.encode(), sources[name]))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]
