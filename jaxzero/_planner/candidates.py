"""Enumerate the candidate plans that a search compares.

They combine presets, pipeline stages, devices that share a row's tokens, numbers of micro-batches,
offload, forms of the loss, and budgets of activations.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from .._activations import Point
from .._local_steps import LocalSteps
from .._sharding import (
    Activations,
    Offload,
    Stages,
    ZeroConfig,
    ddp,
    hsdp,
    without_defaults,
    zero3,
    zeropp,
    zeropp4,
)
from .cluster import Cluster

_PRESETS = {
    "ddp": ddp,
    "stage 2": lambda: ZeroConfig(stage=2),
    "hsdp": hsdp,
    "zero3": zero3,
    "zeropp": zeropp,
    "zeropp4": zeropp4,
}
_CODE = {"stage 2": "jz.ZeroConfig(stage=2)"}  # code of the presets that are no functions
_QUANTIZED = ("zeropp", "zeropp4")
Layers = str | tuple[str, ...]  # the type of `Stages.layers`
_OFFLOAD = {
    "": None,
    "optimizer": Offload(optimizer=True),
    "all": Offload(weights=True, gradients=True, optimizer=True),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to train a model on a cluster, also called a plan.

    Attributes:
        preset: the name of a preset, such as "zeropp"; with stages also their number, as in "zero3
            in 2 stages".
        config: the preset's config, with the candidate's schedule, offload and activations.
        microbatches: the number of micro-batches, for `zero.value_and_grad`.
        loss: the name of the loss function that it trains with, which is one of several forms of
            the loss; "" if there is only one.
        offload: "", "optimizer" or "all": what lies in host memory.
        local_steps: how nodes that train by themselves exchange parameters; `config` is then the
            config of each node. None: all nodes take each step together.
        stages: pipeline stages, for `make_mesh`; 1: none.
        tokens: devices that share the tokens of each row, for `make_mesh`; 1: rows are not split.
    """

    preset: str
    config: ZeroConfig
    microbatches: int
    loss: str
    offload: str
    local_steps: LocalSteps | None = None
    stages: int = 1
    tokens: int = 1

    @property
    def family(self) -> tuple[str, str, LocalSteps | None, int | None, int]:
        """A key that is equal for plans that differ only in prefetch, offload or micro-batches."""
        return self.preset, self.loss, self.local_steps, self.activation_budget, self.tokens

    @property
    def axes(self) -> dict[str, int]:
        """The arguments `stages` and `tokens` of `make_mesh`; those that are 1 are left out."""
        sizes = {"stages": self.stages, "tokens": self.tokens}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def activation_budget(self) -> int | None:
        """The bytes of activations that a device may keep; None if they are not limited."""
        return self.config.activations.budget_bytes if self.config.activations else None

    @property
    def program(self) -> tuple[Candidate, bool]:
        """A key of the program that computes gradients, equal for candidates with equal programs.

        It has two parts: the candidate without the fields that do not change the program, and
        whether the program is of one node (with local steps). These fields say how nodes exchange
        parameters, and where the optimizer state lies, which the program does not read.
        """
        offload = self.offload if self.has_host_arrays else ""
        config = dataclasses.replace(self.config, offload=_OFFLOAD[offload])
        same = dataclasses.replace(self, config=config, offload=offload, local_steps=None)
        return same, self.local_steps is not None

    @property
    def has_host_arrays(self) -> bool:
        """Whether the program of the gradients has arrays in host memory."""
        return self.offload == "all"

    @property
    def name(self) -> str:
        """The choices that the candidate makes, in a few words, for tables and messages."""
        words = [self.preset]
        if self.config.stage == 3:
            words.append(f"prefetch {self.config.schedule.prefetch}")
        if self.microbatches > 1:
            words.append(f"{self.microbatches} micro-batches")
        if self.tokens > 1:
            words.append(f"tokens over {self.tokens}")
        if self.offload:
            words.append(f"{self.offload} in host memory")
        if (budget := self.activation_budget) is not None:
            words.append(f"{budget / 1e9:.3g} GB of activations" if budget else "least activations")
        if self.local_steps is not None:
            words += _words(self.local_steps)
        return ", ".join([*words, *([self.loss] if self.loss else [])])

    @property
    def code(self) -> str:
        """The config as a Python expression, where `jz` is `jaxzero`."""
        name = self.preset.partition(" in ")[0]
        base, code = _PRESETS[name](), _CODE.get(name, f"jz.{name}()")
        fields = ((x.name, getattr(self.config, x.name)) for x in dataclasses.fields(base))
        changed = [f"{k}=jz.{without_defaults(x)}" for k, x in fields if x != getattr(base, k)]
        return f"dataclasses.replace({', '.join([code, *changed])})" if changed else code


def _words(method: LocalSteps) -> list[str]:
    words = [f"local steps {method.every}"]
    if method.fragments > 1:
        words.append(f"{method.fragments} fragments")
    if method.delay:
        words.append(f"delay {method.delay}")
    return [*words, str(method.codec or "float32")]


def enumerate_candidates(
    cluster: Cluster,
    losses: Sequence[str],
    microbatches: Sequence[int],
    quantized: bool,
    local_steps: Sequence[LocalSteps] = (),
    layers: Layers | None = None,
    tokens: Mapping[int, Sequence[int]] | None = None,
) -> Iterator[Candidate]:
    """Yield all candidate plans for a cluster.

    Args:
        cluster: the devices and links. With one node there are no presets that need several;
            without host memory there is no offload.
        losses: names of the forms of the loss.
        microbatches: the numbers of micro-batches to try.
        quantized: whether weights and gradients may travel in 4 and 8 bits.
        local_steps: methods of local steps to try too, each with all plans for one node that have
            no offload.
        layers: the path of the stacks that pipeline stages may divide; None: no stages.
        tokens: for each number of devices that may share a row, the numbers of micro-batches to
            try; None: rows are not split.
    """
    presets = [name for name in _PRESETS if quantized or name not in _QUANTIZED]
    if cluster.nodes == 1:
        presets = [name for name in presets if name not in ("hsdp", "zeropp4")]
    for preset, loss, k in itertools.product(presets, losses, microbatches):
        config = _PRESETS[preset]()
        kinds = list(_OFFLOAD) if cluster.host_memory and config.stage == 3 else [""]
        for offload, prefetch in itertools.product(kinds, (1, 0) if config.stage == 3 else (1,)):
            schedule = dataclasses.replace(config.schedule, prefetch=prefetch)
            chosen = dataclasses.replace(config, schedule=schedule, offload=_OFFLOAD[offload])
            yield Candidate(preset, chosen, k, loss, offload)
    for method in local_steps:
        for candidate in enumerate_candidates(cluster.one_node, losses, microbatches, quantized):
            if not candidate.offload:
                yield dataclasses.replace(candidate, local_steps=method)
    if layers is not None:
        yield from _with_stages(cluster, losses, microbatches, quantized, layers)
    for num, shared in (tokens or {}).items():
        for candidate in enumerate_candidates(cluster, losses, shared, quantized):
            config = candidate.config
            if config.stage == 3 and not config.needs_wire_state:
                yield dataclasses.replace(candidate, tokens=num)


def microbatches_by_tokens(
    num_rows: int, cluster: Cluster, microbatches: Sequence[int]
) -> dict[int, list[int]]:
    """Return the numbers of micro-batches to try, by number of devices that share a row.

    If `t` devices share each row, a group of `t` devices has `t` times the rows of one device. With
    a larger `t`, a device holds as many activations, and has to exchange more keys and values.
    Therefore each number `k` of micro-batches is tried with one `t` only: the least for which `k`
    divides the rows of a group.

    Args:
        num_rows: rows of the batch, over all devices.
        cluster: the devices; those that share a row are of one node.
        microbatches: all numbers of micro-batches to try.

    Returns:
        For each number `t` of devices, 1 included, the numbers of micro-batches that are tried with
        it. A `t` with none is left out.
    """
    by_tokens: dict[int, list[int]] = {}
    for k in microbatches:
        for num in (n for n in range(1, cluster.local + 1) if cluster.local % n == 0):
            if num_rows * num % (cluster.num_devices * k) == 0:
                by_tokens.setdefault(num, []).append(k)
                break
    return by_tokens


def _with_stages(
    cluster: Cluster,
    losses: Sequence[str],
    microbatches: Sequence[int],
    quantized: bool,
    layers: Layers,
) -> Iterator[Candidate]:
    """Yield plans with pipeline stages; the devices of a stage split its layers by ZeRO stage 3.

    With `S` stages, a device computes with `S` times as many rows. So a plan with `k` micro-batches
    gets `S k` of them, each of as many rows as without stages. If `microbatches` is `(1,)`, the
    loss may not be a mean over its rows, and no plan is yielded.
    """
    if max(microbatches, default=1) == 1:
        return
    for num in (n for n in range(2, cluster.nodes + 1) if cluster.nodes % n == 0):
        nodes = dataclasses.replace(cluster, nodes=cluster.nodes // num, device=cluster.kind)
        for inside in enumerate_candidates(nodes, losses, microbatches, quantized):
            config = inside.config
            if config.stage < 3 or config.needs_wire_state or inside.has_host_arrays:
                continue
            total = num * inside.microbatches
            yield dataclasses.replace(
                inside,
                preset=f"{inside.preset} in {num} stages",
                config=dataclasses.replace(
                    config, stages=Stages(microbatches=total, layers=layers)
                ),
                microbatches=total,
                stages=num,
            )


def with_budgets(
    candidate: Candidate, frontier: Sequence[Point]
) -> Iterator[tuple[Candidate, Point]]:
    """Yield a plan with each budget of activations in turn, and the point of that budget.

    A plan without prefetch is for saving memory, and gets the least budget only.

    Args:
        candidate: the plan, without a budget.
        frontier: a point for each budget: the bytes that are kept, and the seconds in which dropped
            activations are computed again. The point with the least bytes is first.
    """
    for i, point in enumerate(frontier if candidate.config.schedule.prefetch else frontier[:1]):
        budget = Activations(budget_bytes=point.num_bytes if i else 0)  # 0: as few as possible
        config = dataclasses.replace(candidate.config, activations=budget)
        yield dataclasses.replace(candidate, config=config), point


def tells_more(
    candidate: Candidate,
    chosen: Sequence[Candidate],
    known: Collection[Candidate],
    losses: Set[str],
) -> bool:
    """Return True if a plan is worth compiling at the same time as the plans `chosen`.

    It is not if a chosen plan has the same program. If some plan is chosen already, it is also not
    worth it while its form of the loss has a known or chosen plan, and another form has none: a
    plan of the other form is compiled first.

    Args:
        candidate: the plan.
        chosen: plans that will be compiled at the same time.
        known: plans whose programs have been compiled.
        losses: the forms of the loss of all plans that may be chosen.
    """
    if candidate.program in {x.program for x in chosen}:
        return False
    seen = {x.loss for x in (*chosen, *known)}
    return not chosen or candidate.loss not in seen or losses <= seen
