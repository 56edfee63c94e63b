"""On CPUs, order collectives so that none outside of a loop runs at the same time as one inside.

XLA:CPU runs the collectives of one computation in turn. But it only waits for a loop (or a `cond`)
to *begin* before it begins the next collective, unless the collective reads a result of the loop.
Collectives inside the loop and after it are then in flight at once. All have the same channel id,
by which XLA:CPU and Gloo match messages: devices would exchange the messages of different
collectives. Each would also block a thread, of which there may be only one for each device.

So a loop with collectives carries a token: a number that is always 0, which XLA cannot prove. It
depends on every collective before the loop, and every collective after the loop depends on it, also
in the next program of the same trace (`in_turn`).
"""

from __future__ import annotations

import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.extend import source_info_util
from jaxtyping import Array, Int32

from .emission import Recording, bind, with_copies
from .mesh_kinds import LOCAL, NODE
from .per_device import (
    CALLS_AND_REMAT,
    appended,
    bare,
    equations_inside,
    evaluate,
    inner_jaxprs,
    is_tracing,
)

Token = Int32[Array, ""]

NAMING_ONLY = {"axis_index", "pvary", "pcast"}  # they name an axis and send nothing

# The last token of each trace under way. A token is alive as long as its program is part of one.
_last_tokens: contextvars.ContextVar[tuple[tuple[Any, weakref.ref], ...]] = contextvars.ContextVar(
    "jaxzero_last_tokens", default=()
)


def in_turn(program: Callable, *args: Any) -> Any:
    """Call a program so that its collectives come after all earlier ones in this trace.

    Args:
        program: a function of a list of tokens and `args`; returns another list of tokens, and any
            tree of arrays. There is one token, or none: on GPUs and TPUs, or without collectives.
        args: trees of arrays.

    Returns:
        The tree of arrays.
    """
    tokens, outputs = program(last_tokens(), *args)
    if not tokens or not is_tracing():
        return outputs
    remember(tokens)
    # The barrier keeps the token alive, which nothing else may read, as long as any output.
    return jax.tree.map(lambda x: lax.optimization_barrier((x, *tokens))[0], outputs)


def last_tokens() -> list[Token]:
    """Return the token of the last program with collectives in this trace, in a list; or `[]`."""
    state = jex.get_opaque_trace_state(convention="jaxzero")
    found = [token() for other, token in _last_tokens.get() if other == state]
    return [token for token in found if token is not None]


def remember(tokens: Sequence[Token]) -> None:
    """Make the next program of this trace wait for the collectives that `tokens` depend on."""
    state = jex.get_opaque_trace_state(convention="jaxzero")
    others = [x for x in _last_tokens.get() if x[0] != state and x[1]() is not None]
    _last_tokens.set((*others, *((state, weakref.ref(token)) for token in tokens)))


def in_order(program: Any, tokens: list[Token]) -> Any:
    """Rewrite a per-device program so that it takes and returns tokens, for `in_turn`.

    Args:
        program: a closed jaxpr.
        tokens: the tokens that the new program will get, before the inputs of `program`.

    Returns:
        A closed jaxpr, with a token or none before the outputs.
    """
    jaxpr, inputs = program.jaxpr, [x.aval for x in program.jaxpr.invars]
    sent = [x for x in jaxpr.eqns if communicates(x)]
    if not tokens and all(map(_is_collective, sent)):
        return _with_token(program, sent) if sent else program

    def run(*arrays: Any) -> list[Any]:
        order = _Order(arrays[0] if tokens else None)
        outputs = order.run(jaxpr, program.consts, arrays[len(tokens) :])
        if order.since:
            order.wait_for_all()
        return [*([] if order.token is None else [order.token]), *outputs]

    return with_copies(jax.make_jaxpr(run)(*map(bare, tokens), *inputs))


def _with_token(program: Any, sent: Sequence[Any]) -> Any:
    """Return a program with one more output, the first: a token that depends on its collectives.

    The program has no loops with collectives, and no collective waits for a token. So it is not
    evaluated again: for an unrolled model that would take as long as a trace.

    Args:
        program: a closed jaxpr.
        sent: the equations of the program that are collectives.
    """

    def last(*arrays: Any) -> Token:
        return _Order(None, list(arrays)).wait_for_all()

    read = [equation.outvars[0] for equation in sent]
    token = with_copies(jax.make_jaxpr(last)(*(x.aval for x in read)))
    return appended(program, token, read)


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a `scan`, from its parameters."""
    if "num_consts" in params:  # JAX 0.10; in 0.12 `ft_in` is a tree of the operands
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


@dataclasses.dataclass
class _Order:
    """The order of the collectives in a program, or in a loop's body, while it is rewritten.

    Attributes:
        token: depends on the last loop with collectives; None if there is none so far.
        since: one result of each collective after that loop.
    """

    token: Token | None = None
    since: list[Any] = dataclasses.field(default_factory=list)

    def run(self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        def apply(equation: Any, args: list[Any]) -> list[Any]:
            source = equation.source_info
            with source_info_util.user_context(source.traceback, name_stack=source.name_stack):
                run = self._communicate if communicates(equation) else bind
                return run(equation, args)

        return evaluate(jaxpr, constants, inputs, apply)

    def _communicate(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name in CALLS_AND_REMAT:
            return self.run(*_opened(params[CALLS_AND_REMAT[name]]), inputs)
        if next(inner_jaxprs(equation), None) is None:
            outputs = bind(equation, self._wait(inputs))
            self.since.append(outputs[0])
            return outputs
        token = self.wait_for_all()
        match name:
            case "scan":
                outputs, self.token = _scan(params, inputs, token)
            case "while":
                outputs, self.token = _while(params, inputs, token)
            # With platforms it is a `lax.platform_dependent`, which `lax.switch` cannot make.
            case "cond" if "branches_platforms" not in params:
                branches = [_body(branch) for branch in params["branches"]]
                outputs, self.token = lax.switch(inputs[0], branches, inputs[1:], token)
            case _:
                outputs = bind(equation, self._wait(inputs))
                self.token = _read(token, outputs)
        return outputs

    def wait_for_all(self) -> Token:
        """Make the token depend on every collective so far, and return it."""
        # The sign bit of an index that is not negative: 0, which XLA does not fold to a constant.
        if self.token is None:
            self.token = lax.shift_right_arithmetic(lax.axis_index((NODE, LOCAL)), jnp.int32(31))
        self.token = _read(self.token, self.since)
        self.since = []
        return self.token

    def _wait(self, arrays: list[Any]) -> list[Any]:
        """Return arrays equal to `arrays`, which XLA takes to depend on the token.

        Each array is selected by a condition on the token that is always true. The other choice is
        filled with 3: XLA would drop a select between equal constants, and the constants that
        programs send are zeros and ones.
        """
        if self.token is None:
            return arrays
        return [lax.select_n(self.token == 0, lax.full_like(x, 3), x) for x in arrays]


def _body(closed: Any) -> Callable[[list[Any], Token], tuple[list[Any], Token]]:
    """Return a loop's body, or a branch, as a function of its inputs and of the token.

    The token that it returns depends on results of the body. XLA would hoist any other token out of
    the loop, and nothing would wait for the loop.
    """

    def run(inputs: list[Any], token: Token) -> tuple[list[Any], Token]:
        order = _Order(token)
        outputs = order.run(*_opened(closed), inputs)
        order.since = order.since or (outputs if order.token is token else [])
        return outputs, order.wait_for_all()

    return run


def _scan(params: dict[str, Any], inputs: list[Any], token: Token) -> tuple[list[Any], Token]:
    num_constants, num_carry = scan_sizes(params)
    constants, first = inputs[:num_constants], num_constants + num_carry
    run = _body(params["jaxpr"])

    def step(carry: tuple[Token, list[Any]], slices: list[Any]) -> Any:
        token, values = carry
        outputs, token = run([*constants, *values, *slices], token)
        return (token, outputs[:num_carry]), outputs[num_carry:]

    (token, carry), stacks = lax.scan(
        step,
        (token, inputs[num_constants:first]),
        inputs[first:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacks], token


def _while(params: dict[str, Any], inputs: list[Any], token: Token) -> tuple[list[Any], Token]:
    first, second = params["cond_nconsts"], params["body_nconsts"]
    asked, constants = inputs[:first], inputs[first : first + second]
    condition, run = _body(params["cond_jaxpr"]), _body(params["body_jaxpr"])

    def goes_on(carry: tuple[Token, list[Any]]) -> Any:
        return condition([*asked, *carry[1]], carry[0])[0][0]

    def step(carry: tuple[Token, list[Any]]) -> Any:
        outputs, token = run([*constants, *carry[1]], carry[0])
        return token, outputs

    token, outputs = lax.while_loop(goes_on, step, (token, inputs[first + second :]))
    return outputs, token


def _read(token: Token, arrays: Sequence[Any]) -> Token:
    """Return a token equal to `token`, which XLA takes to depend on `arrays`.

    It is computed by `minimum`, not by `&`: an array may be a known zero, such as a bucket of
    gradients before the first iteration, and XLA would then know the result.
    """

    def read(token: Token, x: Any) -> Token:
        return jnp.minimum(token, (x[(0,) * x.ndim] != 0).astype(token.dtype))

    recordings: dict[Any, Recording] = {}  # an unrolled program has hundreds of equal types
    for x in arrays:
        if x.size and jnp.issubdtype(x.dtype, jnp.number):
            kind = jax.typeof(x)
            if kind not in recordings:
                recordings[kind] = Recording(read, [token, x])
            token = recordings[kind].put([token, x])
    return token


def communicates(equation: Any) -> bool:
    """Return whether an equation is a collective, or has collectives inside."""
    return _names_an_axis(equation) and any(map(_is_collective, equations_inside(equation)))


def _is_collective(equation: Any) -> bool:
    is_leaf = next(inner_jaxprs(equation), None) is None
    return is_leaf and _names_an_axis(equation) and equation.primitive.name not in NAMING_ONLY


def _names_an_axis(equation: Any) -> bool:
    effects = equation.effects  # most equations have none
    # By name, since JAX exports no such class.
    return bool(effects) and any(type(x).__name__ == "NamedAxisEffect" for x in effects)


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return the open form of a jaxpr, and its constants; from JAX 0.11 on all are closed."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
