"""Cache compiled programs for calls outside of `jax.jit`: trace at every call, compile when new.

`jax.value_and_grad` traces at each call, so it sees attributes and closed-over arrays that have
changed since the last one. `Programs` also sees them: it lowers the program at each call, with the
closed-over arrays as arguments, and reuses the compiled program of an equal StableHLO text. Tracing
takes milliseconds where compiling takes seconds. A training step belongs in `jax.jit`, which traces
and compiles once.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from .._mesh import in_turn, is_traced, is_tracing, last_tokens, remember
from .._program import is_mutable, open_program
from .._sharding import is_array, rebuild, statics_of

_MOST_KEPT = 64  # compiled programs of one `Zero`, for various functions, shapes and dtypes


class Programs:
    """The compiled programs of one `Zero`, without the arrays and functions they were made of.

    Args:
        mesh: the mesh that the programs run on.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._kept: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def run(self, program: Callable, *args: Any, out_shardings: Any = None) -> Any:
        """Return `program(*args)`; an equal program that was compiled before is reused.

        If a transformation such as `jax.jit` is tracing the call, the program becomes part of that
        trace, and nothing is cached. `jax.disable_jit` has no effect on it.

        Args:
            program: a function of trees of arrays. It returns a tree, whose leaves that are not
                arrays (strings, functions) are returned as they are.
            args: trees of arrays or tracers.
            out_shardings: a sharding for each array that is returned, or one for all; None leaves
                them to the compiler.
        """
        with jax.disable_jit(False):
            return self.ready(program, *args, out_shardings=out_shardings)(*args)

    def ready(self, program: Callable, *args: Any, out_shardings: Any = None) -> Callable:
        """The function that `run` calls, for several calls with arguments of the same types."""
        found: dict[str, Any] = {}

        def arrays_only(*args: Any) -> list[Any]:
            leaves, treedef = jax.tree.flatten(program(*args))
            found.update(treedef=treedef, statics=statics_of(leaves))
            return [x for x in leaves if is_array(x)]

        if out_shardings is not None and not isinstance(out_shardings, jax.sharding.Sharding):
            out_shardings = jax.tree.leaves(out_shardings)
        arrays = jax.tree.leaves(args)
        is_part = is_tracing() or any(map(is_traced, arrays))
        opened = None if is_part else open_program(arrays_only, *args)
        # A closure may also hold values of an outer transformation.
        if opened is None or any(map(is_traced, opened.constants)):
            part = _with_tokens(arrays_only, out_shardings)

            def call(*args: Any) -> Any:
                made = in_turn(part, *args)  # which sets `found`
                return rebuild(arrays=made, **found)

            return call
        for x in (*opened.constants, *arrays):
            if is_mutable(x):
                raise ValueError(
                    "A function that `zero` runs is given, or closes over, a mutable array "
                    f"(`jax.Ref`) {x.dtype}{list(x.shape)}. Pass its value, `ref[...]`."
                )
        lowered = jax.jit(opened.run, out_shardings=out_shardings).lower(opened.constants, arrays)
        text = lowered.as_text()
        prints, calls_python = opened.callbacks()
        # Which Python function a callback calls is not in the text, so it is compiled at each call.
        if calls_python or ("callback" in text and not prints):
            compiled = lowered.compile()
        else:  # nor are arguments that are not used, and weak types and shardings of the results
            parts = (text, opened.types, prints, out_shardings)
            compiled = self._compiled("\n".join(map(str, parts)), lowered)
        constants = _placed(opened.constants, compiled)
        return lambda *args: rebuild(arrays=compiled(constants, jax.tree.leaves(args)), **found)

    def _compiled(self, text: str, lowered: Any) -> Any:
        key = hashlib.sha256(text.encode()).hexdigest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        compiled = lowered.compile()
        with self._lock:
            self._kept[key] = compiled
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return compiled


def _placed(constants: Sequence[Any], compiled: Any) -> list[Any]:
    """The arrays that a function closes over, on the devices where the program takes them.

    So no call makes a transfer that `jax.transfer_guard("disallow")` would refuse.
    """
    shardings = compiled.input_shardings[0][0]
    return [
        x
        if sharding is None or not sharding.is_fully_addressable or getattr(x, "committed", False)
        else jax.device_put(x, sharding)
        for x, sharding in zip(constants, shardings, strict=True)
    ]


def _with_tokens(program: Callable, out_shardings: Any) -> Callable:
    """A program as a `jit` of its own, for `in_turn`."""

    def call(tokens: list[Any], *args: Any) -> tuple[list[Any], Any]:
        remember(tokens)
        outputs = program(*args)
        return last_tokens(), outputs

    return jax.jit(functools.wraps(program)(call), out_shardings=(None, out_shardings))
