"""`Zero.verify` runs a step as configured, and compares it with plain JAX on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import optax

from .._sharding import ZeroConfig
from .._verify import Verification, VerifyReport
from .._warnings import RowsMixedWarning
from .batch_choice import BatchArgnums
from .calls import gradient_options, prepare
from .local_rounds import LocalRounds
from .sharded_trees import ShardedTrees
from .verified_call import VerifiedCall
from .verified_round import VerifiedRound, check_round, first_step


class VerifiedTrees(ShardedTrees):
    """The part of `Zero` that verifies steps; see `Zero` for the arguments."""

    def verify(
        self,
        f: Callable[..., Any],
        *args: Any,
        tx: optax.GradientTransformation | None = None,
        reference: Any = None,
        float64: bool = False,
        variations: bool = True,
        codecs: bool = True,
        in_one_program: bool = False,
        local_steps: Any = None,
        progress: Callable[[str], None] | None = None,
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
        **kwargs: Any,
    ) -> VerifyReport:
        """Compare one step with plain JAX on one device with all rows.

        The step runs as configured. Its loss, `aux` leaves, gradients and updated parameters are
        compared with those of `jax.value_and_grad` and optax. A difference is right up to a bound
        that is derived, not chosen:

        - *Roundings.* Plain JAX's program is run 8 times. Each time, the result of every operation
          is moved up or down at random by the operation's rounding error: for a sum of n terms, in
          any order, `sqrt(n) eps/2 sum |a_i b_i|`. The bound is the spread of the results times
          Student's quantile for 1e-6.
        - *Codecs.* The step is run without codecs, under the bound of roundings, and with codecs,
          under a wider bound: gradients may be off by `Codec.error_bound` at each hop, and in the 8
          runs weights are moved by it too. So a codec's error is told from an error of the step.
        - *Updates* are compared with optax on the step's own gradients: Adam would turn a rounding
          of a gradient near zero into a step of its full size.
        - *Random numbers* that rows draw differ between the step and one device. The bound then
          includes what other random numbers change. The step is also compared, under the bound of
          roundings, with plain JAX on the rows of each device.

        If a result is beyond its bound, plain JAX also runs on the rows of each device. If that
        gives the result of the step, the loss is no mean of rows. The report then names the first
        operation of the loss whose value for a device's rows differs from the value that one device
        with all rows computes.

        To verify a round of local steps, plain JAX and optax run every node in turn, and the outer
        optimizer on the mean of the nodes' pseudo-gradients. Compared are losses, parameters and
        optimizer states of all nodes, and outer parameters and state. The round runs without the
        codecs of the config, once with and once without the codec of `local_steps`.

        `verify` costs 3 steps (one more with codecs) and 9 runs of plain JAX; with codecs or random
        numbers, 8 more of each. Every program is compiled once. One device holds all parameters,
        gradients and activations of all rows. If a result fails, numbers are random, or there are
        codecs, each device holds them for its own rows. If a device lacks the memory, plain JAX
        runs on the host's CPU. Call it on all processes: each computes the reference by itself.

        Args:
            f: the loss, as for `value_and_grad`.
            args: the arguments of `f`.
            tx: also compare the parameters that this optimizer updates; `argnums` is then one
                position.
            reference: the device on which plain JAX runs, or "cpu".
            float64: also run plain JAX in float64, which says whose rounding a difference is.
            variations: also run the step with another number of micro-batches, and with rows on
                other devices. A result that then changes depends on which rows are together.
            codecs: also run the step with the codecs of the config. If False, the step is verified
                only as it is without codecs.
            in_one_program: compare the parameters that `value_and_update` makes, in place of those
                of `value_and_grad` and `apply_gradients`. Needs `tx`.
            local_steps: compare a round of local steps that nodes exchange in this way, such as
                `jz.diloco(every=1)`. Arguments after the parameters are then stacked, `[every,
                rows, ...]`; a step is `value_and_grad` and `apply_gradients` with `tx`.
            progress: called with a sentence before each long part, such as the memory that plain
                JAX needs.
            argnums: this and the following as for `value_and_grad`.
            kwargs: keyword arguments of `f`.

        Returns:
            A `VerifyReport`: `print` it, ask for `ok`, or call `raise_if_wrong` in a test.

        Raises:
            NotImplementedError: `local_steps` is given, and an argument other than the parameters
                is a sharded tree; gradients overwrite state, and `local_steps` or `halves` is
                given; or stages encode `messages`, and `codecs` is not False.
            ValueError: `f` is a round; `local_steps` has several fragments, or sends nothing in its
                first round; no device has the memory; `reference` is no device; `float64` is set
                and `f` does not run in float64; or as `value_and_grad`.
        """
        more = bool(halves or shares)
        _check(f, tx, argnums, in_one_program, more)
        _check_messages(self.config, codecs)
        given = args, kwargs
        if local_steps is not None:
            is_plain = argnums == 0 and in_specs is None and not (in_one_program or more)
            check_round(self, local_steps, given, tx is not None and is_plain)
            args = (args[0], *map(first_step, args[1:]))
            kwargs = first_step(kwargs)
        options: dict[str, Any] = dict(
            argnums=argnums,
            has_aux=has_aux,
            microbatches=microbatches,
            weighted=weighted,
            aux_reduce=aux_reduce,
            gradient_reduce=gradient_reduce,
            halves=halves,
            shares=shares,
        )
        checked = gradient_options(self._devices, **options)
        transform, arrays = prepare(self, f, args, kwargs, checked, batch_argnums, in_specs)
        call = VerifiedCall(self, f, args, kwargs, transform, arrays, tx)
        call.in_one_program = in_one_program
        call.options = {**options, "batch_argnums": batch_argnums, "in_specs": in_specs}
        say = progress or (lambda _: None)
        with warnings.catch_warnings():  # the report says where rows are mixed
            warnings.simplefilter("ignore", RowsMixedWarning)
            if local_steps is not None:
                batches = given[0][1:], given[1]
                return VerifiedRound(call, batches, local_steps).report(
                    reference, codecs, float64, say
                )
            verification = Verification(call.problem, call.runs, reference, codecs, say)
            return verification.report(variations, float64)


def _check_messages(config: ZeroConfig, codecs: bool) -> None:
    """Raise `NotImplementedError` if stages encode messages and the codecs are to be verified."""
    if codecs and config.stages is not None and config.stages.messages is not None:
        raise NotImplementedError(
            "`messages` of `Stages` is a codec of activations, for whose errors no bound is known. "
            "Give `codecs=False`, which verifies the step without codecs."
        )


def _check(
    f: Callable[..., Any],
    tx: optax.GradientTransformation | None,
    argnums: int | Sequence[int],
    in_one_program: bool,
    more: bool,
) -> None:
    """Raise an error for arguments of `verify` that are wrong or do not fit together.

    `more` says whether the caller gives `halves` or `shares`.
    """
    if isinstance(f, LocalRounds):
        raise ValueError(
            "`verify` takes the loss and the optimizer of a round, which plain JAX can run, not a "
            "step that calls `zero`. Give `zero.verify(loss_fn, params, batches, tx=tx, "
            "local_steps=rounds.method)`, with the stacked batches of a round."
        )
    if tx is not None and not isinstance(argnums, int):
        raise ValueError(
            f"`tx` updates the tree of one argument, and `argnums` is {argnums!r}. Give one "
            "position, or verify without `tx`."
        )
    if in_one_program and (tx is None or argnums != 0 or more):
        raise ValueError(
            "`in_one_program` verifies `value_and_update`, which updates the first argument. "
            "Give `tx`, and leave out `argnums`, `halves` and `shares`."
        )
