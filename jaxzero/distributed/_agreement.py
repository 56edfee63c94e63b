"""Check that all processes have equal settings and data, and that replicas on devices are equal.

Replicas diverge if a host computes something on its own (a random number, a learning rate from its
clock, another order of data), and training silently continues with wrong values. The hash of a
shard is

    sum over i of word(i) * odd(i)   modulo 2**32,

with odd multipliers. A change of a single word always changes it; any other change does except
with probability 2**-32. Replicas agree if the minimum and the maximum of their hashes are equal,
so one number per leaf is communicated. Leaves without replicas are not hashed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from .._mesh import to_device
from .._processes import describe_process, exchange, exchange_json
from .._sharding import path_name
from ._watchdog import AgreedEnd

_SHOWN = 200  # characters of a value in a message
_NAME = "check_replicas"  # name of the exchanges between processes
_MULTIPLIER = np.uint32(0x9E3779B1)  # odd; spreads indices over 32 bits (Knuth, TAOCP 3, 6.4)


def check_same(*, seconds: float = 60.0, **values: Any) -> None:
    """Compare values, such as settings, seeds and digests of data, over all processes.

    All processes must call it.

    Args:
        seconds: how long to wait for the other processes.
        **values: values that JSON can represent, or that are identified by their `repr`. Dicts are
            compared entry by entry, and the message names the entry.

    Raises:
        ValueError: a value differs. Raised on all processes, with its name and both values.
        TimeoutError: a process did not take part.
    """
    entries = {".".join(path): _text(value) for path, value in _flat(values)}
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    if len(set(exchange("check_same", digest, seconds))) == 1:
        return
    raise ValueError(_difference(exchange_json("check_same", entries, seconds)))


def _difference(reports: list[dict[str, str]]) -> str:
    first = reports[0]
    for index, other in enumerate(reports[1:], start=1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                return (
                    f"`{name}` is {_short(other.get(name))} in {describe_process(index)} and "
                    f"{_short(first.get(name))} in {describe_process(0)}. It must be equal in all "
                    "processes of a run."
                )
    raise AssertionError("digests differ, entries do not")


def _flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) for the entries of nested dicts."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, item in value.items():
        yield from _flat(item, (*path, str(key)))


def _text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError:
        return repr(value)


def _short(text: str | None) -> str:
    if text is None:
        return "missing"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class ReplicasDiffer(AgreedEnd, RuntimeError):
    """Raised on all processes if replicas of an array on several devices differ in any bit."""


def check_replicas(tree: Any, *, step: int, seconds: float = 300.0) -> None:
    """Check that replicated values are equal on all devices, and `step` on all processes.

    All processes must call it, with the training state: parameters, optimizer state, random keys.
    Call it before every save: a checkpoint stores one of the replicas and restores it everywhere,
    so a difference would never be noticed.

    Args:
        tree: tree of `jax.Array`s with `NamedSharding`s over one mesh; other leaves must be equal
            in every process.
        step: training step.
        seconds: how long to wait for the other processes.

    Raises:
        ReplicasDiffer: replicas differ. Raised on all processes; the message names the first leaf
            that differs and the devices in the minority.
        TimeoutError: a process did not take part: it is lost, or at another point of the program.
    """
    leaves = {
        path_name(path): _plain(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    jax.block_until_ready(tree)  # `seconds` does not include pending computations
    # The step is compared first: processes at different steps must not run a collective together.
    own = {name: _host_hash(x) for name, x in leaves.items() if not _is_laid_out(x)}
    if message := _verdict_of_hosts(exchange_json(_NAME, {"step": step, "own": own}, seconds)):
        raise ReplicasDiffer(message)
    shared = {name: x for name, x in leaves.items() if _copies(x)}
    hashes = _hashes(shared) if shared else {}
    differing = {
        name
        for leaf_hashes in hashes.values()
        for name, (_, same) in leaf_hashes.items()
        if not same
    }
    report = {
        device: {name: leaf_hashes[name][0] for name in sorted(differing)}
        for device, leaf_hashes in hashes.items()
        if differing
    }
    if message := _verdict_of_devices(exchange_json(_NAME, report, seconds), leaves, step):
        raise ReplicasDiffer(message)


def _verdict_of_hosts(reports: list[dict[str, Any]]) -> str:
    for index, other in enumerate(reports):
        if other["step"] != reports[0]["step"]:
            return (
                f"{describe_process(index)} is at step {other['step']}, {describe_process(0)} at "
                f"{reports[0]['step']}. Start all of them from the same checkpoint."
            )
        for name in sorted(other["own"].keys() | reports[0]["own"].keys()):
            if other["own"].get(name) != reports[0]["own"].get(name):
                return (
                    f"After step {other['step']} the leaf `{name}` of {describe_process(index)} "
                    f"differs from that of {describe_process(0)}. Compute it from what all "
                    "processes share."
                )
    return ""


def _verdict_of_devices(reports: list[dict[str, Any]], leaves: dict[str, Any], step: int) -> str:
    hashes = {int(device): hashed for report in reports for device, hashed in report.items()}
    differing = sorted({name for leaf_hashes in hashes.values() for name in leaf_hashes})
    if not differing:
        return ""
    name = differing[0]
    return (
        f"After step {step} {len(differing)} of {len(leaves)} leaves differ between devices that "
        f"should hold the same. The first is `{name}`: {_minority(name, leaves[name], hashes)}. "
        "Something was computed outside of the step, or a device is faulty. Go on from the last "
        "checkpoint before which they were compared."
    )


def _minority(name: str, x: jax.Array, hashes: dict[int, dict[str, int]]) -> str:
    """Describe the devices whose hash of the leaf `name` is in the minority."""
    groups: dict[Any, dict[int, list[Any]]] = {}  # by part of the array, devices by hash
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        if (leaf_hashes := hashes.get(device.id)) and name in leaf_hashes:
            by_hash = groups.setdefault(str(index), {})
            by_hash.setdefault(leaf_hashes[name], []).append(device)
    for by_hash in groups.values():
        if len(by_hash) > 1:
            odd = min(by_hash.values(), key=len)
            names = sorted(f"device {d.id} of {describe_process(d.process_index)}" for d in odd)
            return f"{', '.join(names)} against {sum(map(len, by_hash.values())) - len(odd)} others"
    return "its replicas"


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _is_laid_out(x: Any) -> bool:
    return isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)


def _copies(x: Any) -> tuple[str, ...]:
    """Return the mesh axes of more than one device over which a leaf is replicated."""
    if not _is_laid_out(x) or x.size == 0:
        return ()
    split = jax.tree.leaves(tuple(x.sharding.spec))
    return tuple(a for a, n in x.sharding.mesh.shape.items() if n > 1 and a not in split)


def _hashes(leaves: dict[str, Any]) -> dict[int, dict[str, tuple[int, bool]]]:
    """Return, by local device id and leaf, a shard's hash, and True if all its replicas have it."""
    specs = tuple(x.sharding.spec for x in leaves.values())
    copies = tuple(_copies(x) for x in leaves.values())
    mesh = next(iter(leaves.values())).sharding.mesh
    hashes, same = _hash_program(mesh, specs, copies)(*leaves.values())
    by_device = {shard.device.id: np.asarray(shard.data)[0] for shard in same.addressable_shards}
    return {
        shard.device.id: {
            name: (int(value), bool(agrees))
            for name, value, agrees in zip(
                leaves, np.asarray(shard.data)[0], by_device[shard.device.id], strict=True
            )
        }
        for shard in hashes.addressable_shards
    }


@functools.lru_cache(maxsize=16)
def _hash_program(mesh: Any, specs: tuple[Any, ...], copies: tuple[tuple[str, ...], ...]):
    def per_device(*shards):
        hashes, same = [], []
        for shard, axes in zip(shards, copies, strict=True):
            value = _hash(to_device(shard))
            hashes.append(value)
            same.append(lax.pmin(value, axes) == lax.pmax(value, axes))
        return jnp.stack(hashes)[None], jnp.stack(same)[None]

    out = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=(out, out), check_vma=False)
    )


def _hash(x: Array) -> UInt32[Array, ""]:
    """Hash a shard by the formula at the top of this file."""
    words = _words(x)
    index = lax.iota(jnp.uint32, words.size)
    odd = (index * _MULTIPLIER) | np.uint32(1)
    return jnp.sum(words * odd, dtype=jnp.uint32)


def _words(x: Array) -> UInt32[Array, " words"]:
    """Return the bits of an array as uint32 words; each holds one element, or a part of it."""
    if x.dtype == bool:
        return x.reshape(-1).astype(jnp.uint32)
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else 8 * x.dtype.itemsize
    if bits < 8:  # a bitcast would join several elements in a byte, and they may not fill it
        return x.reshape(-1).astype(jnp.int32).view(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
        bits //= 2
    unsigned = {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
    return lax.bitcast_convert_type(x, unsigned).reshape(-1).astype(jnp.uint32)


def _host_hash(x: Any) -> int:
    return zlib.crc32(np.asarray(x).tobytes())
