"""The copies from and to host memory, as steps of a plan.

The plan of a block says when weights are copied. Which ones are, and their bytes, is read from the
record of the traced program (`HostTransfer`): a weight that is copied in full before the program,
or gathered from a node slice, is not copied again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .._collectives import HostTransfer
from .block_plan import BlockPlan, ReduceGroup
from .plan_step import PlanStep, operation_names, region_name, tied_to


class HostSteps:
    """The steps of the copies that a traced program has recorded."""

    def __init__(self, transfers: Sequence[HostTransfer]):
        self._whole = [x for x in transfers if not x.windowed]
        layers = [x for x in transfers if x.windowed]
        self._layers = {(x.path, x.name, x.to): x for x in layers if x.purpose != "update"}
        # The last record of a copy is that of the update after the loop; the others are equal.
        self._updates = {(x.path, x.name, x.to): x for x in layers if x.purpose == "update"}

    def whole(self, to: str, at: int) -> Iterator[PlanStep]:
        """The copies of full leaves to "device" or "host", at operation `at` of the program."""
        for x in self._whole:
            if x.to == to:
                yield _step(x, x.region, (), x.trips, start=at, needed=at, stop=at, windowed=False)

    def of_group(
        self, plan: BlockPlan, number: int, path: tuple[int, ...], trips: int
    ) -> Iterator[PlanStep]:
        """The fetches of a group of weights outside of loops."""
        group, names = plan.gather_groups[number], operation_names(plan)
        assert group.fetch is not None
        for weight in plan.fetched(number):
            if x := self._layers.get((path, weight.name, "device")):
                yield _step(
                    x,
                    group.gathers[0].region,
                    path,
                    trips,
                    group=number,
                    sent=names[group.fetch],
                    at=names[group.issues[0]],
                    tied=tied_to(plan, group.fetch_tie),
                    start=group.fetch,
                    needed=group.issues[0],
                    stop=group.issues[0],
                )

    def of_loop(
        self, plan: BlockPlan, index: int, path: tuple[int, ...], trips: int
    ) -> Iterator[PlanStep]:
        """The fetches of a loop: in each iteration one layer of every stack in host memory."""
        loop = plan.loops[index]
        names = operation_names(loop.body)
        for stack in plan.uses.loops[index].stacks:
            x = self._layers.get((path, stack.layer.name, "device"))
            if x is None:
                continue
            issues = (
                group.issues[0]
                for group in loop.body.gather_groups
                if any(gather.weight is stack.layer for gather in group.gathers)
            )
            needed = min(issues, default=0)
            num = loop.window
            before = "the iteration before" if num == 1 else f"{num} iterations before"
            yield _step(
                x,
                region_name(path),
                path,
                trips,
                sent=before if num else names[0],
                at=names[needed],
                needed=needed,
                stop=needed,
                ahead=num,
                held=num + len(loop.leads(stack.layer)),
            )

    def of_reduced(
        self, plan: BlockPlan, group: ReduceGroup, path: tuple[int, ...], trips: int
    ) -> Iterator[PlanStep]:
        """The offloads of a group of gradients outside of loops."""
        for value in group.values:
            leaf = plan.host_gradients.get(value)
            if leaf and (x := self._layers.get((path, leaf.path, "host"))):
                at = group.at
                yield _step(x, x.region, path, trips, start=at, needed=at, stop=at)

    def gradients(
        self, plan: BlockPlan, index: int, path: tuple[int, ...], trips: int
    ) -> Iterator[PlanStep]:
        """The offloads of a loop: in each iteration one layer of every gradient in host memory.

        They are followed by the copies of updates, in each iteration of one layer of every array.
        """
        loop = plan.loops[index]
        end = len(loop.body.block.operations)
        for leaf in loop.host_gradients.values():
            if x := self._layers.get((path, f"{leaf.path}[i]", "host")):
                yield _step(x, region_name(path), path, trips, start=end, needed=end, stop=end)
        for (where, _, to), x in self._updates.items():
            if where == path:
                ahead, held = (1, 2) if to == "device" else (0, 1)
                yield _step(
                    x, region_name(path), path, trips, at="the update", ahead=ahead, held=held
                )


def _step(
    x: HostTransfer,
    region: str,
    path: tuple[int, ...],
    trips: int,
    *,
    group: int = 0,
    sent: str = "",
    at: str = "",
    tied: str = "",
    start: int = 0,
    needed: int = 0,
    stop: int = 0,
    ahead: int = 0,
    held: int = 1,
    windowed: bool = True,
) -> PlanStep:
    return PlanStep(
        region=region,
        action="fetch" if x.to == "device" else "offload",
        group=group,
        name=x.name,
        shape=x.shape,
        dtype=x.dtype,
        num_bytes=x.num_bytes,
        sent=sent,
        at=at,
        until="",
        tied=tied,
        trips=trips,
        start=start,
        needed=needed,
        stop=stop,
        path=path,
        ahead=ahead,
        held=held,
        windowed=windowed,
    )
