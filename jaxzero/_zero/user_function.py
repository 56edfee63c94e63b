"""Call the user's function, and check what it does and returns.

If the function reads the value of an array in Python, as in `if loss > 1:`, JAX raises an error. A
clearer error is raised in its place. A function that changes a module in place, and does not return
it, is an error too, because the change would be lost. The return value is split into `aux` and a
loss, which may be `(sum, weight)`.

[Note: values of rows] A float leaf of `aux` is averaged over devices unless the user says
otherwise. If the leaf has the loss of each row, that would average different rows. Its dim 0 is the
number of rows, but the dim 0 of batch statistics may by chance be equal. So the function is traced
again with twice as many rows: only values of rows grow.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._mesh import AXES, bare, is_traced
from .._sharding import mutated_leaf, nnx_leaves, split_dim
from .._warnings import INSIDE

_ERRORS = (
    jax.errors.ConcretizationTypeError,  # also of `if` and `while`
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_ARRAY = re.compile(r"\barrays\[(\d+)\]")  # as JAX names an argument of our traced functions
_PACKAGE = re.escape(str(pathlib.Path(__file__).parents[1]))
# JAX's error about a function, such as the body of a `scan`, that is defined outside of jaxzero.
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
    """Explain errors that JAX raises if Python code reads the value of a traced array.

    The new error names the arguments that the value depends on, the line and the remedy.

    Args:
        function: the user's function, which is called inside.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        names: the names of all arguments in error messages, positional ones first.

    Raises:
        ValueError: in place of JAX's error.
    """
    try:
        yield
    except Exception as error:
        said = str(error)
        # An error inside of a `scan` or `jit` of the user, which has a trace of its own, names the
        # user's own line and arguments already.
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
    """Find an array whose value Python code has read; name the arguments that it depends on.

    The names are taken from JAX's error, which has them only if the function is not being
    differentiated. So the function is traced again. Without such an error the list is empty.

    Args:
        function: the user's function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        names: the names of all arguments, positional ones first.
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
    except Exception as error:  # JAX's error again
        found = [owners[numbers[int(i)]] for i in _ARRAY.findall(str(error))]
        return list(dict.fromkeys(found))
    return []


def _line(error: Exception) -> str:
    """Describe the innermost line of the user's code in a traceback, else of another library."""
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


def call_checked(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Any:
    """Return `function(*args, **kwargs)`.

    Args:
        function: the user's function.
        args: the positional arguments.
        kwargs: the keyword arguments.
        names: the names of all arguments in error messages, positional ones first.

    Raises:
        ValueError: the function reads values of arrays in Python; or it has changed an `nnx.Module`
            or `nnx.Rngs` in place, and does not return the new value.
    """
    values = [*args, *kwargs.values()]
    before = [nnx_leaves(value) for value in values]
    with explaining_values(function, args, kwargs, names):
        output = function(*args, **kwargs)
    returned = {id(x) for x in jax.tree.leaves(output)}
    for name, old, value in zip(names, before, values, strict=True):
        changed = mutated_leaf(old, nnx_leaves(value), returned)
        if changed is not None:
            path, kind = changed
            raise ValueError(
                f"The function changes {name}, leaf `{path}`, and the change would be "
                "lost: a function of sharded parameters gets a copy of the module. Return it "
                f"with `has_aux=True`, here `nnx.state(model, {kind})`, several kinds by "
                "`nnx.Any(...)`, and write it back with `nnx.update`; or call a copy that may "
                "be lost, `nnx.clone(model)`. Of `nnx.Rngs`, draw a key outside and pass it: "
                "`key = rngs.dropout()`."
            )
    return output


def split_aux(output: Any, has_aux: bool) -> tuple[Any, Any]:
    """Split the function's return value into `(loss, aux)`; `aux` is None without `has_aux`."""
    if not has_aux:
        return output, None
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        raise ValueError(
            "With `has_aux=True` the function must return `(loss, aux)`; got "
            f"{type(output).__name__}. Return both, or leave out `has_aux`."
        )
    return output[0], output[1]


def split_weight(value: Any, weighted: bool) -> tuple[Any, Array | None]:
    """Split a loss into `(sum of losses, sum of weights)`; the second is None without `weighted`.

    The weight gets no gradient: the derivative of the mean treats the weight as constant.
    `constant_weight` guards second derivatives, which would need its tangent.
    """
    if not weighted:
        return value, None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(
            "With `weighted=True` the function must return `(sum, weight)` as its loss, such as "
            f"the summed loss and the number of tokens; got {type(value).__name__}."
        )
    total, weight = value[0], jnp.asarray(value[1])
    if weight.shape or jnp.iscomplexobj(weight):
        raise ValueError(
            "With `weighted=True` the weight must be a real scalar; got "
            f"{weight.dtype}{list(weight.shape)}. Sum it over the examples."
        )
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        weight = weight.astype(jnp.float32)
    return total, weight


@jax.custom_jvp
def constant_weight(weight: Array) -> Array:
    """Return `weight`. Differentiating with respect to `weight` raises `NotImplementedError`."""
    return weight


@functools.partial(constant_weight.defjvp, symbolic_zeros=True)
def _refuse_tangents(weights: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Any]:
    if isinstance(tangents[0], SymbolicZero):
        return weights[0], tangents[0]
    raise NotImplementedError(
        "`jax.jvp` differentiates with respect to what the weight of `weighted=True` is computed "
        "from. If it is to be constant there, return it through `jax.lax.stop_gradient`; otherwise "
        "return both sums as `aux`, reduced by 'sum', and divide outside."
    )


def check_loss(value: Any) -> None:
    """Raise `ValueError` unless the loss is a real floating-point scalar."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, float)):
        shown = type(value).__name__
        hint = "If it also returns other things, pass `has_aux=True`."
    elif jnp.shape(value) != ():
        shown = f"{jnp.result_type(value)}{list(jnp.shape(value))}"
        hint = "Take the mean over the examples."
    elif not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        shown = str(jnp.result_type(value))
        hint = "Take the real part, or cast."
    else:
        return
    raise ValueError(f"The loss must be a real floating-point scalar; got {shown}. {hint}")


def shapes_with_twice_the_rows(
    outputs: Callable[[list[Any]], Any], inputs: Sequence[Any], specs: Sequence[PartitionSpec]
) -> list[tuple[int, ...]] | None:
    """Return the shapes that the outputs would have if the batch had twice as many rows.

    Args:
        outputs: a function from the inputs to a tree of arrays.
        inputs: the arrays of one device, with its rows.
        specs: how each input is split over devices.

    Returns:
        One shape for each leaf; None if the function fails with another number of rows.
    """
    more = [_with_twice_the_rows(x, spec) for x, spec in zip(inputs, specs, strict=True)]
    try:
        return [x.shape for x in jax.tree.leaves(jax.eval_shape(outputs, more))]
    except Exception:  # whatever the user's function raises
        return None


def _with_twice_the_rows(x: Any, spec: PartitionSpec) -> Any:
    dim = split_dim(spec)
    if dim is None or spec[dim] != AXES:
        return bare(x)
    shape = (*x.shape[:dim], 2 * x.shape[dim], *x.shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype)
