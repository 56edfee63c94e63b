"""Explain JAX's errors where a loss reads the values of arrays in Python, as in `if loss > 1:`."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

import jax

from .._warnings import INSIDE
from .arguments import Call

_ERRORS = (
    jax.errors.ConcretizationTypeError,  # also of `if` and `while`
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_OF_A_PART = re.compile(r"while tracing the function (?!function at \S*device_step\.py)")
_REMEDY = (
    "`zero.value_and_grad` and `zero.apply` always trace the function, also outside of `jax.jit`, "
    "so arrays have no values in it. Use `jnp.where` or `jax.lax.cond` for a branch and "
    "`jax.debug.print` for a print; return what is read with `has_aux=True`, or pass a Python "
    "number, which is not traced."
)


@contextlib.contextmanager
def explaining_values(call: Call, num_before: int) -> Iterator[None]:
    """Say of such errors which arguments the value depends on, in which line, and the remedy.

    Args:
        call: the arguments of the function.
        num_before: how many arrays are traced before those of the arguments.

    Raises:
        ValueError: in place of JAX's error.
    """
    try:
        yield
    except Exception as error:
        said = str(error)
        numbers = [int(i) - num_before for i in re.findall(r"\barrays\[(\d+)\]", said)]
        # In a part with a trace of its own (a `scan`, a `jit`), JAX names what is to be named.
        if _OF_A_PART.search(said) or not (isinstance(error, _ERRORS) or numbers):
            raise
        names = _names(call)
        of = " and ".join(dict.fromkeys(names[i] for i in numbers if 0 <= i < len(names)))
        depends = f", which depends on {of}" if of else ""
        raise ValueError(
            f"The function reads a value of an array in Python{depends}: {_line(error)}. "
            f"{_REMEDY} JAX said: {said.splitlines()[0]}"
        ) from error


def _names(call: Call) -> list[str]:
    """The argument of each traced array: those of sharded trees come first."""
    return [
        argument.name
        for is_sharded in (True, False)
        for argument in call.arguments
        if (argument.plan is not None) is is_sharded
        for static in argument.statics
        if static is None
    ]


def _line(error: Exception) -> str:
    """The innermost line of the user's code, if there is one, or else of another library."""
    frames = [
        summary
        for (frame, _), summary in zip(
            traceback.walk_tb(error.__traceback__),
            traceback.extract_tb(error.__traceback__),
            strict=True,
        )
        if frame.f_globals.get("__name__", "").partition(".")[0] not in INSIDE
    ]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    if not own:
        return "in a place without a line"
    return f'`{own[-1].line}` in {own[-1].name}, "{own[-1].filename}", line {own[-1].lineno}'
