"""Inputs and outputs of models of both libraries as arrays by name."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Named(NamedTuple):
    """A model's outputs."""

    arrays: dict[str, np.ndarray]  # by dotted name; "" if there is one array and nothing else
    others: tuple[str, ...]  # names of what is no array


def named_arrays(tree: Any) -> Named:
    """Name the arrays of outputs: mappings, dataclasses and tuples, nested. None is left out."""
    arrays, others = {}, []
    for name, leaf in _leaves(tree, ""):
        array = as_numpy(leaf)
        if array is None:
            others.append(f"{name} ({type(leaf).__name__})".strip())
        else:
            arrays[name] = array
    return Named(arrays, tuple(others))


def first_array(tree: Any) -> Any:
    """The first array of outputs, as it is; None if there is none."""
    return next((leaf for _, leaf in _leaves(tree, "") if _is_array(leaf)), None)


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    parts = _parts(tree)
    if parts is None:
        yield name, tree
        return
    for key, part in parts:
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _parts(tree: Any) -> list[tuple[Any, Any]] | None:
    """The parts of a container; None if it is a leaf."""
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
    """An array of either library as one of NumPy that shares no memory; None if it is none."""
    if not _is_array(leaf):
        return None
    if hasattr(leaf, "detach"):  # a tensor of PyTorch
        import torch

        tensor = leaf.detach().cpu().resolve_conj().resolve_neg()
        if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
            narrow = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
            return tensor.float().numpy().astype(narrow)
        return tensor.numpy().copy()
    return np.array(jax.tree.leaves(leaf)[0])  # of a variable of Flax, its value


def map_arrays(convert: Callable[[Any], Any], inputs: Any) -> Any:
    """Convert the arrays among inputs, in dicts, lists and tuples; the rest stays."""
    if isinstance(inputs, Mapping):
        return {key: map_arrays(convert, each) for key, each in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(map_arrays(convert, each) for each in inputs)
    return convert(inputs) if _is_array(inputs) else inputs


def jax_array(given: Any) -> jax.Array:
    """An input for JAX, in the dtype that JAX has for it: float32 and int32 without x64.

    Raises:
        ValueError: it holds an integer that this dtype lacks.
    """
    array: Any = as_numpy(given) if hasattr(given, "detach") else given
    found = jnp.asarray(array)
    if jnp.issubdtype(found.dtype, jnp.integer) and not np.array_equal(found, array):
        raise ValueError(f"`inputs` hold integers that {found.dtype} lacks, which JAX would use.")
    return found


def torch_tensor(given: Any, device: Any) -> Any:
    """An input for PyTorch, in the dtype that JAX has for it; but integers have 64 bits.

    A tensor of PyTorch stays what it is.
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
    """Call with a tuple or list as positional arguments, a dict as named ones, else with one."""
    if isinstance(inputs, Mapping):
        return function(**inputs)
    return function(*inputs) if isinstance(inputs, tuple | list) else function(inputs)
