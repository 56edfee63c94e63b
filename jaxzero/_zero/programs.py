"""Cache compiled programs for calls outside of `jax.jit`: trace at every call, compile when new.

`jax.value_and_grad` traces at each call, so it sees attributes and closed-over arrays that have
changed since the last one. `Programs` also sees them: it lowers the program at each call, with the
closed-over arrays as arguments, and reuses the compiled program of an equal StableHLO text. Tracing
takes milliseconds where compiling takes seconds. A training step belongs in `jax.jit`, which traces
and compiles once.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable
from typing import Any

import jax

from .._mesh import is_traced, is_tracing
from .._program import open_program

_MOST_KEPT = 16  # compiled programs of one function, for various batch shapes and dtypes


class Programs:
    """The compiled programs of one function that `value_and_grad` or `apply` has returned."""

    def __init__(self):
        self._kept: collections.OrderedDict[str, Callable] = collections.OrderedDict()

    def run(self, program: Callable, *args: Any) -> Any:
        """Return `program(*args)`; an equal program that was compiled before is reused.

        If a transformation such as `jax.jit` is tracing the call, the program becomes part of that
        trace, and nothing is cached. `jax.disable_jit` has no effect on it.

        Args:
            program: a function from trees of arrays to a tree of arrays.
            args: trees of arrays or tracers.
        """
        with jax.disable_jit(False):
            return self._run(program, *args)

    def _run(self, program: Callable, *args: Any) -> Any:
        if is_tracing() or any(is_traced(x) for x in jax.tree.leaves(args)):
            return jax.jit(program)(*args)
        opened = open_program(program, *args)
        if any(
            is_traced(x) for x in opened.constants
        ):  # it closes over values of an outer transformation
            return jax.jit(program)(*args)
        flat = jax.jit(opened.run)
        arrays = jax.tree.leaves(args)
        text = flat.lower(opened.constants, arrays).as_text()
        # The text of a callback does not identify which Python function it calls, so a program with
        # callbacks is never reused.
        if "callback" not in text:
            flat = self._keep(hashlib.sha256(text.encode()).hexdigest(), flat)
        return jax.tree.unflatten(opened.treedef, flat(opened.constants, arrays))

    def _keep(self, key: str, program: Callable) -> Callable:
        kept = self._kept.setdefault(key, program)
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return kept
