"""Transform a user's function into a sharded program: `run_on_device` inside a `shard_map`.

The program takes and returns global arrays. Its body, on each device, is the user's function with
the gathers and reductions of the plan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from .._collectives import CommSpec, Ledger, accumulator_dtype, labelled, recording
from .._execute import DeviceWireState, Result, run_on_device, specs_of, total_weight
from .._mesh import AnyMesh, forward_only, map_devices, physical
from .._plan import Plan, described_codecs
from .._program import OpenProgram, with_rolled_layers, without_checkpoints
from .._sharding import HpZ, PerAxis, ZeroConfig
from .._simigrad import GradientHalves
from .._stages import LayerLists
from .arguments import BATCH, Argument, Call, Options
from .mixed_rows import warn_of_mixed_rows
from .outputs import Outputs, combined_gradients, combined_leaves, parameters_of, values_of
from .placement import constrain, constrain_tree
from .programs import Rule, run_with_tangents, tangents_like, zeros
from .rows import num_rows
from .stages import check_no_tangents, run_on_stage
from .tangents import Derivative, check_tangents, trace_along
from .updates import ProgramUpdates
from .user_function import (
    call_checked,
    check_loss,
    shapes_with_twice_the_rows,
    split_aux,
    split_weight,
)


class Transform:
    """The sharded program of a user's function for the arguments of one call, and its plan.

    Gradients are reduced to shards; those of the leaves in `combined` are combined like outputs.
    """

    def __init__(
        self,
        function: Callable,
        call: Call,
        options: Options,
        mesh: AnyMesh,
        config: ZeroConfig,
        flat: Callable | None = None,
    ):
        self.function = function
        self.call = call
        self.flat = flat  # or `_flat`: a bound method here would be a cycle of references
        self.options = options
        self.devices = mesh
        self.mesh = physical(mesh)
        self.config = config
        self.comm = CommSpec.of(mesh, config, options.halves, options.node_microbatches)
        self.combined = combined_leaves(call, options)
        self.parameters = parameters_of(call, options, config, mesh, self.combined)
        trees = [number for number, *_, layout in call.sharded() for _ in layout.leaves]
        self.layers = LayerLists.of(self.parameters.leaves, trees, config.stages)
        # Set by tracing `program`: its plan, and what `flat` was traced to.
        self._plan: Plan | None = None
        self._traced: OpenProgram | None = None

    def plan(
        self, run: Callable, arrays: list[list[Any]], state: Any, along: Sequence[int] = ()
    ) -> Plan:
        """Trace `run(arrays, state)`, which calls `program`, and return the plan of the program.

        Args:
            arrays: for each argument of the call its global arrays.
            state: the second argument of `run`: a wire state, or the arrays of an optimizer state.
            along: positions of the arguments along which tangents are traced too.

        Raises:
            ValueError: `along` has a position that no argument of the call has.
        """
        trace_along(run, arrays, state, along, self.call.num_positional)
        assert self._plan is not None
        return self._plan

    def program(
        self,
        arrays: list[list[Array]],
        wire_state: DeviceWireState,
        updates: ProgramUpdates | None = None,
    ) -> tuple[Any, list[Any], Any, DeviceWireState, GradientHalves | None, list[Any]]:
        """Run the step on global arrays.

        Returns:
            Loss, flat gradients, other outputs, next wire state, `GradientHalves`; and for each
            leaf of `updates` its new arrays, or None if its gradient is returned instead.
        """
        updates = updates or ProgramUpdates(None)
        wire_state, unread = wire_state.without(self.combined)
        given = updates.arguments
        if AxisType.Explicit in self.mesh.axis_types:
            specs = self._in_specs, self._state_specs(wire_state), updates.in_specs
            inputs = arrays, wire_state, given
            arrays, wire_state, given = constrain_tree(inputs, self.mesh, specs)
        rows = num_rows(self.call, arrays)
        if rows is not None:
            rows = rows // self.comm.num_devices // self.options.microbatches
        outputs = Outputs(self.options, rows)
        outs = self._run(arrays, wire_state, given, outputs, updates)
        loss, gradients, combined, parts, wire_state, halves, updated = outs
        gradients = self._all_gradients(gradients, combined)
        if halves is not None:  # values of a `custom_vjp` are no gradients to compare
            none = [jnp.zeros([], jnp.float32)] * len(combined)
            first, second, cross = (self._in_order(x, none) for x in halves[:3])
            halves = GradientHalves(first, second, cross, halves.share)
        loss, gradients, parts, halves = forward_only((loss, gradients, parts, halves))
        wire_state = wire_state.joined(unread)
        return loss, gradients, outputs.join(*parts), wire_state, halves, updated

    def _run(
        self,
        arrays: list[list[Array]],
        wire_state: DeviceWireState,
        given: list[list[Array]],
        outputs: Outputs,
        updates: ProgramUpdates,
    ) -> Any:
        """Run the program on every device; return its results as global arrays.

        They are loss, gradients (reduced, combined), outputs, wire state, halves, and updates.
        """
        state_specs = self._state_specs(wire_state)
        gradient_specs = [
            self.parameters.leaves[i].spec(self._gradient_axes, manual_only=True)
            for i in self.parameters.differentiated
        ]
        mapped = map_devices(
            lambda arrays, wire_state, given: self._on_device(
                arrays, wire_state, given, outputs, updates
            ),
            self.devices,
            in_specs=(self._in_specs, state_specs, updates.in_specs),
            out_specs=(
                PartitionSpec(),
                gradient_specs,
                PartitionSpec(),
                (PartitionSpec(), BATCH),
                state_specs,
                PartitionSpec(),
                updates.out_specs,
            ),
        )

        def rule_of(_: OpenProgram) -> tuple[list[Any], Rule]:
            assert self._traced is not None
            closed_over = self._traced.constants
            traced = dataclasses.replace(self._traced, constants=[])

            def tangents_of(primals: Any, tangents: Any, results: Any) -> Any:
                check_no_tangents(self.config)
                check_tangents(self.options, self._shares_loss, updates, tangents[1])
                derivative = Derivative.along(traced, self.call, primals, tangents)
                return self._tangents(derivative, outputs, results)

            return closed_over, tangents_of

        return run_with_tangents(mapped, (arrays, wire_state, given), rule_of)

    def _tangents(self, derivative: Derivative, outputs: Outputs, results: Any) -> Any:
        """Return the tangents of `results`, which `_run` returned, by a program without codecs."""
        call, arrays = derivative.arguments()
        hpz = self.config.hpz and HpZ(codec=None)
        config = dataclasses.replace(self.config, weights=PerAxis(), gradients=PerAxis(), hpz=hpz)
        program = Transform(
            self.function, call, self.options, self.devices, config, derivative.flat
        )
        of_outputs = Outputs(self.options, None)
        of_outputs.how = derivative.floats(outputs.how)
        tangents = program._run(arrays, DeviceWireState(), [[]], of_outputs, ProgramUpdates(None))
        loss, gradients, _, parts, *_ = tangents
        assert self._plan is not None and program._plan is not None
        self._plan = self._plan.with_tangents(program._plan)
        parts = tuple(map(tangents_like, results[3], parts))
        return loss, gradients, [], parts, *zeros(results[4:])

    @property
    def _gradient_axes(self) -> tuple[str, ...]:
        return self.config.axes_at(2)

    @property
    def _in_specs(self) -> list[list[PartitionSpec]]:
        return [self._specs(argument) for argument in self.call.arguments]

    @property
    def differentiated(self) -> tuple[int, ...]:
        """The indices of the leaves that get gradients, including the leaves of `combined`."""
        return tuple(sorted((*self.parameters.differentiated, *self.combined)))

    @property
    def _shares_loss(self) -> bool:
        """Whether devices scale their loss to a share of the full loss before differentiating."""
        return bool(self.combined) or self.options.gradient_reduce is not None

    def _all_gradients(self, reduced: Sequence[Any], combined: Sequence[Array]) -> list[Any]:
        """Return the gradients of reduced and of combined leaves as one list, in their layouts."""
        leaves, axes = self.parameters.leaves, self._gradient_axes
        reduced = [
            constrain(x, self.mesh, leaves[i].spec(axes))
            if x is not None and leaves[i].other_axes
            else x
            for x, i in zip(reduced, self.parameters.differentiated, strict=True)
        ]
        combined = [
            constrain(x, self.mesh, leaves[i].spec(axes))
            for x, i in zip(combined, self.combined, strict=True)
        ]
        return self._in_order(reduced, combined)

    def _in_order(self, reduced: Sequence[Any], combined: Sequence[Any]) -> list[Any]:
        """Return values of reduced and of combined leaves as one list, ordered by leaf."""
        by_leaf = dict(zip(self.parameters.differentiated, reduced, strict=True))
        by_leaf |= zip(self.combined, combined, strict=True)
        return [by_leaf[i] for i in self.differentiated]

    def _specs(self, argument: Argument) -> list[PartitionSpec]:
        if argument.layout is None:
            return list(argument.specs)
        axes = self.config.axes_at(3)
        return [leaf.spec(axes, manual_only=True) for leaf in argument.layout.leaves]

    def _state_specs(self, wire_state: DeviceWireState) -> DeviceWireState:
        specs = specs_of(self.parameters.leaves, self.comm)
        return DeviceWireState(
            {i: specs.slices[i] for i in wire_state.slices},
            {i: specs.errors[i] for i in wire_state.errors},
        )

    def _on_device(
        self,
        arrays: list[list[Array]],
        wire_state: DeviceWireState,
        given: list[list[Array]],
        outputs: Outputs,
        updates: ProgramUpdates,
    ) -> Any:
        stored, inputs, specs = [], [], []
        for argument, leaves in zip(self.call.arguments, arrays, strict=True):
            if argument.layout:
                stored += leaves
            else:
                inputs += leaves
                specs += argument.specs
        leaf_updates = updates.on_device(stored, given, self.differentiated)
        ledger = Ledger(self.devices.shape)
        flat = self.flat or self._flat
        with recording(ledger):
            share = self._share_of_loss(inputs, specs)
            result = self._step(
                lambda stored, inputs: flat(stored, inputs, specs, outputs),
                self.parameters,
                stored,
                wire_state,
                inputs,
                specs,
                self.options.microbatches,
                self.comm,
                leaf_updates,
                share,
            )
            num = len(outputs.how)
            with labelled("other", "aux" if self.options.has_gradients else "output"):
                parts = outputs.part(result.others[:num], self.comm)
            combined = combined_gradients(
                result.others[num:], self.combined, self.parameters.leaves, self.comm
            )
        self._traced = result.program
        if self.flat is None:
            warn_of_mixed_rows(result, len(self.layers.members), inputs, specs, outputs, self.comm)
        leaves = self.parameters.leaves
        self._plan = dataclasses.replace(
            result.plan,
            combined=tuple((leaves[i].path, how) for i, how in self.combined.items()),
            transfers=tuple(ledger.transfers),
            host_transfers=tuple(ledger.host_transfers),
            codecs=described_codecs(self.comm, ledger.transfers),
        )
        updated = [result.updated.get(i) for i in leaf_updates]
        return (
            result.loss,
            result.gradients,
            combined,
            parts,
            result.wire_state,
            result.halves,
            updated,
        )

    @property
    def _step(self) -> Callable[..., Result]:
        """The function that runs a step on one device: `run_on_stage` if the config has stages."""
        if self.config.stages is None:
            return run_on_device
        return functools.partial(run_on_stage, lists=self.layers)

    def _share_of_loss(self, inputs: list[Any], specs: list[PartitionSpec]) -> Array | float | None:
        """Return the factor from a device's loss to its share of the batch's; None: not needed."""
        if not self._shares_loss:
            return None
        if not self.options.weighted:
            return 1 / self.comm.num_runs(self.options.microbatches)
        leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.parameters.leaves]

        def weight(stored: list[Any], inputs: list[Any]) -> Array:
            value, _ = split_aux(self._called(stored, inputs), self.options.has_aux)
            total_and_weight = split_weight(value, True)
            assert total_and_weight[1] is not None
            return total_and_weight[1]

        total = total_weight(weight, leaves, inputs, specs, self.options.microbatches, self.comm)
        return 1 / total.astype(accumulator_dtype(total.dtype))

    def _flat(
        self,
        stored: list[Any],
        inputs: list[Any],
        specs: list[PartitionSpec],
        outputs: Outputs,
    ) -> Any:
        """Call the user's function on one device, and differentiate it if requested.

        Args:
            stored: the full arrays of all sharded trees, in the order of arguments, with a stack in
                place of a list of layers.
            inputs: the arrays of all other arguments, in order.
            specs: how `inputs` are split over devices.
            outputs: records the structure of the auxiliary outputs (of all outputs, for `apply`).

        Returns:
            Loss, weight, gradients, and auxiliary outputs followed by gradients that are combined.
            For `apply`, the first two are None, and there are no gradients.
        """
        options = self.options
        share = None
        if self._shares_loss:
            *inputs, share = inputs
        called, stacks = self._called, self.layers.stacks
        if not options.has_gradients:
            all_outputs = lambda stored: outputs.record(called(stored, inputs))  # noqa: E731
            return None, None, [], with_rolled_layers(all_outputs, stacks)(stored)

        def aux_of(inputs):
            return values_of(split_aux(called(stored, inputs), options.has_aux)[1])

        doubled = functools.partial(shapes_with_twice_the_rows, aux_of, inputs, specs)

        def results_of(stored):
            value, aux = split_aux(called(stored, inputs), options.has_aux)
            value, weight = split_weight(value, options.weighted)
            check_loss(value)
            return value, weight, outputs.record(aux, doubled)

        results = with_rolled_layers(results_of, stacks)
        trained = self.layers.numbers(self.parameters.differentiated)
        numbers = [*trained, *self.layers.apart_of(self.combined)]

        def loss(differentiated):
            merged = list(stored)
            for i, x in zip(numbers, differentiated, strict=True):
                merged[i] = x
            value, weight, others = results(merged)
            share_of_loss = value if share is None else value * share.astype(value.dtype)
            return share_of_loss, (value, weight, others)

        activations = self.config.activations
        if activations is not None and activations.override:
            loss = without_checkpoints(loss)
        (_, (value, weight, others)), gradients = jax.value_and_grad(loss, has_aux=True)(
            [stored[i] for i in numbers]
        )
        return value, weight, gradients[: len(trained)], others + gradients[len(trained) :]

    def _called(self, stored: list[Any], inputs: list[Any]) -> Any:
        args, kwargs = self._rebuild(stored, inputs)
        names = [argument.name for argument in self.call.arguments]
        return call_checked(self.function, args, kwargs, names)

    def _rebuild(self, stored: list[Any], inputs: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        remaining = {True: iter(self.layers.apart(stored)), False: iter(inputs)}
        arrays = [
            [next(remaining[argument.layout is not None]) for s in argument.statics if s is None]
            for argument in self.call.arguments
        ]
        return self.call.rebuild(arrays)
