"""Verify a round of local steps by plain JAX and optax on one device.

There, each node takes its steps in turn, and the nodes' parameters are then exchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._collectives import accumulator_dtype
from .._local_steps import LocalSteps
from .._mesh import AnyMesh
from .._sharding import LeafSpec, path_name
from .codec_bounds import bound_of_shards
from .one_device import OneDevice
from .problem import Problem
from .report import Check, Rounding, VerifyReport
from .samples import Samples, checked, measured

LOSS, OWN, STATE = "loss", "own parameter", "optimizer state"
OUTER, OUTER_STATE, NEXT = "outer parameter", "outer state", "parameter"
_DELTA = "pseudo-gradient"
_OF_NODES = (LOSS, OWN, STATE, NEXT)  # kinds of results `[nodes, ...]`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round(Problem):
    """One round of local steps, which begins with the same state on all nodes.

    `arrays` are the parameters and the batches of all steps, `[every, ...]`. With a codec, they are
    followed by the error to add to each parameter's pseudo-gradients, `[nodes, ...]`. The other
    inherited fields describe one step.

    Attributes:
        method: how nodes exchange parameters; here in one fragment, without a codec.
        nodes: the number of nodes.
        tx: the optimizer of the steps.
        treedef: the structure of the trees that optimizers get, with a leaf for each of
            `differentiated`.
    """

    method: LocalSteps
    nodes: int
    tx: optax.GradientTransformation
    treedef: Any

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """The kind and the name of each result, such as `("optimizer state", "0.mu.kernel")`."""
        like = [self.arrays[i] for i in self.differentiated]
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
        of_tx, of_outer = (
            [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
            for tree in (
                jax.eval_shape(tx.init, self._tree(structs)) for tx in (self.tx, self.method.outer)
            )
        )
        names = {LOSS: ["loss"], OWN: self.grad_names, STATE: of_tx, OUTER: self.grad_names}
        names |= {OUTER_STATE: of_outer, NEXT: self.grad_names, _DELTA: self.grad_names}
        return [(kind, name) for kind, found in names.items() for name in found]

    def _tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.treedef, leaves)

    def loss_and_grads(self, arrays: Sequence[Any], *, divide: bool = True) -> list[Any]:
        """Compute the results of the round, in the order of `kinds`."""
        arrays, errors = arrays[: len(self.leaves)], arrays[len(self.leaves) :]
        rows = dict(self._rows_of_nodes(arrays))
        mine = {-1: jnp.arange(self.nodes), **rows}  # `lax.map` needs an array, also without rows
        sent, own, state, losses = lax.map(lambda rows: self._on_node(arrays, rows), mine)
        anchors = [
            arrays[i].astype(accumulator_dtype(arrays[i].dtype)) for i in self.differentiated
        ]
        deltas = [
            _difference(x[None], y.astype(x.dtype)) for x, y in zip(anchors, sent, strict=True)
        ]
        received = deltas
        if errors:
            pairs = zip(deltas, errors, strict=True)
            received = [x + (e * _signs(e.shape)).astype(x.dtype) for x, e in pairs]
        means = [jnp.mean(x, axis=0) for x in received]
        outer, tree = self.method.outer, self._tree(anchors)
        updates, outer_state = outer.update(self._tree(means), outer.init(tree), tree)
        new = jax.tree.leaves(optax.apply_updates(tree, updates))
        following = [
            self._merged(x, y, z[None]).astype(x.dtype)
            for x, y, z in zip(own, sent, new, strict=True)
        ]
        of_outer = [*new, *map(jnp.asarray, jax.tree.leaves(outer_state))]
        return [losses, *own, *jax.tree.leaves(state), *of_outer, *following, *deltas]

    def _rows_of_nodes(self, arrays: Sequence[Any]) -> list[tuple[int, Any]]:
        """Return the index of each array with rows, and its rows by node, `[nodes, every, ...]`."""
        by_node = []
        for i, dim in enumerate(self.row_dims):
            if dim is not None:
                x, at = arrays[i], dim + 1
                size = x.shape[at] // self.nodes
                split = x.reshape(*x.shape[:at], self.nodes, size, *x.shape[at + 1 :])
                by_node.append((i, jnp.moveaxis(split, at, 0)))
        return by_node

    def _on_node(self, arrays: Sequence[Any], rows: dict[int, Any]) -> tuple[Any, ...]:
        """Compute all steps that a node takes in the round.

        Args:
            arrays: the arrays of the round.
            rows: this node's rows, by index in `arrays`.

        Returns:
            The parameters when the node sends them; the parameters at the end of the round; the
            optimizer state at the end; and the losses of all steps.
        """
        stacked = {i: x for i, x in enumerate(arrays) if self.leaves[i] is None}
        stacked |= {i: x for i, x in rows.items() if i >= 0}

        def step(carry: Any, batch: dict[int, Any]) -> Any:
            params, state = carry
            merged = [batch.get(i, x) for i, x in enumerate(arrays)]
            for i, x in zip(self.differentiated, params, strict=True):
                merged[i] = x
            loss, *rest = Problem.loss_and_grads(self, merged)
            tree, grads = self._tree(params), self._tree(rest[-len(params) :])
            updates, state = self.tx.update(grads, state, tree)
            return (jax.tree.leaves(optax.apply_updates(tree, updates)), state), loss

        params = [arrays[i] for i in self.differentiated]
        carry = params, jax.tree.map(jnp.asarray, self.tx.init(self._tree(params)))
        before = self.method.every - self.method.delay
        carry, losses = lax.scan(step, carry, {i: x[:before] for i, x in stacked.items()})
        sent = carry[0]
        if self.method.delay:
            carry, last = lax.scan(step, carry, {i: x[before:] for i, x in stacked.items()})
            losses = jnp.concatenate([losses, last])
        return sent, *carry, losses

    def _merged(self, own: Any, sent: Any, outer: Any) -> Any:
        """Return the parameters with which each node begins the next round, `[nodes, ...]`.

        Args:
            own: the parameters of each node at the end of the round.
            sent: the parameters of each node when it sent them.
            outer: the outer parameters after the exchange.
        """
        own, sent = own.astype(outer.dtype), sent.astype(outer.dtype)
        if self.method.mixing is None:
            return outer + _difference(own, sent)
        mixing = jnp.asarray(self.method.mixing, outer.dtype)
        return mixing * own + (1 - mixing) * outer


def _difference(x: Any, y: Any) -> Any:
    """Return `x - y`, with 0 where `x` and `y` are the same infinity."""
    return jnp.where(x == y, 0, x - y)


def _still(arrays: Sequence[Any]) -> list[Any]:
    """Return zeros as the `spread` of each array (see `OneDevice`): codecs do not change it."""
    return [np.zeros(np.shape(x), np.float32) for x in arrays]


def _signs(shape: tuple[int, ...]) -> Any:
    """Return an array of plus and minus ones, evenly mixed: signs for the errors of a codec."""
    # Multiplicative hashing (Knuth, TAOCP 3, 6.4).
    bits = lax.iota(jnp.uint32, int(np.prod(shape))) * jnp.uint32(2654435761)
    return (1 - 2 * (bits >> 31).astype(jnp.float32)).reshape(shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundRuns:
    """The function that runs the configured round, and the codecs and layouts of its messages.

    Attributes:
        run: takes a method of local steps, and runs a round by it. Returns the results on the host,
            as a list for each kind in `Round.kinds`. If its second argument is true, the results
            also have each node's parameters before the exchange, as the kind `OWN`.
        codecs: for each parameter, the codec of its pseudo-gradient in `method`; None: none.
        leaves: the layout of each parameter over the devices of a node, as it is sent.
        method: the configured method, with its codec and fragments.
        mesh: the mesh of all nodes.
    """

    run: Callable[[LocalSteps, bool], dict[str, list[Any]]]
    codecs: list[Any]
    leaves: list[LeafSpec]
    method: LocalSteps
    mesh: AnyMesh


class RoundVerification:
    """Compares the configured round with plain JAX's `Round`; see `Zero.verify`."""

    def __init__(
        self,
        problem: Round,
        runs: RoundRuns,
        reference: Any,
        codecs: bool,
        say: Callable[[str], None],
    ):
        self.runs, self.kinds = runs, problem.kinds
        self.encoded = codecs and any(x is not None for x in runs.codecs)
        spread = _still(problem.arrays) if self.encoded else None
        self.one = OneDevice.chosen(problem, problem, runs.mesh, reference, spread, say)
        self.memory = self.one.described()
        self.want = self.one.run()
        self.is_random = self.one.is_random
        self.samples = self.one.samples(self.want, self.is_random, False)

    def report(self, float64: bool, notes: Sequence[str]) -> VerifyReport:
        """Run the configured round, and compare its results with those of plain JAX.

        Args:
            float64: whether to compare the results of both with plain JAX in float64 too.
            notes: sentences to put into the report.
        """
        plain = dataclasses.replace(self.runs.method, codec=None)
        got = self.runs.run(plain, False)
        checks, cause = self._compare(got, self.samples), ""
        first = self._nodes(got, checks)
        if not all(x.ok for x in checks):
            every = self.runs.run(plain, True)
            own = {kind: every[kind] for kind in (LOSS, STATE, OWN)}
            steps = self._compare(own, self.samples)
            cause = "exchange" if all(x.ok for x in steps) else "node"
        if self.encoded and not cause:
            of_codecs = self._check_codecs()
            cause = "" if all(x.ok for x in of_codecs) else "codecs"
            checks += of_codecs
        return VerifyReport(
            checks=tuple(sorted(checks, key=lambda check: -check.ratio)),
            roundings=tuple(self._roundings(got)) if float64 else (),
            cause=cause,
            first=first,
            notes=tuple(notes),
            memory=self.memory,
            is_round=True,
        )

    def _pairs(self, got: dict[str, list[Any]]) -> list[tuple[int, Any]]:
        """Return `(index in Round.kinds, value)` for each result; `got` has results by kind."""
        remaining = {kind: iter(values) for kind, values in got.items()}
        places = [i for i, (kind, _) in enumerate(self.kinds) if kind in got]
        return [(i, next(remaining[self.kinds[i][0]])) for i in places]

    def _compare(self, got: dict[str, list[Any]], samples: Samples, kind: str = "") -> list[Check]:
        num = self.runs.mesh.size
        return [
            checked(
                self.kinds[i][1],
                self.kinds[i][0] + kind,
                x,
                self.want[i],
                samples.bounds(i),
                num,
            )
            for i, x in self._pairs(got)
        ]

    def _check_codecs(self) -> list[Check]:
        """Compare the round with its codecs to plain JAX, in bounds that include codecs' errors."""
        got = self.runs.run(self.runs.method, False)
        deltas = self.want[-len(self.runs.leaves) :]  # the last results of `Round`
        triples = zip(self.runs.codecs, self.runs.leaves, deltas, strict=True)
        errors = [
            np.zeros_like(x)
            if codec is None
            else np.stack([bound_of_shards(codec, leaf, each) for each in x])
            for codec, leaf, x in triples
        ]
        given = self.one.problem.arrays[: len(self.one.problem.leaves)]
        self.one.set_spread([*_still(given), *errors])
        samples = self.one.samples(self.want, self.is_random, True)
        sent = {kind: got[kind] for kind in (OUTER, OUTER_STATE, NEXT)}
        return self._compare(sent, samples, ", encoded")

    def _nodes(self, got: dict[str, list[Any]], checks: Sequence[Check]) -> str:
        """Return a sentence that names the nodes where the worst result is wrong, or ""."""
        pairs = zip(checks, self._pairs(got), strict=True)
        wrong = [(x, i, y) for x, (i, y) in pairs if not x.ok and self.kinds[i][0] in _OF_NODES]
        if not wrong:
            return ""
        worst, i, value = max(wrong, key=lambda each: each[0].ratio)
        off = [measured(x, y)[0] for x, y in zip(value, self.want[i], strict=True)]
        numbers = [
            str(node) for node, x in enumerate(off) if not x <= worst.bound / len(off) ** 0.5
        ]
        of = f"node{'s' if len(numbers) > 1 else ''} {', '.join(numbers)} of {len(off)}"
        return f"The {worst.kind} `{worst.name}` differs on {of}." if numbers else ""

    def _roundings(self, got: dict[str, list[Any]]) -> list[Rounding]:
        exact = self.one.in_float64()
        return [
            Rounding(
                name=f"{self.kinds[i][0]} {self.kinds[i][1]}",
                of_step=float(measured(np.asarray(x), exact[i])[0]),
                of_reference=float(measured(np.asarray(self.want[i]), exact[i])[0]),
            )
            for i, x in self._pairs(got)
        ]
