"""Define `tune`, the public function that plans how to train a model on a cluster."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from .._local_steps import LocalSteps
from .candidates import Candidate, Layers, enumerate_candidates, microbatches_by_tokens
from .cluster import Cluster
from .compiles import Compiler
from .job import Job
from .plans import Plans
from .ranking import notes_on_best, ranked
from .search import Objective, Search
from .target import why_no_compiler

_NEEDS_COMPILER = (
    ", or plan for devices that `jaxzero[aot]` has a compiler for: plans whose devices share rows "
    "need one"
)
_RESERVED = 0.05  # of a device's memory, for the runtime


def tune(
    loss_fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    init_fn: Callable[[], Any],
    batch: Any,
    cluster: Cluster,
    *,
    tx: optax.GradientTransformation | None = None,
    memory: float | None = None,
    objective: Objective = "step_time",
    quantized: bool = True,
    microbatches: Sequence[int] = (1, 2, 4, 8),
    local_steps: LocalSteps | Sequence[LocalSteps] = (),
    layers: Layers | None = "layers",
    activation_budgets: bool = True,
    budget: float = 180.0,
    cache: Path | str | None = "default",
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Plans:
    """Choose how to train a model on a cluster: config, mesh, micro-batches, activations, offload.

    The mesh may have pipeline stages, or devices of a node that share the tokens of each row.

    All plans are enumerated. Those whose parameters, gradients and optimizer state alone do not fit
    are discarded. Up to 8 of the others, those that promise most, are compiled for the cluster's
    devices as proxies: without fused kernels for softmax and RMS norm. Their step time is predicted
    from the cluster's rates. Up to 3 plans, usually of these 8, are compiled in full to check their
    memory. Two plans are compiled at the same time.

    Nothing is run, and no GPU is needed: the compiler is that of the `aot` extra. For devices that
    it does not know, plans are ranked by lower bounds alone, and the result says so.

    Predicted step times are for comparing plans: on real hardware a step may take longer.

    Args:
        loss_fn: `loss_fn(params, batch)`, as for `zero.value_and_grad`; or several forms of it by
            name, such as one for each policy of `jax.checkpoint`, of which one is chosen.
        init_fn: returns the parameters; only their shapes are used.
        batch: arrays or structs of a batch, `[rows, ...]`, with the rows of all devices. It may
            have fewer rows than devices if the loss splits its tokens.
        cluster: the devices and their links.
        tx: the optimizer; by default AdamW.
        memory: bytes of a device that a plan may take; by default 95% of what the device has.
        objective: "step_time" and "tokens_per_second" rank alike, since the batch is given;
            "memory" looks for the plan that takes the least.
        quantized: whether weights and gradients may travel in 4 and 8 bits, which changes losses
            and gradients a little.
        microbatches: the numbers of micro-batches to try. A number that does not divide the rows of
            a device needs devices that share rows. It is tried with as few devices to a row as
            possible if the loss splits its tokens (`jz.split_tokens`, as the models of
            `jaxzero.models` do), and left out otherwise. A plan with `S` stages has `S` times as
            many micro-batches, each of as many rows. Give `(1,)` if the loss of a batch is not a
            mean over its rows (a contrastive loss): then there are no plans with stages.
        local_steps: one method of local steps to compare too, such as
            `jz.streaming_diloco(every=30)`, or a sequence of several. They are other training
            algorithms, whose losses differ, so by default there are none. A plan with local steps
            is for `zero.local_steps`; inside a node it has a preset without wire state, and no
            offload.
        layers: the path of the stacks of layers in the parameters, as for `jz.pipeline`. Plans with
            pipeline stages divide these stacks between nodes. If stages refuse a loss, it has no
            such plans, and a note says why. None: no stages.
        activation_budgets: whether to try budgets of `jz.Activations` too, for each form of the
            loss. They range from the least activations that can be kept to all that are faster to
            read than to compute again. Activations that a `jax.checkpoint` in the loss drops cannot
            be kept, so a loss without `jax.checkpoint` leaves most to choose from.
        budget: seconds after which no further compile is started.
        cache: a folder for compiled programs; by default `~/.cache/jaxzero/plans`; None: none are
            kept.
        progress: called with a line of text for each plan that is bounded or compiled.
        options: further arguments of `zero.value_and_grad`, such as `has_aux` and `weighted`.

    Returns:
        All plans, the best first; after Ctrl-C those found so far. Their property `best` raises if
        no plan fits, or no plan is known to fit after `budget` seconds.

    Raises:
        ValueError: an argument is out of range, the devices cannot share the rows evenly,
            `local_steps` is given for one node, or no program compiles.
        NotImplementedError: no plan can be traced, for instance because `batch` has fewer rows than
            devices and the loss does not split its tokens.

    Example:
        >>> cluster = jz.Cluster(nodes=4, local=8, device="h100", link=50e9)
        >>> plans = jz.tune(loss_fn, init_fn, batch, cluster)
        >>> plans.print()
        >>> mesh = jz.make_mesh(nodes=4, stages=plans.stages, tokens=plans.tokens)
        >>> zero = jz.Zero(mesh, plans.config)
    """
    check_arguments(cluster, objective, memory, budget, microbatches)
    limit = (1 - _RESERVED) * cluster.kind.memory if memory is None else memory
    methods = _methods(local_steps, cluster)
    losses = dict(loss_fn) if isinstance(loss_fn, Mapping) else {"": loss_fn}
    if not losses:
        raise ValueError("`loss_fn` is an empty dict. Give a function, or several by name.")
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), batch)
    chosen = optax.adamw(1e-4) if tx is None else tx
    job = Job(losses, init_fn, structs, chosen, options)
    missing = why_no_compiler(cluster)
    folder = _default_cache() if cache == "default" else cache and Path(cache)
    compiler = None if missing else Compiler(job, cluster, folder or None)
    deadline = time.monotonic() + budget
    say = progress or (lambda line: None)
    budgets = activation_budgets and not missing  # bounds count no activations
    search = Search(job, cluster, limit, objective, compiler, deadline, say, budgets)
    if missing:
        search.notes.append(f"ranked by lower bounds alone: {missing}")
    numbers, shared = _microbatches(structs, cluster, microbatches, has_compiler=not missing)
    if methods and not numbers:
        raise ValueError(
            "`local_steps` needs whole rows on each device, and `batch` and `microbatches` have "
            "none. Give a `batch` with more rows, or leave `local_steps` out."
        )
    forms = tuple(losses)
    candidates = enumerate_candidates(cluster, forms, numbers, quantized, methods, layers, shared)
    search.run(_without_host_arrays(candidates, search.notes) if missing else candidates)
    tokens = [x.size for x in jax.tree.leaves(structs) if jnp.issubdtype(x.dtype, jnp.integer)]
    rows = ranked(search)
    return Plans(
        cluster,
        limit,
        rows,
        max(tokens, default=0),
        (*search.notes, *notes_on_best(rows)),
        search.proxies,
        search.full,
    )


def _without_host_arrays(candidates: Iterable[Candidate], notes: list[str]) -> list[Candidate]:
    """Return the plans without offload, and append to `notes` how many plans have it.

    Simulated devices, which stand for devices without a compiler, have no host memory.
    """
    plans = list(candidates)
    kept = [plan for plan in plans if not plan.offload]
    if len(kept) < len(plans):
        notes.append(
            f"{len(plans) - len(kept)} plans with arrays in host memory were left out: without a "
            "compiler they have no bounds"
        )
    return kept


def check_arguments(
    cluster: Any, objective: Any, memory: Any, budget: Any, microbatches: Sequence[Any]
) -> None:
    """Raise `ValueError` if an argument of `tune` has the wrong type or range."""
    if not isinstance(cluster, Cluster):
        raise ValueError(f"`cluster` must be a `jz.Cluster(...)`; got {cluster!r}.")
    if objective not in get_args(Objective):
        raise ValueError(
            f"`objective` must be one of {', '.join(get_args(Objective))}; got {objective!r}."
        )
    for name, value in (("memory", memory), ("budget", budget)):
        if value is not None and (not isinstance(value, int | float) or not value > 0):
            unit = {"memory": "bytes of a device", "budget": "seconds"}[name]
            raise ValueError(f"`{name}` is a number of {unit}, above 0; got {value!r}.")
    if not all(isinstance(k, int) and k > 0 for k in microbatches):
        raise ValueError(f"`microbatches` must be integers above 0; got {tuple(microbatches)!r}.")


def _microbatches(
    batch: Any, cluster: Cluster, microbatches: Sequence[int], *, has_compiler: bool
) -> tuple[list[int], dict[int, list[int]]]:
    """Return the numbers of micro-batches to try, with whole rows and with shared rows.

    Without a compiler no devices share rows: lower bounds of times and memory are then computed on
    simulated devices, whose meshes cannot have an axis of tokens.

    Returns:
        The numbers for plans whose devices have whole rows; and, by the number of devices that
        share a row, those for plans whose devices share rows (an empty dict without a compiler).
    """
    sizes = {x.shape[0] for x in jax.tree.leaves(batch) if x.shape}
    if len(sizes) != 1:
        raise ValueError(
            "`batch` must hold arrays with the same number of rows in dim 0; got "
            f"{sorted(sizes) or 'no array with a dim'}."
        )
    (num_rows,) = sizes
    shared = microbatches_by_tokens(num_rows, cluster, microbatches)
    whole = shared.pop(1, [])
    split = "" if has_compiler or not shared else _NEEDS_COMPILER
    if not has_compiler:
        shared = {}
    if not whole and not shared and num_rows % cluster.num_devices:
        raise ValueError(
            f"`batch` has {num_rows} rows, which {cluster.num_devices} devices cannot share evenly."
            f" Give a multiple, such as {math.ceil(num_rows / cluster.num_devices)} for each"
            f"{split}."
        )
    if not whole and not shared:
        raise ValueError(
            f"`microbatches` must have a number that divides the {num_rows // cluster.num_devices} "
            f"rows of a device; got {tuple(microbatches)}. Add 1."
        )
    return whole, shared


def _methods(given: LocalSteps | Sequence[LocalSteps], cluster: Cluster) -> tuple[LocalSteps, ...]:
    methods = (given,) if isinstance(given, LocalSteps) else given
    if not isinstance(methods, Sequence) or not all(isinstance(x, LocalSteps) for x in methods):
        raise ValueError(
            "`local_steps` must be a `jz.LocalSteps`, such as `jz.streaming_diloco(every=30, "
            f"fragments=3)`, or a sequence of them; got {given!r}."
        )
    if methods and cluster.nodes == 1:
        raise ValueError(
            "`local_steps` trains each node by itself, and `cluster` has one node. Leave it out, "
            "or give a `Cluster` of several nodes."
        )
    return tuple(dict.fromkeys(methods))


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxzero" / "plans"
