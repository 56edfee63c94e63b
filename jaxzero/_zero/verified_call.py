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
    """One call of the loss, with its arguments whole (for plain JAX) and as they are stored.

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
        """Return for each row whether it is computed, if `shares` leaves out some; else None."""
        options = self.transform.options
        if options.shares is None or self.rows is None:
            return None
        return counted_rows(self.rows, self.zero._devices, options.microbatches, options.shares)

    def _places(self) -> list[int]:
        """Return the indices, among all arguments' arrays, of the leaves that get gradients."""
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
        """The configured step, with its mesh and codecs, as `Verification` runs it."""
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
        """Run the configured step on `arrays`, with or without codecs: see `Runs.step`."""
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
        """Return the tables whose rows the configured step sends: see `Runs.tables`."""
        args, kwargs = self._arguments(self.problem.arrays)
        kwargs |= self._wire_state(self.zero, args)
        plan = self.zero.plan(self.f, *args, **self.options, **kwargs)
        return {x.name: not x.is_alone for x in plan.rows}

    def _wire_state(self, zero: Any, args: Sequence[Any]) -> dict[str, Any]:
        """Return `{"wire_state": a new state}`, or `{}` if the config needs no state."""
        if not zero.config.needs_wire_state:
            return {}
        number = self.options["argnums"]
        numbers = (number,) if isinstance(number, int) else number
        states = tuple(zero.init_wire_state(args[i]) for i in numbers)
        return {"wire_state": states[0] if isinstance(number, int) else states}

    def extras(self, outcome: Any) -> tuple[Update | None, list[Any] | None]:
        """Return the update and the half-batch products of a run of `step`: see `Runs.extras`.

        Args:
            outcome: the second value that `step` returned.
        """
        zero, args, kwargs, grads, *more = outcome
        halves = self._halves(more[0]) if self.options["halves"] else None
        return self._update(zero, args, kwargs, grads), halves

    def _halves(self, halves: GradientHalves) -> list[Any]:
        """Flatten `halves` into one list: three inner products for all leaves, and the share."""
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
        """A `Zero` with the same layouts and no codecs, made once so that it compiles once."""
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
        """Return the call's arguments: sharded trees as given, other arguments made of `arrays`."""
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
    """Copy an array to the host. A random key that is on this process's devices stays there."""
    if not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        return on_host(x)
    if x.is_fully_addressable:
        return x
    return jax.random.wrap_key_data(on_host(x), impl=jax.random.key_impl(x))
