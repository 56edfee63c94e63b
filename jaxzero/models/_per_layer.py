"""Windows and rotations that differ between layers, for one layer at a time.

In a list of layers the index of a layer is an `int`, and what depends on it is known when tracing.
In a scan the index is a traced array; then a value is selected with `jnp.where`, unless all layers
agree.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._attention import Window
from ._rope import Turns


def is_among(numbers: tuple[int, ...], i: int | Array, num_layers: int) -> bool | Array:
    """Return whether layer i is one of the layers `numbers`.

    The result is a Python bool where it is known when tracing. If the layers are scanned (`i` is an
    array) and only some are among `numbers`, it is a boolean array.
    """
    each = [number in numbers for number in range(num_layers)]
    if isinstance(i, int):
        return each[i]
    return each[0] if all(each) or not any(each) else jnp.array(each)[i]


def window_if(has_window: bool | Array, window: int | None, num_tokens: int) -> Window:
    """Return `window`, in tokens, if the layer has one.

    A layer without a window gets None where that is known when tracing, and otherwise `num_tokens`,
    which hides no token.
    """
    if window is None or isinstance(has_window, bool):
        return window if has_window is True else None
    return jnp.where(has_window, window, num_tokens)


def turns_if(condition: bool | Array, one: Turns, other: Turns) -> Turns:
    """Return `one` if the condition is true, else `other`; both have the same shapes."""
    if isinstance(condition, bool):
        return one if condition else other
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)
