"""Processes that meet before JAX starts: all learn what is wrong, and who is missing."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxzero.distributed import _rendezvous
from jaxzero.distributed._rendezvous import Hello, meet
from tests.processes import free_address


def _hello(number: int, *, count: int = 2, host: str = "", **facts: str) -> Hello:
    host = host or f"host{number}"
    return Hello(process_id=number, num_processes=count, host=host, facts=facts)


def _meet(hellos: list[Hello], seconds: float = 20.0, address: str | None = None) -> list[object]:
    """What each process gets."""
    address = address or free_address()
    with ThreadPoolExecutor(len(hellos)) as pool:
        return list(pool.map(lambda hello: _answer(address, hello, seconds), hellos))


def _answer(address: str, hello: Hello, seconds: float = 20.0) -> object:
    """The hosts, or an error."""
    try:
        return meet(address, hello, seconds)
    except (TimeoutError, ValueError) as error:
        return error


def test_processes_meet():
    assert _meet([_hello(number, count=5) for number in (3, 0, 4, 1, 2)]) == 5 * [
        [f"host{number}" for number in range(5)]
    ]


@pytest.mark.parametrize(
    ("hellos", "message"),
    [
        ([_hello(0, count=3), _hello(2, count=3)], "1 of 3 processes did not come within 1 s: 1. "),
        ([_hello(0), _hello(1, script="b.py")], r"Process 1 \(host1\) has another script .*: b.py"),
        ([_hello(0), _hello(1, count=4)], "counts 4 processes, process 0 .* 2. Give all the same"),
        (
            [_hello(0, count=3), _hello(1, count=3), _hello(1, count=3, host="c")],
            "Two processes have `process_id` 1: one on (host1|c), one on (host1|c).",
        ),
    ],
    ids=["missing", "other code", "other count", "twins"],
)
def test_all_learn_what_is_wrong(hellos: list[Hello], message: str):
    answers = _meet(hellos, seconds=1.0)
    assert len({str(answer) for answer in answers}) == 1
    for answer in answers:
        assert isinstance(answer, Exception)
        with pytest.raises(type(answer), match=message):
            raise answer


def test_who_comes_late_hears_what_is_wrong():
    address = free_address()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(_answer, address, _hello(0, count=3))
        other = pool.submit(_answer, address, _hello(1, count=3, script="b.py"))
        time.sleep(1.0)
        late = pool.submit(_answer, address, _hello(2, count=3))
        answers = {str(meeting.result()) for meeting in (first, other, late)}
    assert len(answers) == 1 and "Process 1 (host1) has another script" in answers.pop()


def test_who_gives_up_is_not_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_rendezvous, "_ANSWER_SECONDS", 0.0)
    address = free_address()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_answer, address, _hello(0, count=3), 4.0)
        early = pool.submit(_answer, address, _hello(1, count=3), 1.0)
        assert "reached 127.0.0.1" in str(early.result()) and "no answer" in str(early.result())
        assert "2 of 3 processes did not come within 4 s: 1, 2." in str(first.result())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("no.such.host.invalid:1234", r"could not reach process 0 at no.such.host.invalid:1234"),
        (None, r"within 0.5 s: .*[Rr]efused.* `coordinator_address` must name the host"),
        ("host", "`coordinator_address` must be host:port of process 0; got 'host'"),
        ("host:70000", "`coordinator_address` must be host:port"),
    ],
)
def test_wrong_addresses(address: str | None, message: str):
    with pytest.raises((TimeoutError, ValueError), match=message):
        meet(address or free_address(), _hello(1), 0.5)


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match="cannot listen on port .* in use"):
            meet(address, _hello(0), 0.5)


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (
            b"",
            r"s \(the program that answers is not a process .*\): another program holds",
        ),
        (b"HTTP/1.1 400 Bad Request\r\n", "not a process of this run.*: another program holds"),
        (b"5\n", "not a process of this run.*: another program holds"),
        (None, r"\(timed out\): not all processes connected.*; or another program holds the port"),
    ],
    ids=["closes", "no JSON", "other JSON", "silent"],
)
def test_another_program_that_holds_the_port(says: bytes | None, message: str, monkeypatch):
    monkeypatch.setattr(_rendezvous, "_ANSWER_SECONDS", 0.0)
    held = []

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed below
            while True:
                connection = server.accept()[0]
                held.append(connection)
                if says is not None:
                    connection.recv(1 << 16)
                    connection.sendall(says)
                    connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=[server], daemon=True).start()
        with pytest.raises(TimeoutError, match=message):
            meet(f"127.0.0.1:{server.getsockname()[1]}", _hello(1), 0.5)
        server.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


def test_strangers_and_broken_connections_are_passed_over():
    address = free_address()
    host, port = address.split(":")
    hosts = []
    first = _hello(0, count=3)
    waiting = threading.Thread(target=lambda: hosts.append(meet(address, first, 30.0)))
    waiting.start()
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"\n", b"", b'{"jaxzero": {"process_id": 1}}\n'):
        _say(host, int(port), text)
    broken = {"process_id": 1, "num_processes": 3, "host": "host1", "facts": {}}
    _say(host, int(port), json.dumps({"jaxzero": broken})[:-3].encode())
    _say(host, int(port), json.dumps({"jaxzero": broken}).encode() + b"\n")  # it came, and left
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(meet, address, _hello(n, count=3), 30.0) for n in (1, 2)]
        assert [other.result() for other in others] == [["host0", "host1", "host2"]] * 2
    waiting.join()
    assert hosts == [["host0", "host1", "host2"]]


def _say(host: str, port: int, text: bytes) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.sendall(text)
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
