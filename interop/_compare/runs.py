"""Run a function of JAX and a module of PyTorch, and record the outputs of their submodules.

PyTorch has hooks that record outputs. Flax NNX, Equinox and plain classes have no common way to
record, so the `__call__` of their classes is replaced while the function runs. A submodule is
recognised by the arrays that it holds, since `nnx.merge` and `eqx.combine` make new objects with
the same arrays. Inside a `scan` or `nnx.vmap` over layers these arrays are tracers, so submodules
called there are not recorded.
"""

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxzero._mesh import is_traced
from jaxzero.interop._tensors import array_of_torch, plain_name

Calls = dict[str, list[np.ndarray]]  # by name: the first array of the output of each call


class Named(NamedTuple):
    """The outputs of a model by name."""

    arrays: dict[str, np.ndarray]  # by dotted name; "" if there is one array and nothing else
    others: tuple[str, ...]  # names and types of outputs that are no arrays


def named_arrays(tree: Any) -> Named:
    """Name the arrays in a model's outputs, which may be nested mappings, dataclasses and tuples.

    `None` is left out.
    """
    arrays, others = {}, []
    for name, leaf in _leaves(tree, ""):
        array = as_numpy(leaf)
        if array is None:
            others.append(f"{name} ({type(leaf).__name__})".strip())
        else:
            arrays[name] = array
    return Named(arrays, tuple(others))


def first_array(tree: Any) -> Any:
    """Return the first array in a model's outputs, without converting it; None if there is none."""
    return next((leaf for _, leaf in _leaves(tree, "") if _is_array(leaf)), None)


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    parts = _parts(tree)
    if parts is None:
        yield name, tree
        return
    for key, part in parts:
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _parts(tree: Any) -> list[tuple[Any, Any]] | None:
    """Return (key, value) for each entry of a container; None if `tree` is not a container."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):  # also the outputs of transformers
        return list(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(tree, tuple | list):
        return list(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not _is_array(tree):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def as_numpy(leaf: Any) -> np.ndarray | None:
    """Copy an array of either library to NumPy; return None if `leaf` is no array."""
    if not _is_array(leaf):
        return None
    if hasattr(leaf, "detach"):  # a tensor of PyTorch
        return np.array(array_of_torch(leaf))
    return np.array(jax.tree.leaves(leaf)[0])  # of a variable of Flax, its value


def map_arrays(convert: Callable[[Any], Any], inputs: Any) -> Any:
    """Apply `convert` to the arrays in nested dicts, lists and tuples; keep all other values."""
    if isinstance(inputs, Mapping):
        return {key: map_arrays(convert, each) for key, each in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(map_arrays(convert, each) for each in inputs)
    return convert(inputs) if _is_array(inputs) else inputs


def jax_array(given: Any) -> jax.Array:
    """Convert an input to a JAX array with JAX's default dtype: without x64, 64 bits become 32.

    Raises:
        ValueError: it holds an integer that this dtype cannot represent.
    """
    array: Any = as_numpy(given) if hasattr(given, "detach") else given
    converted = jnp.asarray(array)
    if jnp.issubdtype(converted.dtype, jnp.integer) and not np.array_equal(converted, array):
        raise ValueError(
            f"`inputs` hold integers that {converted.dtype} lacks, which JAX would use."
        )
    return converted


def torch_tensor(given: Any, device: Any) -> Any:
    """Convert an array to a PyTorch tensor on `device`; a tensor is only moved there.

    An array gets the dtype that `jax_array` gives it, so that both models see the same numbers,
    except that integers become int64, PyTorch's own default.
    """
    import torch

    if hasattr(given, "detach"):
        return given.to(device)
    array = np.array(jax_array(given))
    if jnp.issubdtype(array.dtype, jnp.integer):
        array = array.astype(np.int64)
    narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
    tensor = torch.from_numpy(array.astype(np.float32) if narrow else array)
    return tensor.to(device, getattr(torch, array.dtype.name))


def call(function: Callable[..., Any], inputs: Any) -> Any:
    """Call a function with inputs: a tuple or list as positional arguments, a dict as named ones.

    Anything else is the single argument.
    """
    if isinstance(inputs, Mapping):
        return function(**inputs)
    return function(*inputs) if isinstance(inputs, tuple | list) else function(inputs)


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[Calls]:
    """Record the outputs of submodules of `model` while the context is active.

    It yields a dict that fills as submodules are called: dotted name -> output of each call.
    """
    calls: Calls = {}
    names: dict[Any, str] = {}
    for name, part in submodules_of(model).items():
        names.setdefault(_identity(part), name)
    active: set[int] = set()  # `__call__` of a class may call that of its base: one call

    def replaced(original: Any) -> Any:
        @functools.wraps(original)
        def run(self, *args, **kwargs):
            name = None if id(self) in active else names.get(_identity(self))
            bound = original.__get__(self, type(self))
            if name is None:
                return bound(*args, **kwargs)
            active.add(id(self))
            try:
                output = bound(*args, **kwargs)
            finally:
                active.discard(id(self))
            array = first_array(output)
            if is_traced(array):  # in a vmap: one call for each example
                jax.debug.callback(lambda x: _add(calls, name, x), array)
            else:
                _add(calls, name, array)
            return output

        return run

    owners = {_owner(type(part)) for part in submodules_of(model).values()}
    originals = {owner: vars(owner)["__call__"] for owner in owners}
    try:
        for owner, original in originals.items():
            owner.__call__ = replaced(original)
        yield calls
        jax.effects_barrier()  # for the callbacks
    finally:
        for owner, original in originals.items():
            owner.__call__ = original


def _add(calls: Calls, name: str, output: Any) -> None:
    if name and output is not None and not jnp.issubdtype(output.dtype, jax.dtypes.extended):
        array = as_numpy(output)
        assert array is not None
        calls.setdefault(name, []).append(array)


def submodules_of(model: Any) -> dict[str, Any]:
    """Return the parts of a model that can be called, by dotted path."""
    submodules: dict[str, Any] = {}
    seen: set[int] = set()

    def walk(node: Any, path: str) -> None:
        if id(node) in seen or isinstance(node, nnx.Variable | nnx.RngStream):
            return
        seen.add(id(node))
        if path and callable(node) and isinstance(type(node).__call__, types.FunctionType):
            submodules[path] = node
        for name, part in _parts_of_model(node):
            walk(part, f"{path}.{name}" if path else str(name))

    walk(model, "")
    return submodules


def _parts_of_model(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, tuple | list):
        return list(enumerate(node))
    if isinstance(node, type | types.FunctionType | types.ModuleType | np.ndarray | jax.Array):
        return []
    held = getattr(node, "__dict__", {})
    return [(name, part) for name, part in held.items() if not name.startswith("_")]


def _identity(part: Any) -> Any:
    leaves = jax.tree.leaves(part)
    return type(part), tuple(map(id, leaves)) if leaves else id(part)


def _owner(kind: type) -> type:
    """Return the class that defines the `__call__` of `kind`: `kind` itself or one of its bases."""
    return next(each for each in kind.__mro__ if "__call__" in vars(each))


def calls_in(intermediates: Any) -> Calls:
    """Return the calls of submodules by dotted path, from intermediates in nested dicts.

    `{"layers": {"0": {"mlp": array}}}` has one call of `layers.0.mlp`. In Flax each leaf is a tuple
    of one array per call, outputs of modules are under the key `__call__`, and Linen puts all of it
    under "intermediates".
    """
    calls: Calls = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, nnx.Variable):
            node = node.get_value()
        if isinstance(node, Mapping):
            for key, part in node.items():
                walk(part, path if key == "__call__" else (*path, str(key)))
        elif isinstance(node, list):
            for number, part in enumerate(node):
                walk(part, (*path, str(number)))
        else:
            for each in node if isinstance(node, tuple) else (node,):
                _add(calls, ".".join(path), first_array(each))

    held = intermediates if isinstance(intermediates, Mapping) else {}
    walk(held["intermediates"] if set(held) == {"intermediates"} else intermediates, ())
    return calls


@dataclasses.dataclass(frozen=True)
class TorchCall:
    """One call of a submodule of PyTorch.

    Attributes:
        name: name of the submodule.
        array: the first array of its output; None if it has none, or is not recorded.
        num_roundings: number of parameters that the model has used up to the end of this call, plus
            the number of calls of submodules without parameters.
        longest_sum: the largest number of terms that an output of these parameters sums: inputs of
            a linear layer, or features of a norm.
    """

    name: str
    array: np.ndarray | None
    num_roundings: int
    longest_sum: int


def run_torch(module: Any, inputs: Any, *, record: bool) -> tuple[Any, list[TorchCall]]:
    """Run a module of PyTorch in evaluation mode, without gradients.

    Args:
        module: the `torch.nn.Module`.
        inputs: its inputs, as for `compare`.
        record: True to keep the outputs of its submodules.

    Returns:
        Its outputs, and the calls of its submodules in the order in which they ended. The last one
        is that of `module`, with the name "".
    """
    import torch

    parameter = next(module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    inputs = map_arrays(lambda each: torch_tensor(each, device), inputs)
    calls: list[TorchCall] = []

    def add(name: str, submodule: Any, _: Any, output: Any) -> None:
        own = len(list(submodule.parameters(recurse=False)))
        is_leaf = next(submodule.children(), None) is None
        held = list(submodule.parameters())  # also of children that are used without a call
        last = calls[-1] if calls else TorchCall("", None, 0, 1)
        calls.append(
            TorchCall(
                name,
                as_numpy(first_array(output)) if record and name else None,
                max(last.num_roundings + max(own, int(is_leaf)), len(held)),
                max([last.longest_sum, *map(_summed, held)]),
            )
        )

    with _evaluation(module), contextlib.ExitStack() as stack, torch.no_grad():
        for name, each in module.named_modules():
            hook = functools.partial(add, plain_name(name))
            stack.callback(each.register_forward_hook(hook).remove)
        outputs = call(module, inputs)
    return outputs, calls


def _summed(parameter: Any) -> int:
    """Return how many terms each output sums: inputs of a linear layer, or features of a norm."""
    return math.prod(parameter.shape[1:]) if parameter.ndim > 1 else parameter.numel()


@contextlib.contextmanager
def _evaluation(module: Any) -> Iterator[None]:
    training = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, was in training.items():
            each.training = was
