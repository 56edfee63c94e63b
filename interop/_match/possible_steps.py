"""List the steps that convert a tensor's shape to a parameter's shape, the most usual first.

Flax stores kernels as `[in, out]` and `[*window, in, out]` and names them `kernel`; PyTorch and
Equinox store them as `[out, in]` and `[out, in, *window]` and name them `weight`. Attention in
Flax splits a dimension into heads. If a shape is ambiguous (a square matrix may or may not be
transposed), all possibilities are listed.
"""

import math

from jaxzero.interop._rules import Step, Transpose, Unflatten

Steps = tuple[Step, ...]
Shape = tuple[int, ...]


def possible_steps(name: str, ours: Shape, theirs: Shape) -> list[Steps]:
    """List sequences of steps from shape `theirs` to `ours` that suit a parameter named `name`."""
    as_is: list[Steps] = [()] if ours == theirs else []
    turned: list[Steps] = []
    if len(theirs) >= 2 and name not in ("embedding", "scale", "bias"):
        # The dimensions of a convolution's window keep their order. A matrix is just transposed.
        window = tuple(range(2, len(theirs)))
        dims = (*window, 1, 0)
        step = Transpose(*dims) if window else Transpose()
        shape = tuple(theirs[dim] for dim in dims)
        turned = [(step,)] if shape == ours else _with_heads((step,), ours, shape)
    unturned = [*as_is, *_with_heads((), ours, theirs)]
    return [*turned, *unturned] if name == "kernel" else [*unturned, *turned]


def _with_heads(steps: Steps, ours: Shape, theirs: Shape) -> list[Steps]:
    """Extend `steps` by an `Unflatten` of one dimension, such as into `[heads, size]`."""
    found = []
    more = len(ours) - len(theirs)
    for dim in range(len(theirs)) if more > 0 else ():
        sizes = ours[dim : dim + more + 1]
        rest = (*theirs[:dim], *sizes, *theirs[dim + 1 :])
        if rest == ours and math.prod(sizes) == theirs[dim]:
            found.append((*steps, Unflatten(dim, sizes)))
    return found
