"""Run a training step as one program: loss, gradients, and the update of parameters and state.

A scanned stack in host memory is updated layer by layer in the loop that makes its gradient. Other
leaves are updated at the end, by the same traced update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax import lax
from jaxtyping import Array

from .._execute import DeviceWireState
from .._mesh import in_host
from .._plan import Plan
from .._sharding import (
    ZeroConfig,
    arrays_of,
    flatten,
    of_arrays,
    overwritten_leaves,
)
from .._windowed_update import TracedUpdate, UpdateLayouts
from .arguments import Options
from .calls import returned
from .optimizer_state import TrueShapes, check_is_optimizer, trained_part
from .programs import Programs
from .transform import Transform
from .updates import Layouts, ProgramUpdates, apply_gradients, split, split_arrays, with_untrained


def check_one_program(tx: Any, config: ZeroConfig, microbatches: int, weighted: bool) -> None:
    """Check `tx`, and refuse options that delay the final gradients to the end of the step.

    Raises:
        TypeError: `tx` is no optimizer.
        NotImplementedError: `microbatches` is not 1, `weighted` is set, or the codecs of the config
            keep a wire state.
    """
    check_is_optimizer(tx)
    reasons = {
        f"`microbatches` of {microbatches}: gradients are final only after the last one": (
            microbatches != 1
        ),
        "`weighted=True`: the sum of all weights is known only at the end": weighted,
        "codecs that keep a wire state "
        f"(weights {config.weights.node}, gradients {config.gradients.node})": (
            config.needs_wire_state
        ),
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise NotImplementedError(
                f"`value_and_update` cannot do {reason}. Use `zero.value_and_grad(f, ...)` and "
                "`zero.apply_gradients(tx, grads, opt_state, params)`."
            )


def check_plan(
    tx: Any, opt_state: Any, wire_state: Any, options: Options, config: ZeroConfig
) -> None:
    """Check those arguments of `Zero.plan` that ask for a plan of `value_and_update`.

    Raises:
        TypeError: `tx` is no optimizer.
        ValueError: `tx` or `opt_state` is given alone, or `tx` with an argument that
            `value_and_update` does not take.
        NotImplementedError: as `check_one_program`.
    """
    if tx is None:
        if opt_state is not None:
            raise ValueError(
                "`plan` got `opt_state` without `tx`. Give both, for the plan of "
                "`zero.value_and_update(f, tx)`, or neither."
            )
        return
    check_one_program(tx, config, options.microbatches, options.weighted)
    if opt_state is None:
        raise ValueError(
            "`plan` got `tx` without `opt_state`. Give the state too: "
            "`zero.init_optimizer(tx, params)`, where `params` may be abstract."
        )
    refused = {
        "argnums": options.argnums != (0,),
        "halves": options.halves,
        "shares": options.shares is not None,
        "wire_state": wire_state is not None,
    }
    for name, is_given in refused.items():
        if is_given:
            raise ValueError(
                f"`plan` with `tx` plans `zero.value_and_update(f, tx)`, which takes no `{name}`. "
                "Leave it out, or `tx`."
            )


class ValueAndUpdate:
    """One call of a step made by `Zero.value_and_update`.

    Args:
        transform: the transform of the loss; its first argument has the parameters.
        tx: the optimizer.
        params: the parameters, a tree in stored form.
        opt_state: the optimizer state.
        layouts: the layouts of gradients, state and parameters.
        programs: the cache of compiled programs.
    """

    def __init__(
        self,
        transform: Transform,
        tx: optax.GradientTransformation,
        params: Any,
        opt_state: Any,
        layouts: Layouts,
        programs: Programs,
    ):
        self._transform = transform
        self._tx = tx
        pairs = (layouts.params, params), (layouts.state, opt_state)
        self._tree_layouts = tuple(layout.with_statics_of(tree) for layout, tree in pairs)
        self._layouts = layouts
        self._programs = programs

    def run(self, arrays: list[list[Any]], opt_state: Any) -> tuple[Any, ...]:
        """Run the step; return `(loss or (loss, aux), params, opt_state)`.

        Args:
            arrays: the arrays of each argument of the loss.
            opt_state: the optimizer state.
        """
        value, *outputs = self._programs.run(self._traced, arrays, arrays_of(opt_state))
        pairs = zip(self._tree_layouts, outputs, strict=True)
        return value, *(layout.stored(x) for layout, x in pairs)

    def plan(self, arrays: list[list[Any]], opt_state: Any, along: Sequence[int]) -> Plan:
        """Return the plan of the step, and of its tangents along arguments at positions `along`."""
        return self._transform.plan(self._traced, arrays, arrays_of(opt_state), along)

    def _traced(self, arrays: list[list[Array]], state: list[Array]) -> tuple[Any, ...]:
        of_params, of_state = self._tree_layouts
        params, opt_state = of_params.stored(arrays[0]), of_state.stored(state)
        if any(map(in_host, (*arrays[0], *state))):
            value, *new = self._with_offload(arrays, params, opt_state)
        else:
            outputs = self._transform.program(arrays, DeviceWireState())
            value, grads = returned(self._transform, outputs, True, False)
            new = apply_gradients(
                self._tx, grads, opt_state, params, self._layouts, {}, self._programs
            )
        return value, *map(arrays_of, new)

    def _with_offload(
        self, arrays: list[list[Array]], params: Any, opt_state: Any
    ) -> tuple[Any, Any, Any]:
        """Run the step for a model some of whose arrays are in host memory.

        Args:
            arrays: the arrays of each argument of the loss.
            params: the parameters, a tree in stored form.
            opt_state: the optimizer state.

        Returns:
            The loss or `(loss, aux)`; and the new parameters and optimizer state.
        """
        layouts, tx = self._layouts, self._tx
        mesh, axes = layouts.mesh, layouts.state_axes
        trained, layout = trained_part(params, self._tree_layouts[0])
        of_grads = trained_part(params, layouts.gradients)[1]
        update = TracedUpdate(
            tx.inner if isinstance(tx, TrueShapes) else tx,
            opt_state,
            split(layout, trained, mesh, axes),
            UpdateLayouts(of_grads, self._tree_layouts[1], layout, mesh, axes),
            {},
        )
        argument, states = self._transform.call.arguments[0], overwritten_leaves(params)
        kinds = zip(of_arrays(params, states), argument.trained, strict=True)
        of_state = [is_state for is_state, has_gradient in kinds if has_gradient]
        updates = ProgramUpdates(update, [i for i, x in enumerate(of_state) if not x])
        outputs = self._transform.program(arrays, DeviceWireState(), updates)
        loss, flat, aux, _, _, updated = outputs
        gradients = [x for x, is_state in zip(flat, of_state, strict=True) if not is_state]
        next_states = iter([x for x, is_state in zip(flat, of_state, strict=True) if is_state])
        next_states = jax.tree.unflatten(
            flatten(params)[2], [next(next_states, None) if x else None for x in states]
        )
        done = {}
        for leaf, new in zip(updates.leaves.values(), updated, strict=True):
            if new is not None:
                done |= dict(zip(leaf.values, new, strict=True))
        gradients = split_arrays(of_grads, gradients, mesh, axes)
        at_once = _fit_at_once(update, updates, [x is None for x in gradients])
        # Without a barrier, XLA may add a term of the update before the gradient is summed up.
        if at_once:  # a barrier for each, so that no gradient waits for another
            gradients = [x if x is None else lax.optimization_barrier(x) for x in gradients]
        else:
            gradients = lax.optimization_barrier(gradients)
        new, new_state = update.apply(gradients, done, at_once=at_once)
        new = split(layout, new, mesh, layouts.weight_axes)
        if isinstance(tx, TrueShapes):  # some of the state may be split by layer
            new_state = split(self._tree_layouts[1], new_state, mesh, axes)
        value = (loss, aux) if self._transform.options.has_aux else loss
        return value, with_untrained(params, trained, new, next_states), new_state


def _fit_at_once(update: TracedUpdate, updates: ProgramUpdates, are_done: Sequence[bool]) -> bool:
    """Return whether leaves in host memory can be updated all at once at the end of the step.

    These are the leaves that the program has not updated in its loops. At once, all of them are on
    the device together; otherwise they are updated in windows. They fit if they take no more memory
    than the loop that updates layers, which holds a layer being fetched and a layer being written.

    Args:
        update: the update of all leaves.
        updates: the updates that the program could run.
        are_done: for each leaf, whether the program has updated it.
    """
    done = [number for number in updates.leaves if are_done[number]]
    lengths = {number: update.leaf(number).spec.shape[0] for number in done}
    layer_bytes = sum(update.host_bytes([i]) / length for i, length in lengths.items())
    left = [number for number in update.windowed if not are_done[number]]
    return update.host_bytes(left) <= 2 * layer_bytes
