"""Warn where a loss mixes rows, with the user's line and the remedy.

Each device runs the function on its own rows, and the loss is the mean of the devices' losses. This
equals the loss of one device with all rows only if the loss is linear in every sum over rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._collectives import CommSpec
from .._execute import Result
from .._mesh import AXES
from .._program import Mixing, Operation, RowInput, Value, find_mixings
from .._sharding import axes_of, split_dim
from .._warnings import RowsMixedWarning, is_of_user, warn, warn_at
from .arguments import Options
from .outputs import Outputs

_AXES = '("node", "local")'
_MEANT = 'If a value per device is meant, say so: `row_statistics="device"`.'
_REMEDIES = {
    "statistic": (
        f"Take it over all devices: `jax.lax.pmean(..., {_AXES})` of a mean, for a variance of "
        "both means that it is made of; `jax.lax.psum` of a sum. BatchNorm layers of Flax and "
        f"Haiku take the axes as an argument. {_MEANT}"
    ),
    "ratio": (
        "Return `(sum, weight)` with `weighted=True`, which divides the sums over all devices; in "
        f"`aux`, return both sums with 'sum' in `aux_reduce`, and divide outside. {_MEANT}"
    ),
    "pairs": (
        f"Gather what rows are compared with: `jax.lax.all_gather(x, {_AXES}, tiled=True)`. "
        f"{_MEANT}"
    ),
    "order": f"Gather the rows first: `jax.lax.all_gather(x, {_AXES}, tiled=True)`. {_MEANT}",
    "extreme": (
        f"Take it over all devices: `jax.lax.pmax(..., {_AXES})`, `jax.lax.pmin`, or gather the "
        f"rows first: `jax.lax.all_gather(x, {_AXES}, tiled=True)`. {_MEANT}"
    ),
    "key": (
        "Call `key = jz.fold_in_device(key)` inside the function, before anything is drawn, for "
        "other bits on each device."
    ),
}
_REMEDIES["product"] = _REMEDIES["function"] = (
    f"Take it over all devices before that: `jax.lax.pmean(..., {_AXES})`. {_MEANT}"
)
# Of several kinds at one line, the leftmost is named, because it says most.
_ORDER = ("key", "pairs", "ratio", "statistic", "order", "extreme", "product", "function")
# These get a warning of their own, beside that of another kind at the same line.
_ALONE = ("key", "pairs", "ratio", "statistic", "order")
_NAMES = {
    "argmax": "position of the maximum",
    "argmin": "position of the minimum",
    "reduce_max": "maximum",
    "reduce_min": "minimum",
    "reduce_prod": "product",
    "scan": "loop",
}


def warn_of_mixed_rows(
    result: Result,
    num_stored: int,
    inputs: Sequence[Any],
    specs: Sequence[Any],
    outputs: Outputs,
    comm: CommSpec,
) -> None:
    """Warn of each line that mixes rows of the batch: outputs are not linear in a sum over rows.

    A function with such a line (a batch norm, a contrastive loss) gives other results on several
    devices than on one device with all rows.

    Args:
        result: the result of the step, with the program of one micro-batch as it was traced.
        num_stored: the number of parameters, which come before `inputs` among the program's inputs.
        inputs: this device's rows of the batch, and replicated values.
        specs: the `PartitionSpec` of each input.
        outputs: the reduction over devices of each output other than the loss, and the options of
            the call.
        comm: sizes of the mesh axes.
    """
    try:
        warnings = [*messages(result, num_stored, inputs, specs, outputs, comm)]
    except Exception as error:  # a mistake in a check must not stop the training
        warn(
            "Whether the function mixes rows of the batch could not be found out "
            f"({type(error).__name__}: {error}). This is a mistake in jaxzero; nothing else "
            "depends on it."
        )
        return
    for text, file, line in warnings:
        warn_at(text, RowsMixedWarning, file, line)


def messages(
    result: Result,
    num_stored: int,
    inputs: Sequence[Any],
    specs: Sequence[Any],
    outputs: Outputs,
    comm: CommSpec,
) -> Iterator[tuple[str, str, int]]:
    """Yield a warning `(text, file, line)` for each line that mixes rows of the batch.

    The arguments, and what mixes rows, are as in `warn_of_mixed_rows`.
    """
    options = outputs.options
    split = [{x for x in axes_of(spec) if x in AXES} for spec in specs]
    axes = frozenset(x for x in set().union(*split) if comm.sizes[x] > 1)
    num_devices = math.prod(comm.sizes[x] for x in axes)
    if num_devices * options.microbatches == 1 or any(map(_is_split_twice, specs)):
        return
    # With several micro-batches, the first input of the program is the micro-batch's index.
    first = num_stored + (options.microbatches > 1)
    given = {
        first + i: RowInput(dim, x.shape[dim] // options.microbatches)
        for i, (x, spec) in enumerate(zip(inputs, specs, strict=True))
        if (dim := split_dim(spec)) is not None
    }
    if options.microbatches > 1:
        given[0] = RowInput(None)  # it differs between micro-batches, and has no rows
    shapes = result.program.shapes  # loss, weight, gradients and others
    num_before = len(jax.tree.leaves(shapes[:3]))
    others = [i for i, how in enumerate(outputs.how) if how in ("mean", "sum", "concat")]
    num_losses = len(jax.tree.leaves(shapes[:2]))
    wanted = [*range(num_losses), *(num_before + i for i in others)]
    mixings = find_mixings(result.block, given, axes, wanted)
    losses = zip(mixings, (False, True)[:num_losses], strict=False)
    in_loss = frozenset().union(*(_of_weight(x) if weight else x for x, weight in losses))
    in_others = frozenset().union(*mixings[num_losses:]) - in_loss
    rows = max(x.num_rows for x in given.values())
    who = f"Each of {num_devices} devices" if num_devices > 1 else "Each micro-batch"
    if num_devices > 1 and options.microbatches > 1:
        who += f", in each of {options.microbatches} micro-batches,"
    for of_outputs, where in ((in_loss, "the loss"), (in_others, _others(options))):
        # Equal random bits are a mistake also where statistics of a device's rows are meant.
        kept = [x for x in of_outputs if x.kind == "key" or options.row_statistics is None]
        for mixing, (file, line), inside in _by_line(kept):
            what = _described(mixing, rows, f"{file.rpartition('/')[2]}:{line}", inside)
            meaning = _meaning(mixing, rows, who, where)
            yield f"{what} {meaning} {_REMEDIES[mixing.kind]}", file, line


def _is_split_twice(spec: Any) -> bool:
    """Return whether devices split two dims of one array, so that no single dim is the rows."""
    return sum(any(x in AXES for x in axes_of(type(spec)(entry))) for entry in spec) > 1


def _of_weight(mixings: frozenset[Mixing]) -> frozenset[Mixing]:
    """Remove mixings by `jnp.maximum(weight, 1)`, which only guards against division by 0."""
    return frozenset(x for x in mixings if (x.kind, x.at.name) != ("function", "max"))


def _others(options: Options) -> str:
    return "`aux`" if options.has_gradients else "an output"


def _by_line(mixings: Sequence[Mixing]) -> Iterator[tuple[Mixing, tuple[str, int], str | None]]:
    """Yield one mixing of each kind for each line of the user's code.

    Yields:
        The mixing; the user's file and line; and, if that line calls a library, the line in the
        library, else None.
    """
    lines: dict[tuple[str, int], dict[str, tuple[Mixing, str | None]]] = {}
    for mixing in sorted(mixings, key=_rank):
        (file, line), inside = _place(mixing)
        kinds = lines.setdefault((file, line), {})
        if mixing.kind in _ALONE or not kinds:
            kinds.setdefault(mixing.kind, (mixing, inside))
    for place, kinds in sorted(lines.items()):
        for mixing, inside in kinds.values():
            yield mixing, place, inside


def _rank(mixing: Mixing) -> tuple[Any, ...]:
    """Return a sort key: by kind, the most telling first; then means before sums; then by line."""
    return _ORDER.index(mixing.kind), not mixing.is_mean, mixing.source.frames, mixing.at.name


def _place(mixing: Mixing) -> tuple[tuple[str, int], str | None]:
    """Return the user's file and line; and the line of the library that it calls, or None."""
    frames = mixing.source.frames
    outside = [x for x in frames if "/jax/" not in x[0] and not x[0].startswith("<frozen")]
    own = next((x for x in frames if is_of_user(x[0])), None)
    if own is None:
        return (outside or frames or [("<unknown>", 0)])[0], None
    file, line = outside[0]
    inside = "/".join(file.split("/")[-3:])
    return own, None if (file, line) == own else f"{inside}:{line}"


def _described(mixing: Mixing, rows: int, line: str, inside: str | None) -> str:
    """Describe what is mixed, and where, such as `Mean over 64 rows of float32[64], ppo.py:41.`"""
    source: Operation = mixing.source
    at = f"{line} (in {inside})" if inside else line
    values = [x for x in source.inputs if isinstance(x, Value) and x.shape]
    named = ""
    if values:
        largest = max(values, key=lambda x: math.prod(x.shape))
        named = f" of {largest.dtype}{list(largest.shape)}"
    match mixing.kind:
        case "pairs":
            out = source.outputs[0]
            return f"All pairs of {rows} rows, {out.dtype}{list(out.shape)}, {at}."
        case "ratio":
            return f"A sum over {rows} rows divided by a sum over rows, {at}."
        case "key":
            out = source.outputs[0]
            return f"Random bits {list(out.shape)} for {rows} rows, {at}, are equal on all devices."
        case "order" | "extreme":
            name = _NAMES.get(source.name, f"`{source.name}`")
            return f"{_capital(name)} over {rows} rows{named}, {at}."
    name = _NAMES.get(source.name, "mean" if mixing.is_mean else "sum")
    return f"{_capital(name)} over {rows} rows{named}, {at}."


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]


def _meaning(mixing: Mixing, rows: int, who: str, where: str) -> str:
    """Describe what each device computes, and what one device with all rows would compute."""
    one = "one device would use all rows"
    match mixing.kind:
        case "pairs":
            return f"It reaches {where}. {who} compares its own {rows} rows with each other; {one}."
        case "ratio":
            return (
                f"{who} divides its own sums, and {where} becomes the mean of these ratios; one "
                "device would divide the sums over all rows."
            )
        case "key":
            return f"It reaches {where}: the rows of all devices get the same."
        case "order" | "extreme":
            return f"It reaches {where}. {who} sees its own {rows} rows; {one}."
        case "statistic":
            use = "is combined with rows again"
        case "product":
            use = "is multiplied by another sum over rows"
        case _:
            use = f"goes through `{mixing.at.name}`"
    return f"It {use} on the way to {where}. {who} uses that of its own {rows} rows; {one}."
