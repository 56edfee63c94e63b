"""The plans that are compared.

Presets, stages, tokens split over devices, micro-batches, offload, forms of the loss, and budgets
of activations.
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
_CODE = {"stage 2": "jz.ZeroConfig(stage=2)"}  # of a preset that is no function
_QUANTIZED = ("zeropp", "zeropp4")
Layers = str | tuple[str, ...]  # the type of `Stages.layers`
_OFFLOAD = {
    "": None,
    "optimizer": Offload(optimizer=True),
    "all": Offload(weights=True, gradients=True, optimizer=True),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to train a model on a cluster.

    Attributes:
        preset: the name of a preset, such as "zeropp"; with stages also their number, as in "zero3
            in 2 stages". Schedule, offload and activations may differ from it.
        config: the config.
        microbatches: the number of micro-batches, for `zero.value_and_grad`.
        loss: the name of the form of the loss; "" if there is only one.
        offload: "", "optimizer" or "all": what lies in host memory.
        local_steps: how nodes that train by themselves exchange parameters; `config` is then that
            of each node. None: all nodes take each step together.
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
        """Equal for plans that differ only in prefetch, offload and the number of micro-batches."""
        return self.preset, self.loss, self.local_steps, self.activation_budget, self.tokens

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes beside `node` and `local`, for `make_mesh`; those of 1 are left out."""
        sizes = {"stages": self.stages, "tokens": self.tokens}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def activation_budget(self) -> int | None:
        """The budget of activations; None: what the loss keeps."""
        return self.config.activations.budget_bytes if self.config.activations else None

    @property
    def program(self) -> tuple[Candidate, bool]:
        """A key, equal for candidates whose programs of the gradients are equal by construction.

        The step of a node that trains by itself is the same program however nodes exchange. The
        optimizer state is not in it, so it may lie anywhere.
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
        """All choices in a few words."""
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
        """The config as Python, where `jz` is `jaxzero`."""
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
    """All plans for a cluster.

    Args:
        cluster: with one node, presets that differ between nodes only are left out; without host
            memory, so is offload.
        losses: names of the forms of the loss.
        microbatches: numbers of them.
        quantized: whether weights and gradients may travel in 4 and 8 bits.
        local_steps: ways of local steps to compare too; with each of them all plans for one node,
            without offload.
        layers: the path of the stacks that pipeline stages may divide; None: no stages.
        tokens: for each number of devices that may share a row, the numbers of micro-batches.
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
    """For each number of devices that may share a row, the numbers of micro-batches to try.

    With `t` devices to a row, each group of `t` devices has `t` times the rows that a device would
    have, so a device holds as many activations as without the axis, and exchanges keys and values
    too. So each number `k` of micro-batches is tried with the least `t` for which `k` divides the
    rows of a group.

    Args:
        num_rows: rows of the batch, over all devices.
        cluster: the devices; those that share a row are of one node.
        microbatches: all numbers of them to try.

    Returns:
        By number of devices, 1 included; those without a number of micro-batches are left out.
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
    """Plans with pipeline stages. The nodes of one pipeline stage split its layers by ZeRO stage 3.

    A device of `S` stages computes with `S` times as many rows, so with `S k` micro-batches each
    has as many rows as one of `k` without stages. If 1 is the only `k`, the loss may be no mean
    over its rows, and there are no such plans.
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
    """Yield a plan with each budget of a frontier, the least first, and the point of each.

    Leaving out prefetch saves the memory of one layer's weights. That is worth a try only together
    with the least budget.
    """
    for i, point in enumerate(frontier if candidate.config.schedule.prefetch else frontier[:1]):
        budget = Activations(budget_bytes=point.num_bytes if i else 0)  # 0: the least there is
        config = dataclasses.replace(candidate.config, activations=budget)
        yield dataclasses.replace(candidate, config=config), point


def tells_more(
    candidate: Candidate,
    chosen: Sequence[Candidate],
    known: Collection[Candidate],
    losses: Set[str],
) -> bool:
    """Whether a plan should be compiled at the same time as `chosen`.

    It should not if its program is among theirs. Nor should it while some form of the loss has no
    compiled program and this plan's form has one: the other form is compiled first.

    Args:
        candidate: the plan.
        chosen: plans that will be compiled at the same time.
        known: plans whose programs are compiled.
        losses: the forms of the loss of all plans that may be chosen.
    """
    if candidate.program in {x.program for x in chosen}:
        return False
    seen = {x.loss for x in (*chosen, *known)}
    return not chosen or candidate.loss not in seen or losses <= seen
