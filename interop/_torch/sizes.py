"""Check the shape of a tensor, or the offsets of a chunk, that a file of PyTorch gives."""

from typing import Any, TypeGuard

from jaxzero.interop._tensors import MAX_DIMS


def are_sizes(value: Any) -> TypeGuard[tuple[int, ...]]:
    """Return True for a tuple of at most `MAX_DIMS` integers from 0 to 2**63 - 1."""
    return (
        type(value) is tuple
        and len(value) <= MAX_DIMS
        and all(type(size) is int and 0 <= size < 2**63 for size in value)
    )
