"""Continue prompts token by token.

    logits = decode(prompt);  repeat: token = choose(logits);  logits = decode(token)

`generate` is traced once, as one prefill and one `lax.while_loop`. It calls the model only through
a function `decode` of the cache and tokens, so that parameters may be held in any way: whole, with
any sharding that XLA follows, or as shards that `zero.apply` gathers.

Dimensions: b batch, t columns of the prompts, n new tokens, v vocabulary.
"""

import contextlib
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32, Key

from .._mesh import LOCAL
from .._text import shown
from ._cache import Cache
from ._sampling import Sampling, choose, is_a

Decode = Callable[[Cache, Any, Any], tuple[Any, Cache]]  # as `Decoder.decode`


class Generation(NamedTuple):
    """The state of a generation between two calls of `continue_generation`: a pytree of arrays."""

    tokens: Int32[Array, "b n"]  # `pad_token` behind the end of a row
    lengths: Int32[Array, "b"]  # new tokens of each row, with the stop token
    is_done: Bool[Array, "b"]
    num_columns: Int32[Array, ""]  # number of columns of `tokens` that are written
    cache: Cache
    keys: Key[Array, "b"] | None  # None for temperature 0


class Generated(NamedTuple):
    """The new tokens of each row, and how many there are."""

    tokens: Int32[Array, "b n"]  # `pad_token` behind the end of a row
    lengths: Int32[Array, "b"]  # new tokens of each row, with the stop token


def generate(
    decode: Decode,
    cache: Cache,
    ids: Int[Array, "b t"],
    mask: Bool[Array, "b t"] | Int[Array, "b t"] | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    key: Key[Array, ""] | Key[Array, "b"] | None = None,
) -> Generated:
    """Continue prompts until each has a stop token or `max_new_tokens` more tokens.

    Call it under `jax.jit`, with the parameters as an argument. Given the same prompt, key and
    parameters, a row has the same tokens whatever the other rows are, up to rounding.

    Args:
        decode: `model.decode` of a `Decoder`, or a function with its arguments and results. If it
            calls `zero.apply`, each layer is gathered at every token; if `generate` is called
            within `zero.apply`, all are gathered once.
        cache: from `make_cache`, empty, with room for t + n - 1 columns.
        ids: prompts.
        mask: False for padding, on either side of a prompt, or 0 in an array of integers, as
            tokenizers give it. A row without a token gets no new tokens.
        max_new_tokens: n.
        sampling: how tokens are chosen, and what ends a row.
        key: one of `jax.random.key` for all rows, or one for each (so that rows may be on different
            devices); needed unless the temperature is 0.

    Returns:
        New tokens and how many each row has. A row whose logits are NaN ends with the token -1.

    Raises:
        ValueError: prompts are empty, the cache is too small, or the key is missing.
        TypeError: an argument is no array, or has another dtype; the message names it.

    Example:
        ```python
        @jax.jit
        def sample(params, ids, mask, key):
            model = nnx.merge(loaded.graph, params)
            cache = model.make_cache(len(ids), ids.shape[1] + 64)
            return models.generate(model.decode, cache, ids, mask, max_new_tokens=64, key=key,
                                   sampling=models.Sampling(temperature=0.7, top_p=0.9))
        ```
    """
    generation = start_generation(
        decode, cache, ids, mask, max_new_tokens=max_new_tokens, sampling=sampling, key=key
    )
    generation = continue_generation(decode, generation, sampling=sampling)
    return Generated(generation.tokens, generation.lengths)


def start_generation(
    decode: Decode,
    cache: Cache,
    ids: Int[Array, "b t"],
    mask: Bool[Array, "b t"] | Int[Array, "b t"] | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    key: Key[Array, ""] | Key[Array, "b"] | None = None,
) -> Generation:
    """Read the prompts into the cache, and choose the first new token of each row.

    The arguments are those of `generate`. Programs that show tokens as they come use this and
    `continue_generation`.
    """
    keys = check_arguments(cache, ids, mask, max_new_tokens, sampling, key)
    if mask is None:
        mask = jnp.ones(ids.shape, bool)
    else:  # padding is moved to the left, so that the last column is the last token of every row
        mask = jnp.asarray(mask, bool)
        order = jnp.argsort(mask, axis=1, stable=True)
        ids, mask = (jnp.take_along_axis(x, order, axis=1) for x in (ids, mask))
    logits, cache = decode(cache, ids, mask)
    generation = Generation(
        tokens=jnp.full((len(ids), max_new_tokens), sampling.pad_token, jnp.int32),
        lengths=jnp.zeros(len(ids), jnp.int32),
        is_done=~mask[:, -1],  # rows without a token
        num_columns=jnp.int32(0),
        cache=cache,
        keys=keys,
    )
    return _with_next(generation, logits, sampling)


def continue_generation(
    decode: Decode,
    generation: Generation,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008
    num_tokens: int | None = None,
) -> Generation:
    """Choose up to `num_tokens` more tokens of each row.

    Args:
        decode: as for `generate`.
        generation: from `start_generation` or the last call. Donate it to the jitted function that
            this is called in; then the cache is written in place.
        sampling: as for `start_generation`.
        num_tokens: the most tokens per row, fewer if all rows end; None for all that are left of
            `max_new_tokens`.

    Returns:
        The generation with the new tokens.
    """
    limit = generation.tokens.shape[1]
    end = jnp.int32(limit)
    if num_tokens is not None:
        end = jnp.minimum(end, generation.num_columns + num_tokens)

    def goes_on(generation: Generation) -> Bool[Array, ""]:
        return (generation.num_columns < end) & ~_are_done_everywhere(generation.is_done)

    def step(generation: Generation) -> Generation:
        last = jax.lax.dynamic_slice_in_dim(
            generation.tokens, generation.num_columns - 1, 1, axis=1
        )
        logits, cache = decode(generation.cache, last, jnp.ones(last.shape, bool))
        return _with_next(generation._replace(cache=cache), logits, sampling)

    return jax.lax.while_loop(goes_on, step, generation)


def _are_done_everywhere(is_done: Bool[Array, "b"]) -> Bool[Array, ""]:
    """Return whether all rows on all devices of the node are done.

    These devices must take the same number of steps: experts may exchange tokens in each step, and
    every device of the node has to take part.
    """
    with contextlib.suppress(NameError):  # outside of a step, which has no axes
        return jax.lax.pmin(is_done.all().astype(jnp.int32), LOCAL) > 0
    return is_done.all()


def _with_next(generation: Generation, logits: Array, sampling: Sampling) -> Generation:
    """Add the next token to each row that is not done, and `pad_token` to the other rows."""
    number, is_done = generation.num_columns, generation.is_done
    keys = generation.keys
    if keys is not None:
        # A key of its own for each column: a row's draws depend neither on rows nor on calls.
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
    chosen = jnp.where(is_done, jnp.int32(sampling.pad_token), choose(logits, sampling, keys))
    # The choice from NaN is -1.
    stops = jnp.isin(chosen, jnp.array([-1, *sampling.stop_tokens], jnp.int32))
    return generation._replace(
        tokens=jax.lax.dynamic_update_slice_in_dim(
            generation.tokens, chosen[:, None], number, axis=1
        ),
        lengths=generation.lengths + (~is_done).astype(jnp.int32),
        is_done=is_done | stops,
        num_columns=number + 1,
    )


def check_arguments(
    cache: Cache,
    ids: Any,
    mask: Any,
    max_new_tokens: Any,
    sampling: Sampling,
    key: Any,
) -> Array | None:
    """Check the arguments of `generate`; return a key for each row, or None for temperature 0.

    Raises:
        ValueError, TypeError: as `generate`.
    """
    if not _is_array(ids, jnp.integer) or ids.ndim != 2:
        raise TypeError(
            f"`ids` must be an array of integers, [rows, tokens]; got {_described(ids)}. Give the "
            "token ids of a tokenizer, padded to one length, as `jnp.asarray(ids, jnp.int32)`."
        )
    if not (mask is None or _is_array(mask, jnp.bool_) or _is_array(mask, jnp.integer)):
        raise TypeError(
            "`mask` must be an array of booleans, or of the integers 0 and 1; got "
            f"{_described(mask)}. Give `jnp.asarray(mask, bool)`, True for tokens."
        )
    batch_size, num_columns = ids.shape
    if num_columns == 0:
        raise ValueError("`ids` must hold at least one token per row; got prompts without tokens.")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"`mask` must have the shape of `ids`, {ids.shape}; got {mask.shape}.")
    if not is_a(numbers.Integral, max_new_tokens) or max_new_tokens < 1:
        raise ValueError(
            f"`max_new_tokens` must be an integer of at least 1; got {shown(max_new_tokens)}."
        )
    # The last new token is not read again, so it needs no column.
    needed, room = num_columns + max_new_tokens - 1, cache.mask.shape[1]
    if room < needed:
        raise ValueError(
            f"`ids` holds {num_columns} tokens per row and `max_new_tokens` is {max_new_tokens}, "
            f"which needs {needed} columns; the `cache` has {room}. Make a larger one, or cut the "
            "prompts."
        )
    if sampling.temperature == 0:
        return None
    if key is None:
        raise ValueError(
            f"`key` is needed for temperature {sampling.temperature}. Give `jax.random.key(seed)`."
        )
    if not _is_array(key, jax.dtypes.prng_key):
        raise TypeError(
            f"`key` must be a key of `jax.random.key(seed)`; got {_described(key)}. Give that, or "
            "`jax.random.wrap_key_data(key)` for one of `jax.random.PRNGKey`."
        )
    if key.shape not in ((), (batch_size,)):
        raise ValueError(
            f"`key` must be one key, or one for each of {batch_size} rows; got shape {key.shape}."
        )
    return key if key.ndim else jax.random.split(key, batch_size)


def _is_array(value: Any, kind: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) and jnp.issubdtype(value.dtype, kind)


def _described(value: Any) -> str:
    """Describe a value for messages: an array by dtype and shape, as `float32[2,5]`."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    return f"{value.dtype}{[*value.shape]}" if is_array else shown(value)
