"""Configure which activations forward keeps for backward."""

from __future__ import annotations

import dataclasses

from .hops import check_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activations:
    """Choose which activations forward keeps for backward, and which backward computes again.

    Of all choices within the budget, the one with the shortest step by a cost model is taken. It is
    found as a minimum cut of the program, between the values that are kept and those that backward
    reads. Results are those of the unchanged program, except for roundings where XLA fuses
    operations differently. Random bits are made again from the same keys. Effects, calls of Python
    and the user's own collectives are not repeated.

    Args:
        budget_bytes: the most bytes of activations that a device keeps from forward to backward, of
            one micro-batch. 0: as few as possible, up to 2% for values that would take long to
            compute again. `None`: as many as the program keeps by itself. With any budget, a value
            that is faster to compute again than to read from memory is not kept. Memory for
            computing one layer again in backward is needed in addition.
        host: whether activations of layers in a loop may also wait in pinned host memory: as many
            as can be copied there while forward computes, so that as little as possible is computed
            again. They are copied back one layer ahead. Without such a loop, a budget below what
            the program keeps by itself is refused.
        override: whether to leave out every `jax.checkpoint` of the model, so that the budget alone
            decides. False: what a `jax.checkpoint` says to recompute is recomputed.

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
