"""What processes tell each other outside of collectives: the seam to JAX's coordination service.

`jax.distributed` runs a small key-value store beside the computation. It works while devices are
busy, and when they hang, and every wait has an end; so it is what agreements and heartbeats use.
JAX gives no public name to its client; this module alone reaches for it.
"""

from __future__ import annotations

import collections
import contextlib
import json
import socket
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import clusters, distributed, xla_bridge

_PREFIX = "jaxzero"
_HOST_SECONDS = 60.0
_LONGEST = 1e6  # seconds, of a wait that was told to have no end

_calls: collections.Counter[str] = collections.Counter()
_hosts: list[str] | None = None


def process_index() -> int:
    """Number of this process, without starting a backend."""
    return distributed.global_state.process_id if _client() else 0


def process_count() -> int:
    """How many processes there are, without starting a backend."""
    return (distributed.global_state.num_processes or 1) if _client() else 1


def exchange(name: str, value: str, seconds: float) -> list[str]:
    """Tell all processes a text, and learn theirs. All must call it, in the same order.

    Args:
        name: what for, as errors say it.
        value: this process's text; small, for it travels through one process.
        seconds: how long to wait for the others.

    Returns:
        The text of every process, by its number.

    Raises:
        TimeoutError: a process did not come in time, or is gone.
    """
    client = _client()
    if client is None:
        return [value]
    directory = f"{_PREFIX}/{name}/{_calls[name]}"
    _calls[name] += 1
    client.key_value_set(f"{directory}/{process_index()}", value)
    _wait(client, f"{directory} written", directory, name, seconds)
    told = _read(client, directory)
    _wait(client, f"{directory} read", directory, name, seconds)  # so that it can be forgotten
    client.key_value_delete(f"{directory}/{process_index()}")
    return [told[index] for index in range(process_count())]


def exchange_json(name: str, value: Any, seconds: float) -> list[Any]:
    """As `exchange`, of what JSON can hold."""
    return [json.loads(text) for text in exchange(name, json.dumps(value), seconds)]


def of_first(name: str, value: str, seconds: float) -> str:
    """The text that process 0 gives, on all; otherwise as `exchange`."""
    return exchange(name, value, seconds)[0]


def barrier(name: str, seconds: float) -> None:
    """Wait until all processes are here.

    Raises:
        TimeoutError: one did not come in time, or is gone.
    """
    exchange(name, "", seconds)


def publish(name: str, value: str) -> None:
    """Leave a text where `published` finds it, in place of this process's last."""
    client = _client()
    if client is not None:
        key = f"{_PREFIX}/{name}/{process_index()}"
        client.key_value_set(key, value, allow_overwrite=True)


def published(name: str) -> dict[int, str]:
    """The last text of each process that has left one."""
    client = _client()
    return {} if client is None else _read(client, f"{_PREFIX}/{name}")


def hosts() -> list[str]:
    """The host of every process, by the process's number. The first call is for all together."""
    global _hosts
    if _hosts is None or len(_hosts) != process_count():
        _hosts = exchange("hosts", socket.gethostname(), _HOST_SECONDS)
    return _hosts


def set_hosts(names: Sequence[str]) -> None:
    """Say on which host each process is, where that is known already."""
    global _hosts
    _hosts = list(names)


def describe_process(index: int) -> str:
    """A process as messages name it."""
    known = _hosts is not None and index < len(_hosts)
    return f"process {index} ({_hosts[index]})" if known and _hosts else f"process {index}"


def detect_cluster(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
    method: str | None,
    seconds: int,
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Fill in what is not given from what JAX knows of SLURM, Kubernetes, MPI and TPUs.

    `method` is JAX's name of one of them; None: the first that is there.
    """
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        coordinator_address, num_processes, process_id, local_device_ids, method, seconds
    )


def notices_sigterm() -> bool:
    """Whether JAX's preemption service listens for SIGTERM, so that nobody else need."""
    return distributed.global_state.preemption_sync_manager is not None


def has_backend() -> bool:
    """Whether JAX has started, so that it is too late to become one of several processes."""
    return xla_bridge.backends_are_initialized()


def _client() -> Any | None:
    return distributed.global_state.client


def _read(client: Any, directory: str) -> dict[int, str]:
    pairs = client.key_value_dir_get(directory)
    named = ((key.rpartition("/")[2], value) for key, value in pairs)
    return {int(number): value for number, value in named}


def _wait(client: Any, barrier_id: str, directory: str, name: str, seconds: float) -> None:
    try:
        client.wait_at_barrier(barrier_id, timeout_in_ms=int(min(seconds, _LONGEST) * 1000))
    except jax.errors.JaxRuntimeError as error:
        gone = describe_process(0)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # it is process 0 that is gone
            here = _read(client, directory)
            missing = [n for n in range(process_count()) if n not in here]
            gone = ", ".join(describe_process(n) for n in missing) or "one that came and left"
        raise TimeoutError(
            f"At {name!r} this process waited up to {seconds:g} s for {gone}. Look at its log: it "
            "failed, hangs, or is at another place of the program."
        ) from error
