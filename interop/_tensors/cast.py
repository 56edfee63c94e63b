"""Cast arrays to another dtype, and refuse values that it cannot hold."""

import jax.numpy as jnp
import numpy as np


def checked_cast(array: np.ndarray, dtype: np.dtype, label: str) -> np.ndarray:
    """Cast an array; values are rounded, also to 0.

    Raises:
        ValueError: a finite number would be infinite or NaN, or an integer dtype lacks a value. The
            message names the tensor by `label`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if array.size and not _covers(dtype, array.dtype):
            _check(array, dtype, label)
        return array.astype(dtype)


def _check(array: np.ndarray, dtype: np.dtype, label: str) -> None:
    # The dtypes that numpy lacks are exact in float32, in which it is ten times as fast.
    values = array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
    if _surely_fits(np.stack([values.min(), values.max()]), dtype).all():
        return  # rounding keeps the order, so all values fit
    fits = _surely_fits(values, dtype)
    if not jnp.issubdtype(dtype, jnp.integer):
        fits |= ~np.isfinite(values)
    if fits.all():
        return
    least, most = _range(dtype) or (None, None)
    raise ValueError(
        f"Tensor {label} holds {array[~fits].flat[0]} ({array.dtype}), which {dtype} cannot hold: "
        f"its range is {least} to {most}. Choose a dtype with a larger range: as `dtype`, or as "
        "that of the parameter in the model."
    )


def _surely_fits(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Which values are finite and in the range of a dtype, rounded to it."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return np.isfinite(values.astype(dtype))
    least, most = _range(dtype) or (0, 0)
    whole = np.trunc(values) if jnp.issubdtype(values.dtype, jnp.floating) else values
    return (whole >= least) & (whole < most + 1)  # ends that float dtypes can hold exactly


def _covers(dtype: np.dtype, source: np.dtype) -> bool:
    """Whether a dtype holds every value of another one, perhaps rounded."""
    ours, theirs = _range(dtype), _range(source)
    if ours is None or theirs is None:
        return True  # of booleans and complex numbers, which are cast as numpy does
    if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(source, jnp.floating):
        return False  # NaN
    return ours[0] <= theirs[0] and theirs[1] <= ours[1]


def _range(dtype: np.dtype) -> tuple[float, float] | None:
    """The smallest and the largest finite value of a dtype; None if it is neither int nor float."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    if jnp.issubdtype(dtype, jnp.floating):
        return float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)
    return None
