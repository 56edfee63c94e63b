"""Compile programs with arguments and results in host memory ahead of time, without GPUs.

The devices of a topology list no memories. For such devices JAX silently drops the memory kind of a
`NamedSharding` when it is made, so an argument in `pinned_host` would be compiled as one in device
memory. A sharding on the mesh's abstract mesh, which has no devices, keeps the kind. Lowering then
finds the devices by `jax.set_mesh` with the mesh of devices (JAX 0.10.2 and 0.12.0.1).

A result is in host memory if the program puts it there
(`jax.device_put(x, jax.memory.Space.Host)`). `in_shardings` and `out_shardings` of `jax.jit` cannot
name host memory: they are shardings on devices of the topology, which drop the memory kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

HOST = "pinned_host"


def on_abstract_mesh(tree: Any, memory_kinds: Any = None) -> Any:
    """Move the shardings of structs to the abstract mesh, where they can name a kind of memory.

    Args:
        tree: a tree of `jax.ShapeDtypeStruct`s with `NamedSharding`s.
        memory_kinds: the kind for each leaf, `"pinned_host"`, `"device"` or None, in a tree that is
            a prefix of `tree`. None keeps the kind of the leaf's sharding. A sharding on devices of
            a topology has no kind, even if it was made with one.

    Returns:
        The tree of structs with the new shardings.

    Raises:
        ValueError: a leaf has no `NamedSharding`.
    """
    kinds = jax.tree.broadcast(memory_kinds, tree, is_leaf=lambda x: x is None)

    def moved(path: Any, x: Any, kind: str | None) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"`tree{jax.tree_util.keystr(path)}` must have a `NamedSharding`; got {sharding}. "
                "Give one to its `jax.ShapeDtypeStruct`, or leave it out of `tree`."
            )
        mesh = sharding.mesh.abstract_mesh
        kept = NamedSharding(mesh, sharding.spec, memory_kind=kind or sharding.memory_kind)
        return x.update(sharding=kept)

    return jax.tree_util.tree_map_with_path(moved, tree, kinds)


def host_bytes(tree: Any) -> int:
    """Return how many bytes of a tree of structs lie in host memory for one device.

    These are its shards of the structs whose shardings name host memory.

    Raises:
        ValueError: a sharding in host memory is not on an abstract mesh.
    """
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        sharding = getattr(leaf, "sharding", None)
        if sharding is None or sharding.memory_kind != HOST:
            continue
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
            raise ValueError(
                f"`tree{jax.tree_util.keystr(path)}` in host memory must be on an abstract mesh; "
                f"got {sharding}. Give it to `on_abstract_mesh` first."
            )
        total += _shard_bytes(leaf, sharding)
    return total


def compile_with_host_memory(
    function: Any,
    arguments: Sequence[Any],
    mesh: Mesh,
    *,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> jax.stages.Compiled:
    """Compile for the devices of `mesh`, and check how many bytes are in host memory.

    Args:
        function: the result of `jax.jit`, without `in_shardings` and `out_shardings`.
        arguments: trees of structs. Structs in host memory are from `on_abstract_mesh`.
        mesh: the mesh of a topology's devices.
        options: the options of the compiler.
        keywords: trees of structs that `function` takes by name.

    Raises:
        ValueError: a sharding in host memory is not on an abstract mesh; or the compiled program
            has a different number of bytes of arguments or results in host memory than the types
            of its arguments and results say.
    """
    given = host_bytes((arguments, keywords))
    with jax.set_mesh(mesh):
        traced = function.trace(*arguments, **keywords)
        compiled = traced.lower().compile(compiler_options=options)
    memory = compiled.memory_analysis()
    _require_equal("arguments", given, memory.host_argument_size_in_bytes)
    left = sum(_shard_bytes(x, sharding) for x, sharding in _results_on_host(traced, compiled))
    _require_equal("results", left, memory.host_output_size_in_bytes)
    return compiled


def _results_on_host(traced: Any, compiled: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the type and the sharding of each result that the program puts into host memory.

    Args:
        traced: what `trace` of the jitted function returned.
        compiled: the compiled program.
    """
    shardings = jax.tree.leaves(compiled.output_shardings)
    for x, sharding in zip(traced.jaxpr.out_avals, shardings, strict=True):
        if x.memory_space == jax.memory.Space.Host:
            yield x, sharding


def _shard_bytes(x: Any, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _require_equal(name: str, given: int, there: int) -> None:
    if given != there:
        raise ValueError(
            f"By their types, the {name} have {given} bytes of a device in host memory; the "
            f"compiled program has {there}. If an argument is not used, keep it "
            "(`jax.jit(..., keep_unused=True)`); give `jax.jit` no `in_shardings` and no "
            "`out_shardings`; and let no result be a slice of a host array, which XLA leaves in "
            "device memory."
        )
