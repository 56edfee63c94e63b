"""`Zero`: what a user holds. Sharded parameters in, loss and sharded gradients out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from ._arguments import BATCH, Call, check_differentiable, check_rows, resolve
from ._calls import gradient_options, memory_of, returned
from ._codec_noise import measure_codec_noise
from ._codecs import Codec
from ._collectives import Wire
from ._config import ZeroConfig, zero3
from ._mesh import check_mesh
from ._optimizer import init_state, plan_state, true_shapes, warn_of_padding
from ._partition import TreePlan, plan_tree
from ._placement import auto_mesh, gather_whole, pad_tree, place_tree, run_automatic
from ._plan import Plan
from ._registry import Registry
from ._report import Report, make_report
from ._similarity import CodecNoise
from ._simulate import AnyMesh, physical
from ._transform import Options, Transform, flat_reductions
from ._wire_state import Memory, WireState, make_state


class Zero:
    """ZeRO for any differentiable function, over a mesh with axes `node` and `local`.

    Args:
        mesh: from `make_mesh`, or any mesh that has these two axes.
        config: what is split and how it travels; by default ZeRO-3.

    Raises:
        ValueError: `mesh` lacks one of the axes.

    Example:
        >>> zero = jz.Zero(jz.make_mesh(nodes=2))
        >>> params = zero.init(init_fn, key)
        >>> opt_state = zero.init_optimizer(tx, params)
        >>> loss, grads = zero.value_and_grad(loss_fn)(params, batch)

    References:
        ZeRO (https://arxiv.org/abs/1910.02054), section 5;
        MiCS (https://arxiv.org/abs/2205.00119) for `split="local"`.
    """

    def __init__(self, mesh: AnyMesh, config: ZeroConfig | None = None):
        check_mesh(mesh)
        if config is not None and not isinstance(config, ZeroConfig):
            raise ValueError(
                f"`config` must be a `jz.ZeroConfig`, such as `jz.zero3()`; got {config!r}."
            )
        self.mesh = physical(mesh)
        self._devices = mesh
        self.config = zero3() if config is None else config
        self._plans = Registry()
        self._states = Registry()
        self._transform = functools.lru_cache(maxsize=256)(self._new_transform)

    batch_spec: PartitionSpec = BATCH
    """How a batch is split: dim 0 over all devices. For `in_specs` and data loading."""

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self._devices.shape.items())
        return f"Zero({sizes}; {self.config})"

    # Trees in and out of their sharded form.

    def init(self, init_fn: Callable, *args: Any, specs: Any = None) -> Any:
        """Run `init_fn(*args)` so that each device only ever makes its own shards.

        Args:
            init_fn: returns a tree of arrays (and `None`s).
            args: for example a key.
            specs: a tree prefix of `PartitionSpec`s over mesh axes other than ours.

        Returns:
            The tree of global `jax.Array`s, each split on one dim over all devices. A
            leaf that no dim of which divides is padded with zeros.

        Raises:
            ValueError: a leaf is no array, or `specs` names our axes.
        """
        plan = self._plan(jax.eval_shape(init_fn, *args), specs)
        shardings = plan.shardings(auto_mesh(self.mesh), self._weight_axes)

        def run(*args):
            leaves = pad_tree(plan, jax.tree.leaves(init_fn(*args)))
            return jax.tree.unflatten(plan.treedef, leaves)

        return run_automatic(run, shardings, self.mesh, *args)

    def abstract(
        self, init_fn: Callable, *args: Any, specs: Any = None, codec: Codec | None = None
    ) -> Any:
        """What `init` would return, as `ShapeDtypeStruct`s with shardings: nothing is made.

        Use it as the target of a restore, or to load a checkpoint into. With `codec`, what
        `shard` would return.
        """
        plan = self._plan(jax.eval_shape(init_fn, *args), specs, codec)
        shardings = jax.tree.leaves(plan.shardings(self.mesh, self._weight_axes))
        structs = [
            jax.ShapeDtypeStruct(leaf.stored.shape, leaf.stored.dtype, sharding=sharding)
            for leaf, sharding in zip(plan.leaves, shardings, strict=True)
        ]
        return jax.tree.unflatten(plan.treedef, structs)

    def shard(self, tree: Any, specs: Any = None, codec: Codec | None = None) -> Any:
        """Split a tree of whole arrays over the devices.

        Args:
            tree: leaves are numpy or jax arrays, or anything with `shape`, `dtype` and
                `__getitem__` for a tuple of slices, such as a tensor in a file. Of each
                leaf only the slices that this process's devices own are read.
            specs: as for `init`.
            codec: store float leaves of at least `config.min_quantized_size` elements as its
                messages, which are gathered as they are: for frozen parameters, such as
                those beneath LoRA (ZeRO++, mixed precision).

        Returns:
            The same as `init`; with a codec, leaves of unsigned integers.
        """
        plan = self._plan(tree, specs, codec)
        leaves = place_tree(plan, jax.tree.leaves(tree), self.mesh, self._weight_axes)
        return jax.tree.unflatten(plan.treedef, leaves)

    def unshard(self, tree: Any) -> Any:
        """Gather a sharded tree: true shapes, whole on every device.

        Takes parameters, gradients, updates or optimizer state. To save a model, use
        `Checkpoints` or an export, which never hold all of it in one place.
        """
        plan = self._plan_of(tree)
        whole = gather_whole(plan, jax.tree.leaves(tree), self.mesh)
        return jax.tree.unflatten(plan.treedef, whole)

    def shardings(self, tree: Any) -> Any:
        """The tree of `NamedSharding`s in which `tree` is stored, for `out_shardings` and the like.

        Args:
            tree: parameters from `init`, or optimizer state from `init_optimizer`.
        """
        state = self._states.find(tree)
        if state is not None:
            return state.shardings(self.mesh, self._state_axes)
        return self._plan_of(tree).shardings(self.mesh, self._weight_axes)

    # Optimizers.

    def init_optimizer(self, tx: optax.GradientTransformation, params: Any) -> Any:
        """`tx.init(params)`, with every leaf split like the parameter it belongs to.

        Raises:
            ValueError: `params` did not come from this `Zero`.
        """
        plan = self._plan_of(params)
        warn_of_padding(tx, plan)
        state_plan = plan_state(tx, plan, self._devices, self.config)
        state_plan = self._states.add(state_plan)
        return init_state(tx, params, state_plan, self.mesh, self._state_axes)

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """Wrap `tx` so that it sees leaves in their own shapes where they are padded.

        Needed only on meshes that divide no dim of a leaf, and there only by optimizers
        that use shapes, such as Adafactor and Muon.
        """
        return true_shapes(tx, self._plan_of, self._devices, self.config)

    def init_wire_state(self, params: Any) -> WireState:
        """What the wire has to remember of `params` from step to step, before the first step.

        Only `Difference` and `ErrorFeedback` remember anything (`config.needs_wire_state`).
        Pass it to the function from `value_and_grad`, which returns the next one; save it
        like optimizer state. After parameters have changed otherwise (a restored
        checkpoint), make it anew: the slices in it are those of the old ones.

        Returns:
            Sharded arrays: of each leaf, a device holds its node's slice.

        Raises:
            ValueError: `params` did not come from this `Zero`.
        """
        wire = Wire.of(self._devices, self.config)
        return make_state(self._plan_of(params), params, self._weight_axes, self._devices, wire)

    def codec_noise(self, grads: Any, *, microbatches: int = 1) -> CodecNoise:
        """How much noise the codecs have added to gradients like these, for `jz.simigrad`.

        Call it in the jitted step, or now and then: devices encode and decode their shards of
        `grads`, from `value_and_grad` with as many `microbatches`, and sum three scalars.

        Raises:
            ValueError: `grads` are not like parameters of this `Zero`, or `microbatches` < 1.
            NotImplementedError: errors are fed back, or sums are encoded twice.
        """
        leaves, grads = self._plan_of(grads).leaves, jax.tree.leaves(grads)
        return measure_codec_noise(leaves, grads, self._devices, self.config, microbatches)

    # Programs.

    def value_and_grad(
        self,
        f: Callable,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        allow_int: bool = False,
        *,
        microbatches: int = 1,
        weighted: bool = False,
        aux_reduce: Any = None,
        halves: bool = False,
        in_specs: Sequence[Any] | None = None,
    ) -> Callable:
        """`jax.value_and_grad` on sharded parameters.

        `f` is written for one device: it sees full parameters and this device's rows of
        the batch, and returns the mean loss over those rows. The program is re-emitted so
        that each parameter is gathered just before it is used, in forward and again in
        backward, and each gradient is reduced where it is produced. Collectives over the
        axes `("node", "local")` are allowed in `f`.

        Args:
            f: `f(params, batch, ...) -> loss`. The loss is a real scalar.
            argnums: which positional arguments are differentiated; each must be a tree
                from `init` or `shard`. Other arguments may be such trees too (frozen
                parameters); they are gathered at use likewise.
            has_aux: `f` returns `(loss, aux)`.
            allow_int: integer leaves get gradients of type `float0`, as in JAX.
            microbatches: run the rows of each device in this many equal runs, one after
                the other, and add up gradients as shards in float32.
            weighted: `f` returns `(sum, weight)` as its loss; the result is the sum of sums
                over the sum of weights, over all devices and micro-batches. The weight (a
                number of tokens) is taken as independent of the parameters.
            aux_reduce: how leaves of `aux` are combined over devices and micro-batches: a
                tree prefix of "mean", "sum", "first", or "stack" (on a new leading dim, in
                the order of the batch). Float leaves default to "mean"; others need one.
            halves: also compare the gradients of two halves of the nodes (of one node's
                devices), for `jz.simigrad`. This sends three numbers for each leaf, and holds
                one more float32 shard of it. Gradients keep their bits where reduce-scatters
                add in the order of devices, as on CPUs; `split="local"` may round otherwise.
            in_specs: for each positional argument None, or a tree prefix of
                `PartitionSpec`s over `node` and `local`. By default the first argument
                that is no sharded tree is the batch, split on dim 0 (`batch_spec`);
                others are given whole to every device.

        Returns:
            A function of the same arguments that returns `(loss, grads)`, or
            `((loss, aux), grads)`: the mean over all devices, and its gradient, split like
            the parameters; then, with `halves`, a `GradientHalves`; and, given `wire_state=`
            (`init_wire_state`), the next one. Works under `jax.jit` and outside of it. Leaves
            that are no arrays (strings, functions, Python numbers) are passed to `f`
            unchanged, and each new value compiles a new program.

        Raises:
            ValueError: before anything is compiled, with the argument and the tree path.
        """
        options = gradient_options(
            argnums, has_aux, microbatches, weighted, aux_reduce, halves, self._devices
        )

        @functools.wraps(f)
        def wrapped(*args, wire_state=None, **kwargs):
            transform, arrays = self._prepare(f, args, kwargs, options, in_specs)
            for number in transform.options.argnums:
                check_differentiable(transform.call.arguments[number], arrays[number], allow_int)
            outputs = transform.program(arrays, memory_of(transform, wire_state))
            return returned(transform, outputs, isinstance(argnums, int), wire_state is not None)

        return wrapped

    def apply(
        self,
        f: Callable,
        argnums: int | Sequence[int] = 0,
        *,
        in_specs: Sequence[Any] | None = None,
        out_reduce: Any = None,
    ) -> Callable:
        """Run a function of sharded parameters, without gradients: for evaluation.

        Args:
            f: `f(params, batch, ...) -> outputs`, written as for `value_and_grad`.
            argnums: which arguments must be sharded trees.
            in_specs: as for `value_and_grad`.
            out_reduce: how outputs are combined over devices: a tree prefix of "mean",
                "sum", "first", "stack" and "concat". By default an output with as many
                rows as this device's batch is joined to one of the whole batch
                ("concat"), and a float scalar is averaged; others need one.

        Returns:
            A function of the same arguments.
        """
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        reduce = flat_reductions("out_reduce", out_reduce)
        options = Options(numbers, has_gradients=False, reduce=reduce)

        @functools.wraps(f)
        def wrapped(*args, **kwargs):
            transform, arrays = self._prepare(f, args, kwargs, options, in_specs)
            return transform.program(arrays, Memory())[2]

        return wrapped

    def plan(
        self,
        f: Callable,
        *args: Any,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        microbatches: int = 1,
        weighted: bool = False,
        aux_reduce: Any = None,
        halves: bool = False,
        in_specs: Sequence[Any] | None = None,
        wire_state: Any = None,
    ) -> Plan:
        """What one call of `value_and_grad(f)` would gather and reduce, and when.

        Nothing is compiled or run. Arguments are as for `value_and_grad`; `print` the result.
        """
        options = gradient_options(
            argnums, has_aux, microbatches, weighted, aux_reduce, halves, self._devices
        )
        transform, arrays = self._prepare(f, args, {}, options, in_specs)
        return transform.plan(arrays, memory_of(transform, wire_state))

    # What the above share.

    @property
    def _weight_axes(self) -> tuple[str, ...]:
        return self.config.axes if self.config.stage >= 3 else ()

    @property
    def _state_axes(self) -> tuple[str, ...]:
        return self.config.axes if self.config.stage >= 1 else ()

    def _plan(self, tree: Any, specs: Any, codec: Codec | None = None) -> TreePlan:
        return self._plans.add(plan_tree(tree, self._devices, self.config, specs, codec))

    def find_plan(self, tree: Any) -> TreePlan | None:
        """How a tree from `init`, `shard` or `init_optimizer` is laid out; None: it is not."""
        return self._plans.find(tree) or self._states.find(tree)

    def report(self, params: Any, opt_state: Any = None, plan: Plan | None = None) -> Report:
        """What is split how, how many bytes one device holds, and what a step sends.

        Args:
            params: arrays, or from `abstract`.
            opt_state: from `init_optimizer`.
            plan: of a training step, from `plan`: then the report has its traffic.

        Returns:
            Data that prints itself (`print`) or becomes plain data (`as_dict`).
        """
        gradient_axes = self.config.axes if self.config.stage >= 2 else ()
        axes = {
            "parameters": self._weight_axes,
            "gradients": gradient_axes,
            "optimizer state": self._state_axes,
        }
        state = None if opt_state is None else self._plan_of(opt_state)
        return make_report(self._plan_of(params), state, plan, self._devices, axes)

    def _plan_of(self, tree: Any) -> TreePlan:
        plan = self.find_plan(tree)
        if plan is None:
            raise ValueError(f"The given tree: {self._plans.explain(tree)}")
        return plan

    def _prepare(
        self,
        f: Callable,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        options: Options,
        in_specs: Sequence[Any] | None,
    ) -> tuple[Transform, list[list[Any]]]:
        """Find out what the arguments are, check them, and find the program for them."""
        numbers = tuple(i + len(args) if i < 0 else i for i in options.argnums)
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"`argnums` names an argument twice; got {numbers}.")
        options = dataclasses.replace(options, argnums=numbers)
        call, arrays = resolve(
            f, args, kwargs, argnums=numbers, in_specs=in_specs, registry=self._plans
        )
        check_rows(call, arrays, self._devices, options.microbatches)
        make = self._transform if isinstance(f, Hashable) else self._new_transform
        return make(f, call, options), arrays

    def _new_transform(self, f: Callable, call: Call, options: Options) -> Transform:
        return Transform(f, call, options, self._devices, self.config)
