"""Cast arrays to another dtype, and refuse values that this dtype cannot hold."""

import jax.numpy as jnp
import numpy as np


def checked_cast(array: np.ndarray, dtype: np.dtype, label: str) -> np.ndarray:
    """Cast an array to `dtype`; values are rounded, and those too small for it become 0.

    Raises:
        ValueError: a finite number would become infinite or NaN, or lies outside of the range of an
            integer dtype. The message names the tensor by `label`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if array.size and not _covers(dtype, array.dtype):
            _check(array, dtype, label)
        return array.astype(dtype)


def _check(array: np.ndarray, dtype: np.dtype, label: str) -> None:
    # The dtypes of ml_dtypes (bfloat16, float8) are exact in float32, in which numpy is ten times
    # as fast.
    values = array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
    if _surely_fits(np.stack([values.min(), values.max()]), dtype).all():
        return  # rounding keeps the order, so all values between the extremes fit too
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
    """Return a mask of the values that, rounded to `dtype`, are finite and in its range."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return np.isfinite(values.astype(dtype))
    least, most = _range(dtype) or (0, 0)
    # A cast to integers drops the fraction, so -0.5 fits an unsigned dtype.
    whole = np.trunc(values) if jnp.issubdtype(values.dtype, jnp.floating) else values
    # `most` would be rounded up in a float dtype; `most + 1` is a power of 2, which is exact.
    return (whole >= least) & (whole < most + 1)


def _covers(dtype: np.dtype, source: np.dtype) -> bool:
    """Return whether a cast from `source` to `dtype` only rounds values, so needs no check."""
    ours, theirs = _range(dtype), _range(source)
    if ours is None or theirs is None:
        return True  # booleans and complex numbers are cast as numpy does
    if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(source, jnp.floating):
        return False  # integers have no NaN
    return ours[0] <= theirs[0] and theirs[1] <= ours[1]


def _range(dtype: np.dtype) -> tuple[float, float] | None:
    """Return the least and the greatest finite value of a dtype; None if it is no int or float."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    if jnp.issubdtype(dtype, jnp.floating):
        return float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)
    return None
