"""Explain JAX's errors where a function reads values of arrays in Python, as in `if loss > 1:`."""

from __future__ import annotations

import contextlib
import pathlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from .._mesh import bare, is_traced
from .._warnings import INSIDE

_ERRORS = (
    jax.errors.ConcretizationTypeError,  # also of `if` and `while`
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_ARRAY = re.compile(r"\barrays\[(\d+)\]")  # as JAX names an argument of our traced functions
_PACKAGE = re.escape(str(pathlib.Path(__file__).parents[1]))
_OF_A_PART = re.compile(rf"while tracing the function \S+ at (?!{_PACKAGE})")
_REMEDY = (
    "`zero` always traces the function, also outside of `jax.jit`, so arrays have no values in it. "
    "Use `jnp.where` or `jax.lax.cond` for a branch and `jax.debug.print` for a print; return what "
    "is read (`has_aux=True`), or pass a Python number, which is not traced."
)


@contextlib.contextmanager
def explaining_values(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Iterator[None]:
    """Say of such errors which arguments the value depends on, in which line, and the remedy.

    Args:
        function: the user's function, which is called inside.
        args: its positional arguments.
        kwargs: its keyword arguments.
        names: the names of all of them in error messages.

    Raises:
        ValueError: in place of JAX's error.
    """
    try:
        yield
    except Exception as error:
        said = str(error)
        # In a part with a trace of its own (a `scan`, a `jit`), JAX names what is to be named.
        if _OF_A_PART.search(said) or not (isinstance(error, _ERRORS) or _ARRAY.search(said)):
            raise
        of = " and ".join(_read_arguments(function, args, kwargs, names))
        raise ValueError(
            f"The function reads a value of an array in Python{of and f', which depends on {of}'}: "
            f"{_line(error)}. {_REMEDY} JAX said: {said.splitlines()[0]}"
        ) from error


def _read_arguments(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> list[str]:
    """The names of the arguments that the value depends on, as far as JAX tells.

    JAX tells it of a function that is not being differentiated, so it is traced again.
    """
    values = [*args, *kwargs.values()]
    leaves, treedef = jax.tree.flatten(values)
    owners = [name for name, x in zip(names, values, strict=True) for _ in jax.tree.leaves(x)]
    numbers = [i for i, x in enumerate(leaves) if is_traced(x)]

    def again(*arrays: Any) -> None:
        filled = list(leaves)
        for i, x in zip(numbers, arrays, strict=True):
            filled[i] = x
        new = jax.tree.unflatten(treedef, filled)
        function(*new[: len(args)], **dict(zip(kwargs, new[len(args) :], strict=True)))

    try:
        jax.eval_shape(again, *(bare(leaves[i]) for i in numbers))
    except Exception as error:  # the same one
        found = [owners[numbers[int(i)]] for i in _ARRAY.findall(str(error))]
        return list(dict.fromkeys(found))
    return []


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
