"""What the processes run, and on which Python.

The first `python` on PATH is often not the interpreter that `jaxzero` runs on: `.venv/bin/jaxzero`
works without an activated environment, `python` then is the system's, and "No module named ..." is
all that is seen. So, as under torchrun, a script alone runs on the interpreter of jaxzero. A bare
`python` stays what it is everywhere else, the first on PATH, but it is said which one that is, with
a warning if packages come from another environment.

Paths do not tell environments apart: a virtual environment's interpreter is a link to one outside,
and pyenv's shims start one that is elsewhere. So the interpreter itself is asked.
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
    """A Python as it sees itself: `sys.executable`, `sys.prefix` and `sys.version`."""

    executable: str
    prefix: str
    version: str

    def __str__(self) -> str:
        return f"Python {self.version.split()[0]} at {self.executable}"

    def shares_environment(self, other: "Interpreter") -> bool:
        """Whether both import the same packages. Two versions may share a prefix such as /usr."""
        prefixes = os.path.realpath(self.prefix), os.path.realpath(other.prefix)
        return prefixes[0] == prefixes[1] and self.version == other.version


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The command line to start, and a message to print before it; "" prints nothing."""

    command: tuple[str, ...]
    said: str = ""


def prepare(command: tuple[str, ...]) -> Prepared:
    """Check that `command` can be found, and settle which interpreter it runs on.

    Raises:
        ValueError: there is no such program.
    """
    program = command[0]
    if program.endswith(".py") and Path(program).is_file():
        return Prepared((sys.executable, *command), _said_of_script(program))
    found = _find(command)
    if not _BARE_PYTHON.fullmatch(program):
        return Prepared(command)
    # By its path: what is started is what was asked, whatever else PATH has.
    return Prepared((found, *command[1:]), _said_of_python(command, found))


def _find(command: tuple[str, ...]) -> str:
    program = command[0]
    if (found := shutil.which(program)) is not None:
        return found
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


def _said_of_script(script: str) -> str:
    said = f"{script} runs on {_this()}, the interpreter that jaxzero runs on"
    if os.access(script, os.X_OK) and _names_its_program(script):
        said += "; its first line (#!) is not followed"
    return said


def _names_its_program(script: str) -> bool:
    try:
        with open(script, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:  # Python will say why it cannot be read
        return False


def _said_of_python(command: tuple[str, ...], found: str) -> str:
    if _is_this(found):
        return f"{command[0]} is {found}, the interpreter that jaxzero runs on"
    used = _ask(command, found)
    if used is None:
        shown, used_path = f"{command[0]} is {found}", found
        warning = f"it does not say which environment it has; jaxzero itself runs on {_this()}"
    else:
        shown, used_path = f"{command[0]} is {_chain(found, used)}", used.executable
        if used.shares_environment(_this()):
            return f"{shown}, in the environment that jaxzero runs in"
        warning = f"jaxzero itself runs in another environment, on {_this()}"
    keep = f"To run on this one without the warning: -- {_typed((used_path, *command[1:]))}"
    return f"{shown}\nwarning: {warning}\n{_remedy(command[1:])}\n{keep}"


def _chain(found: str, used: Interpreter) -> str:
    return str(used) if used.executable == found else f"{found}, which starts {used}"


def _remedy(arguments: tuple[str, ...]) -> str:
    """What to type for the interpreter of jaxzero, in place of a bare `python` and `arguments`."""
    alone = arguments and arguments[0].endswith(".py") and Path(arguments[0]).is_file()
    words = arguments if alone else (sys.executable, *arguments)
    return f"To run on the interpreter of jaxzero, give: -- {_typed(words)}"


def _typed(words: tuple[str, ...]) -> str:
    text = shlex.join(words)
    return text if len(text) <= _LONGEST and "\n" not in text else f"{shlex.quote(words[0])} ..."


def _this() -> Interpreter:
    return Interpreter(sys.executable, sys.prefix, sys.version)


def _is_this(path: str) -> bool:
    """Whether `path` is this interpreter by another name in its folder: none has to be asked.

    The folder counts as it is written: by it Python finds its virtual environment.
    """
    folders = {os.path.dirname(os.path.abspath(name)) for name in (path, sys.executable)}
    return len(folders) == 1 and os.path.samefile(path, sys.executable)


def _ask(command: tuple[str, ...], found: str) -> Interpreter | None:
    """What `found`, the first word of `command`, starts; None if it does not answer.

    Raises:
        ValueError: it runs nothing, such as a shim of pyenv with no version behind it.
    """
    question = [found, "-c", _ASK]
    try:
        answer = subprocess.run(
            question, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_SECONDS
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(_is_no_python(command, found, reason)) from error
    if answer.returncode != 0:
        said = answer.stderr.decode(errors="replace").strip()
        raise ValueError(_is_no_python(command, found, said or describe(answer.returncode)))
    try:
        last = answer.stdout.decode("ascii", "replace").splitlines()[-1]  # sitecustomize may print
        return Interpreter(*ast.literal_eval(last))
    except (IndexError, SyntaxError, TypeError, ValueError):
        return None


def _is_no_python(command: tuple[str, ...], found: str, reason: str) -> str:
    return (
        f"`command` starts with {command[0]!r}, which is {found}, and that does not run as "
        f"Python 3: {reason}\n{_remedy(command[1:])}"
    )
