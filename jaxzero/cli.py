"""The `jaxzero` command. tyro makes its flags from the fields of each command's dataclass.

jaxzero train --steps 100 --learning-rate 1e-4
jaxzero report --stage 2
jaxzero plan --model checkpoints/7b --nodes 4 --device h100
jaxzero verify train:job --preset zeropp
jaxzero sample checkpoints/7b --prompt "Once upon a time"
jaxzero inspect checkpoints/7b
jaxzero convert checkpoints/7b exported --dtype bfloat16 --check
jaxzero launch --nodes 2 --restart 3 -- train.py
jaxzero --version
"""

import dataclasses
import difflib
import errno
import importlib.metadata
import shlex
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args, get_type_hints

import tyro
from rich.console import Console
from rich.markup import escape
from tyro.conf import Positional, UseAppendAction

from . import commands, distributed, jobs
from ._processes import DIVERGED, FILE_ERROR, INTERRUPTED, MISTAKE, PEER_LOST, STOPPED
from .launch import Launch, launch

# The exit statuses of errors whose message suffices, so that no traceback is printed. The first
# class that an error is an instance of counts.
_STATUSES = {
    distributed.ReplicasDiffer: DIVERGED,
    jobs.Diverged: DIVERGED,
    ImportError: MISTAKE,
    NotImplementedError: MISTAKE,
    ValueError: MISTAKE,
}

# Advice for errors of the file system, whose own messages say only what is wrong.
_ADVICE = {
    errno.EACCES: "Check its permissions, or name another path.",
    errno.EPERM: "Check its permissions, or name another path.",
    errno.EROFS: "Name a path on another file system.",
    errno.ENOSPC: "Free some space, or name a path on another disk.",
    errno.EDQUOT: "Free some space, or name a path on another disk.",
    errno.ENAMETOOLONG: "Name a shorter path.",
}

_Command = (
    Annotated[jobs.Train, tyro.conf.subcommand("train", prefix_name=False)]
    | Annotated[commands.Report, tyro.conf.subcommand("report", prefix_name=False)]
    | Annotated[commands.Plan, tyro.conf.subcommand("plan", prefix_name=False)]
    | Annotated[commands.Verify, tyro.conf.subcommand("verify", prefix_name=False)]
    | Annotated[commands.Sample, tyro.conf.subcommand("sample", prefix_name=False)]
    | Annotated[commands.Inspect, tyro.conf.subcommand("inspect", prefix_name=False)]
    | Annotated[commands.Convert, tyro.conf.subcommand("convert", prefix_name=False)]
    | Annotated[Launch, tyro.conf.subcommand("launch", prefix_name=False)]
)


_COMMANDS = {chosen.name: settings for settings, chosen in map(get_args, get_args(_Command))}


def _parsed(arguments: Sequence[str]) -> Any:
    """Parse a command line, and return the settings: an instance of the command's dataclass.

    Each command has a parser of its own, so that errors point to the command's `--help`.

    Raises:
        ValueError: there is no such command, or a flag is repeated that takes one value.
    """
    shape = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _COMMANDS:
        near = difflib.get_close_matches(arguments[0], _COMMANDS, n=1)
        meant = (
            f"Do you mean `jaxzero {near[0]}`?" if near else f"There are {', '.join(_COMMANDS)}."
        )
        raise ValueError(f"There is no command `jaxzero {arguments[0]}`. {meant}")
    if arguments and arguments[0] in _COMMANDS:
        settings = _COMMANDS[arguments[0]]
        _check_repeated(arguments, settings)
        return tyro.cli(settings, args=arguments[1:], prog=f"jaxzero {arguments[0]}", config=shape)
    return tyro.cli(
        _Command,
        args=arguments,
        prog="jaxzero",
        description="Train with parameters, gradients and optimizer state split over devices.",
        config=shape,
    )


def _check_repeated(arguments: Sequence[str], settings: Any) -> None:
    """Raise `ValueError` if a command line repeats a flag that takes one value.

    tyro would take the last value and drop the others in silence. Flags that collect values
    (`UseAppendAction`) and flags without a value may be repeated.

    Args:
        arguments: a command line; words after `--` are not looked at.
        settings: the dataclass whose fields are the command's flags.
    """
    single = set(_single(settings))
    given = defaultdict(list)
    for number, word in enumerate(arguments):
        if word == "--":
            break
        flag, has_value, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in single:
            given[flag].append(value if has_value else " ".join(arguments[number + 1 :][:1]))
    for flag, values in given.items():
        if len(values) > 1:
            raise ValueError(
                f"`{flag}` is given {len(values)} times, with {', '.join(map(repr, values))}. Give "
                "it once."
            )


def _single(settings: Any) -> Iterator[str]:
    """Yield the flags, such as `--steps`, that take one value and may not be repeated.

    `settings` is a dataclass; fields of dataclasses nested in it are flags too.
    """
    hints = get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        kind = hints[field.name]
        marks = getattr(kind, "__metadata__", ())
        if dataclasses.is_dataclass(kind):
            yield from _single(kind)
        elif kind is not bool and UseAppendAction not in marks and Positional not in marks:
            yield f"--{field.name.replace('_', '-')}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `jaxzero` command, and return its exit status.

    Args:
        arguments: the command line without the program's name; by default `sys.argv[1:]`.

    Returns:
        0 on success; 2 for a mistake in the arguments; 74 if a file cannot be read or written; 130
        after Ctrl-C. `jaxzero verify` returns 1 if it finds something wrong. `jaxzero train`
        returns 75 after SIGTERM, 76 if another process is lost, and 77 if training diverged.
        `jaxzero launch` returns the status of the first process that failed.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console, errors = Console(), Console(stderr=True)
    if arguments == ["--version"]:
        console.print(f"jaxzero {importlib.metadata.version('jaxzero')}", highlight=False)
        return 0
    try:
        command = _parsed(arguments)
        match command:
            case jobs.Train():
                jobs.train(command, console)
            case commands.Verify():
                return 0 if commands.verify(command, console) else 1
            case Launch():
                return launch(command)
            case _:
                getattr(commands, type(command).__name__.lower())(command, console)
    except jobs.Interrupted as interrupted:
        console.print(
            f"Interrupted; saved after step {interrupted.step}. Go on with:", highlight=False
        )
        resume = resume_command(arguments, interrupted.name)
        console.print(f"  {_plain(resume)}", highlight=False, soft_wrap=True)
        return INTERRUPTED if interrupted.by_ctrl_c else STOPPED
    except KeyboardInterrupt:
        errors.print("Interrupted; nothing was saved since the last checkpoint.")
        distributed.leave(INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        status = _status_of(error)
        if status is None:
            traceback.print_exception(error)
            distributed.leave(1)
            raise
        errors.print(
            f"[bold red]Error:[/] {_plain(_text_of(error))}", highlight=False, soft_wrap=True
        )
        if not isinstance(error, distributed.AgreedEnd):
            distributed.leave(status)  # the other processes may not have failed
        return status
    return 0


def _status_of(error: Exception) -> int | None:
    """Return the exit status of an error whose message is enough; None if it needs a traceback."""
    causes = [*distributed.causes(error)]
    if any(isinstance(cause, TimeoutError) for cause in causes):
        return PEER_LOST
    # A checkpoint that cannot be saved is a `RuntimeError`, caused by the error of its file.
    if _is_of_files(error) or (type(error) is RuntimeError and any(map(_is_of_files, causes))):
        return FILE_ERROR
    return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), None)


def resume_command(arguments: Sequence[str], name: str | None) -> str:
    """Return the command line that resumes the run `name`, which was started with `arguments`."""
    words = ["jaxzero", *arguments]
    if not any(word.split("=")[0] == "--name" for word in words):
        words += ["--name", str(name)]
    if "--resume" not in words:
        words.append("--resume")
    return shlex.join(words)


def _is_of_files(error: BaseException) -> bool:
    others = (ConnectionError, ChildProcessError, ProcessLookupError, InterruptedError)
    return isinstance(error, OSError) and not isinstance(error, others)


def _text_of(error: Exception) -> str:
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    where = "" if error.filename is None else f"{str(error.filename)!r}: "
    return f"{where}{error.strerror}. {_ADVICE.get(error.errno, '')}".rstrip()


def _plain(text: str) -> str:
    """Escape what rich would read as markup, and control characters that a terminal would obey."""
    return escape("".join(x if x.isprintable() or x == "\n" else repr(x)[1:-1] for x in text))
