"""The keys and values of the tokens that a decoder has seen, so that each is computed once.

All arrays have static shapes: the cache is made with room for a number of columns, and t tokens per
row are written to the next t columns of all rows. Rows of different lengths have padding, which is
stored too and masked.

Latent attention stores the short vector and the rotated part of each token instead of keys and
values (see `_latent_attention`).

Dimensions: b batch, t columns that are written, s columns of the cache, g key-value heads, k size
of keys, v size of values.

On a mesh with the axis `tokens` the columns are split over it, `num_columns / tokens` neighbours on
each device. Each device writes new columns to its own part: if an update began at a traced column,
the compiler would gather the cache.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from .._mesh import num_token_parts, on_token_parts, split_over_tokens
from ._decoder_config import DecoderConfig

_COLUMNS = -2  # the dim of columns


class LayerCache(NamedTuple):
    """The keys and values of one layer, or of a stack of layers, whose leading dim counts layers.

    Heads come before columns, so that attention multiplies matrices that are contiguous in memory.
    """

    keys: Float[Array, "*layers b g s k"]
    values: Float[Array, "*layers b g s v"] | None = None  # None in latent attention


class Cache(NamedTuple):
    """The keys and values that `Decoder.extend` has computed so far, with their mask and length."""

    layers: tuple[LayerCache, ...] | LayerCache  # a tuple for a list of layers, else one stack
    mask: Bool[Array, "b s"]  # True for tokens; False for padding and for columns not yet written
    length: Int32[Array, ""]  # columns that are written


def make_cache(config: DecoderConfig, batch_size: int, num_columns: int) -> Cache:
    """Make an empty cache, in `compute_dtype`.

    Args:
        config: the config of the decoder.
        batch_size: number of rows.
        num_columns: tokens of a row that the cache has room for, padding included. On a mesh with
            the axis `tokens` it is rounded up to a multiple of that, and columns are split over it.

    Raises:
        ValueError: a size is not positive, or `num_columns` is more than the model's positions or
            more than the tokens up to which rotary frequencies are constant.
    """
    for name, size in (("batch_size", batch_size), ("num_columns", num_columns)):
        if size < 1:
            raise ValueError(f"`{name}` must be a positive integer; got {size}.")
    _check_positions(config, num_columns)
    num_columns += -num_columns % num_token_parts()  # the columns that this adds hold no tokens
    latent = config.latent
    if latent is None:
        num_heads, key_size = config.num_key_value_heads, config.head_size
    else:
        num_heads, key_size = 1, latent.key_value_rank + config.head_size - latent.plain_size
    stack = (config.num_layers,) if config.scan_layers else ()
    shape = (*stack, batch_size, num_heads, num_columns, key_size)
    dtype = jnp.dtype(config.compute_dtype)

    def layer() -> LayerCache:
        keys, values = (_split(jnp.zeros(shape, dtype)) for _ in range(2))
        return LayerCache(keys, None if latent is not None else values)

    return Cache(
        layer() if config.scan_layers else tuple(layer() for _ in range(config.num_layers)),
        jnp.zeros((batch_size, num_columns), bool),
        jnp.int32(0),
    )


def _check_positions(config: DecoderConfig, num_columns: int) -> None:
    if config.rope is None and num_columns > config.max_length:
        raise ValueError(
            f"`num_columns` is {num_columns}, but the model has positions for `max_length`, "
            f"{config.max_length}. "
            "Make a smaller cache."
        )
    for rope in (config.rope, config.sliding_rope):
        scaling = None if rope is None else rope.scaling
        limit = None if scaling is None else scaling.constant_up_to
        if limit is not None and num_columns > limit:
            raise ValueError(
                f"`num_columns` is {num_columns}, but with {type(scaling).__name__} the rotary "
                f"frequencies change when a row has more than {limit} tokens, and the keys in the "
                f"cache have those of shorter rows. Make a cache of at most {limit} columns, or "
                "give the decoder a `rope` whose frequencies are the same for all lengths."
            )


def check_room(cache: Cache, ids: Int[Array, "b t"]) -> None:
    """Raise `ValueError` if it is known when tracing that tokens do not fit into the cache."""
    batch_size, size = cache.mask.shape
    try:
        held = int(cache.length)
    except jax.errors.ConcretizationTypeError:  # traced: `Decoder.extend` returns NaN if it is full
        held = 0
    if held + ids.shape[1] > size:
        raise ValueError(
            f"`ids` holds {ids.shape[1]} tokens per row, but of the {size} columns of the `cache` "
            f"{held} are used. Make a cache with more `num_columns`."
        )
    if size % num_token_parts():
        raise ValueError(
            f"The `cache` has {size} columns, and the mesh axis `tokens` splits them over "
            f"{num_token_parts()} devices. Make it with a multiple of that as `num_columns`, or in "
            "the function given to `zero`, where `make_cache` adds columns."
        )
    if len(ids) != batch_size:
        raise ValueError(
            f"`ids` holds {len(ids)} rows, the `cache` {batch_size}. Make a cache with this "
            "`batch_size`."
        )


class Slots:
    """The place in a cache where one layer writes the keys and values of new tokens.

    `write` replaces the attribute `layers` by arrays that also hold the new tokens.
    """

    def __init__(
        self,
        layers: Any,
        number: Any,
        start: Int[Array, ""],
    ):
        """Point to one layer of a cache.

        Args:
            layers: `layers` of a `Cache`: a tuple of `LayerCache`s, or a stack of them.
            number: index of the layer: an `int` for a tuple of layers, an array for a stack.
            start: index of the first column that is written. A column is the place of one token
                in every row.
        """
        self.layers, self.number, self.start = layers, number, start

    def write(self, *new: Float[Array, "b t g _"]) -> tuple[Float[Array, "b s g _"], ...]:
        """Store the keys of new tokens, and values if the cache has them.

        Returns the keys, and the values, of all columns of the cache.
        """
        stack = isinstance(self.layers, LayerCache)
        held: tuple[Any, ...] = self.layers if stack else self.layers[self.number]
        # Latent attention has no values: neither here nor in the cache.
        pairs = [self._written(array, x) for array, x in zip(held, new, strict=False)]
        layer = LayerCache(*(array for array, _ in pairs))
        if stack:
            self.layers = layer
        else:
            before, after = self.layers[: self.number], self.layers[self.number + 1 :]
            self.layers = (*before, layer, *after)
        return tuple(x for _, x in pairs)

    def _written(self, held: Array, new: Array) -> tuple[Array, Array]:
        """Write new keys or values into one array of the cache.

        Returns:
            The array with the new columns; and this layer's part of it, with columns before heads.
        """
        update = jnp.swapaxes(new, 1, 2).astype(held.dtype)
        is_layer = held.ndim == update.ndim
        number = None if is_layer else jnp.asarray(self.number, jnp.int32)
        held = _split(_with_columns(held, update, self.start, number))
        layer = held if is_layer else jax.lax.dynamic_index_in_dim(held, number, keepdims=False)
        return held, jnp.swapaxes(_split(layer), 1, 2)


def _split(x: Float[Array, "*_ s k"]) -> Float[Array, "*_ s k"]:
    return split_over_tokens(x, x.ndim + _COLUMNS)


def _with_columns(
    held: Float[Array, "*layers b g s k"],
    update: Float[Array, "b g t k"],
    start: Int[Array, ""],
    number: Int[Array, ""] | None,
) -> Float[Array, "*layers b g s k"]:
    """Write `update` to the columns of `held` from `start` on.

    If `held` is a stack of layers, only its layer `number` is written.
    """
    num_parts = num_token_parts()
    if num_parts == 1:
        return _update(held, update, start, number)
    dim = held.ndim + _COLUMNS
    write = on_token_parts(_write_part, (dim, None, None, None, 0), dim)
    return write(held, update, start, number, jnp.arange(num_parts, dtype=jnp.int32))


def _write_part(
    held: Float[Array, "*layers b g u k"],
    update: Float[Array, "b g t k"],
    start: Int[Array, ""],
    number: Int[Array, ""] | None,
    part: Int[Array, "1"],
) -> Float[Array, "*layers b g u k"]:
    """Write those columns of `update` that belong to the part of the cache on one device.

    The new columns may lie before, in or after this part. So a fixed number of columns is read,
    those among them that are new are replaced, and all are written back.

    Args:
        held: the device's part of the cache, with u columns.
        update: the new columns.
        start: the first new column, counted in the whole cache.
        number: the layer, if `held` is a stack.
        part: the number of this part.
    """
    num_new, num_held = update.shape[_COLUMNS], held.shape[_COLUMNS]
    num = min(num_new, num_held)
    from_here = start - part[0] * num_held  # the first new column, counted in this part
    first = jnp.clip(from_here, 0, num_held - num)
    sources = first + jnp.arange(num, dtype=jnp.int32) - from_here
    is_new = (sources >= 0) & (sources < num_new)
    layer = held if number is None else jax.lax.dynamic_index_in_dim(held, number, keepdims=False)
    old = jax.lax.dynamic_slice_in_dim(layer, first, num, axis=_COLUMNS)
    new = jnp.take(update, jnp.clip(sources, 0, num_new - 1), axis=_COLUMNS)
    return _update(held, jnp.where(is_new[:, None], new, old), first, number)


def _update(
    held: Float[Array, "*layers b g s k"],
    update: Float[Array, "b g t k"],
    start: Int[Array, ""],
    number: Int[Array, ""] | None,
) -> Float[Array, "*layers b g s k"]:
    zero = jnp.int32(0)
    begin = zero, zero, start, zero
    if number is None:
        return jax.lax.dynamic_update_slice(held, update, begin)
    return jax.lax.dynamic_update_slice(held, update[None], (number, *begin))
