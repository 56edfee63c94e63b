"""The plans that are compared: presets, micro-batches, prefetch, offload, and forms of the loss."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from .._sharding import Offload, ZeroConfig, ddp, hsdp, zero3, zeropp, zeropp4
from .cluster import Cluster

_PRESETS = {
    "ddp": ddp,
    "stage 2": lambda: ZeroConfig(stage=2),
    "hsdp": hsdp,
    "zero3": zero3,
    "zeropp": zeropp,
    "zeropp4": zeropp4,
}
_QUANTIZED = ("zeropp", "zeropp4")
_OFFLOAD = {
    "": None,
    "optimizer": Offload(optimizer=True),
    "all": Offload(weights=True, gradients=True, optimizer=True),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to train a model on a cluster.

    Attributes:
        preset: the name of the config, without its schedule and offload.
        config: the config.
        microbatches: for `zero.value_and_grad`.
        loss: the name of the form of the loss; "" if there is one.
        offload: "", "optimizer" or "all": what lies in host memory.
    """

    preset: str
    config: ZeroConfig
    microbatches: int
    loss: str
    offload: str

    @property
    def family(self) -> tuple[str, str]:
        """What it shares with the plans that only save memory, compared with it."""
        return self.preset, self.loss

    @property
    def saving(self) -> tuple[int, int, int]:
        """How much is done to save memory, at the price of time: more sorts after less."""
        return (
            list(_OFFLOAD).index(self.offload),
            self.microbatches,
            1 - self.config.schedule.prefetch,
        )

    @property
    def name(self) -> str:
        """All choices in a few words."""
        words = [self.preset]
        if self.config.stage == 3:
            words.append(f"prefetch {self.config.schedule.prefetch}")
        if self.microbatches > 1:
            words.append(f"{self.microbatches} micro-batches")
        if self.offload:
            words.append(f"{self.offload} in host memory")
        return ", ".join([*words, *([self.loss] if self.loss else [])])


def enumerate_candidates(
    cluster: Cluster, losses: Sequence[str], microbatches: Sequence[int], quantized: bool
) -> Iterator[Candidate]:
    """All plans for a cluster.

    Args:
        cluster: with one node, presets that differ between nodes only are left out; without host
            memory, so is offload.
        losses: names of the forms of the loss.
        microbatches: numbers of them.
        quantized: whether weights and gradients may travel in 4 and 8 bits.
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
