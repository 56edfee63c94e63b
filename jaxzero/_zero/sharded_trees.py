"""Shard and unshard trees: parameters, gradients and optimizer state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import optax
from jax.sharding import NamedSharding

from .._codecs import Codec
from .._collectives import CommSpec
from .._execute import WireState, first_state
from .._mesh import (
    AXES,
    AnyMesh,
    NodeMesh,
    gloo_workaround,
    is_one_node,
    physical,
    with_stages,
)
from .._plan import MovedRows, Plan
from .._report import Report, make_report
from .._sharding import (
    Registry,
    TreeLayout,
    ZeroConfig,
    array_leaves,
    arrays_of,
    is_stored,
    lay_out,
    offloaded,
    unboxed,
)
from .._simigrad import CodecNoise
from .codec_noise import measure_codec_noise, names_of_tables
from .config_check import checked_config
from .host_memory import check_offloaded, check_room
from .optimizer_state import check_optimized, init_state, state_layout, trained_part, true_shapes
from .padding_check import warn_of_padding
from .placement import gather_full, make_leaves, pad_leaf, place_tree, stored_struct
from .programs import Initializer, Programs, numbers_as_arrays
from .rounding_check import warn_of_rounding
from .updates import Layouts, apply_gradients


class ShardedTrees:
    """The part of `Zero` that shards trees; see `Zero` for the arguments."""

    def __init__(self, mesh: AnyMesh, config: ZeroConfig | None = None):
        self.config = checked_config(mesh, config)
        mesh = mesh if self.config.stages is None else with_stages(mesh)
        self.mesh = physical(mesh)
        self._devices = mesh
        self._programs = Programs(self.mesh)
        self._registry = Registry(mesh, self.config)
        self._states = Registry(mesh, self.config)
        self._matched: set[str] = set()  # patterns of `Offload` that have matched a leaf
        self._matched_ungathered: set[str] = set()
        self._has_warned = False  # that `apply` reads full weights

    @property
    def num_devices(self) -> int:
        """The number of devices, simulated ones included, that share the rows of a batch."""
        return math.prod(self._devices.shape[axis] for axis in AXES)

    # Trees in and out of their sharded form.

    def init(self, init_fn: Callable[..., Any], *args: Any, specs: Any = None) -> Any:
        """Run `init_fn(*args)` so that each device makes only its own shards.

        Args:
            init_fn: returns a tree of arrays (and `None`s), an `eqx.Module` or an `nnx.Module`.
                Boxes of `nn.with_partitioning` are removed.
            args: arguments of `init_fn`, such as a key.
            specs: a tree prefix of `PartitionSpec`s over mesh axes other than `node` and `local`;
                by default the axes that the boxes name.

        Returns:
            The tree of global `jax.Array`s in their own shapes, each split on one dim over all
            devices. A leaf none of whose dims the devices divide evenly is padded with zeros and
            returned as a `StoredArray`, a pytree node with the true `shape` and `size`.
            `jax.tree.map` and optax see the padded array inside, so a mean over elements, or a
            count of elements, includes the zeros.

        Raises:
            TypeError: `init_fn` is no function, but parameters or a module with parameters.
            ValueError: a leaf or an argument of `init_fn` is not an array, or `specs` names `node`
                or `local`.
        """
        run = Initializer(init_fn)
        layout = self._lay_out(run.shapes(*args), specs)

        def stored(*args: Any) -> list[Any]:
            pairs = zip(layout.leaves, run(*args), strict=True)
            # `zero.optimizer(tx).init` returns leaves that are padded already.
            return [x.data if is_stored(x) else pad_leaf(leaf, x) for leaf, x in pairs]

        check_room("parameters", layout.leaves, self.mesh, self._weight_axes)
        # Here processes are at the same point. Later, one may still compile while others send.
        gloo_workaround.connect_groups(self.mesh)
        made = make_leaves(stored, layout.leaves, self._programs, self._weight_axes, *args)
        return layout.stored(made)

    def abstract(
        self, init_fn: Callable[..., Any], *args: Any, specs: Any = None, codec: Codec | None = None
    ) -> Any:
        """Return `ShapeDtypeStruct`s with shardings like the result of `init`; allocate nothing.

        Use it as the target of a restore, or to load a checkpoint into. With `codec`, it describes
        the result of `shard` with that codec.
        """
        layout = self._lay_out(Initializer(init_fn).shapes(*args), specs, codec)
        return layout.stored(
            [stored_struct(x, self.mesh, self._weight_axes) for x in layout.leaves]
        )

    def shard(self, tree: Any, specs: Any = None, codec: Codec | None = None) -> Any:
        """Shard a tree of full arrays over the devices.

        Args:
            tree: its leaves are numpy or jax arrays, or anything with `shape`, `dtype` and
                `__getitem__` for a tuple of slices, such as a tensor in a file. Of each
                leaf only the slices that this process's devices own are read. An
                `eqx.Module` or `nnx.Module` may hold other leaves, which are unchanged.
            specs: a tree prefix of `PartitionSpec`s over mesh axes other than `node` and `local`.
            codec: store float leaves of at least `config.min_quantized_size` elements encoded by
                this codec, and gather them without encoding them again: for frozen parameters,
                such as those beneath LoRA (ZeRO++, mixed precision).

        Returns:
            The sharded tree, as from `init`; with a codec, `StoredArray`s of unsigned integers.

        Raises:
            ValueError: a leaf is not an array, or is stored already, for another mesh or codec.
        """
        layout = self._lay_out(tree, specs, codec)
        self._registry.check_is_ours(layout)
        check_room("parameters", layout.leaves, self.mesh, self._weight_axes)
        gloo_workaround.connect_groups(self.mesh)
        axes = self._weight_axes
        return layout.stored(place_tree(layout, array_leaves(tree), self._programs, axes))

    def unshard(self, tree: Any) -> Any:
        """Gather a sharded tree: ordinary arrays in their true shapes, in full on every device.

        It takes parameters, gradients, updates or optimizer state, or parts of them. To save a
        model, use `Checkpoints` or an export, which never hold the full model in one place.

        Raises:
            ValueError: an array in `tree` was not laid out by this `Zero`.
        """
        layout = self._layout_of(tree)
        return layout.whole(gather_full(layout, arrays_of(tree), self._programs))

    def shardings(self, tree: Any) -> Any:
        """Return the `NamedSharding`s in which `tree` is stored, for `out_shardings` and the like.

        Args:
            tree: parameters from `init` or a part of them, or optimizer state from
                `init_optimizer`.
        """
        layout, shardings = self.stored_layout(tree)
        return layout.stored(shardings)

    # Optimizers.

    def init_optimizer(self, tx: optax.GradientTransformation, params: Any) -> Any:
        """Return `tx.init(params)`, with every leaf sharded like the parameter that it belongs to.

        In an `eqx.Module` or `nnx.Module`, `tx` gets `None` for the leaves that the module does not
        train, as in the gradients.

        `tx` is tried on tiny leaves. You are warned of updates that padding changes (wrap `tx` by
        `zero.optimizer`) or that 16 bits round away, and of an `nnx.State` with more than `Param`s.

        Raises:
            TypeError: `tx` is no optimizer.
            ValueError: `params` did not come from this `Zero`; or `tx` keeps statistics of another
                shape for a padded leaf, as Adafactor does, and is not wrapped (`zero.optimizer`).
        """
        check_optimized(tx, params)
        params, layout = trained_part(params, self._layout_of(params))
        warn_of_padding(tx, layout, self._programs)
        warn_of_rounding(tx, params, layout, self._programs)
        state = self._states.add(state_layout(tx, layout, self._devices, self.config))
        return init_state(tx, params, state, self._programs, self._state_axes)

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """Wrap `tx` so that it sees leaves in their true shapes, and multiplies whole matrices.

        A leaf is padded if the mesh divides none of its dims. Then wrap optimizers that use shapes
        (Adafactor, Muon), or gradients or parameters given as extra arguments (L-BFGS).

        An all-to-all gives each device the whole matrices of some layers (of a stack, or of leaves
        of equal shape); another all-to-all returns their products. So an optimizer such as Muon
        does not gather all matrices on every device, as XLA would without the wrapper
        (docs/howto/muon.md).

        Extra arguments of `update` are in true shapes too: `grad=grads` of a line search may hold
        `StoredArray`s, and `value_fn` is called with ordinary arrays. If the line search
        differentiates `value_fn` (`optax.lbfgs` does), pass a function that JAX can differentiate,
        such as the loss itself, with its batch. XLA then decides what is gathered.
        """
        return true_shapes(
            tx,
            self._layout_of,
            lambda tx, layout: state_layout(tx, layout, self._here._devices, self.config),
            self._programs,
            self._state_axes,
        )

    def apply_gradients(
        self,
        tx: optax.GradientTransformation,
        grads: Any,
        opt_state: Any,
        params: Any,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        """Update parameters and optimizer state, also where they are in host memory.

        Without arrays in host memory this is `tx.update` followed by `optax.apply_updates`. A leaf
        whose gradient, parameter or state is in host memory is copied to the device and back in
        windows of 64 MiB, while the previous window is computed. For such leaves the optimizer must
        compute each element from the elements at its index and from reductions over leaves, as
        Adam, Lion, SGD, LAMB, clipping, schedules, masks and weight decay do. Results equal those
        in device memory, except that reductions add in another order.

        Call it in the jitted step, donate `params` and `opt_state`, and return these two in the
        order of the step's arguments: then arrays in host memory are updated in place. (JAX pairs
        donated arrays and results of one shape in order; XLA copies a new value that is paired with
        another array.)

        Args:
            tx: the optimizer, given to `init_optimizer` before; also one from `zero.optimizer`.
            grads: the gradients, from `value_and_grad`.
            opt_state: the optimizer state, from `init_optimizer` or the last update.
            params: the parameters. Leaves that their module does not train are returned unchanged.
            extra_args: further arguments of `tx.update`, such as `value=loss`.

        Returns:
            `(params, opt_state)`, each array in the memory of the old one.

        Raises:
            TypeError: `tx` is no optimizer.
            NotImplementedError: `tx` needs more of a leaf in host memory than this (Muon, Shampoo,
                Adafactor, `optax.MultiSteps`); the error names the leaf and the line of `tx`.
            ValueError: a tree did not come from this `Zero`, or they do not fit each other.
        """
        opt_state = numbers_as_arrays(opt_state)  # of an update outside of `jit`
        layouts = self._layouts(params, opt_state, self._layout_of(grads))
        return apply_gradients(tx, grads, opt_state, params, layouts, extra_args, self._programs)

    def report(self, params: Any, opt_state: Any = None, plan: Plan | None = None) -> Report:
        """Report how leaves are sharded, bytes held and sent, and the largest model that fits.

        Bytes are counted in device memory, in host memory (`jz.Offload`), into a node or device in
        a step, and between host and device in a step.

        Args:
            params: the parameters, or their `ShapeDtypeStruct`s from `abstract`.
            opt_state: from `init_optimizer`; adds its bytes, and the update's copies from and to
                host memory.
            plan: plan of a training step, from `plan`; adds its traffic to the report.

        Returns:
            A `Report`, with methods `print`, `as_dict` and `largest_model`.
        """
        axes = {
            "parameters": self._weight_axes,
            "gradients": self.config.axes_at(2),
            "optimizer state": self._state_axes,
        }
        state = None if opt_state is None else self._layout_of(opt_state)
        layout = self._layout_of(params)
        of_gradients = self._layout_of_gradients(layout)
        return make_report(layout, of_gradients, state, plan, self._devices, axes)

    def init_wire_state(self, params: Any) -> WireState:
        """Make the state that hops keep from step to step (the wire state), before the first step.

        Only hops such as `WeightDelta` (node slices of weights) and `ErrorFeedback` (residuals of
        gradients) need it (`config.needs_wire_state`). Pass it to the function from
        `value_and_grad`, which returns the next one; save it like optimizer state. If parameters
        change outside of the training step, make it again: it holds slices of the old ones.

        Returns:
            Sharded arrays: each device holds its node slice of each leaf.

        Raises:
            ValueError: `params` did not come from this `Zero`.
        """
        comm = CommSpec.of(self._devices, self.config)
        make = first_state(self._layout_of(params), self._weight_axes, self._devices, comm)
        return self._programs.run(make, arrays_of(params))

    def codec_noise(
        self, grads: Any, *, microbatches: int = 1, rows: Sequence[MovedRows] = ()
    ) -> CodecNoise:
        """Measure the noise that the codecs add to gradients such as `grads`, for `jz.simigrad`.

        Devices encode and decode their shards of `grads`, and all-reduce three scalars. Call it in
        the jitted step, or only every few steps. `microbatches` is that of the `value_and_grad`
        that returned `grads`. If that call sends rows of tables, pass `zero.plan(...).rows` as
        `rows`: each row is encoded by itself, and `grads` alone do not show the noise of that.

        Raises:
            ValueError: `grads` are not like parameters of this `Zero`, or `microbatches` < 1.
            NotImplementedError: the config uses error feedback, or encodes sums twice; or a table
                of `rows` is also gathered as a whole.
        """
        grads, layout = trained_part(grads, self._layout_of(grads))
        devices = self._here._devices
        args = layout.leaves, devices, self.config, microbatches, names_of_tables(rows)
        return self._programs.run(functools.partial(measure_codec_noise, *args), arrays_of(grads))

    # Shared by the methods above, and with `LocalRounds`.

    @functools.cached_property
    def _on_one_node(self) -> Any:
        """A `Zero` with the same config on the devices of one node, for programs of one node."""
        assert not isinstance(self._devices, NodeMesh)
        return type(self)(NodeMesh(self._devices), self.config)

    @property
    def _here(self) -> Any:
        """The `Zero` of the current trace: `_on_one_node` in a program of one node, else `self`."""
        is_own = isinstance(self._devices, NodeMesh)
        return self._on_one_node if is_one_node() and not is_own else self

    def _layouts(self, params: Any, opt_state: Any, gradients: TreeLayout | None = None) -> Layouts:
        """Return the layouts of an update's trees; `gradients` is by default `value_and_grad`'s."""
        of_params = self._layout_of(params)
        return Layouts(
            gradients=gradients or self._layout_of_gradients(of_params),
            state=self._layout_of(opt_state),
            params=of_params,
            mesh=self.mesh,
            state_axes=self._state_axes,
            weight_axes=self._weight_axes,
        )

    def _layout_of_gradients(self, params: TreeLayout) -> TreeLayout:
        """Return the layout of the gradients that `value_and_grad` returns, with their memories."""
        resident = [dataclasses.replace(leaf, memory_kind=None) for leaf in params.leaves]
        gradients = dataclasses.replace(params, leaves=tuple(resident))
        num_shards, offload = self.config.num_shards(self._devices), self.config.offload
        is_split = self.config.stage >= 2
        return offloaded(gradients, offload, num_shards, "gradients") if is_split else gradients

    @property
    def _weight_axes(self) -> tuple[str, ...]:
        return self.config.axes_at(3)

    @property
    def _state_axes(self) -> tuple[str, ...]:
        return self.config.axes_at(1)

    def _lay_out(self, tree: Any, specs: Any, codec: Codec | None = None) -> TreeLayout:
        others = [axis for axis in self.mesh.axis_names if axis not in AXES]
        tree, specs = unboxed(tree, specs, others)
        layout = lay_out(tree, self._devices, self.config, specs, codec)
        offload = self.config.offload
        if offload is not None:
            check_offloaded(offload, layout, self._matched)
        if self.config.ungathered is not None:
            self.config.ungathered.check(layout.leaves, self._devices, self._matched_ungathered)
        return self._registry.add(offloaded(layout, offload, self.config.num_shards(self._devices)))

    def stored_layout(self, tree: Any) -> tuple[TreeLayout, list[NamedSharding]]:
        """Return the layout of a stored tree, or of a part of one, and the sharding of each array.

        Raises:
            ValueError: an array in `tree` was not laid out by this `Zero`.
        """
        state = self._states.find(tree)
        layout, axes = (
            (state, self._state_axes) if state else (self._layout_of(tree), self._weight_axes)
        )
        return layout, layout.shardings(self.mesh, axes)

    def find_layout(self, tree: Any) -> TreeLayout | None:
        """Return the layout of a tree from `init`, `shard` or `init_optimizer`; None for others."""
        return self._registry.find(tree) or self._states.find(tree)

    def _layout_of(self, tree: Any) -> TreeLayout:
        here = self._here
        try:
            return here.find_layout(tree) or here._registry.layout_of(tree)
        except ValueError as error:
            raise ValueError(f"The given tree: {error}") from error


# Python's errors about missing arguments then name the class that users call.
ShardedTrees.__init__.__qualname__ = "Zero.__init__"
