"""`VerifiedRound`: a round of local steps that `verify` runs as plain JAX and as configured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._local_steps import LocalSteps
from .._sharding import arrays_of
from .._verify import (
    LOSS,
    NEXT,
    OUTER,
    OUTER_STATE,
    OWN,
    STATE,
    Round,
    RoundRuns,
    RoundVerification,
    VerifyReport,
    on_host,
)
from .local_rounds import LocalRounds
from .local_state import Kept
from .local_step import batch_specs, check_local_steps, local_method
from .optimizer_state import TrueShapes, trained_tree
from .placement import unpad_leaf
from .sharded_trees import ShardedTrees
from .verified_call import VerifiedCall, fetched


def check_round(
    zero: ShardedTrees,
    method: Any,
    given: tuple[Sequence[Any], dict[str, Any]],
    is_plain: bool,
) -> None:
    """Raise an error if `verify` cannot compare the first round of `method`.

    Args:
        zero: the mesh and the config.
        method: the settings of local steps, a `LocalSteps`.
        given: the arguments and the keyword arguments of the loss; batches are stacked over the
            steps.
        is_plain: whether `verify` was given an optimizer, and only options that a round supports,
            which `halves`, for example, is not.
    """
    args, kwargs = given
    local_method(method, {})
    check_local_steps(zero._devices, zero.config)
    if not is_plain:
        raise ValueError(
            "`verify` with `local_steps` takes `tx`, the optimizer of the steps, and "
            "differentiates the first argument: leave out `argnums`, `in_specs`, `halves`, "
            "`shares` and `in_one_program`."
        )
    if any(zero.find_layout(x) for x in (*args[1:], *kwargs.values())):
        raise NotImplementedError(
            "`verify` with `local_steps` takes one sharded tree, the parameters. Let the loss "
            "close over the full arrays of another one."
        )
    if method.fragments > 1:
        raise ValueError(
            f"`verify` compares rounds of one fragment, and `local_steps` has {method.fragments}: "
            "their elements depend on the devices of a node. Give `dataclasses.replace(method, "
            "fragments=1)`: steps, delay, merge, outer optimizer and codec are the same, for all "
            "elements at once."
        )
    if method.delay == method.every:
        raise ValueError(
            f"`verify` runs the first round, which sends nothing new with `delay={method.delay}` "
            f"and `every={method.every}`: what is sent leaves before the first step. Give "
            f"`dataclasses.replace(method, every={method.every + 1})`, and as many batches."
        )
    batch_specs((tuple(args[1:]), kwargs), method.every, zero.num_devices)


def first_step(tree: Any) -> Any:
    """Return the first batch of a tree of batches that are stacked on a leading dim."""
    return jax.tree.map(lambda x: x[0], tree)


class VerifiedRound:
    """The first round of local steps, for `verify` to compare as configured with plain JAX.

    The round starts from the state that `LocalRounds.init` makes.

    Args:
        call: the loss of the first step.
        batches: the arguments of the loss after the parameters, and its keyword arguments. Each is
            stacked over the steps.
        method: the settings of local steps.
    """

    def __init__(self, call: VerifiedCall, batches: tuple[Any, Any], method: LocalSteps):
        self.call, self.batches, self.method = call, batches, method
        self.params = call.args[0]
        self.rounds = self._rounds(method)
        self.opt_state = call.without_codecs.init_optimizer(call.tx, self.params)
        self.rounds.abstract(self.params, self.opt_state)
        self.layouts = self.rounds._known()
        problem = call.problem
        if len(self.layouts.exchanged) != len(problem.differentiated):
            raise NotImplementedError(
                "`verify` does not follow state that gradients overwrite (fp8 layers) through a "
                "round of local steps. Verify the loss without `local_steps`."
            )

    def _rounds(self, method: LocalSteps, own: bool = False) -> LocalRounds:
        """Make `LocalRounds` whose step returns the loss as its metric.

        If `own` is set, the metrics also have each node's parameters after each step.
        """
        call, zero = self.call, self.call.without_codecs
        gradients = zero.value_and_grad(call.f, **call.options)

        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            args, kwargs = batch
            value, grads = gradients(params, *args, **kwargs)
            loss = value[0] if call.options["has_aux"] else value
            params, opt_state = zero.apply_gradients(call.tx, grads, opt_state, params)
            return params, opt_state, (loss, arrays_of(params) if own else [])

        return zero.local_steps(step, method)

    @property
    def problem(self) -> Round:
        """The round as plain JAX computes it, on one device."""
        of_step, nodes = self.call.problem, self.rounds.num_nodes
        fields = {x.name: getattr(of_step, x.name) for x in dataclasses.fields(of_step)}
        args, kwargs = self.batches
        stacked = iter(map(fetched, arrays_of([*args, *kwargs.values()])))
        arrays = [
            next(stacked) if leaf is None else x
            for x, leaf in zip(of_step.arrays, of_step.leaves, strict=True)
        ]
        trained = [arrays[i] for i in of_step.differentiated] if self.method.codec else []
        errors = [np.zeros((nodes, *x.shape), np.float32) for x in trained]
        tx = self.call.tx
        assert tx is not None
        return Round(
            **{**fields, "arrays": [*arrays, *errors]},
            method=dataclasses.replace(self.method, codec=None),
            nodes=nodes,
            tx=tx.inner if isinstance(tx, TrueShapes) else tx,
            treedef=jax.tree.structure(trained_tree(self.call.zero.unshard(self.params))),
        )

    @property
    def runs(self) -> RoundRuns:
        """The function that runs the configured round, and its codecs, layouts and mesh."""
        exchange = self.layouts.exchange
        return RoundRuns(
            run=self.run,
            codecs=[exchange.codec_of(leaf) for leaf in exchange.leaves],
            leaves=list(exchange.leaves),
            method=self.method,
            mesh=self.call.zero._devices,
        )

    def report(
        self, reference: Any, codecs: bool, float64: bool, say: Callable[[str], None]
    ) -> VerifyReport:
        """Run the round as configured and by plain JAX, and return the report that compares both.

        Args:
            reference: the device on which plain JAX runs, or "cpu".
            codecs: whether the round also runs with the codec of the method.
            float64: whether plain JAX also runs in float64.
            say: called with a sentence before each long part.
        """
        notes = {
            "aux is not compared in a round of local steps: verify the loss for it.": (
                self.call.options["has_aux"]
            ),
            "A round is compared without the codecs of the config: verify the loss for them.": (
                self.call.without_codecs is not self.call.zero
            ),
        }
        verification = RoundVerification(self.problem, self.runs, reference, codecs, say)
        return verification.report(float64, [note for note, holds in notes.items() if holds])

    def run(self, method: LocalSteps, own: bool) -> dict[str, list[Any]]:
        """Run the sharded round; return lists of arrays on the host, by kind of result.

        The kinds are constants, such as `LOSS` and `NEXT`: see `RoundRuns`. With `own`, they
        include each node's parameters before the exchange.
        """
        rounds = self._rounds(method, own)
        state, (losses, of_nodes) = rounds(rounds.init(self.params, self.opt_state), self.batches)
        layouts, num = rounds._known(), rounds.num_nodes

        def whole(kept: Kept, arrays: Sequence[Any]) -> list[Any]:
            pairs = zip(kept.global_leaves(num), arrays, strict=True)
            return [on_host(unpad_leaf(leaf, x)) for leaf, x in pairs]

        params, opt_state, outer, outer_state, _ = (
            whole(layouts.kept[field.name], arrays_of(getattr(state, field.name)))
            for field in dataclasses.fields(state)
        )
        owners = layouts.exchange.outer.owners
        results = {
            LOSS: [on_host(losses).T],
            NEXT: [params[i] for i in layouts.exchanged],
            STATE: opt_state,
            OUTER: outer,
            OUTER_STATE: [
                x[0] if i is None else x for i, x in zip(owners, outer_state, strict=True)
            ],
        }
        if own:
            last = whole(layouts.kept["params"], [x[-1] for x in of_nodes])
            results[OWN] = [last[i] for i in layouts.exchanged]
        return results
