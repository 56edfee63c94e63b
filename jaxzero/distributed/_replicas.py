"""Whether what should be the same on several devices is: a hash of bits, compared now and then.

Replicas drift apart when a host computes something by itself (a random number, a learning rate from
its own clock, another order of data), and training goes on, wrongly. The hash of a shard is

    sum over i of word(i) * odd(i)   modulo 2**32,

with odd multipliers, so a change of any one word changes it, and other changes do but for one in
2**32. Replicas agree if the smallest and the largest hash among them are equal: one number for each
leaf travels. Leaves that no two devices hold in common cost nothing.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from .._processes import describe_process, exchange_json
from .._sharding import path_name
from ._watchdog import AgreedEnd

_NAME = "check_replicas"  # of its exchanges
_MULTIPLIER = np.uint32(0x9E3779B1)  # odd; spreads indices over 32 bits (Knuth, TAOCP 3, 6.4)


class ReplicasDiffer(AgreedEnd, RuntimeError):
    """Devices that should hold the same bits do not. Raised on all processes."""


def check_replicas(tree: Any, *, step: int, seconds: float = 300.0) -> None:
    """Compare what several devices hold in common, and the step, over all processes.

    Call it on what training carries on: parameters, optimizer state, keys. Do so before every save:
    a checkpoint keeps one of the replicas, and whoever goes on from it has that everywhere, so that
    what differed would never be noticed. All processes call it together.

    Args:
        tree: of `jax.Array`s laid out by `NamedSharding` over one mesh; other leaves must be the
            same in every process.
        step: of training.
        seconds: how long to wait for the other processes.

    Raises:
        ReplicasDiffer: on all processes; it names the first leaf that differs and the devices in
            the minority.
        TimeoutError: a process did not come: it is lost, or at another place of the program.
    """
    leaves = {
        path_name(path): _plain(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    jax.block_until_ready(tree)  # so that what devices still do is no part of `seconds`
    # First, for processes at different steps must not meet in the collective that comes then.
    own = {name: _host_hash(x) for name, x in leaves.items() if not _is_laid_out(x)}
    if message := _verdict_of_hosts(exchange_json(_NAME, {"step": step, "own": own}, seconds)):
        raise ReplicasDiffer(message)
    shared = {name: x for name, x in leaves.items() if _copies(x)}
    hashes = _hashes(shared) if shared else {}
    differing = {name for of in hashes.values() for name, (_, same) in of.items() if not same}
    told = {
        device: {name: of[name][0] for name in sorted(differing)}
        for device, of in hashes.items()
        if differing
    }
    if message := _verdict_of_devices(exchange_json(_NAME, told, seconds), leaves, step):
        raise ReplicasDiffer(message)


def _verdict_of_hosts(told: list[dict[str, Any]]) -> str:
    for index, other in enumerate(told):
        if other["step"] != told[0]["step"]:
            return (
                f"{describe_process(index)} is at step {other['step']}, {describe_process(0)} at "
                f"{told[0]['step']}. Start all of them from the same checkpoint."
            )
        for name, value in other["own"].items():
            if value != told[0]["own"].get(name):
                return (
                    f"After step {other['step']} the leaf `{name}` of {describe_process(index)} "
                    f"differs from that of {describe_process(0)}. Compute it from what all "
                    "processes share."
                )
    return ""


def _verdict_of_devices(told: list[dict[str, Any]], leaves: dict[str, Any], step: int) -> str:
    hashes = {int(device): of for other in told for device, of in other.items()}
    differing = sorted({name for of in hashes.values() for name in of})
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
    """Which devices are alone with their bits."""
    groups: dict[Any, dict[int, list[Any]]] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        if (of := hashes.get(device.id)) and name in of:
            piece = groups.setdefault(str(index), {})
            piece.setdefault(of[name], []).append(device)
    for piece in groups.values():
        if len(piece) > 1:
            odd = min(piece.values(), key=len)
            names = sorted(f"device {d.id} of {describe_process(d.process_index)}" for d in odd)
            return f"{', '.join(names)} against {sum(map(len, piece.values())) - len(odd)} others"
    return "its replicas"


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _is_laid_out(x: Any) -> bool:
    return isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)


def _copies(x: Any) -> tuple[str, ...]:
    """The mesh axes over which a leaf is replicated; those of one device do not count."""
    if not _is_laid_out(x) or x.size == 0:
        return ()
    split = jax.tree.leaves(tuple(x.sharding.spec))
    return tuple(a for a, n in x.sharding.mesh.shape.items() if n > 1 and a not in split)


def _hashes(leaves: dict[str, Any]) -> dict[int, dict[str, tuple[int, bool]]]:
    """By device of this process and leaf: the hash, and whether all replicas have the same."""
    specs = tuple(x.sharding.spec for x in leaves.values())
    copies = tuple(_copies(x) for x in leaves.values())
    mesh = next(iter(leaves.values())).sharding.mesh
    found, same = _hash_program(mesh, specs, copies)(*leaves.values())
    by_device = {shard.device.id: np.asarray(shard.data)[0] for shard in same.addressable_shards}
    return {
        shard.device.id: {
            name: (int(value), bool(agrees))
            for name, value, agrees in zip(
                leaves, np.asarray(shard.data)[0], by_device[shard.device.id], strict=True
            )
        }
        for shard in found.addressable_shards
    }


@functools.lru_cache(maxsize=16)
def _hash_program(mesh: Any, specs: tuple[Any, ...], copies: tuple[tuple[str, ...], ...]):
    def per_device(*shards):
        found, same = [], []
        for shard, axes in zip(shards, copies, strict=True):
            value = _hash(shard)
            found.append(value)
            same.append(lax.pmin(value, axes) == lax.pmax(value, axes))
        return jnp.stack(found)[None], jnp.stack(same)[None]

    out = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=(out, out), check_vma=False)
    )


def _hash(x: Array) -> UInt32[Array, ""]:
    """The formula above."""
    words = _words(x)
    index = lax.iota(jnp.uint32, words.size)
    odd = (index * _MULTIPLIER) | np.uint32(1)
    return jnp.sum(words * odd, dtype=jnp.uint32)


def _words(x: Array) -> UInt32[Array, " words"]:
    """The bits of an array, one element or a part of one to a word."""
    if x.dtype == bool:
        return x.reshape(-1).astype(jnp.uint32)
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else 8 * x.dtype.itemsize
    if bits < 8:
        return x.reshape(-1).astype(jnp.int32).view(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
        bits //= 2
    unsigned = {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
    return lax.bitcast_convert_type(x, unsigned).reshape(-1).astype(jnp.uint32)


def _host_hash(x: Any) -> int:
    return zlib.crc32(np.asarray(x).tobytes())
