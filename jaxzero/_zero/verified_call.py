"""`VerifiedCall`: one call of a loss that `Zero.verify` runs as plain JAX and as configured."""

from __future__ import annotations

import dataclasses
import functools
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
from .._simigrad import GradientHalves
from .._verify import Problem, Runs, Update, on_host
from .optimizer_state import TrueShapes, trained_tree
from .outputs import Outputs, values_of
from .rows import counted_rows, num_rows
from .transform import Transform
from .user_function import split_aux, split_weight


class VerifiedCall:
    """One call of the loss, with its arguments as full arrays (for plain JAX) and as stored.

    Args:
        zero: the `Zero` that is verified.
        f: the loss.
        args: the positional arguments of `f`.
        kwargs: the keyword arguments of `f`.
        transform: the transform of the call.
        arrays: the stored arrays of each argument.
        tx: the optimizer, or None.
    """

    options: dict[str, Any]
    in_one_program: bool

    def __init__(
        self,
        zero: Any,
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
            full = arrays_of(zero.unshard(value)) if argument.layout else stored
            whole += [fetched(x) for x in full]
            specs += [PartitionSpec()] * len(full) if argument.layout else argument.specs
            leaves += argument.layout.leaves if argument.layout else [None] * len(full)
        self.sizes = [len(x) for x in arrays]
        self.rows = num_rows(transform.call, arrays)
        grads = [
            i for i in self._places() if jax.numpy.issubdtype(whole[i].dtype, jax.numpy.inexact)
        ]
        # The names of `aux` are known once `_function` has been traced, which adds them.
        self.problem = Problem(
            function=self._function,
            arrays=whole,
            specs=specs,
            leaves=leaves,
            differentiated=grads,
            grad_names=[self._name(i, leaves[i].path) for i in grads],
            aux_names=[],
            aux_how=[],
            counted=self._counted(),
        )

    def _counted(self) -> Any:
        """Return for each row of the batch whether any device computes it; None: all are computed.

        With `shares`, the rows of micro-batches that do not run are not computed.
        """
        options = self.transform.options
        if options.shares is None or self.rows is None:
            return None
        return counted_rows(self.rows, self.zero._devices, options.microbatches, options.shares)

    def _places(self) -> list[int]:
        """Return which leaves get gradients, as indices among the arrays of all arguments."""
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

    @property
    def runs(self) -> Runs:
        """The functions by which `Verification` runs the configured step, and its settings."""
        return Runs(
            step=self.step,
            extras=self.extras,
            tables=self.tables,
            mesh=self.zero._devices,
            config=self.zero.config,
            comm=self.transform.comm,
            microbatches=self.transform.options.microbatches,
        )

    def step(
        self, arrays: Sequence[Any], microbatches: int, encoded: bool
    ) -> tuple[list[Any], Any]:
        """Run the configured step on full `arrays`, with codecs if `encoded`: see `Runs.step`.

        Returns:
            The loss, `aux` and full gradients in one list, on the host; and a value for `extras`.
        """
        zero = self.zero if encoded else self.without_codecs
        args, kwargs = self._arguments(arrays)
        options = {**self.options, "microbatches": microbatches}
        number, state = self.options["argnums"], self._wire_state(zero, args)
        outputs = zero.value_and_grad(self.f, **options)(*args, **kwargs, **state)
        value, grads = outputs[:2]
        loss, aux = value if self.options["has_aux"] else (value, None)
        trees = [grads] if isinstance(number, int) else list(grads)
        full = [x for tree in self._in_order(trees) for x in _floats(zero.unshard(tree))]
        results = on_host([loss, *values_of(aux), *full])
        return results, (zero, args, kwargs, *outputs[1:])

    def tables(self) -> dict[str, bool]:
        """Return the paths of the tables whose rows the step sends.

        The value of each says whether the step also gathers the whole table.
        """
        args, kwargs = self._arguments(self.problem.arrays)
        kwargs |= self._wire_state(self.zero, args)
        plan = self.zero.plan(self.f, *args, **self.options, **kwargs)
        return {x.name: not x.is_alone for x in plan.rows}

    def _wire_state(self, zero: Any, args: Sequence[Any]) -> dict[str, Any]:
        """Return the keyword arguments that give a new wire state to the step.

        They are `{"wire_state": state}`, or `{}` if the config needs no wire state.
        """
        if not zero.config.needs_wire_state:
            return {}
        number = self.options["argnums"]
        numbers = (number,) if isinstance(number, int) else number
        states = tuple(zero.init_wire_state(args[i]) for i in numbers)
        return {"wire_state": states[0] if isinstance(number, int) else states}

    def extras(self, outcome: Any) -> tuple[Update | None, list[Any] | None]:
        """Return what a run of `step` gives beside its results.

        Args:
            outcome: the second value that `step` returned.

        Returns:
            The optimizer's update, or None without an optimizer; and the inner products of the
            half-batches' gradients, or None without `halves`.
        """
        zero, args, kwargs, grads, *more = outcome
        halves = self._halves(more[0]) if self.options["halves"] else None
        return self._update(zero, args, kwargs, grads), halves

    def _halves(self, halves: GradientHalves) -> list[Any]:
        """Flatten `halves` into a list of numbers on the host.

        It has the first inner product of every leaf, then the second and the third, and last the
        share of the first half.
        """
        *products, share = halves
        leaves = []
        for product in products:
            trees = [product] if isinstance(self.options["argnums"], int) else product
            leaves += [x for tree in self._in_order(trees) for x in jax.tree.leaves(tree)]
        if len(leaves) != len(products) * len(self.problem.grad_names):
            raise NotImplementedError(
                "`verify` cannot compare `halves` with state that gradients overwrite (fp8 "
                "layers), which has no gradients. Leave out `halves`."
            )
        return on_host([*leaves, share])

    def _in_order(self, trees: Sequence[Any]) -> list[Any]:
        """Sort trees, one for each entry of `argnums`, by the positions of their arguments."""
        numbers = self.transform.options.argnums
        return [trees[i] for i in sorted(range(len(trees)), key=lambda i: numbers[i])]

    @functools.cached_property
    def without_codecs(self) -> Any:
        """A `Zero` with the same layouts and no codecs. It is cached, so it compiles once."""
        config = self.zero.config
        hpz = config.hpz and HpZ(codec=None)
        stages = config.stages and dataclasses.replace(config.stages, messages=None)
        config = dataclasses.replace(
            config, weights=PerAxis(), gradients=PerAxis(), hpz=hpz, stages=stages
        )
        if config == self.zero.config:
            return self.zero
        zero = type(self.zero)(self.zero._devices, config)
        zero._programs = self.zero._programs  # many compiled programs are the same
        for argument in self.transform.call.arguments:
            if argument.layout is not None:
                zero._registry.add(argument.layout)
        return zero

    def _arguments(self, arrays: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return `(args, kwargs)` for the step.

        Sharded trees are those that the user gave. All other arguments are built from `arrays`.
        """
        remaining = iter(arrays)
        parts = [[next(remaining) for _ in range(size)] for size in self.sizes]
        values = [
            given if argument.layout else argument.rebuild(part)
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
        self, zero: Any, args: list[Any], kwargs: dict[str, Any], grads: Any
    ) -> Update | None:
        if self.tx is None:
            return None
        tx, params = self.tx, args[self.options["argnums"]]
        state = zero.init_optimizer(tx, params)
        if self.in_one_program:
            left_out = ("argnums", "microbatches", "weighted", "halves", "shares")
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
    """Return the arrays of a tree of gradients, without those of dtype `float0`."""
    return [x for x in flatten(tree)[1] if is_array(x) and x.dtype != jax.dtypes.float0]


def fetched(x: Any) -> Any:
    """Copy an array to the host.

    An array of random keys that is wholly on this process's devices is returned unchanged.
    """
    if not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        return on_host(x)
    if x.is_fully_addressable:
        return x
    return jax.random.wrap_key_data(on_host(x), impl=jax.random.key_impl(x))
