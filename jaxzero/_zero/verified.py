"""`Zero.verify`: run a step as configured, and compare it with plain JAX on one device."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from .._sharding import (
    HpZ,
    PerAxis,
    arrays_of,
    flatten,
    is_array,
    path_name,
)
from .._verify import Problem, Runs, Update, Verification, VerifyReport, on_host
from .._warnings import RowsMixedWarning
from .batch_choice import BatchArgnums
from .calls import gradient_options, prepare
from .local_rounds import LocalRounds
from .optimizer_state import TrueShapes, trained_tree
from .outputs import Outputs, values_of
from .rows import num_rows
from .sharded_trees import ShardedTrees
from .transform import Transform
from .user_function import split_aux, split_weight


class VerifiedTrees(ShardedTrees):
    """The part of `Zero` that verifies steps; see `Zero` for the arguments."""

    value_and_grad: Callable
    value_and_update: Callable

    def verify(
        self,
        f: Callable,
        *args: Any,
        tx: optax.GradientTransformation | None = None,
        reference: Any = None,
        float64: bool = False,
        variations: bool = True,
        codecs: bool = True,
        in_one_program: bool = False,
        progress: Callable[[str], None] | None = None,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        microbatches: int = 1,
        weighted: bool = False,
        aux_reduce: Any = None,
        gradient_reduce: Any = None,
        batch_argnums: BatchArgnums = None,
        in_specs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> VerifyReport:
        """Compare one step with plain JAX on one device with all rows.

        Loss, `aux` leaves, gradients and updated parameters of the step, as configured, are
        compared with `jax.value_and_grad` and optax. A difference is right up to a bound that is
        derived, not chosen:

        - *Roundings.* Plain JAX's program is run with the result of each operation moved by its
          rounding error, for a sum of n terms `sqrt(n) eps/2 sum |a_i b_i|` in any order, up or
          down by chance, 8 times. The bound is the spread times Student's quantile for 1e-6.
        - *Codecs.* The step is run without codecs, under the bound of roundings, and with them,
          where gradients may be off by `Codec.error_bound` at each hop, and weights are moved by
          it in the 8 runs. So an error of a codec is told from one of the step.
        - *Updates* are compared with optax on the step's own gradients: Adam would turn a rounding
          of a gradient near zero into a step of its full size.
        - *Random numbers* that rows draw are others on one device. The bound then includes what
          other random numbers change, and the step is also compared, under the first bound, with
          plain JAX on the rows of each device.

        Where a result is beyond its bound, plain JAX also runs on the rows of each device: if that
        gives what the step gives, the loss is no mean of rows, and the report names the first
        operation of the loss whose value on a device's rows is not what one device has for them.

        It costs 3 steps (one more with codecs), and 9 runs of plain JAX. One device holds all
        parameters, gradients and activations of all rows; where a result fails, or there are
        codecs, each device holds them all for its own rows. If a device has not the room, plain
        JAX runs on the host's CPU. Every process computes the reference by itself.

        Args:
            f: the loss, as for `value_and_grad`.
            args: its arguments.
            tx: also compare the parameters that this optimizer updates; `argnums` is then one
                position.
            reference: the device on which plain JAX runs, or "cpu".
            float64: also run plain JAX in float64, which says whose rounding a difference is.
            variations: also run the step with another number of micro-batches and with rows on
                other devices. What changes then depends on which rows are together.
            codecs: also run the step with the codecs of the config. Without, only what does not
                come from codecs is verified.
            in_one_program: compare the parameters that `value_and_update` makes, in place of those
                of `value_and_grad` and `apply_gradients`. Needs `tx`.
            progress: called with a sentence before each long part, such as the memory that plain
                JAX needs.
            argnums: this and the following as for `value_and_grad`.
            kwargs: keyword arguments of `f`.

        Returns:
            A `VerifyReport`: `print` it, ask for `ok`, or call `raise_if_wrong` in a test.

        Raises:
            NotImplementedError: `f` is a round of local steps, or `shares` or `halves` is given.
            ValueError: no device has the room, or `reference` is none; `float64` is set and `f`
                does not run in float64; or as `value_and_grad`.
        """
        _check(f, kwargs, tx, argnums, in_one_program)
        options: dict[str, Any] = dict(
            argnums=argnums,
            has_aux=has_aux,
            microbatches=microbatches,
            weighted=weighted,
            aux_reduce=aux_reduce,
            gradient_reduce=gradient_reduce,
        )
        checked = gradient_options(self._devices, **options)
        transform, arrays = prepare(self, f, args, kwargs, checked, batch_argnums, in_specs)
        call = _Call(self, f, args, kwargs, transform, arrays, tx)
        call.in_one_program = in_one_program
        call.options = {**options, "batch_argnums": batch_argnums, "in_specs": in_specs}
        runs = Runs(
            step=call.step, mesh=self._devices, config=self.config, microbatches=microbatches
        )
        say = progress or (lambda _: None)
        verification = Verification(call.problem, runs, reference, codecs, say)
        with warnings.catch_warnings():  # the report says where rows are mixed
            warnings.simplefilter("ignore", RowsMixedWarning)
            return verification.report(variations, float64)


def _check(
    f: Callable,
    kwargs: dict[str, Any],
    tx: optax.GradientTransformation | None,
    argnums: int | Sequence[int],
    in_one_program: bool,
) -> None:
    """Raise the errors of `verify` that concern its own arguments."""
    if isinstance(f, LocalRounds):
        raise NotImplementedError(
            "`verify` compares a loss, and a round of local steps is none. Verify the loss of "
            "its steps: what a round adds is the exchange between nodes."
        )
    for name in ("shares", "halves"):
        if kwargs.get(name):
            raise NotImplementedError(
                f"`verify` does not know `{name}` yet. Leave it out: the rest of the step is "
                "the same."
            )
    if tx is not None and not isinstance(argnums, int):
        raise ValueError(
            f"`tx` updates the tree of one argument, and `argnums` is {argnums!r}. Give one "
            "position, or verify without `tx`."
        )
    if in_one_program and (tx is None or argnums != 0):
        raise ValueError(
            "`in_one_program` verifies `value_and_update`, which updates the first argument. "
            "Give `tx`, and leave out `argnums`."
        )


class _Call:
    """The arguments of one call, whole and as they are stored."""

    options: dict[str, Any]
    in_one_program: bool

    def __init__(
        self,
        zero: VerifiedTrees,
        f: Callable,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        transform: Transform,
        arrays: list[list[Any]],
        tx: optax.GradientTransformation | None,
    ):
        self.zero, self.f, self.transform, self.tx = zero, f, transform, tx
        self.args, self.kwargs = list(args), kwargs
        values = [*args, *kwargs.values()]
        self.names: list[str] = []
        whole, specs, leaves = [], [], []
        for value, argument, stored in zip(values, transform.call.arguments, arrays, strict=True):
            full = arrays_of(zero.unshard(value)) if argument.plan else stored
            whole += [_fetched(x) for x in full]
            specs += [PartitionSpec()] * len(full) if argument.plan else argument.specs
            leaves += argument.plan.leaves if argument.plan else [None] * len(full)
        self.sizes = [len(x) for x in arrays]
        grads = [
            i for i in self._places() if jax.numpy.issubdtype(whole[i].dtype, jax.numpy.inexact)
        ]
        self.problem = Problem(
            function=self._function,
            arrays=whole,
            specs=specs,
            leaves=leaves,
            differentiated=grads,
            grad_names=[self._name(i, leaves[i].path) for i in grads],
            aux_names=[],
            aux_how=[],
        )
        self.rows = num_rows(transform.call, arrays)

    def _places(self) -> list[int]:
        """The places of the leaves that get gradients, in the order of arguments."""
        places = []
        for number in sorted(self.transform.options.argnums):
            first = sum(self.sizes[:number])
            trained = self.transform.call.arguments[number].trained
            places += [first + i for i, kind in enumerate(trained) if kind]
        return places

    def _name(self, i: int, path: str) -> str:
        numbers = self.transform.options.argnums
        if len(numbers) == 1:
            return path
        number = int(np.searchsorted(np.cumsum(self.sizes), i, side="right"))
        return f"{number}.{path}"

    def _function(self, arrays: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
        remaining = iter(arrays)
        args, kwargs = self.transform.call.rebuild(
            [[next(remaining) for _ in range(size)] for size in self.sizes]
        )
        options = self.transform.options
        value, aux = split_aux(self.f(*args, **kwargs), options.has_aux)
        value, weight = split_weight(value, options.weighted)
        outputs = Outputs(options, self.rows)
        leaves = outputs.record(aux)
        pairs = zip(jax.tree_util.tree_leaves_with_path(aux), outputs.statics, strict=True)
        self.problem.aux_names[:] = [
            path_name(path) for (path, _), static in pairs if static is None
        ]
        self.problem.aux_how[:] = outputs.how
        return value, weight, leaves

    def step(
        self, arrays: Sequence[Any], microbatches: int, encoded: bool
    ) -> tuple[list[Any], Update | None]:
        """Run the configured step: see `Runs.step`."""
        zero = self.zero if encoded else self._without_codecs
        args, kwargs = self._arguments(arrays)
        options = {**self.options, "microbatches": microbatches}
        state = {}
        number = self.options["argnums"]
        if zero.config.needs_wire_state:
            numbers = (number,) if isinstance(number, int) else number
            states = tuple(zero.init_wire_state(args[i]) for i in numbers)
            state["wire_state"] = states[0] if isinstance(number, int) else states
        made = zero.value_and_grad(self.f, **options)(*args, **kwargs, **state)
        value, grads = made[:2]
        loss, aux = value if self.options["has_aux"] else (value, None)
        trees = [grads] if isinstance(number, int) else list(grads)
        order = sorted(range(len(trees)), key=lambda i: self.transform.options.argnums[i])
        full = [x for i in order for x in _floats(zero.unshard(trees[i]))]
        results = on_host([loss, *values_of(aux), *full])
        return results, self._update(zero, args, kwargs, grads)

    @property
    def _without_codecs(self) -> VerifiedTrees:
        config = self.zero.config
        hpz = config.hpz and HpZ(codec=None)
        config = dataclasses.replace(config, weights=PerAxis(), gradients=PerAxis(), hpz=hpz)
        if config == self.zero.config:
            return self.zero
        zero = type(self.zero)(self.zero._devices, config)
        for argument in self.transform.call.arguments:
            if argument.plan is not None:
                zero._plans.add(argument.plan)
        return zero

    def _arguments(self, arrays: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with other rows; parameters as they are stored."""
        remaining = iter(arrays)
        parts = [[next(remaining) for _ in range(size)] for size in self.sizes]
        values = [
            given if argument.plan else argument.rebuild(part)
            for given, argument, part in zip(
                [*self.args, *self.kwargs.values()],
                self.transform.call.arguments,
                parts,
                strict=True,
            )
        ]
        num = len(self.args)
        return values[:num], dict(zip(self.kwargs, values[num:], strict=True))

    def _update(
        self, zero: VerifiedTrees, args: list[Any], kwargs: dict[str, Any], grads: Any
    ) -> Update | None:
        if self.tx is None:
            return None
        tx, params = self.tx, args[self.options["argnums"]]
        state = zero.init_optimizer(tx, params)
        if self.in_one_program:
            left_out = ("argnums", "microbatches", "weighted")
            options = {name: x for name, x in self.options.items() if name not in left_out}
            step = zero.value_and_update(self.f, tx, **options)
            _, updated, _ = step(params, state, *args[1:], **kwargs)
        else:
            updated, _ = zero.apply_gradients(tx, grads, state, params)
        if isinstance(tx, TrueShapes):
            tx = tx.inner
        whole, new, of_grads = (
            trained_tree(zero.unshard(tree)) for tree in (params, updated, grads)
        )
        paths, leaves, treedef = flatten(whole)
        of_grads_def = jax.tree.structure(of_grads)

        def update(grads: Sequence[Any], params: Sequence[Any]) -> list[Any]:
            trees = jax.tree.unflatten(of_grads_def, grads), jax.tree.unflatten(treedef, params)
            updates, _ = tx.update(trees[0], tx.init(trees[1]), trees[1])
            return jax.tree.leaves(optax.apply_updates(trees[1], updates))

        return Update(
            names=[path_name(path) for path in paths],
            got=on_host(jax.tree.leaves(new)),
            function=update,
            gradients=on_host(jax.tree.leaves(of_grads)),
            params=on_host(leaves),
            grad_names=[path_name(path) for path in flatten(of_grads)[0]],
            is_apart=self.in_one_program,
        )


def _floats(tree: Any) -> list[Any]:
    """The arrays of a tree of gradients, without those of type `float0`."""
    return [x for x in flatten(tree)[1] if is_array(x) and x.dtype != jax.dtypes.float0]


def _fetched(x: Any) -> Any:
    """An array on the host; a random key as it is."""
    is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else on_host(x)
