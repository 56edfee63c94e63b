"""`Zero`, the public class: it runs functions of full parameters on sharded parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optax
from jax.sharding import PartitionSpec

from .._codecs import Codec
from .._execute import DeviceWireState
from .._local_steps import LocalSteps
from .._plan import Plan
from .._sharding import without_defaults
from .arguments import BATCH, Options, argument_numbers
from .batch_choice import BatchArgnums
from .calls import (
    check_differentiable,
    checked_row_statistics,
    gradient_options,
    prepare,
    reads_kept_slices,
    returned,
    warn_of_full_weights,
    wire_state_of,
)
from .freezing import Freezing
from .frozen_layers import Names
from .local_rounds import LocalRounds
from .local_step import check_local_steps, local_method
from .outputs import flat_reductions
from .value_and_update import ValueAndUpdate, check_one_program, check_plan
from .verified import VerifiedTrees


class Zero(VerifiedTrees):
    """ZeRO for any differentiable function, over a mesh with axes `node` and `local`.

    Args:
        mesh: from `make_mesh`, or any mesh that has these two axes.
        config: what is sharded, and the codecs of its collectives; by default ZeRO-3.

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

    batch_spec: PartitionSpec = BATCH
    """The spec of a batch: dim 0 is split over all devices. For `in_specs` and data loading."""

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self._devices.shape.items())
        return f"Zero({sizes}; {without_defaults(self.config)})"

    def freeze(
        self, params: Any, prefix: int, *, layers: Names, before: Names, codec: Codec | None = None
    ) -> Freezing:
        """Freeze the first layers of a model: no gradients, no reductions, no optimizer state.

        The model's code stays as it is, also if it scans one stack of layers. `print` the result.

        Args:
            params: the parameters, from `init` or `shard`.
            prefix: the number of layers to freeze; 0 freezes nothing.
            layers: where the layers are, as a path in `params`: `"encoder.layers"` for a stack with
                a leading dim of layers; for a list of layers, with `*` for the number,
                `"encoder.layers.*"`; or several such paths.
            before: paths of parameters that are used before layer 0, and are frozen with it, such
                as `"embeddings"`; `()` if there are none. If such a parameter is not named here,
                its gradients pass through the frozen layers.
            codec: store large frozen leaves encoded by this codec, such as `jz.Int8()`, and gather
                them without encoding them again, as `shard` does; without `stages` only.

        Raises:
            ValueError: `params` is not from this `Zero`; a path fits no leaf, or `layers` no stack
                or list of layers; or `prefix` is out of range.
        """
        return Freezing(self, params, prefix, layers, before, codec)

    def value_and_grad(
        self,
        f: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        allow_int: bool = False,
        *,
        microbatches: int = 1,
        weighted: bool = False,
        aux_reduce: Any = None,
        gradient_reduce: Any = None,
        halves: bool = False,
        shares: Sequence[int] | None = None,
        row_statistics: str | None = None,
        batch_argnums: BatchArgnums = None,
        in_specs: Sequence[Any] | None = None,
    ) -> Callable[..., Any]:
        """Return a function for loss and gradients: `jax.value_and_grad` on sharded parameters.

        `f` is written for one device: it sees full parameters and this device's rows of the batch,
        and returns the mean loss over those rows. It may use collectives over the axes `("node",
        "local")`. Each parameter is gathered just before it is used, in forward and again in
        backward, and each gradient is reduced where it is produced.

        Args:
            f: `f(params, batch, ...) -> loss`. The loss is a real scalar.
            argnums: positions of the differentiated arguments: trees from `init` or `shard`, or
                parts of such trees, renamed or put together. Other arguments may be such trees too.
            has_aux: `f` returns `(loss, aux)`. Leaves of `aux` that are neither arrays nor numbers
                (strings, functions) are returned unchanged.
            allow_int: integer leaves get gradients of type `float0`, as in JAX.
            microbatches: cut the rows of each device into this many equal micro-batches, run them
                one after the other, and add up gradients as shards in float32.
            weighted: `f` returns `(sum, weight)` as its loss; the result is the sum of sums over
                the sum of weights, over all devices and micro-batches. The weight (a number of
                tokens) is taken as independent of the parameters.
            aux_reduce: how leaves of `aux` are combined over devices and micro-batches: a tree
                prefix of "mean", "sum", "max", "first" (the value of the first device), "stack" (on
                a new leading dim, in the order of the batch) and "concat" (leaves whose dim 0 is
                the device's rows are joined to one of all rows). Float leaves default to "mean";
                other leaves need an entry, and so do leaves with a value for each row.
            gradient_reduce: for leaves whose gradient is a value that a `custom_vjp` returns, such
                as the next scale of fp8 weights: a tree prefix of the parameters of "mean", "max",
                "sum" and "first". Codecs apply to leaves of "mean" only, which hold derivatives.
                With this argument each device multiplies its loss by its share in the mean, and
                then differentiates it: so `f` sees the cotangents of the full batch. By default,
                Flax's collection `_overwrite_with_gradient` is reduced by "max".
            halves: also compare the gradients of two halves of the nodes (or of the devices, if
                there is one node), for `jz.simigrad`. This sends three numbers for each leaf, and
                holds one more float32 shard of it. Gradients stay bitwise equal on CPUs, where
                reduce-scatters add in the order of devices, except with `split="local"`.
            shares: for nodes of different speeds, such as `(2, 1)`: the proportions in which nodes
                share the micro-batches; see `jz.Cluster.shares`. Devices of the fastest node run
                `microbatches`, a multiple of the largest share; other devices run fewer. Arrange
                the batch by `jz.pad_batch`: rows of micro-batches that do not run are ignored, and
                means are over rows that do. Each device keeps its node slices of weights (`jz.HpZ`)
                and of the sums of gradients for the step. `f` may use collectives over `local`, but
                none over `node`. `aux_reduce` cannot be "stack" or "concat".
            row_statistics: "device" says that `f` computes values of a device's rows alone, such as
                statistics of BatchNorm, on purpose: then there is no `jz.RowsMixedWarning`.
            batch_argnums: the argument that is the batch, split on dim 0 over all devices
                (`batch_spec`): a position, a name, or several. By default the one argument that can
                be: it holds an array with rows, and is neither a sharded tree nor a random key.
                `()` says that there is no batch. Other arguments are replicated on every device.
            in_specs: for each positional argument None, or a tree prefix of `PartitionSpec`s over
                `node` and `local`: for arguments that are split in another way, or only in part.

        Returns:
            A function of the same arguments that returns `(loss, grads)`, or `((loss, aux),
            grads)`. The loss is the mean over all devices; its gradient is split like the
            parameters. With `halves` follows a `GradientHalves`; with `wire_state=` (from
            `init_wire_state`), the next state. `f` is traced at every call, as by
            `jax.value_and_grad`. Leaves that are no arrays are passed to `f` unchanged.

            The gradient of an `eqx.Module` or `nnx.Module` is such a module, with None for each
            leaf that is not a floating-point array or, in an `nnx.Module`, not an `nnx.Param`.

        Raises:
            ValueError: before compiling; among others if several arguments can be the batch.

        Warns:
            UserWarning: no argument is a batch, so that each device computes everything.
            RowsMixedWarning: `f` mixes rows, so that its loss is no mean over the rows.
        """
        options = gradient_options(
            self._devices,
            argnums=argnums,
            has_aux=has_aux,
            microbatches=microbatches,
            weighted=weighted,
            aux_reduce=aux_reduce,
            gradient_reduce=gradient_reduce,
            halves=halves,
            shares=shares,
            row_statistics=row_statistics,
        )

        @functools.wraps(f)
        def wrapped(*args, wire_state=None, **kwargs):
            transform, arrays = prepare(self, f, args, kwargs, options, batch_argnums, in_specs)
            for number in transform.options.argnums:
                check_differentiable(transform.call.arguments[number], arrays[number], allow_int)
            local_state = wire_state_of(transform, wire_state)
            outputs = self._programs.run(transform.program, arrays, local_state)
            return returned(transform, outputs, isinstance(argnums, int), wire_state is not None)

        return wrapped

    def value_and_update(
        self,
        f: Callable[..., Any],
        tx: optax.GradientTransformation,
        has_aux: bool = False,
        *,
        microbatches: int = 1,
        weighted: bool = False,
        aux_reduce: Any = None,
        gradient_reduce: Any = None,
        row_statistics: str | None = None,
        batch_argnums: BatchArgnums = None,
        in_specs: Sequence[Any] | None = None,
    ) -> Callable[..., Any]:
        """Return a training step: loss, gradient and update of the parameters, in one program.

        With offload (`jz.Offload`), a scanned stack whose parameter and state are in host memory is
        updated layer by layer in the backward loop, as soon as a layer's gradient is reduced. The
        stack's gradient is never stored. Other leaves are updated at the end. The results are those
        of `value_and_grad` and `apply_gradients`, bit for bit where XLA rounds alike.

        The update in the loop cannot wait for all gradients, so `tx` must need no reduction (norm)
        of such a stack. Its leaves need no `Offload(gradients=...)`. Call the step under `jax.jit`,
        and donate `params` and `opt_state`: otherwise XLA copies arrays in host memory.

        Args:
            f: `f(params, batch, ...) -> loss`, as for `value_and_grad`.
            tx: the optimizer, given to `init_optimizer` before; also one from `optimizer`.
            has_aux: `f` returns `(loss, aux)`.
            microbatches: must be 1, because a gradient is final only after the last micro-batch.
            weighted: must be False, because the sum of all weights is known only at the end.
            aux_reduce: as for `value_and_grad`.
            gradient_reduce: likewise. Leaves of Flax's collection `_overwrite_with_gradient` get
                their gradient as the next value; `tx` does not see them.
            row_statistics: likewise.
            batch_argnums: likewise; positions are those of the arguments of `f`.
            in_specs: likewise.

        Returns:
            `step(params, opt_state, batch, ...)`, which returns `(loss, params, opt_state)` or
            `((loss, aux), params, opt_state)`, each array in the memory of the old one.

        Raises:
            NotImplementedError: `microbatches` or `weighted` is given, or the config keeps a wire
                state; or, when `step` is called, `tx` needs a reduction of a leaf that could be
                updated in the loop: a norm, clipping by a global norm, LAMB. The error names the
                leaf and the line of `tx`. Use `value_and_grad` and `apply_gradients`.
            ValueError: as `value_and_grad` and `apply_gradients`.
        """
        check_one_program(tx, self.config, microbatches, weighted)
        options = gradient_options(
            self._devices,
            has_aux=has_aux,
            aux_reduce=aux_reduce,
            gradient_reduce=gradient_reduce,
            row_statistics=row_statistics,
        )

        @functools.wraps(f)
        def step(params, opt_state, *args, **kwargs):
            transform, arrays = prepare(
                self, f, (params, *args), kwargs, options, batch_argnums, in_specs
            )
            check_differentiable(transform.call.arguments[0], arrays[0], False)
            layouts = self._layouts(params, opt_state)
            run = ValueAndUpdate(transform, tx, params, opt_state, layouts, self._programs).run
            return run(arrays, opt_state)

        return step

    def apply(
        self,
        f: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        *,
        batch_argnums: BatchArgnums = None,
        in_specs: Sequence[Any] | None = None,
        out_reduce: Any = None,
        row_statistics: str | None = None,
    ) -> Callable[..., Any]:
        """Return a function that runs `f` on sharded parameters without gradients, for evaluation.

        Args:
            f: `f(params, batch, ...) -> outputs`, written as for `value_and_grad`.
            argnums: positions of the arguments that must be sharded trees.
            batch_argnums: the argument that is the batch, as in `value_and_grad`.
            in_specs: `PartitionSpec`s of arguments, as in `value_and_grad`.
            out_reduce: how outputs are combined over devices: a tree prefix of "mean", "sum",
                "max", "first", "stack" and "concat". By default, an output with one row for each
                row of this device's batch is concatenated over devices, and a float scalar is
                averaged. For any other output, `out_reduce` is required.
            row_statistics: as in `value_and_grad`.

        Returns:
            A function of the same arguments. Where the config keeps slices of the weights from step
            to step (`WeightDelta`), it also takes `wire_state=`, and reads the weights that the
            next training step would read from this state, which it does not change.

        Raises:
            ValueError: as `value_and_grad`; among others for a wire state of other parameters.

        Warns:
            UserWarning: once, if the config keeps such slices and `wire_state` is not given. Full
                weights are then read, which differ a little from the slices of a training step.
        """
        numbers = argument_numbers(argnums)
        reduce = flat_reductions("out_reduce", out_reduce)
        meant = checked_row_statistics(row_statistics)
        options = Options(numbers, has_gradients=False, reduce=reduce, row_statistics=meant)

        @functools.wraps(f)
        def wrapped(*args, wire_state=None, **kwargs):
            transform, arrays = prepare(self, f, args, kwargs, options, batch_argnums, in_specs)
            if wire_state is None and not self._has_warned and reads_kept_slices(transform):
                self._has_warned = True
                warn_of_full_weights(self.config)
            # Residuals of gradients have no part in a program without gradients.
            slices = DeviceWireState(wire_state_of(transform, wire_state).slices)
            return self._programs.run(transform.program, arrays, slices)[2]

        return wrapped

    def plan(
        self,
        f: Callable[..., Any],
        *args: Any,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        microbatches: int = 1,
        weighted: bool = False,
        aux_reduce: Any = None,
        gradient_reduce: Any = None,
        halves: bool = False,
        shares: Sequence[int] | None = None,
        batch_argnums: BatchArgnums = None,
        in_specs: Sequence[Any] | None = None,
        wire_state: Any = None,
        tx: optax.GradientTransformation | None = None,
        opt_state: Any = None,
        tangent_argnums: int | Sequence[int] = (),
        **kwargs: Any,
    ) -> Plan:
        """Plan one call of `value_and_grad(f)`: what it gathers and reduces, and when.

        Nothing is compiled or run; `print` the result. Options are as for `value_and_grad`; other
        keyword arguments are passed to `f`. Given `tx` and `opt_state`, plan `value_and_update(f,
        tx)` instead. `tangent_argnums` adds the traffic of `jax.jvp` along these arguments.
        """
        options = gradient_options(
            self._devices,
            argnums=argnums,
            has_aux=has_aux,
            microbatches=microbatches,
            weighted=weighted,
            aux_reduce=aux_reduce,
            gradient_reduce=gradient_reduce,
            halves=halves,
            shares=shares,
            row_statistics="device",  # a plan is no place to warn
        )
        transform, arrays = prepare(self, f, args, kwargs, options, batch_argnums, in_specs)
        along = argument_numbers(tangent_argnums, "tangent_argnums")
        check_plan(tx, opt_state, wire_state, options, self.config)
        if tx is not None:
            layouts = self._layouts(args[0], opt_state)
            step = ValueAndUpdate(transform, tx, args[0], opt_state, layouts, self._programs)
            return step.plan(arrays, opt_state, along)
        state = wire_state_of(transform, wire_state)
        return transform.plan(transform.program, arrays, state, along)

    def local_steps(
        self, step: Callable[..., Any], method: LocalSteps | None = None, /, **options: Any
    ) -> LocalRounds:
        """Train every node by itself, and average the nodes' parameters every few steps.

        Inside a node, devices shard as `config` says. Between nodes, only fragments of parameters
        are sent. Each node has its own parameters and optimizer state, split over its devices.

        Args:
            step: `step(params, opt_state, batch) -> (params, opt_state, metrics)`, a training step
                that calls `zero.value_and_grad`. It sees arrays and rows of one node; its losses
                and gradients are means over one node.
            method: how and how often nodes exchange, such as `jz.streaming_diloco()`.
            options: fields of `jz.LocalSteps` that replace those of `method`.

        Returns:
            A function that runs one round of `every` steps in one program: `rounds(state, batches)
            -> (state, metrics)`, with methods `init`, `mean`, `abstract`, `rejoin` and `report`.

        Raises:
            ValueError: `step` is no function; the mesh has one node; an option is unknown or out of
                range; or the config has hops that keep arrays from step to step (`zeropp4`).
            NotImplementedError: the config offloads arrays to host memory.

        Example:
            >>> rounds = zero.local_steps(step, jz.streaming_diloco(every=30, fragments=3))
            >>> state = rounds.init(params, opt_state)
            >>> state, metrics = jax.jit(rounds, donate_argnums=0)(state, batches)
            >>> params = rounds.mean(state)
        """
        check_local_steps(self._devices, self.config)
        return LocalRounds(step, local_method(method, options), self)
