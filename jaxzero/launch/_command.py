"""Determine the command line of the processes and its Python interpreter.

The first `python` on PATH is often not the interpreter of `jaxzero`: if `.venv/bin/jaxzero` is
called without activating the environment, `python` is the system's, and users only see "No module
named ...". So, as under torchrun, a script alone runs on the interpreter of jaxzero. A bare
`python` is still the first on PATH, but the launcher prints its path, with a warning if it belongs
to another environment.

Environments cannot be distinguished by path: the interpreter of a virtual environment is a link to
one outside, and pyenv's shims start interpreters elsewhere. So the interpreter itself is queried.
"""

import ast
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from .._processes import describe

_BARE_PYTHON = re.compile(r"python[\d.]*t?")
_ASK = "import sys; print(ascii((sys.executable, sys.prefix, sys.version)))"
_ASK_SECONDS = 10.0
_LONGEST = 200  # characters of a command that is shown


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python interpreter: its `sys.executable`, `sys.prefix` and `sys.version`."""

    executable: str
    prefix: str
    version: str

    def __str__(self) -> str:
        return f"Python {self.version.split()[0]} at {self.executable}"

    def shares_environment(self, other: "Interpreter") -> bool:
        """Return True if both import the same packages: their prefixes and versions are equal."""
        prefixes = os.path.realpath(self.prefix), os.path.realpath(other.prefix)
        return prefixes[0] == prefixes[1] and self.version == other.version


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The command line to start, and a message to print before starting it; "" for none."""

    command: tuple[str, ...]
    message: str = ""


def prepare(command: tuple[str, ...]) -> Prepared:
    """Check that `command` exists, and choose its interpreter.

    Raises:
        ValueError: there is no such program.
    """
    program = command[0]
    if program.endswith(".py") and Path(program).is_file():
        return Prepared((sys.executable, *command), _message_for_script(program))
    executable = _find(command)
    if not _BARE_PYTHON.fullmatch(program):
        return Prepared(command)
    # The full path is used, so that the interpreter that was queried is the one that is started.
    return Prepared((executable, *command[1:]), _message_for_python(command, executable))


def _find(command: tuple[str, ...]) -> str:
    program = command[0]
    if (executable := shutil.which(program)) is not None:
        return executable
    if Path(program).is_file():
        raise ValueError(
            f"`command` starts with {program!r}, which is not executable. Put the program that "
            f"runs it first: jaxzero launch -- bash {program}"
        )
    if program.endswith(".py"):
        raise ValueError(
            f"`command` starts with {program!r}, and there is no such file in {os.getcwd()}. "
            "Give the script's path."
        )
    remedy = "Give it with its path."
    if _BARE_PYTHON.fullmatch(program):
        remedy = _remedy(command[1:])
    raise ValueError(
        f"`command` starts with {program!r}, and there is no such program, neither at that path "
        f"nor on PATH. {remedy}"
    )


def _message_for_script(script: str) -> str:
    message = f"{script} runs on {_this()}, the interpreter that jaxzero runs on"
    if os.access(script, os.X_OK) and _names_its_program(script):
        message += "; its first line (#!) is not followed"
    return message


def _names_its_program(script: str) -> bool:
    try:
        with open(script, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:  # Python reports the reason when it runs the script
        return False


def _message_for_python(command: tuple[str, ...], executable: str) -> str:
    if _is_this(executable):
        return f"{command[0]} is {executable}, the interpreter that jaxzero runs on"
    used = _ask(command, executable)
    if used is None:
        shown, used_path = f"{command[0]} is {executable}", executable
        warning = f"it does not say which environment it has; jaxzero itself runs on {_this()}"
    else:
        shown, used_path = f"{command[0]} is {_chain(executable, used)}", used.executable
        if used.shares_environment(_this()):
            return f"{shown}, in the environment that jaxzero runs in"
        warning = f"jaxzero itself runs in another environment, on {_this()}"
    keep = f"To run on this one without the warning: -- {_typed((used_path, *command[1:]))}"
    return f"{shown}\nwarning: {warning}\n{_remedy(command[1:])}\n{keep}"


def _chain(executable: str, used: Interpreter) -> str:
    return str(used) if used.executable == executable else f"{executable}, which starts {used}"


def _remedy(arguments: tuple[str, ...]) -> str:
    """Suggest a command that runs `arguments` on the interpreter of jaxzero."""
    alone = arguments and arguments[0].endswith(".py") and Path(arguments[0]).is_file()
    words = arguments if alone else (sys.executable, *arguments)
    return f"To run on the interpreter of jaxzero, give: -- {_typed(words)}"


def _typed(words: tuple[str, ...]) -> str:
    text = shlex.join(words)
    return text if len(text) <= _LONGEST and "\n" not in text else f"{shlex.quote(words[0])} ..."


def _this() -> Interpreter:
    return Interpreter(sys.executable, sys.prefix, sys.version)


def _is_this(path: str) -> bool:
    """Return True if `path` is this interpreter under another name, so that `_ask` is not needed.

    Folders are compared without resolving links: Python finds its virtual environment by them.
    """
    folders = {os.path.dirname(os.path.abspath(name)) for name in (path, sys.executable)}
    return len(folders) == 1 and os.path.samefile(path, sys.executable)


def _ask(command: tuple[str, ...], executable: str) -> Interpreter | None:
    """Ask the interpreter that `executable` starts for its path, prefix and version.

    Return None if the answer is late, or has another form. `command`, the user's command line, is
    only for error messages.

    Raises:
        ValueError: `executable` starts no interpreter, like a shim of pyenv without a version.
    """
    question = [executable, "-c", _ASK]
    try:
        answer = subprocess.run(
            question, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_SECONDS
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(_is_no_python(command, executable, reason)) from error
    if answer.returncode != 0:
        reason = answer.stderr.decode(errors="replace").strip()
        raise ValueError(_is_no_python(command, executable, reason or describe(answer.returncode)))
    try:
        last = answer.stdout.decode("ascii", "replace").splitlines()[-1]  # sitecustomize may print
        return Interpreter(*ast.literal_eval(last))
    except (IndexError, SyntaxError, TypeError, ValueError):
        return None


def _is_no_python(command: tuple[str, ...], executable: str, reason: str) -> str:
    return (
        f"`command` starts with {command[0]!r}, which is {executable}, and that does not run as "
        f"Python 3: {reason}\n{_remedy(command[1:])}"
    )
