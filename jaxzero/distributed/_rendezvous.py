"""Connect and compare all processes before JAX starts, to report errors clearly on all of them.

If a process is missing or an address is wrong, `jax.distributed.initialize` aborts with a C++
stack trace, and if two runs are mixed up, they hang later. So process 0 first listens on the
coordinator's port itself. Every process sends one line of JSON with its rank, its host and the
facts that must be equal everywhere. When all have connected, or at the timeout, all get the same
answer. Then the port is closed, and JAX opens it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

_LINE_BYTES = 1 << 20  # limit for a line from an unknown program
_RETRY_SECONDS = 0.2  # between attempts to connect: process 0 may start last
_LATE_SECONDS = 30.0  # after an error is found, how long others may still connect to receive it
_LOOK_SECONDS = 0.5  # interval of checks for closed connections
_SEND_SECONDS = 5.0  # for a short line; a peer that does not write or read it is stopped or gone
_CONNECT_SECONDS = 10.0  # for an attempt to connect: a firewall may drop packets without an answer
_ANSWER_SECONDS = 10.0  # how long to wait for the answer after the timeout of connecting
_STRANGER = "the program that answers is not a process of this run"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """The message with which a process introduces itself."""

    process_id: int
    num_processes: int
    host: str
    facts: Mapping[str, str]  # versions and digests that must be equal on all processes


def meet(address: str, hello: Hello, seconds: float) -> list[str]:
    """Wait for all processes to connect, and check that they belong to one run.

    Args:
        address: `host:port` of process 0.
        hello: the message of this process.
        seconds: how long to wait for the other processes.

    Returns:
        The host of every process, in the order of ranks.

    Raises:
        TimeoutError: a process did not connect, or process 0 cannot be reached.
        ValueError: the processes do not belong together. Every process raises the same message.
    """
    host, port = split_address(address)
    deadline = time.monotonic() + seconds
    if hello.process_id == 0:
        answer = _receive_all(port, hello, deadline, seconds)
    else:
        answer = _report(host, port, hello, deadline, seconds)
    if answer["missing"]:
        raise TimeoutError(answer["missing"])
    if answer["wrong"]:
        raise ValueError(answer["wrong"])
    return answer["hosts"]


def split_address(address: str) -> tuple[str, int]:
    """Split an address `host:port` into `(host, port)`.

    Raises:
        ValueError: the address does not have this form.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"`coordinator_address` must be host:port of process 0; got {address!r}. Give for "
            "example 'node001:1234'."
        )
    return host.strip("[]"), int(port)


def _receive_all(port: int, hello: Hello, deadline: float, seconds: float) -> dict[str, Any]:
    """Run process 0: collect messages, compare them, and answer all processes."""
    connections: dict[socket.socket, Hello] = {}
    with _listen(port) as server:
        try:
            while (left := deadline - time.monotonic()) > 0:
                _drop_those_that_left(connections)
                came = [hello, *connections.values()]
                if len(came) >= hello.num_processes:
                    break
                if _mistake(came):  # processes that connect soon shall receive the error too
                    deadline = min(deadline, time.monotonic() + _LATE_SECONDS)
                server.settimeout(min(left, _LOOK_SECONDS))
                with contextlib.suppress(TimeoutError):
                    connection, _ = server.accept()
                    other = _read_hello(connection)
                    if other is None:  # not a process of a run: a port scan, a health check
                        connection.close()
                    else:
                        connections[connection] = other
            answer = _judge([hello, *connections.values()], seconds)
            for connection in connections:
                _send(connection, answer)
        finally:
            for connection in connections:
                connection.close()
    return answer


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            family = socket.AF_INET6
            return socket.create_server(
                ("", port), family=family, backlog=1024, dualstack_ipv6=True
            )
        return socket.create_server(("", port))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ValueError(
            f"Process 0 cannot listen on port {port} of `coordinator_address`: {why}. Choose "
            "another port, or end the run that holds it."
        ) from error


def _drop_those_that_left(connections: dict[socket.socket, Hello]) -> None:
    """Remove closed connections; their processes may connect again."""
    for connection in list(connections):
        connection.setblocking(False)
        try:
            is_open = connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            is_open = True  # nothing to read: the process waits for the answer
        except OSError:
            is_open = False
        connection.settimeout(_SEND_SECONDS)
        if not is_open:
            connection.close()
            del connections[connection]


def _judge(came: list[Hello], seconds: float) -> dict[str, Any]:
    by_number = {hello.process_id: hello for hello in came}
    wrong = _mistake(came)
    missing = ""
    if not wrong and len(by_number) < came[0].num_processes:
        absent = [n for n in range(came[0].num_processes) if n not in by_number]
        here = ", ".join(f"{n} ({by_number[n].host})" for n in sorted(by_number))
        missing = (
            f"{len(absent)} of {came[0].num_processes} processes did not come within "
            f"{seconds:g} s: {_listed(absent)}. There are: {here}. Look at the logs of those that "
            "are missing: they did not start, or have another `coordinator_address`."
        )
    hosts = [hello.host for _, hello in sorted(by_number.items())]
    return {"wrong": wrong, "missing": missing, "hosts": hosts}


def _mistake(came: list[Hello]) -> str:
    """Describe why these processes cannot work together; empty if they can."""
    first = came[0]
    seen: dict[int, Hello] = {}
    for hello in came:
        if (twin := seen.get(hello.process_id)) is not None:
            return (
                f"Two processes have `process_id` {hello.process_id}: one on {twin.host}, one on "
                f"{hello.host}. Give each its own `process_id`, and each run its own port."
            )
        seen[hello.process_id] = hello
        if hello.num_processes != first.num_processes:
            return (
                f"Process {hello.process_id} ({hello.host}) counts {hello.num_processes} "
                f"processes, process 0 ({first.host}) {first.num_processes}. Give all the same "
                "`num_processes`."
            )
        for name in sorted(first.facts.keys() | hello.facts.keys()):
            expected, fact = first.facts.get(name), hello.facts.get(name)
            if fact != expected:
                return (
                    f"Process {hello.process_id} ({hello.host}) has another {name} than process 0 "
                    f"({first.host}): {fact} and {expected}. Run the same code everywhere."
                )
    return ""


def _report(host: str, port: int, hello: Hello, deadline: float, seconds: float) -> dict[str, Any]:
    """Run any other process: connect to process 0, send the message, receive the answer."""
    reason, has_met = "no time was left", False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(
                (host, port), timeout=min(left, _CONNECT_SECONDS)
            ) as connection:
                _send(connection, {"jaxzero": dataclasses.asdict(hello)})
                has_met = True
                connection.settimeout(max(deadline - time.monotonic(), 0) + _ANSWER_SECONDS)
                line = _read_line(connection)
            answer = None if line is None else json.loads(line)
            if isinstance(answer, dict) and "hosts" in answer:
                return answer
            reason = _STRANGER
        except OSError as error:
            reason = error.strerror or str(error)
        except ValueError as error:  # not JSON, or, before the connection, an invalid host name
            reason = _STRANGER if has_met else str(error)
        time.sleep(_RETRY_SECONDS)
    if has_met:
        why = "another program holds the port, or process 0 has ended"
        if reason != _STRANGER:
            why = (
                "not all processes connected, see the log of process 0 (start them closer "
                f"together, or raise `start_seconds`); or {why}"
            )
        raise TimeoutError(
            f"Process {hello.process_id} ({hello.host}) reached {host}:{port}, and had no answer "
            f"of process 0 within {seconds:g} s ({reason}): {why}. Look at the log of process 0, "
            "and choose another port if it cannot listen."
        )
    raise TimeoutError(
        f"Process {hello.process_id} ({hello.host}) could not reach process 0 at {host}:{port} "
        f"within {seconds:g} s: {reason}. `coordinator_address` must name the host on which "
        "process 0 runs, and a port that is open between the two."
    )


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        if "hosts" not in message:
            raise  # but a lost process is noticed later, so failing to answer it is ignored here


def _read_hello(connection: socket.socket) -> Hello | None:
    """Read the first message of a connection; return None if it is not from a process of a run."""
    connection.settimeout(_SEND_SECONDS)
    try:
        line = _read_line(connection)
        return None if line is None else Hello(**json.loads(line)["jaxzero"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _read_line(connection: socket.socket) -> bytes | None:
    """Read one line; None if the connection is closed before its end."""
    with connection.makefile("rb") as file:
        line = file.readline(_LINE_BYTES)
    return line if line.endswith(b"\n") else None


def _listed(numbers: list[int], most: int = 20) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more
