"""When to freeze how many layers: the schedule of PipeTransformer, in few steps.

Of the layers that still train, a share `alpha` is frozen after each epoch:

    frozen(T) = ceil(L (1 - (1 - alpha)^T)),  T = 0, 1, 2, ...

PipeTransformer's released code has `ceil((1 - a)^T [a L / (1 - a) + sum_t a L / (1 - a)^t])`, t
from 2 to T, which is the same. Each number of frozen layers is another program to compile. So
layers are frozen only when the number of active ones can be halved: L, L // 2, L // 4, ..., 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def freeze_schedule(num_layers: int, alpha: float = 1 / 3) -> Callable[[int], int]:
    """A schedule for `Zero.freeze`: epoch, counted from 0, to the number of frozen layers.

    It never freezes more layers than PipeTransformer's formula, nor all of them, and changes at
    most `log2(num_layers)` times, which is how often the step is compiled again.

    Args:
        num_layers: layers of the model.
        alpha: the share of the active layers that the formula freezes in each epoch, in (0, 1).

    Raises:
        ValueError: an argument is out of range; or, when called, an epoch is.

    Example:
        >>> [jz.freeze_schedule(12)(epoch) for epoch in range(6)]
        [0, 0, 6, 9, 9, 11]

    References:
        PipeTransformer (https://proceedings.mlr.press/v139/he21a.html).
    """
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"`num_layers` must be an integer of at least 1; got {num_layers!r}.")
    if not 0 < alpha < 1:
        raise ValueError(f"`alpha` must be between 0 and 1; got {alpha!r}.")

    def prefix(epoch: int) -> int:
        if epoch < 0:
            raise ValueError(f"`epoch` must be at least 0; got {epoch!r}.")
        rest = num_layers * (1 - alpha) ** epoch
        # Rounding errors must not cost a layer: 6 (2/3) is just below or above 4.
        active = max(math.floor(rest + 1e-9 * num_layers), 1)
        allowed = num_layers
        while allowed // 2 >= active:
            allowed //= 2
        return num_layers - allowed

    return prefix
