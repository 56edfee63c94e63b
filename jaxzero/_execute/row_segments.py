"""Run what lies between two collectives with the number of rows that this device's node has.

A segment is a sequence of operations of a block without a collective between them. It runs as one
`lax.switch` over the versions of the program (`row_versions`): version 0 on the arrays as they are,
any other on their leading part, padded with zeros at the end. Nothing reads the padding. Segments
end where the plan gathers, reduces or ties, so no collective is in a branch, and every device runs
all collectives in the same order.

Operations that depend on constants only, and broadcasts, run again in every segment that reads
them. Otherwise their results would be stored from one segment to the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from .._plan import COSTLY, BlockPlan
from .._program import Atom, Barrier, Constant, Loop, Operation, Value, is_same_constant
from .row_versions import RowVersions

Read = Callable[[Value], Any]  # the array of a value; for a view of a weight, the gathered weight


class RowSegments:
    """The segments of one run of a block.

    Args:
        plan: the block, in the first version of the program.
        versions: all versions.
        after_gather: the operations of a view, in the first version, that follow its gather.
    """

    def __init__(
        self,
        plan: BlockPlan,
        versions: RowVersions,
        after_gather: Callable[[Value], tuple[Any, ...]],
    ):
        self._plan = plan
        self._versions = versions
        self._after_gather = after_gather
        self._operations = plan.block.operations
        self._makers = {x: i for i, op in enumerate(self._operations) for x in op.outputs}
        self._pending: list[int] = []  # operations of the current segment
        self._operands: dict[Value, Any] = {}  # what they read
        # The operations before which a segment must end, because they or the plan read its values.
        self._ends = {
            len(self._operations),
            *(issue for group in plan.gather_groups for issue in (*group.issues, group.at)),
            *(group.fetch for group in plan.gather_groups),
            *(group.at + 1 for group in plan.reduce_groups),
            *(loop.issue for loop in plan.loops.values()),
            *plan.reduce_early,
            *(i for i in range(len(self._operations)) if self._is_outside(i)),
        }
        self._repeated = self._find_repeated()
        self._last_reads = self._find_last_reads()

    @property
    def repeated(self) -> frozenset[Value]:
        """The outputs of operations that run in every segment that reads them."""
        return frozenset(x for i in self._repeated for x in self._operations[i].outputs)

    def takes(self, index: int) -> bool:
        """Whether operation `index` runs in a segment."""
        outputs = self._operations[index].outputs
        is_computed = not outputs or (
            outputs[0] not in self._plan.uses.views and outputs[0] not in self._plan.zeros
        )
        return (
            is_computed
            and not self._is_outside(index)
            and index not in self._plan.gradients.on_shards
        )

    def add(self, index: int, read: Read) -> None:
        """Add an operation to the current segment."""
        if index not in self._repeated:
            self._add(index, read)

    def end(self, index: int) -> list[tuple[Value, Any]]:
        """Run the segment if it must end before operation `index`.

        Returns:
            The values that something after it reads, with their arrays.
        """
        if index not in self._ends or not self._pending:
            return []
        made = (x for i in self._pending for x in self._operations[i].outputs)
        kept = [x for x in made if self._last_reads.get(x, -1) >= index]
        arrays = self._run(kept)
        return list(zip(kept, arrays, strict=True))

    def is_made_here(self, atom: Atom) -> bool:
        """Whether the array of an atom comes from `array`, and not from the block's environment.

        So it is for constants and views that differ between versions, and for the outputs of
        operations that run in every segment.
        """
        if isinstance(atom, Constant):
            return not is_same_constant(self._versions.of(atom))
        if atom in self._plan.uses.views:
            ops = self._versions.after_gather(atom, self._after_gather(atom))
            return any(x != ops[0] for x in ops)
        return self._makers.get(atom) in self._repeated

    def array(self, atom: Atom, read: Read) -> Any:
        """The array of a constant, of a view, or of an operation that runs in every segment."""
        assert not self._pending
        if isinstance(atom, Value):
            self._need(atom, read)
        return self._run([atom])[0]

    def _is_outside(self, index: int) -> bool:
        """Whether an operation reads arrays in full size: a barrier, or a loop with collectives."""
        operation = self._operations[index]
        if isinstance(operation, Loop):
            return not self._plan.loops[index].is_local
        return isinstance(operation, Barrier) or operation.name == "device_put"

    def _find_repeated(self) -> set[int]:
        """The operations that run in every segment that reads them."""
        found: set[int] = set()
        for index, operation in enumerate(self._operations):
            is_reduced = any(x in self._plan.gradients.reduces for x in operation.outputs)
            if is_reduced or operation.name in COSTLY or not self.takes(index):
                continue
            makers = (self._makers.get(x) for x in operation.inputs if isinstance(x, Value))
            if operation.name == "broadcast_in_dim" or all(maker in found for maker in makers):
                found.add(index)
        return found

    def _read(self, atom: Atom) -> Iterator[Value]:
        """The values of other segments that reading an atom reads."""
        if isinstance(atom, Value) and atom not in self._plan.uses.views:
            maker = self._makers.get(atom)
            if maker is not None and maker in self._repeated:
                for x in self._operations[maker].inputs:
                    yield from self._read(x)
            else:
                yield atom

    def _find_last_reads(self) -> dict[Value, int]:
        """For each value the last operation that reads it; values that the plan reads stay."""
        plan, forever = self._plan, len(self._operations) + 1
        last: dict[Value, int] = {}
        for index, operation in enumerate(self._operations):
            last.update((x, index) for atom in operation.inputs for x in self._read(atom))
        last.update((x, forever) for atom in plan.block.outputs for x in self._read(atom))
        last.update((x, forever) for x in plan.gradients.reduces)
        ties = [
            *(tie for group in plan.gather_groups for tie in (*group.ties, group.fetch_tie)),
            *(loop.tie for loop in plan.loops.values()),
            *plan.reduce_early.values(),
        ]
        last.update((tie, forever) for tie in ties if tie is not None)
        return last

    def _add(self, index: int, read: Read) -> None:
        for atom in self._operations[index].inputs:
            if isinstance(atom, Value):
                self._need(atom, read)
        self._pending.append(index)

    def _need(self, value: Value, read: Read) -> None:
        """Make a value available in the current segment."""
        maker = self._makers.get(value)
        if value in self._operands or maker in self._pending:
            return
        is_view = value in self._plan.uses.views
        if maker is not None and maker in self._repeated and not is_view:
            self._add(maker, read)
        else:
            self._operands[value] = read(value)

    def _run(self, outputs: Sequence[Atom]) -> list[Any]:
        """Run the pending operations, and return their results in full size."""
        pending, self._pending = self._pending, []
        operands, self._operands = self._operands, {}
        if not outputs:
            return []
        views = {
            x: self._versions.after_gather(x, self._after_gather(x))
            for x in operands
            if x in self._plan.uses.views
        }

        def branch(number: int, arrays: Sequence[Any]) -> list[Any]:
            def of(atom: Atom) -> Atom:
                return self._versions.of(atom)[number]

            env: dict[Value, Any] = {}
            for value, x in zip(operands, arrays, strict=True):
                if value in views:
                    for op in views[value][number]:
                        x = op.apply(x)
                own = of(value)
                assert isinstance(own, Value)
                env[own] = _leading_part(x, own.shape)
            for index in pending:
                operation = self._versions.matched.operations[self._operations[index]][number]
                _bind(operation, env)
            results = [jnp.asarray(_array(of(atom), env)) for atom in outputs]
            start = jnp.minimum(self._versions.which, 0)
            pairs = zip(results, outputs, strict=True)
            return [_in_full_size(x, _shape(atom), start) for x, atom in pairs]

        num = len(self._versions.of(outputs[0]))
        branches = [functools.partial(branch, number) for number in range(num)]
        return lax.switch(self._versions.which, branches, list(operands.values()))


def _bind(operation: Operation, env: dict[Value, Any]) -> None:
    """Run an operation on the arrays in `env`, and add its results."""
    inputs = [_array(atom, env) for atom in operation.inputs]
    outputs = (
        _run_loop(operation, inputs) if isinstance(operation, Loop) else operation.bind(inputs)
    )
    env.update(zip(operation.outputs, outputs, strict=True))


def _run_loop(loop: Loop, inputs: Sequence[Any]) -> list[Any]:
    """Run a loop without collectives, as traced."""
    first = loop.num_constants + loop.num_carry

    def body(carry, stacks):
        arrays = [*inputs[: loop.num_constants], *carry, *stacks]
        env: dict[Value, Any] = dict(zip(loop.body.inputs, arrays, strict=True))
        for operation in loop.body.operations:
            _bind(operation, env)
        outputs = [_array(atom, env) for atom in loop.body.outputs]
        return outputs[: loop.num_carry], outputs[loop.num_carry :]

    carry, stacked = loop.scan(body, inputs[loop.num_constants : first], inputs[first:])
    return [*carry, *stacked]


def _array(atom: Atom, env: Mapping[Value, Any]) -> Any:
    return atom.value if isinstance(atom, Constant) else env[atom]


def _shape(atom: Atom) -> tuple[int, ...]:
    return jnp.shape(atom.value) if isinstance(atom, Constant) else atom.shape


def _leading_part(x: Any, shape: tuple[int, ...]) -> Any:
    return x if x.shape == shape else x[tuple(slice(size) for size in shape)]


def _in_full_size(x: Any, shape: tuple[int, ...], start: Int32[Array, ""]) -> Any:
    """`x` as the leading part of an array of `shape`, which is zero elsewhere.

    `start` is 0, and XLA must not know: it would write this as a `pad`, with which XLA:CPU fuses
    what makes `x`, and computes that number by number.
    """
    if x.shape == shape:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        data = _in_full_size(data, (*shape, *data.shape[x.ndim :]), start)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return lax.dynamic_update_slice(jnp.zeros(shape, x.dtype), x, (start,) * x.ndim)
