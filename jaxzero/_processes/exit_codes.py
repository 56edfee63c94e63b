"""Exit codes of a training process, by which a launcher decides whether to start it again.

A launcher, SLURM or Kubernetes sees nothing but this number of a process that has ended. 74 and 75
are EX_IOERR and EX_TEMPFAIL of sysexits.h. 76 and 77 follow them, with meanings of this package.
Shells report 130 and other numbers above 128 for signals.
"""

import signal

MISTAKE = 2  # in the arguments: starting again would only repeat it
FILE_ERROR = 74  # the file system refuses: permissions, a full disk, a path that is too long
STOPPED = 75  # saved at SIGTERM: run again to continue
PEER_LOST = 76  # another process is lost or hangs: its end, not this one, is the cause
DIVERGED = 77  # too many non-finite steps, or replicas that differ: look before running again
INTERRUPTED = 130  # Ctrl-C

MEANINGS = {
    0: "done",
    1: "an error in the program",
    MISTAKE: "a mistake in the arguments",
    FILE_ERROR: "a file could not be read or written",
    STOPPED: "stopped by SIGTERM after saving: run again to go on",
    PEER_LOST: "another process is lost or hangs",
    DIVERGED: "too many non-finite steps, or replicas differ: look before running again",
    126: "the command cannot be run",
    127: "the command was not found",
    INTERRUPTED: "interrupted by Ctrl-C",
}

_HINTS = {
    signal.SIGKILL: "; often because memory ran out",
    signal.SIGSEGV: "; a crash in native code",
    signal.SIGABRT: "; native code gave up",
}


def describe(returncode: int) -> str:
    """Describe in words how a process ended.

    Args:
        returncode: as in `subprocess`: the exit code, or minus the number of a signal.
    """
    if returncode < 0:
        return f"killed by {_signal_name(-returncode)}"
    meaning = MEANINGS.get(returncode)
    if meaning is None and returncode > 128:
        meaning = f"as after {_signal_name(returncode - 128)}"
    return f"exit code {returncode}" + (f" ({meaning})" if meaning else "")


def exit_status(returncode: int) -> int:
    """Return the exit status that a shell reports for a `returncode` of `subprocess`.

    For a process that a signal killed it is 128 + the signal's number.
    """
    return returncode if returncode >= 0 else 128 - returncode


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number)
    except ValueError:
        return f"signal {number}"  # a real-time signal has a number only
    return name.name + _HINTS.get(name, "")
