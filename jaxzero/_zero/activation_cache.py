"""`ActivationCache` keeps the outputs of frozen layers on the host, for later epochs.

This is AutoCache of PipeTransformer: a batch that comes again need not run the frozen layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._program import known_part, rest_part
from .._sharding import Static, is_array, rebuild, statics_of
from .batch_choice import BatchArgnums


class ActivationCache:
    """Cached outputs of frozen layers, one entry for each batch key; made by `Freezing.cache`.

    Example:
        >>> cache = freezing.cache(loss_fn, frozen)
        >>> step = zero.value_and_grad(cache.rest, batch_argnums=(2, 3))
        >>> for key, batch in enumerate(batches):
        ...     activations = cache(key, batch)
        ...     loss, grads = step(active, frozen, activations, batch)

    The activations of each device are kept in the memory of its host. The frozen layers are traced
    and compiled once for each shape of a batch, so the values that `f` closes over must not change
    while the cache is in use. Values that `f` computes from the batch alone (masks) are computed
    again at each call. `microbatches` of `value_and_grad` must be 1. Each call hashes the batch, so
    that a key which is given with two different batches is an error.

    Attributes:
        frozen: the frozen parameters.
        num_bytes: bytes of host memory that the activations take, in this process.
        hits: the number of calls that returned cached activations.
        misses: the number of calls that computed the activations.
    """

    def __init__(
        self,
        zero: Any,
        function: Callable,
        active: Any,
        frozen: Any,
        max_bytes: int | None,
        batch_argnums: BatchArgnums,
    ):
        self.frozen = frozen
        self.num_bytes = self.hits = self.misses = 0
        self._function = function
        self._max_bytes = max_bytes
        self._kept: dict[Hashable, _Entry] = {}

        def known(frozen: Any, *args: Any) -> tuple[Any, ...]:
            run, arrays = self._flat(args)
            return tuple(known_part(run, active, frozen, arrays))

        apply = zero.apply(known, batch_argnums=batch_argnums, out_reduce="stack")

        def compute(static: _Static, frozen: Any, arrays: list[Any]) -> tuple[jax.Array, ...]:
            return apply(frozen, *_filled(static, arrays))

        self._compute = jax.jit(compute, static_argnums=0)

    def __repr__(self) -> str:
        return (
            f"ActivationCache({len(self._kept)} batches, {self.num_bytes:,} bytes; {self.hits} "
            f"hits, {self.misses} misses)"
        )

    def __call__(self, key: Hashable, *args: Any) -> tuple[jax.Array, ...]:
        """Return the activations of a batch: cached ones if there are any, else new ones.

        New activations are cached, unless `max_bytes` of `Freezing.cache` is used up. Call this
        outside of `jax.jit`.

        Args:
            key: names the batch, such as its number in the epoch.
            args: the arguments of `f` after the parameters.

        Returns:
            The arrays for `rest`, `[devices, ...]`: dim 0 counts devices and is split over them.

        Raises:
            ValueError: another batch was cached under this key; the frozen layers draw random
                numbers; or all of `f` depends on active parameters.
        """
        static, arrays = _split(args)
        digest, entry = _digest(arrays), self._kept.get(key)
        # Trees of other structure can hold the same arrays: `{"a": x}` and `{"b": x}`.
        if entry is not None and (entry.digest, entry.static) != (digest, static):
            raise ValueError(
                f"`key` {key!r} names two batches: the one given differs from the one that was "
                "cached under it. Give every batch a key of its own."
            )
        if entry is not None:
            self.hits += 1
            return tuple(_on_devices(x) for x in entry.arrays)
        self.misses += 1
        activations = self._compute(static, self.frozen, arrays)
        num_bytes = sum(shard.data.nbytes for x in activations for shard in x.addressable_shards)
        if self._max_bytes is None or self.num_bytes + num_bytes <= self._max_bytes:
            self._kept[key] = _Entry(digest, static, tuple(_on_host(x) for x in activations))
            self.num_bytes += num_bytes
        return activations

    def rest(self, active: Any, frozen: Any, activations: Sequence[Any], *args: Any) -> Any:
        """Compute `f` from cached activations. Pass `rest` to `value_and_grad` in place of `f`.

        Args:
            active: the active parameters.
            frozen: the frozen parameters. A parameter that only the activations need is not
                gathered.
            activations: the result of calling the cache with the same batch. Its arrays are split
                over devices, so `batch_argnums` must name this argument beside the batch.
            args: the arguments of `f` after the parameters.
        """
        run, arrays = self._flat(args)
        return rest_part(run, active, frozen, arrays, [x[0] for x in activations])

    def _flat(self, args: Sequence[Any]) -> tuple[Callable[[Any, Any, Any], Any], list[Any]]:
        """Split `args` into arrays and a static part.

        Returns:
            A function of `(active, frozen, arrays)` that calls `f`, with the static part filled in;
            and the arrays in `args`.
        """
        static, arrays = _split(args)

        def run(active: Any, frozen: Any, arrays: list[Any]) -> Any:
            return self._function(active, frozen, *_filled(static, arrays))

        return run, arrays


class _Static(NamedTuple):
    """The tree structure of `f`'s arguments, and the leaves that are not arrays.

    It is hashable, so it can be a static argument of `jax.jit`.
    """

    treedef: Any
    statics: tuple[Static | None, ...]
    # `repr` of each of `statics`: 1, 1.0 and True are equal, but their programs differ.
    texts: tuple[str, ...]


class _Kept(NamedTuple):
    """A copy, in host memory, of the parts of an array that this process's devices hold."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: tuple[tuple[Any, np.ndarray], ...]


class _Entry(NamedTuple):
    """The cached activations of one batch.

    The hash of the batch's arrays (`digest`) and its leaves that are not arrays (`static`) tell
    whether a later call has the same batch.
    """

    digest: bytes
    static: _Static
    arrays: tuple[_Kept, ...]


def _split(args: Sequence[Any]) -> tuple[_Static, list[Any]]:
    """Separate the arguments of `f` into a static part and a flat list of arrays."""
    leaves, treedef = jax.tree.flatten(tuple(args))
    statics = statics_of(leaves)
    return _Static(treedef, statics, tuple(map(repr, statics))), [*filter(is_array, leaves)]


def _filled(static: _Static, arrays: Sequence[Any]) -> Any:
    """Build the arguments of `f` from a static part and arrays; the reverse of `_split`."""
    return rebuild(static.treedef, static.statics, arrays)


def _on_host(x: jax.Array) -> _Kept:
    parts = tuple((shard.device, np.array(shard.data)) for shard in x.addressable_shards)
    return _Kept(x.shape, x.sharding, parts)


def _on_devices(kept: _Kept) -> jax.Array:
    parts = [jax.device_put(x, device) for device, x in kept.parts]
    return jax.make_array_from_single_device_arrays(kept.shape, kept.sharding, parts)


def _digest(arrays: Sequence[Any]) -> bytes:
    """Return a hash of the contents, shapes and dtypes of arrays.

    Of a sharded array, only the shards on this process's devices are read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        if isinstance(array, jax.Array):
            is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            data = jax.random.key_data(array) if is_key else array
            parts = [np.asarray(shard.data) for shard in data.addressable_shards]
        else:
            parts = [np.asarray(array)]
        for x in parts:
            digest.update(f"{x.shape} {x.dtype}".encode())
            digest.update(np.ascontiguousarray(x).view(np.uint8).reshape(-1).data)
    return digest.digest()
