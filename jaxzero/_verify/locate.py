"""Find the first operation whose value for a device's rows depends on rows of other devices.

The loss is traced twice: for all rows, and for the rows of one part. A part is a device, or a
micro-batch of a device. Both programs are run operation by operation, the second for each part.
Every value of the second program is compared with the same value of the first. If the value has
rows, each part should have

    the part's rows of the value for all rows, in backward perhaps times the number of parts, since
    each part takes its own mean.

If it has no rows, each part should have either

    the value for all rows, in backward perhaps times a power of the number of parts; or
    a term of it, so that the value for all rows is the sum or the mean over parts.

The first value in program order for which none of these holds shows where rows of different parts
meet. Values count as equal if they agree in half of their digits, since roundings may change the
other digits. With several processes, each process computes the values of all parts by itself, on a
device of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .._mesh import AXES, LOCAL, NODE, AnyMesh, SimulatedMesh, map_devices
from .._program import Block, Constant, Loop, Operation, Value, exchanged_or_effect, trace
from .._sharding import split_dim
from .problem import Problem, is_key, on_host


class _FoundError(Exception):
    """The exception that ends the search; its message is a sentence about the operation found."""


def first_difference(
    problem: Problem, mesh: AnyMesh, microbatches: int, wanted: Sequence[int]
) -> str:
    """Return a sentence about the first operation that mixes rows of several parts, or "".

    Args:
        problem: the call to run.
        mesh: the devices.
        microbatches: the number of micro-batches of a device.
        wanted: the indices, in `problem.names`, of the results that differ.
    """
    num_forward = 1 + len(problem.aux_how)
    only_forward = all(i < num_forward for i in wanted)

    def results(arrays: Sequence[Any]) -> list[Any]:
        if not only_forward:
            return problem.loss_and_grads(arrays, divide=False)
        forward = _forward(problem, arrays)
        return forward if len(forward) > num_forward else [forward[i] for i in wanted]

    try:
        _Lockstep(problem, mesh, microbatches, results).run()
    except _FoundError as found:
        return str(found)
    return ""


def shared_draw(problem: Problem, mesh: AnyMesh) -> str:
    """Return the first source line where all devices draw the same random numbers, or ""."""
    lockstep = _Lockstep(problem, mesh, 1, functools.partial(_forward, problem), judged=False)
    lockstep.run()
    return lockstep.shared


def _forward(problem: Problem, arrays: Sequence[Any]) -> list[Any]:
    """Return the loss, its weight if it has one, and the arrays of `aux`, in one list."""
    value, weight, aux = problem.function(arrays)
    return [value, *aux] if weight is None else [value, weight, *aux]


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A value of the program for all rows, and the same value in the program of each part.

    Attributes:
        whole: the value for all rows.
        parts: the value of each part.
        source: the source line that computes it, if `whole` is the sum or mean of `parts`; else "".
    """

    whole: Any
    parts: list[Any]
    source: str = ""


class _Lockstep:
    """Runs two programs operation by operation: one for all rows, and one for each part.

    Args:
        problem: the call to run.
        mesh: the devices.
        microbatches: the number of micro-batches of a device.
        results: the function of a list of arrays that is traced to both programs.
        judged: whether to compare values, and raise `_FoundError` at the first that differs.

    Attributes:
        shared: the first source line where all parts draw the same random numbers; "" for none.
    """

    def __init__(
        self,
        problem: Problem,
        mesh: AnyMesh,
        microbatches: int,
        results: Callable,
        judged: bool = True,
    ):
        self.mesh, self.judged, self.shared = _on_this_process(mesh), judged, ""
        self.num = mesh.shape[NODE] * mesh.shape[LOCAL]
        self.one = _on_this_process(Mesh(np.array([[jax.local_devices()[0]]]), AXES))
        arrays = [x if is_key(x) else jnp.asarray(x) for x in problem.arrays]
        self.whole = _traced(results, self.one, arrays)
        parts = _parts(problem, arrays, self.num)
        self.part = _traced(results, self.mesh, parts[0])
        # A collective needs one part for each device; without one, parts may be micro-batches.
        if microbatches > 1 and not any(map(_is_collective, self.part.operations)):
            self.num *= microbatches
            parts = _parts(problem, arrays, self.num)
            self.part = _traced(results, self.mesh, parts[0])
        self.arrays = [
            _Pair(x, list(each)) for x, each in zip(arrays, zip(*parts, strict=True), strict=True)
        ]

    def run(self) -> None:
        self._block(self.whole, self.part, self.arrays, "")

    def _block(
        self, whole: Block, part: Block, inputs: Sequence[_Pair], where: str
    ) -> list[_Pair] | None:
        """Run a block of both programs in lockstep, and return the values of its outputs.

        Args:
            whole: the block of the program for all rows.
            part: the block of the program for a part.
            inputs: the values of the blocks' inputs.
            where: the iteration of each loop around the block, as words for the sentence.

        Returns:
            The values of the outputs; None if the two blocks have different operations.
        """
        if [x.name for x in whole.operations] != [x.name for x in part.operations]:
            return None
        env: dict[Value, _Pair] = {}
        env.update(zip(whole.inputs, inputs, strict=True))
        names = dict(zip(part.inputs, whole.inputs, strict=True))  # from part to whole

        def read(x: Any, y: Any) -> _Pair:
            if isinstance(x, Value) and isinstance(y, Value):
                return env[x]
            whole = x.value if isinstance(x, Constant) else env[x].whole
            parts = [y.value] * self.num if isinstance(y, Constant) else env[names[y]].parts
            return _Pair(whole, parts)

        for x, y in zip(whole.operations, part.operations, strict=True):
            read_values = [read(a, b) for a, b in zip(x.inputs, y.inputs, strict=True)]
            for out, other, pair in zip(
                x.outputs, y.outputs, self._apply(x, y, read_values, where), strict=True
            ):
                env[out], names[other] = pair, out
        return [read(a, b) for a, b in zip(whole.outputs, part.outputs, strict=True)]

    def _apply(
        self, whole: Operation, part: Operation, inputs: list[_Pair], where: str
    ) -> list[_Pair]:
        if isinstance(whole, Loop) and isinstance(part, Loop) and whole.length == part.length:
            made = self._loop(whole, part, inputs, where)
            if made is not None:
                return made
        of_whole = _run(whole, [[x.whole for x in inputs]], self.one)[0]
        of_parts = _run(
            part, list(zip(*(x.parts for x in inputs), strict=True)) or [()] * self.num, self.mesh
        )
        pairs = [
            _Pair(x, list(y)) for x, y in zip(of_whole, zip(*of_parts, strict=True), strict=True)
        ]
        if whole.name == "random_bits":
            return [self._drawn(whole, pair) for pair in pairs]
        if not self.judged:
            return pairs
        return [self._judged(whole, pair, inputs, where) for pair in pairs]

    def _loop(self, whole: Loop, part: Loop, inputs: list[_Pair], where: str) -> list[_Pair] | None:
        first = whole.num_constants + whole.num_carry
        constants, carry = inputs[: whole.num_constants], inputs[whole.num_constants : first]
        stacked: dict[int, list[_Pair]] = {}
        order = range(whole.length)
        for i in reversed(order) if whole.is_reversed else order:
            layers = [_Pair(x.whole[i], [y[i] for y in x.parts]) for x in inputs[first:]]
            at = f"{where}, iteration {i}"
            made = self._block(whole.body, part.body, [*constants, *carry, *layers], at)
            if made is None:
                return None
            carry, stacked[i] = made[: whole.num_carry], made[whole.num_carry :]
        columns = zip(*(stacked[i] for i in order), strict=True)
        stacks = [
            _Pair(
                jnp.stack([x.whole for x in column]),
                [jnp.stack(list(each)) for each in zip(*(x.parts for x in column), strict=True)],
            )
            for column in columns
        ]
        return [*carry, *stacks]

    def _drawn(self, operation: Operation, pair: _Pair) -> _Pair:
        """Return `pair` with its random bits for all rows replaced by those that the parts draw."""
        dims = _split_dims(pair, self.num)
        if not dims:
            return pair
        first = np.asarray(pair.parts[0])
        if all(np.array_equal(first, np.asarray(x)) for x in pair.parts[1:]) and not self.shared:
            self.shared = operation.where
        return _Pair(jnp.concatenate(pair.parts, axis=dims[0]), pair.parts)

    def _judged(
        self, operation: Operation, pair: _Pair, inputs: Sequence[_Pair], where: str
    ) -> _Pair:
        """Compare a value for all rows with those of the parts, and return the pair.

        If the value for all rows is the sum or mean of the others, `source` is set in the result.

        Raises:
            _FoundError: none of the relations in the docstring of this module holds.
        """
        dtype = getattr(pair.whole, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            return pair
        whole, parts = np.asarray(pair.whole), [np.asarray(x) for x in pair.parts]
        if whole.shape == parts[0].shape:
            if any(all(_is_near(whole * f, x) for x in parts) for f in _factors(self.num)):
                return pair
            total = np.sum(np.stack(parts).astype(_wide(whole)), axis=0)
            size = float(np.sum([np.linalg.norm(x.astype(_wide(x)).ravel()) for x in parts]))
            if any(_is_near(total / f, whole, size / f) for f in _factors(self.num)):
                return dataclasses.replace(pair, source=operation.where)
            off = "is neither the sum nor the mean of those of the devices"
        else:
            dims = _split_dims(pair, self.num)
            if dims is None or _is_row_aligned(whole, parts, dims):
                return pair
            off = "differs from what one device has for these rows"
        read = next((x.source for x in inputs if x.source), "")
        of = f" It reads a sum or mean over a device's rows only, from {read}." if read else ""
        raise _FoundError(
            f"The first operation that differs is `{operation.name}` at {operation.where}{where}: "
            f"its value on a device's rows {off}.{of}"
        )


def _on_this_process(mesh: AnyMesh) -> AnyMesh:
    """Return a mesh on which this process can run alone: `mesh`, or one of simulated devices.

    Every process has all rows, and searches by itself. If processes exchanged values, one that
    found the operation would leave the others waiting.
    """
    if jax.process_count() == 1:
        return mesh
    sizes = tuple(mesh.shape[axis] for axis in mesh.axis_names)
    return SimulatedMesh(tuple(mesh.axis_names), sizes, jax.local_devices()[0])


def _traced(results: Callable, mesh: AnyMesh, arrays: Sequence[Any]) -> Block:
    """Trace a function of a list of arrays, with the axes of `mesh`, to a block of operations."""
    blocks = []
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

    def note(_: Any) -> Any:
        blocks.append(trace(lambda *xs: results(list(xs)), *structs)[0])
        return jnp.zeros(())

    jax.eval_shape(map_devices(note, mesh, (PartitionSpec(),), PartitionSpec()), jnp.zeros(()))
    return blocks[0]


def _parts(problem: Problem, arrays: Sequence[Any], num: int) -> list[list[Any]]:
    """Return the arrays of each of `num` parts: arrays with rows are cut, others are kept whole."""

    def cut(x: Any, spec: PartitionSpec) -> list[Any]:
        dim = split_dim(spec)
        if dim is None:
            return [x] * num
        size = x.shape[dim] // num
        return [jax.lax.slice_in_dim(x, i * size, (i + 1) * size, axis=dim) for i in range(num)]

    columns = [cut(x, spec) for x, spec in zip(arrays, problem.specs, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _is_collective(operation: Operation) -> bool:
    if isinstance(operation, Loop):
        return any(map(_is_collective, operation.body.operations))
    return operation.name == "axis_index" or exchanged_or_effect(operation) is not None


def _run(operation: Operation, inputs: Sequence[Sequence[Any]], mesh: Any) -> list[list[Any]]:
    """Run an operation for each part; return a list of outputs for each part.

    Args:
        operation: the operation.
        inputs: for each part the inputs of the operation.
        mesh: has a device for each part, if the operation is a collective.
    """
    if not _is_collective(operation):
        return [operation.bind(list(x)) for x in inputs]
    stacked = [jnp.stack([jnp.asarray(x) for x in column]) for column in zip(*inputs, strict=True)]

    def on_device(arrays: list[Any]) -> list[Any]:
        return [x[None] for x in operation.bind([x[0] for x in arrays])]

    rows = PartitionSpec(AXES)
    made = on_host(jax.jit(map_devices(on_device, mesh, (rows,), rows))(stacked))
    return [[jnp.asarray(x[i]) for x in made] for i in range(len(inputs))]


def _split_dims(pair: _Pair, num: int) -> list[int] | None:
    """Return the dims that are `num` times as long for all rows as for a part.

    None: the shapes differ in another way.
    """
    whole, part = np.shape(pair.whole), np.shape(pair.parts[0])
    if len(whole) != len(part):
        return None
    dims = [i for i, (x, y) in enumerate(zip(whole, part, strict=True)) if x != y]
    return dims if all(whole[i] == num * part[i] for i in dims) else None


def _is_row_aligned(whole: Any, parts: list[Any], dims: Sequence[int]) -> bool:
    """Return True if each part equals its own rows of `whole`, up to one factor of `_factors`.

    `dims` are the dims that are shorter in a part. A reshape may have merged rows with other dims.
    """
    num = len(parts)
    for outers in itertools.product(*(_divisors(parts[0].shape[i]) for i in dims)):
        cut = [_cut(whole, dims, outers, i, num) for i in range(num)]
        for factor in _factors(num):
            if all(_is_near(x * factor, y) for x, y in zip(cut, parts, strict=True)):
                return True
    return False


def _cut(whole: Any, dims: Sequence[int], outers: Sequence[int], i: int, num: int) -> Any:
    """Return the rows of part `i` of `num`, from an array for all rows.

    Each of `dims` is seen as `[outer, num, rest]`, with the sizes of `outer` in `outers`, and index
    `i` of `num` is taken.
    """
    for dim, outer in zip(dims, outers, strict=True):
        shape = whole.shape
        split = whole.reshape(*shape[:dim], outer, num, -1, *shape[dim + 1 :])
        whole = split.take(i, axis=dim + 1).reshape(*shape[:dim], -1, *shape[dim + 1 :])
    return whole


def _factors(num: int) -> list[float]:
    """Return the factors by which a part's value may differ from the value for all rows.

    They are powers of `num`, the number of parts, since a part takes means over fewer rows, and
    backward multiplies the factors of several means.
    """
    return [float(num) ** power for power in (0, 1, -1, 2, -2)]


def _divisors(size: int) -> list[int]:
    return [x for x in range(1, size + 1) if size % x == 0]


def _is_near(x: Any, y: Any, size: Any = 0.0) -> bool:
    """Return True if `x` and `y` agree in half of the digits of the dtype of `y`.

    The norm of `x - y` is compared with the largest of three numbers: the norms of `x` and `y`, and
    `size`.
    """
    digits = float(jnp.finfo(y.dtype).eps) ** 0.5
    x, y = x.astype(_wide(x)).ravel(), y.astype(_wide(y)).ravel()
    with np.errstate(invalid="ignore"):
        off = np.linalg.norm(np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, x - y))
    finite = (np.linalg.norm(z[np.isfinite(z)]) for z in (x, y))
    return bool(off <= digits * max(*finite, size))


def _wide(x: Any) -> Any:
    return np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
