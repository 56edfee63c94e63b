"""On CPUs, keep what communicates from running beside a loop that does.

XLA:CPU runs the collectives of one computation in turn. But it only waits for a loop (or a `cond`)
to *begin* before it begins the next collective, unless that reads what the loop writes. Collectives
inside the loop and after it are then in flight at once. All have the same channel id, by which
XLA:CPU and Gloo find out which messages belong together: devices would exchange the messages of
different collectives. Each would also block a thread, of which there may be one for each device.

So loops with collectives carry a token, and every collective that may begin beside such a loop
reads it. The token is a number that is 0, which XLA cannot know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.extend import source_info_util
from jaxtyping import Array, Int32

Token = Int32[Array, ""]

_LOCAL = {"axis_index", "pvary", "pcast"}  # they name an axis and send nothing
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # `closed_call` from JAX 0.12 on
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}


def eval_in_order(jaxpr: Any, constants: Sequence[Any], *arguments: Any) -> list[Any]:
    """Evaluate the jaxpr of a per-device program, as `jax.core.eval_jaxpr` does, with tokens."""
    return _Order(None).run(jaxpr, constants, arguments)


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Numbers of constants and carried values, which parameters name differently by JAX version."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


@dataclasses.dataclass
class _Order:
    """The order of what communicates in a program, or in a loop's body.

    Attributes:
        token: depends on the last loop; None if no loop with collectives came before.
        since: a result of each collective after it.
    """

    token: Token | None
    since: list[Any] = dataclasses.field(default_factory=list)

    def run(self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        values = dict(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex.Literal) else values[atom]

        for equation in jaxpr.eqns:
            args = [read(atom) for atom in equation.invars]
            source = equation.source_info
            with source_info_util.user_context(source.traceback, name_stack=source.name_stack):
                run = self._communicate if communicates(equation) else _bind
                values.update(zip(equation.outvars, run(equation, args), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _communicate(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            return self.run(*_opened(params[_CALLS[name]]), inputs)
        if not list(_inner_jaxprs(equation)):
            outputs = _bind(equation, self._wait(inputs))
            self.since.append(outputs[0])
            return outputs
        self.token = _read(_unknown_zero() if self.token is None else self.token, self.since)
        match name:
            case "scan":
                outputs, self.token = _scan(params, inputs, self.token)
            case "while":
                outputs, self.token = _while(params, inputs, self.token)
            case "cond" if "branches_platforms" not in params:
                branches = [_body(branch) for branch in params["branches"]]
                outputs, self.token = lax.switch(inputs[0], branches, inputs[1:], self.token)
            case _:
                outputs = _bind(equation, self._wait(inputs))
                self.token = _read(self.token, outputs)
        self.since = []
        return outputs

    def _wait(self, arrays: list[Any]) -> list[Any]:
        """The same arrays, which XLA takes to depend on the token."""
        if self.token is None:
            return arrays
        return [lax.select_n(self.token == 0, lax.full_like(x, 0), x) for x in arrays]


def _bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    params = equation.primitive.get_bind_params(equation.params)
    args, params = params if isinstance(params, tuple) else ((), params)
    with equation.ctx.manager:
        out = equation.primitive.bind(*args, *inputs, **params)
    return list(out) if equation.primitive.multiple_results else [out]


def _body(closed: Any) -> Callable[[list[Any], Token], tuple[list[Any], Token]]:
    """A body or a branch, as a function of its inputs and of the token.

    The token that it returns depends on what the body computes. XLA would take another one out of
    the loop, and nothing would wait for the loop.
    """

    def run(inputs: list[Any], token: Token) -> tuple[list[Any], Token]:
        order = _Order(token)
        outputs = order.run(*_opened(closed), inputs)
        return outputs, _read(order.token, order.since or outputs)

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
    """The same token, which XLA takes to depend on `arrays`."""
    for x in arrays:
        if x.size and jnp.issubdtype(x.dtype, jnp.number):
            token = token & (x[(0,) * x.ndim] != 0).astype(token.dtype)
    return token


def _unknown_zero() -> Token:
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return lax.shift_right_arithmetic(lax.axis_index(axes), jnp.int32(31))


def communicates(equation: Any) -> bool:
    """Whether an equation is a collective, or has collectives inside."""
    if not any(type(effect).__name__ == "NamedAxisEffect" for effect in equation.effects):
        return False
    inner = list(_inner_jaxprs(equation))
    if not inner:
        return equation.primitive.name not in _LOCAL
    return any(communicates(x) for jaxpr in inner for x in jaxpr.eqns)


def _inner_jaxprs(equation: Any) -> Iterator[Any]:
    for param in equation.params.values():
        for x in param if isinstance(param, tuple) else (param,):
            if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr):
                yield _opened(x)[0]


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, and its constants if it is a closed one (as all are from JAX 0.11 on)."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
