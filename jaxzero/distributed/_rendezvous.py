"""All processes meet before JAX starts, so that what is wrong is said in words, on all of them.

When a process is missing, or an address is wrong, `jax.distributed.initialize` ends the process
with a trace of C++ frames, and that two runs were mixed up shows later, as a hang. So process 0
first listens on the coordinator's port itself. Every process sends one line of JSON: its number,
its host and what must be the same everywhere. When all are there, or the time is over, each gets
the same answer. Then the port is free for JAX.
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

_LINE_BYTES = 1 << 20  # longest line taken from a stranger
_RETRY_SECONDS = 0.2
_LATE_SECONDS = 30.0  # for others to come, once something is known to be wrong
_LOOK_SECONDS = 0.5  # between two looks at who has left
_SEND_SECONDS = 5.0
_ANSWER_SECONDS = 10.0  # for an answer to arrive, after the time for coming is over
_STRANGER = "what answers there is no process of this run"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """What a process says of itself."""

    process_id: int
    num_processes: int
    host: str
    facts: Mapping[str, str]  # what must be the same everywhere


def meet(address: str, hello: Hello, seconds: float) -> list[str]:
    """Wait for all processes, and compare them.

    Args:
        address: `host:port` of process 0.
        hello: of this process.
        seconds: to wait at most.

    Returns:
        The host of every process, by the process's number.

    Raises:
        TimeoutError: a process did not come, or process 0 cannot be reached.
        ValueError: the processes do not belong together; the text says why, the same on all.
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
    """Take `host:port` apart.

    Raises:
        ValueError: it is not of this form.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"`coordinator_address` must be host:port of process 0; got {address!r}. Give for "
            "example 'node001:1234'."
        )
    return host.strip("[]"), int(port)


def _receive_all(port: int, hello: Hello, deadline: float, seconds: float) -> dict[str, Any]:
    """Process 0: collect, judge, answer."""
    connections: dict[socket.socket, Hello] = {}
    with _listen(port) as server:
        try:
            while (left := deadline - time.monotonic()) > 0:
                _drop_those_that_left(connections)
                came = [hello, *connections.values()]
                if len(came) >= hello.num_processes:
                    break
                if _mistake(came):  # those that come soon shall hear it too
                    deadline = min(deadline, time.monotonic() + _LATE_SECONDS)
                server.settimeout(min(left, _LOOK_SECONDS))
                with contextlib.suppress(TimeoutError):
                    connection, _ = server.accept()
                    other = _read_hello(connection)
                    if other is None:  # a stranger: a port scan, a health check
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
    """Forget processes that gave up, or whose connection broke; they may come again."""
    for connection in list(connections):
        connection.setblocking(False)
        try:
            is_open = connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            is_open = True  # nothing was sent: it waits for the answer
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
    """Why these processes cannot work together, or nothing."""
    first = came[0]
    seen: dict[int, Hello] = {}
    for hello in came:
        if (twin := seen.get(hello.process_id)) is not None:
            return (
                f"Two processes call themselves {hello.process_id}: one on {twin.host}, one on "
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
            mine, theirs = first.facts.get(name), hello.facts.get(name)
            if mine != theirs:
                return (
                    f"Process {hello.process_id} ({hello.host}) has another {name} than process 0 "
                    f"({first.host}): {theirs} and {mine}. Run the same code everywhere."
                )
    return ""


def _report(host: str, port: int, hello: Hello, deadline: float, seconds: float) -> dict[str, Any]:
    """Any other process: find process 0, tell it, hear the answer."""
    reason, has_met = "no time was left", False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(left, 10.0)) as connection:
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
        except ValueError as error:  # no JSON; before that, no name of a host
            reason = _STRANGER if has_met else str(error)
        time.sleep(_RETRY_SECONDS)
    if has_met:
        why = "another program holds the port, or process 0 has ended"
        if reason != _STRANGER:
            why = (
                "not all processes came, which process 0 says in its log (start them closer "
                f"together, or wait longer: `start_seconds`); or {why}"
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
            raise  # an answer that finds nobody is no error of ours: that process will be missed


def _read_hello(connection: socket.socket) -> Hello | None:
    connection.settimeout(5.0)
    try:
        line = _read_line(connection)
        return None if line is None else Hello(**json.loads(line)["jaxzero"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _read_line(connection: socket.socket) -> bytes | None:
    """One line, or None if the other side ends before it does."""
    with connection.makefile("rb") as file:
        line = file.readline(_LINE_BYTES)
    return line if line.endswith(b"\n") else None


def _listed(numbers: list[int], most: int = 20) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more
