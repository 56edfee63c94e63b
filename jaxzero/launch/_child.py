"""The processes that are launched: their environment, and their output.

A process finds its rank, the coordinator's address and its devices in its environment. Output of
all processes is merged line by line, each line prefixed by the process's rank:

    [1] step 3, loss 2.71

One thread per pipe splits the output into lines, and one thread writes them all. So lines are
never mixed, and a slow terminal slows the processes down, as a pipe would, but never blocks the
supervisor. Bytes are passed through in any encoding. If carriage returns overwrite a line, as in a
progress bar, only its last state is shown.
"""

import collections
import contextlib
import dataclasses
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import IO

_HOST = "127.0.0.1"
_LONGEST = 64 * 1024  # bytes; a longer line is shown in pieces
_TAIL_LINES = 15
_QUEUE = 1000  # lines that wait to be written
_SAY_SECONDS = 0.2  # wait for space in the queue before a line of the launcher is dropped
_COLOURS = (36, 33, 35, 32, 34, 31)


@dataclasses.dataclass(frozen=True)
class Slot:
    """The rank, node and devices of one process."""

    process: int  # rank
    node: int
    devices: tuple[int, ...] | None  # device ids on this machine; None for all devices

    def __str__(self) -> str:
        return f"process {self.process} (node {self.node})"


def slots(nodes: list[int], procs_per_node: int, devices_per_proc: int | None) -> list[Slot]:
    """Assign ranks and devices to the processes on `nodes`.

    `nodes` has the original number of each node, which determines the devices of its processes.
    `Slot.node` counts nodes from 0. Without `devices_per_proc` a process gets one device, as under
    SLURM and MPI; a single process gets all devices.
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

    It is this process's environment, plus the variables that `jaxzero.distributed.initialize`
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


_OUT, _ERR = 1, 2


class Output:
    """The standard output and error of this process, to which lines of all children are written."""

    def __init__(self):
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(_QUEUE)
        self._writer = threading.Thread(target=self._write_all, daemon=True)
        self._writer.start()
        self._coloured = {fd: os.isatty(fd) and "NO_COLOR" not in os.environ for fd in (_OUT, _ERR)}

    def say(self, text: str) -> None:
        """Write lines of the launcher to standard error; drop them if the terminal is blocked."""
        lines = "".join(f"launch: {line}\n" for line in text.splitlines())
        with contextlib.suppress(queue.Full):
            self._queue.put((_ERR, lines.encode(errors="replace")), timeout=_SAY_SECONDS)

    def close(self, seconds: float) -> None:
        """Write the queued lines, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
            self._writer.join(max(0.0, deadline - time.monotonic()))

    def put(self, fd: int, number: int | None, line: bytes) -> None:
        """Queue a line of child `number`; block while the queue is full."""
        self._queue.put((fd, self._prefix(fd, number) + line + b"\n"))

    def _prefix(self, fd: int, number: int | None) -> bytes:
        if number is None:
            return b""
        if not self._coloured[fd]:
            return b"[%d] " % number
        return b"\x1b[0;%dm[%d]\x1b[0m " % (_COLOURS[number % len(_COLOURS)], number)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            fd, data = item
            with contextlib.suppress(OSError):  # the terminal is closed; the children continue
                while data:
                    data = data[os.write(fd, data) :]


class ChildOutput:
    """Shows the output of one child, appends it to a log file, and keeps its last lines.

    Args:
        output: where lines are shown.
        process: the child; its standard output and standard error are pipes.
        number: rank for the prefix of lines; None for no prefix.
        log: file to which the bytes of both streams are appended, or None.
    """

    def __init__(
        self,
        output: Output,
        process: subprocess.Popen[bytes],
        *,
        number: int | None,
        log: Path | None,
    ):
        assert process.stdout is not None and process.stderr is not None
        self._output, self._number = output, number
        self._tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)
        self._log = _Log(output, log) if log else None
        self._threads = [
            threading.Thread(target=self._follow, args=(stream, fd), daemon=True)
            for stream, fd in ((process.stdout, _OUT), (process.stderr, _ERR))
        ]
        for thread in self._threads:
            thread.start()

    def close(self, seconds: float) -> list[str]:
        """Wait at most `seconds` for the remaining output; return the last lines, oldest first.

        The wait is bounded because a process that left the child's process group may keep its
        pipes open forever.
        """
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._log:
            self._log.close()
        return [line.decode(errors="replace") for line in list(self._tail)]

    def _follow(self, stream: IO[bytes], fd: int) -> None:
        for line in _lines(self._chunks(stream)):
            self._tail.append(line)
            self._output.put(fd, self._number, line)

    def _chunks(self, stream: IO[bytes]) -> Iterator[bytes]:
        with stream:
            while chunk := os.read(stream.fileno(), _LONGEST):
                if self._log:
                    self._log.write(chunk)
                yield chunk


class _Log:
    """A file that both streams of a child append to, until the first write error."""

    def __init__(self, output: Output, path: Path):
        self._output, self._path = output, path
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._over = False

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._over:
                return
            try:
                if self._file is None:
                    self._file = FileIO(self._path, "a")
                while data:
                    data = data[self._file.write(data) :]
            except OSError as error:  # a full disk must not end the training
                self._output.say(f"{self._path} ends here: {error.strerror or error}")
                self._close()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._over = True
        if self._file is not None:
            self._file.close()


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield lines without line ends; lines longer than `_LONGEST` bytes are split."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield from _pieces(_overwritten(line))
        # A progress bar may run for hours without a newline: only its last state is kept.
        rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        while len(rest) > _LONGEST:
            yield rest[:_LONGEST]
            rest = rest[_LONGEST:]
    if rest:
        yield _overwritten(rest)


def _pieces(line: bytes) -> Iterator[bytes]:
    for start in range(0, max(len(line), 1), _LONGEST):
        yield line[start : start + _LONGEST]


def _overwritten(line: bytes) -> bytes:
    """Return the text after the last carriage return, which is what a terminal shows."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
