"""Which steps lead from a tensor's shape to a parameter's, the usual ones first.

Flax keeps kernels as `[in, out]` and `[*window, in, out]` and calls them `kernel`; PyTorch, and
Equinox like it, as `[out, in]` and `[out, in, *window]`, and calls them `weight`. Attention in Flax
splits a dimension into heads. Where a shape allows several ways (a square matrix may be transposed
or not), all are given.
"""

import math

from jaxzero.interop._rules import Step, Transpose, Unflatten

Steps = tuple[Step, ...]
Shape = tuple[int, ...]


def possible_steps(name: str, ours: Shape, theirs: Shape) -> list[Steps]:
    """Every way from `theirs` to `ours` that makes sense for a parameter called `name`."""
    as_is: list[Steps] = [()] if ours == theirs else []
    turned: list[Steps] = []
    if len(theirs) >= 2 and name not in ("embedding", "scale", "bias"):
        # The window's dimensions keep their order; a matrix has none, and is transposed.
        window = tuple(range(2, len(theirs)))
        dims = (*window, 1, 0)
        step = Transpose(*dims) if window else Transpose()
        shape = tuple(theirs[dim] for dim in dims)
        turned = [(step,)] if shape == ours else _with_heads((step,), ours, shape)
    unturned = [*as_is, *_with_heads((), ours, theirs)]
    return [*turned, *unturned] if name == "kernel" else [*unturned, *turned]


def _with_heads(steps: Steps, ours: Shape, theirs: Shape) -> list[Steps]:
    """Ways that make several dimensions, such as `[heads, size]`, of one."""
    found = []
    more = len(ours) - len(theirs)
    for dim in range(len(theirs)) if more > 0 else ():
        sizes = ours[dim : dim + more + 1]
        rest = (*theirs[:dim], *sizes, *theirs[dim + 1 :])
        if rest == ours and math.prod(sizes) == theirs[dim]:
            found.append((*steps, Unflatten(dim, sizes)))
    return found
