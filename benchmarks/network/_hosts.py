"""Simulate two hosts on one machine by network namespaces with a rate-limited link.

    with Hosts() as hosts:
        hosts.shape("100mbit")
        processes = [hosts.start(number, command) for number in range(2)]

Each host has its own address, its own name in its own `/etc/hosts` (Gloo connects to what its
host's name stands for) and one interface, `eth0`; what it sends is shaped by a token bucket
(`tc`, HTB), and what arrives is acknowledged at once. A process in a host ends with the one that
started it, and the hosts with the context; of hosts whose owner was killed, the next ones clear
what is left. Needs Linux, root and iproute2: `missing` says what of it there is not.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INTERFACE = "eth0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_TOOLS = ("ip", "tc", "unshare", "setpriv")
_NAME = re.compile(r"jz(\d+)[ab]")  # the process that owns it

_TRIAL = (
    "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root handle 1: htb default 10"
)
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


def missing() -> str | None:
    """What this machine lacks for two hosts; None: nothing."""
    if sys.platform != "linux":
        return f"needs the network namespaces of Linux; this is {sys.platform}"
    absent = [name for name in _TOOLS if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)} (packages iproute2 and util-linux)"
    if os.geteuid():
        return "needs root, for network namespaces"
    trial = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _TRIAL]
    tried = subprocess.run(trial, capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"needs the right to make and shape network links: {tried.stderr.strip()}"
    return None


class Hosts:
    """Two hosts, from `with` to its end.

    Raises:
        RuntimeError: on entering, where something is `missing`.
    """

    def __init__(self):
        self.names = tuple(f"jz{os.getpid()}{letter}" for letter in "ab")
        self._started: list[subprocess.Popen] = []
        self._folder = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        if (reason := missing()) is not None:
            raise RuntimeError(f"Cannot make two hosts: {reason}.")
        _clear_abandoned()
        folder = self._folder.enter_context(tempfile.TemporaryDirectory())
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(ADDRESSES, self.names, strict=True))]
        self._known = Path(folder, "hosts")
        self._known.write_text("\n".join(lines) + "\n")
        try:
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _join(self) -> None:
        first, second = self.names
        for name in self.names:
            _run("ip", "netns", "add", name)
        ends = ["netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second]
        _run("ip", "link", "add", INTERFACE, *ends)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            _acknowledge_at_once(name, address)

    def __exit__(self, *_: object) -> None:
        self.stop()
        for name in self.names:
            _remove(name)
        self._folder.close()

    def shape(self, rate: str) -> None:
        """Let each host send `rate` at most, such as "100mbit"; "none" takes the limit away."""
        for name in self.names:
            tc = ("tc", "-n", name)
            here = ("dev", INTERFACE)
            subprocess.run(  # there may be none yet
                [*tc, "qdisc", "del", *here, "root"], capture_output=True, check=False
            )
            if rate == "none":
                continue
            limits = ("rate", rate, "ceil", rate, "burst", "64k", "cburst", "64k")
            _run(*tc, "qdisc", "add", *here, "root", "handle", "1:", "htb", "default", "10")
            _run(*tc, "class", "add", *here, "parent", "1:", "classid", "1:10", "htb", *limits)
            queue = ("handle", "10:", "pfifo", "limit", "2000")
            _run(*tc, "qdisc", "add", *here, "parent", "1:10", *queue)

    def cut(self) -> None:
        """Take the link down, as if a cable were pulled."""
        _run("ip", "-n", self.names[0], "link", "set", INTERFACE, "down")

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> subprocess.Popen:
        """Start a command in host 0 or 1; further arguments are those of `Popen`."""
        enter = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.names[host]]
        enter += ["unshare", "--uts", "--mount", "sh", "-c", _ENTER, self.names[host]]
        process = subprocess.Popen(
            [*enter, str(self._known), *command], env=env, start_new_session=True, **kwargs
        )
        self._started.append(process)
        return process

    def stop(self) -> None:
        """End all that was started, with what it started in turn."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._started.clear()


def _acknowledge_at_once(name: str, address: str) -> None:
    """Let the host wait for nothing before it acknowledges what arrived.

    Linux holds acknowledgements back for up to 40 ms, which is for links where they cost
    something. Collectives of Gloo met that so often that a step of `zeropp()`, which has 75 of
    them on each device, took 7 s in place of 2 s, on a link without a limit and a busy machine.
    """
    net = ("10.77.0.0/24", "dev", INTERFACE, "proto", "kernel", "scope", "link")
    own = ("local", address, "dev", "lo", "table", "local", "proto", "kernel", "scope", "host")
    for route in (net, own):
        _run("ip", "-n", name, "route", "replace", *route, "src", address, "quickack", "1")


def sent_bytes() -> int:
    """Bytes that the host of this process has sent to the other one so far."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _clear_abandoned() -> None:
    """Remove hosts whose owner is gone."""
    for line in _run("ip", "netns", "list").splitlines():
        owner = _NAME.fullmatch(line.split()[0])
        if owner and not Path("/proc", owner[1]).exists():
            _remove(owner[0])


def _remove(name: str) -> None:
    """Remove a host, if it is there, and end what runs in it."""
    ask = ["ip", "netns", "pids", name]
    inside = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
    for pid in inside.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
