"""Exchange small texts between processes over JAX's coordination service.

`jax.distributed` runs a small key-value store beside the computation. It works while devices are
busy or hang, and every wait has a timeout, so agreements and heartbeats use it. JAX has no public
name for its client; only this module uses the private one.
"""

from __future__ import annotations

import collections
import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import clusters, distributed, xla_bridge

_PREFIX = "jaxzero"
_HOST_SECONDS = 60.0  # timeout of the exchange of host names
_LONGEST = 1e6  # seconds; used for an infinite timeout

_calls: collections.Counter[str] = collections.Counter()
_hosts: list[str] | None = None


def process_index() -> int:
    """Return the index of this process; unlike `jax.process_index`, start no backend."""
    return distributed.global_state.process_id if _client() else 0


def process_count() -> int:
    """Return the number of processes; unlike `jax.process_count`, start no backend."""
    return (distributed.global_state.num_processes or 1) if _client() else 1


def exchange(name: str, value: str, seconds: float) -> list[str]:
    """Send a text to all processes and receive theirs. All must call it, in the same order.

    Args:
        name: purpose of the exchange, for error messages.
        value: this process's text; it should be small, since process 0 stores all of them.
        seconds: timeout for the other processes.

    Returns:
        The text of every process, by its index.

    Raises:
        TimeoutError: a process did not call it in time, or has ended.
    """
    client = _client()
    if client is None:
        return [value]
    directory = f"{_PREFIX}/{name}/{_calls[name]}"
    _calls[name] += 1
    client.key_value_set(f"{directory}/{process_index()}", value)
    _wait(client, f"{directory} written", directory, name, seconds)
    texts = _read(client, directory)
    # Once all have read the texts, each process can delete its own.
    _wait(client, f"{directory} read", directory, name, seconds)
    client.key_value_delete(f"{directory}/{process_index()}")
    return [texts[index] for index in range(process_count())]


def exchange_json(name: str, value: Any, seconds: float) -> list[Any]:
    """Exchange values that JSON can represent, as `exchange` does with texts."""
    return [json.loads(text) for text in exchange(name, json.dumps(value), seconds)]


class Facts(dict[str, Any]):
    """Values by name that this process sends to all other processes; JSON can represent them.

    Attributes:
        of_all: the facts of each process, by its index, once they have been exchanged.
    """

    of_all: list[dict[str, Any]]


@contextlib.contextmanager
def all_succeed(name: str, seconds: float, *, failed: str = "") -> Iterator[Facts]:
    """Exchange facts at the end of the body, and raise on every process if it raised on any.

    Collective. The body may contain collectives only if it runs all of them even after a failure;
    otherwise the other processes deadlock.

    Args:
        name: name of this exchange, equal on all processes.
        seconds: timeout of waiting for the others.
        failed: the beginning of the `RuntimeError`'s message, before "process 1: OSError: ".

    Yields:
        The facts of this process, for the body to fill. Afterwards `of_all` holds the facts of
        every process.

    Raises:
        RuntimeError: raised on the processes that succeeded, if any failed; it names a process that
            failed and its error. Processes that failed raise their own errors.
        TimeoutError: a process did not take part in time.
    """
    facts, message, error = Facts(), None, None
    try:
        yield facts
    except BaseException as raised:
        error, message = raised, f"{type(raised).__name__}: {raised}"
    reports = exchange_json(name, [message, facts], seconds)
    if error is not None:
        raise error
    reasons = [f"process {i}: {said}" for i, (said, _) in enumerate(reports) if said is not None]
    if reasons:
        raise RuntimeError(failed + "; ".join(reasons))
    facts.of_all = [told for _, told in reports]


def of_first(name: str, value: str, seconds: float) -> str:
    """Return the text of process 0 on every process; all must call it, in the same order."""
    return exchange(name, value, seconds)[0]


def barrier(name: str, seconds: float) -> None:
    """Wait until all processes have called this function with `name`.

    Raises:
        TimeoutError: a process did not call it in time, or has ended.
    """
    exchange(name, "", seconds)


def meet_processes(name: str, processes: Sequence[int], seconds: float) -> None:
    """Wait until some processes, given by index, have called this function with `name`.

    A name can be used once.

    Raises:
        TimeoutError: a process did not call it in time, or has ended.
    """
    client = _client()
    if client is None:
        return
    try:
        client.wait_at_barrier(f"{_PREFIX}/{name}", int(seconds * 1000), list(processes))
    except jax.errors.JaxRuntimeError as error:
        others = ", ".join(describe_process(i) for i in processes if i != process_index())
        raise TimeoutError(
            f"At {name!r} this process waited up to {seconds:g} s for {others}. Look at their "
            "logs: one failed, hangs, or is at another place of the program."
        ) from error


def publish(name: str, value: str) -> None:
    """Store a text under `name` for all processes to read with `published`, without waiting.

    It replaces the text that this process stored before.
    """
    client = _client()
    if client is not None:
        key = f"{_PREFIX}/{name}/{process_index()}"
        client.key_value_set(key, value, allow_overwrite=True)


def published(name: str) -> dict[int, str]:
    """Return the text that each process last published under `name`, by process index."""
    client = _client()
    return {} if client is None else _read(client, f"{_PREFIX}/{name}")


def hosts() -> list[str]:
    """Return the host name of every process, by index. The first call is collective."""
    global _hosts
    if _hosts is None or len(_hosts) != process_count():
        _hosts = exchange("hosts", socket.gethostname(), _HOST_SECONDS)
    return _hosts


def set_hosts(names: Sequence[str]) -> None:
    """Set the host names that `hosts` returns, if they are known already."""
    global _hosts
    _hosts = list(names)


def describe_process(index: int) -> str:
    """Name a process in a message by its index and, if known, its host: `process 3 (host)`."""
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
    """Fill in missing values from the environment of SLURM, Kubernetes, MPI or TPUs, as JAX does.

    `method` is JAX's name for one of these; None takes the first that JAX detects.
    """
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        coordinator_address, num_processes, process_id, local_device_ids, method, seconds
    )


def notices_sigterm() -> bool:
    """Return True if JAX's preemption service handles SIGTERM, so that no handler is needed."""
    return distributed.global_state.preemption_sync_manager is not None


def has_backend() -> bool:
    """Return True if JAX has started a backend, after which `jax.distributed` cannot start."""
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
        # If reading fails too, process 0, which runs the service, has ended.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            present = _read(client, directory)
            missing = [n for n in range(process_count()) if n not in present]
            gone = ", ".join(describe_process(n) for n in missing) or "one that began and ended"
        raise TimeoutError(
            f"At {name!r} this process waited up to {seconds:g} s for {gone}. Look at its log: it "
            "failed, hangs, or is at another place of the program."
        ) from error
