"""Which activations are kept for backward."""

from __future__ import annotations

import dataclasses

from .hops import check_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activations:
    """Choose which activations forward keeps for backward, and which backward computes again.

    The choice is the one that takes the least time by the cost model: a minimum cut of the program
    between what is kept and what backward reads. Results are those of the unchanged program, up to
    what XLA rounds otherwise where it fuses other operations. Random bits are made again from the
    same keys; effects, calls of Python and collectives of the user's are not repeated.

    Args:
        budget_bytes: the most bytes of activations that a device keeps from forward to backward, of
            one micro-batch. 0: as few as possible, up to 2% for values that would take long to
            compute again. `None`: what the program keeps. With any budget, what is faster to
            compute again than to read from memory is not kept. What backward computes again for
            one layer, and works with, comes on top.
        host: whether activations of layers in a loop may also wait in pinned host memory: as many
            as can be copied there while forward computes, so that as little as possible is
            computed again. They are copied back one layer ahead. Without such a loop, a budget
            below what the program keeps is refused.
        override: whether to leave out every `jax.checkpoint` of the model, so that the budget alone
            decides. False: what they say to recompute is recomputed.

    Raises:
        ValueError: `budget_bytes` is negative or no integer.

    References:
        Checkmate (https://arxiv.org/abs/1910.02653).
    """

    budget_bytes: int | None = None
    host: bool = False
    override: bool = False

    def __post_init__(self):
        check_integer("budget_bytes", "Activations", self.budget_bytes, 0, optional=True)
        for name in ("host", "override"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"`{name}` of `Activations` must be True or False; got {value!r}.")
        if self.host and self.budget_bytes is None:
            raise ValueError(
                "`host=True` of `Activations` needs `budget_bytes`: what does not fit on the "
                "device goes to host memory. Give the bytes that a device may keep."
            )
