"""The update of all leaves: reductions over windows, level by level, then the pass that writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optax
from jaxtyping import Array

from .._mesh import in_host
from .._program import Atom, Value
from .._sharding import LeafSpec, StoredArray, arrays_of
from .analysis import analyse
from .full_values import FullValues
from .layouts import UpdateLayouts
from .leaf_sweeps import Passes, WindowedLeaf
from .outputs import check_outputs
from .program import trace_update

WINDOW_BYTES = 2**26  # a copy of 1 ms at 64 GB/s, which hides the launch of the next


def windowed_update(
    tx: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    *,
    layouts: UpdateLayouts,
    extra_args: Mapping[str, Any],
    window_bytes: int = WINDOW_BYTES,
) -> tuple[Any, Any]:
    """`tx.update` and `optax.apply_updates`, with about two windows of a leaf on the device.

    A leaf is updated by windows if its gradient, its parameter, or any of its state is in host
    memory. All other leaves are updated as without offload, by any optimizer.

    Args:
        tx: the optimizer, which sees leaves in their true shapes.
        grads: the gradients: traced arrays, like all the trees.
        state: the optimizer state.
        params: the trained parameters.
        layouts: the layouts of these trees.
        extra_args: further arguments of `tx.update`.
        window_bytes: bytes of a leaf's arrays that one window holds.

    Returns:
        The new parameters and the new state, each array in the memory of the old one. They are
        those of `tx.update`, bit for bit if the optimizer reduces nothing over a leaf; otherwise
        sums are added in another order.

    Raises:
        NotImplementedError: the optimizer needs more of a leaf in host memory than one element at
            a time, and reductions of all its elements.
        ValueError: the trees do not fit each other.
    """
    known = layouts.owners()
    program, extras = trace_update(tx, layouts, extra_args)
    arrays = [x for tree in (grads, state, params, extras) for x in arrays_of(tree)]
    forms = [x.leaf() if isinstance(x, StoredArray) else None for x in extras]
    leaves: list[LeafSpec | None] = [*layouts.leaves, *forms]
    owners = _windowed_owners(known, layouts, arrays)
    analysis = analyse(program, owners, layouts.params.leaves)
    inputs = program.block.inputs
    new = dict(zip(inputs[len(layouts.gradients.leaves) :], program.block.outputs, strict=False))
    check_outputs(analysis, layouts, owners)

    full = FullValues(program, layouts)
    for value, x, leaf, owner in zip(inputs, arrays, leaves, owners, strict=True):
        if owner is None:
            full.add(value, x, leaf)

    def scalars(atoms: Sequence[Atom]) -> list[Array]:
        return full.compute(atoms, [None] * len(atoms))

    windowed = _windowed_leaves(layouts, owners, dict(zip(inputs, arrays, strict=True)), new)
    passes = Passes(analysis, layouts, window_bytes)
    for operations in analysis.reductions:
        for value, x in passes.reduce(windowed, operations, scalars).items():
            full.add(value, x)
    results = passes.update([x for x in windowed.values() if x.updates], scalars)
    rest = {
        value: leaf
        for value, leaf, owner in zip(inputs, leaves, owners, strict=True)
        if owner is None and value in new
    }
    computed = full.compute([new[value] for value in rest], list(rest.values()))
    results |= dict(zip(rest, computed, strict=True))
    kept = dict(zip(inputs, arrays, strict=True))
    outputs = [results.get(value, kept[value]) for value in new]
    num_state = len(layouts.state.leaves)
    return layouts.params.stored(outputs[num_state:]), layouts.state.stored(outputs[:num_state])


def _windowed_owners(
    known: Sequence[int | None], layouts: UpdateLayouts, arrays: Sequence[Array]
) -> list[int | None]:
    """For each input of the program the windowed leaf that it belongs to, or None."""
    names = [leaf.path for leaf in layouts.leaves]
    num_extras = len(arrays) - len(known)
    owners = [*known, *[None] * num_extras]
    for x, owner, name in zip(arrays, owners, [*names, *["extra_args"] * num_extras], strict=True):
        if in_host(x) and owner is None:
            raise ValueError(
                f"`{name}` is an array in host memory that does not belong to a parameter of its "
                "shape, so it cannot be used window by window. Keep it in device memory: "
                "`jax.device_put(x, jax.memory.Space.Device)`."
            )
    windowed = {owner for x, owner in zip(arrays, owners, strict=True) if in_host(x)}
    return [owner if owner in windowed else None for owner in owners]


def _windowed_leaves(
    layouts: UpdateLayouts,
    owners: Sequence[int | None],
    arrays: Mapping[Value, Array],
    new: Mapping[Value, Atom],
) -> dict[int, WindowedLeaf]:
    """The leaves that are updated by windows, by their index among the parameters."""
    found = {}
    for number in sorted({owner for owner in owners if owner is not None}):
        pairs = zip(arrays.items(), owners, strict=True)
        mine = {value: x for (value, x), owner in pairs if owner == number}
        updates = {v: new[v] for v in mine if v in new and new[v] is not v}
        found[number] = WindowedLeaf(number, layouts.params.leaves[number], mine, updates)
    return found
