"""Keys and values of the tokens that a decoder has seen, so that each is computed once.

All arrays have static shapes: the cache is made with room for a number of columns, and t tokens per
row are written to the next t columns of all rows. Rows of different lengths have padding, which is
stored too and masked.

Latent attention stores the short vector and the rotated part of each token instead of keys and
values (see `_latent_attention`).

Dimensions: b batch, t columns that are written, s columns of the cache, g key-value heads, k size
of keys, v size of values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from ._decoder_config import DecoderConfig


class LayerCache(NamedTuple):
    """Keys and values of a layer, or with a leading dimension of layers, those of a stack.

    Heads come before columns, so that attention multiplies matrices that lie in one piece.
    """

    keys: Float[Array, "*layers b g s k"]
    values: Float[Array, "*layers b g s v"] | None = None  # None in latent attention


class Cache(NamedTuple):
    """What `Decoder.extend` has computed so far: a pytree of arrays with static shapes."""

    layers: tuple[LayerCache, ...] | LayerCache  # a tuple for a list of layers, else one stack
    mask: Bool[Array, "b s"]  # True for tokens; False for padding and for columns not yet written
    length: Int32[Array, ""]  # columns that are written


def make_cache(config: DecoderConfig, batch_size: int, num_columns: int) -> Cache:
    """Make an empty cache, in `compute_dtype`.

    Args:
        config: the config of the decoder.
        batch_size: number of rows.
        num_columns: tokens of a row that the cache has room for, padding included.

    Raises:
        ValueError: a size is not positive, or `num_columns` is more than the model's positions or
            more than the tokens up to which rotary frequencies are constant.
    """
    for name, size in (("batch_size", batch_size), ("num_columns", num_columns)):
        if size < 1:
            raise ValueError(f"`{name}` must be a positive integer; got {size}.")
    _check_positions(config, num_columns)
    latent = config.latent
    if latent is None:
        num_heads, key_size = config.num_key_value_heads, config.head_size
    else:
        num_heads, key_size = 1, latent.key_value_rank + config.head_size - latent.plain_size
    stack = (config.num_layers,) if config.scan_layers else ()
    shape = (*stack, batch_size, num_heads, num_columns, key_size)
    dtype = jnp.dtype(config.compute_dtype)

    def layer() -> LayerCache:
        zeros = jnp.zeros(shape, dtype)
        return LayerCache(zeros, None if latent is not None else jnp.zeros(shape, dtype))

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
    """Raise if tokens are known not to fit into the cache."""
    batch_size, size = cache.mask.shape
    try:
        held = int(cache.length)
    except jax.errors.ConcretizationTypeError:  # traced
        held = 0
    if held + ids.shape[1] > size:
        raise ValueError(
            f"`ids` holds {ids.shape[1]} tokens per row, but of the {size} columns of the `cache` "
            f"{held} are used. Make a cache with more `num_columns`."
        )
    if len(ids) != batch_size:
        raise ValueError(
            f"`ids` holds {len(ids)} rows, the `cache` {batch_size}. Make a cache with this "
            "`batch_size`."
        )


class Slots:
    """Where one layer writes the keys and values of new tokens, while it is traced.

    `write` replaces `layers` by arrays that hold them too.
    """

    def __init__(
        self,
        layers: Any,
        number: Any,
        start: Int[Array, ""],
    ):
        """Point to a layer.

        Args:
            layers: those of a `Cache`.
            number: index of the layer: an `int` for a tuple of layers, an array for a stack.
            start: first column that is written.
        """
        self.layers, self.number, self.start = layers, number, start

    def write(self, *new: Float[Array, "b t g _"]) -> tuple[Float[Array, "b s g _"], ...]:
        """Store keys, and values if the cache has them; return those of all columns."""
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
        """The array with new columns; and its layer, with heads behind columns."""
        update = jnp.swapaxes(new, 1, 2).astype(held.dtype)
        zero = jnp.int32(0)
        if held.ndim == update.ndim:
            held = jax.lax.dynamic_update_slice(held, update, (zero, zero, self.start, zero))
            return held, jnp.swapaxes(held, 1, 2)
        number = jnp.asarray(self.number, jnp.int32)
        start = (number, zero, zero, self.start, zero)
        held = jax.lax.dynamic_update_slice(held, update[None], start)
        layer = jax.lax.dynamic_index_in_dim(held, number, keepdims=False)
        return held, jnp.swapaxes(layer, 1, 2)
