"""The GSPMD baseline: arrays are sharded along their largest dim, and XLA inserts collectives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxzero as jz

from ._llama import EXPERTS


def shardings(tree: Any, mesh: Mesh, experts: Sequence[str] = ()) -> Any:
    """Shardings that split each leaf over all devices, along its largest dim that they divide.

    A leaf without such a dim is replicated. Leaves `[layers, experts, ...]` whose names are in
    `experts` are split over `local` on their second dim, and over `node` on the largest one after
    it.

    That is how FSDP is commonly written with GSPMD. Where matrices are cut on their first dim, as
    jaxzero does, the compiler sends more: with 40M parameters 704 MB for a step of
    `race.py`, and with this rule 297 MB.
    """

    def sharding(path: Any, x: Any) -> NamedSharding:
        if getattr(path[-1], "key", None) in experts:
            dim = max(range(2, x.ndim), key=lambda dim: x.shape[dim])
            return NamedSharding(mesh, PartitionSpec(None, "local", *[None] * (dim - 2), "node"))
        even = [dim for dim, size in enumerate(x.shape) if size and size % mesh.size == 0]
        if not even:
            return NamedSharding(mesh, PartitionSpec())
        dim = max(even, key=lambda dim: (x.shape[dim], -dim))
        return NamedSharding(mesh, PartitionSpec(*[None] * dim, mesh.axis_names[::-1]))

    return jax.tree.map_with_path(sharding, tree)


def init(function: Callable, *args: Any, mesh: Mesh) -> Any:
    """Run `function(*args)` on all devices, with its results sharded by `shardings`."""
    split = shardings(jax.eval_shape(function, *args), mesh)
    return jax.jit(function, out_shardings=split)(*args)


def lowered(variant: str, model: Any, mesh: Mesh, batch: Any) -> Any:
    """Lower the loss and gradients of a model of `_models` as one GSPMD program.

    All variants except `gspmd` have sharding constraints on activations. With `gspmd-experts`
    experts are split over the devices of a node, gathered over nodes for each layer, and tokens are
    exchanged as with jaxzero, in a `jax.shard_map` around the experts.
    """
    names = EXPERTS if variant == "gspmd-experts" else ()
    of_rows, is_long = jz.Zero(mesh).batch_spec, "tokens" in mesh.axis_names
    rows = NamedSharding(mesh, of_rows)

    def constrain(x: jax.Array) -> jax.Array:
        others = (None, "tokens") if x.ndim == 4 else ("tokens",)  # heads, or tokens
        spec = PartitionSpec(*of_rows, *others) if is_long else of_rows
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def on_devices(function: Callable) -> Callable:
        specs = of_rows, of_rows, of_rows, PartitionSpec("local")
        return jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=of_rows, check_vma=False
        )

    options: dict[str, Any] = {} if variant == "gspmd" else {"constrain": constrain}
    options |= {"on_devices": on_devices} if names else {}
    loss = functools.partial(model.loss, **options)
    trees = [jax.eval_shape(make, jax.random.key(0)) for make in (model.init, model.frozen) if make]
    split = [shardings(tree, mesh, names) for tree in trees]
    args = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), trees, split)
    batch = jax.tree.map(lambda x: x.update(sharding=rows), batch)
    whole = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(jax.value_and_grad(loss), out_shardings=(whole, split[0]))
    with jax.set_mesh(mesh) if is_long else contextlib.nullcontext():
        return step.lower(*args, batch)
