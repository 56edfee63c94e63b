"""Run `examples/several_hosts.py` once, kill one of its processes, and check the result."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "several_hosts.py"
COMMAND = (sys.executable, "-c", "from jaxzero.cli import main; raise SystemExit(main())")
STEPS, SAVE_EVERY, HOSTS = 60, 2, 2
_SECONDS = 600.0  # for all attempts of a run together
_SAVING = ".*.tmp"  # what a checkpoint is called until it is complete


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """Whom to kill, and when."""

    host: int
    after_step: int
    during_save: bool  # wait for the next save to begin, and kill a moment later
    moment: float  # seconds to wait then
    signum: int = signal.SIGKILL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aftermath:
    """What became of a run."""

    status: int
    digest: str  # of the final parameters
    saved: int  # the last checkpoint that was reported before the new start; 0: none
    resumed: int  # after which step the run went on; 0: from the start
    was_saving: bool  # whether a save was under way at the kill
    restarted: bool  # whether the launcher started it again; False: the kill came after the end
    seconds: float | None  # from the kill to the first step after it

    @property
    def nothing_lost(self) -> bool:
        """Whether it went on from a checkpoint as new as the last one reported, or newer."""
        return self.resumed >= self.saved or not self.restarted


def random_kill(seed: int, *, during_save: bool) -> Kill:
    """A host, a step and a moment, by chance, so early that the run is not over by then."""
    chance = random.Random(seed)
    return Kill(
        host=chance.randrange(HOSTS),
        after_step=chance.randrange(1, STEPS // 2),
        during_save=during_save,
        moment=chance.uniform(0.0, 0.15 if during_save else 0.5),
    )


def train(folder: Path, kill: Kill | None, *, launch: list[str] | None = None) -> Aftermath:
    """Run the example to its end on two hosts of this machine; with `kill`, start again after it.

    Args:
        folder: for the checkpoints; emptied first.
        kill: what happens on the way.
        launch: options for `jaxzero launch`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    lines: list[str] = []
    saved = resumed = 0
    killed: float | None = None
    has_restarted, was_saving, seconds = False, False, None
    with _launched(folder, launch or []) as process:
        assert process.stdout is not None
        deadline = threading.Timer(_SECONDS, process.kill)  # the launcher's end is that of all
        deadline.start()
        for line in process.stdout:
            lines.append(line)
            has_restarted |= killed is not None and "starting again" in line
            if match := re.search(r"resumed after (\d+)", line):
                resumed = int(match[1])
            step = re.search(r"step (\d+) loss \S+ saved (\d+|None)", line)
            if step is None:
                continue
            if not has_restarted:
                saved = int(step[2]) if step[2] != "None" else 0
            elif killed is not None and seconds is None:
                seconds = time.monotonic() - killed
            if kill is not None and killed is None and int(step[1]) >= kill.after_step:
                was_saving = _kill(kill, folder, workers(process.pid))
                killed = time.monotonic()
        status = process.wait()
        deadline.cancel()
    digest = re.search(r"parameters (\w+)", "".join(lines))
    if digest is None:
        raise RuntimeError(f"The run ended with {status}:\n{''.join(lines[-30:])}")
    return Aftermath(
        status=status,
        digest=digest[1],
        saved=saved,
        resumed=resumed,
        was_saving=was_saving,
        restarted=has_restarted,
        seconds=seconds,
    )


@contextlib.contextmanager
def _launched(folder: Path, options: list[str]) -> Iterator[subprocess.Popen]:
    command = [*COMMAND, "launch", "--nodes", str(HOSTS)]
    command += ["--devices-per-proc", "2", "--restart", "3", "--grace", "5", *options, "--"]
    command += [sys.executable, str(EXAMPLE), str(folder)]
    command += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _kill(kill: Kill, folder: Path, pids: dict[int, int]) -> bool:
    """Kill one host's process; whether a save was under way.

    All processes are stopped before the look for a save, so what is seen is so at the kill. A save
    that ended before they were stopped is not one to kill at moment 0: the next one is awaited.
    """
    deadline = time.monotonic() + 30
    while True:
        while kill.during_save and not _is_saving(folder) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(kill.moment)
        _signal(pids.values(), signal.SIGSTOP)
        was_saving = _is_saving(folder)
        if was_saving or not kill.during_save or kill.moment or time.monotonic() >= deadline:
            break
        _signal(pids.values(), signal.SIGCONT)
    _signal([pids[kill.host]], kill.signum)
    _signal([pid for host, pid in pids.items() if host != kill.host], signal.SIGCONT)
    return was_saving


def _is_saving(folder: Path) -> bool:
    return any(folder.glob(_SAVING))


def _signal(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it was done before
            os.kill(pid, signum)


def workers(launcher: int) -> dict[int, int]:
    """The children of `jaxzero launch` by their number in the run, which their environment says."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            if f"\nPPid:\t{launcher}\n" in (entry / "status").read_text():
                variables = (entry / "environ").read_bytes().decode().split("\0")
                for variable in variables:
                    name, _, value = variable.partition("=")
                    if name == "JAXZERO_PROCESS_ID":
                        found[int(value)] = pid
    return found
