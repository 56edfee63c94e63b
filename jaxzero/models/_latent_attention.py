"""Latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434).

Keys and values of all heads are computed from one short vector c of each token:

    c, r = split(down(x));    keys, values = split(up(norm(c)))
    key of head h = [key_h, rotate(r)]         r is common to all heads
    query of head h = [query_h, rotate(rest of query_h)]

Only the last numbers of queries and keys are rotated. Queries may be computed from a short vector
of their own.

A cache holds norm(c) and rotate(r) of each token. To compute with it, `up` is not applied to each
token of the cache again: the part for keys is applied to the query, and the part for values to the
mixed vectors c:

    key_h = U_h norm(c), so that query_h . key_h = (U_h^T query_h) . norm(c);  values likewise

Dimensions: b batch, t tokens, s keys, d hidden, h heads, k head size, r size of c, v value size.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from ._attention import Mask, Window, attend, make_linear
from ._cache import Slots
from ._decoder_config import DecoderConfig
from ._part_configs import LatentConfig
from ._parts import RMSNorm
from ._rope import Turns, rotate


class LatentAttention(nnx.Module):
    """Attention of each token to itself and to the tokens before it, by keys from short vectors."""

    def __init__(self, config: DecoderConfig, latent: LatentConfig, *, rngs: nnx.Rngs):
        self.config, self.latent = config, latent
        hidden, heads, bias = config.hidden_size, config.num_heads, config.query_key_value_bias
        query_size, epsilon = heads * config.head_size, latent.norm_epsilon
        if latent.query_rank is None:
            self.query = make_linear(config, hidden, query_size, False, rngs)
        else:
            self.query_down = make_linear(config, hidden, latent.query_rank, bias, rngs)
            self.query_norm = RMSNorm(latent.query_rank, epsilon=epsilon)
            self.query_up = make_linear(config, latent.query_rank, query_size, False, rngs)
        rank, rotary_size = latent.key_value_rank, config.head_size - latent.plain_size
        self.key_value_down = make_linear(config, hidden, rank + rotary_size, bias, rngs)
        self.key_value_norm = RMSNorm(rank, epsilon=epsilon)
        self.key_value_up = make_linear(
            config, rank, heads * (latent.plain_size + latent.value_size), False, rngs
        )
        self.output = make_linear(
            config, heads * latent.value_size, hidden, config.attention_output_bias, rngs
        )

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        mask: Mask,
        *,
        window: Window = None,
        turns: Turns | None = None,
        dropout_key: Key[Array, ""] | None = None,
        slots: Slots | None = None,
    ) -> Float[Array, "b t d"]:
        """Mix the tokens by attention, and project back; the arguments are those of `Attention`."""
        config, latent = self.config, self.latent
        query_bthk = self._queries(x_btd).reshape(*x_btd.shape[:2], -1, config.head_size)
        plain, rotated = jnp.split(query_bthk, [latent.plain_size], axis=-1)
        short, common = jnp.split(self.key_value_down(x_btd), [latent.key_value_rank], axis=-1)
        short, common = self.key_value_norm(short), common[:, :, None]  # `[b, t, 1, _]`: one head
        if turns is not None and config.rope is not None:
            rotated = rotate(rotated, turns, config.rope.pairs)
            common = rotate(common, turns, config.rope.pairs)
        mix = functools.partial(
            attend,
            mask_bs=mask,
            window=window,
            # Not the default of `attend`: queries are wider with a cache.
            scale=config.head_size**-0.5
            if config.attention_scale is None
            else config.attention_scale,
            softcap=config.attention_softcap,
            dropout_rate=config.attention_dropout,
            dropout_key=dropout_key,
            implementation=config.attention_implementation,
        )
        if slots is None:
            wide = self.key_value_up(short).reshape(*x_btd.shape[:2], config.num_heads, -1)
            key, value = jnp.split(wide, [latent.plain_size], axis=-1)
            common = jnp.broadcast_to(common, (*key.shape[:-1], common.shape[-1]))
            query = jnp.concatenate([plain, rotated], axis=-1)
            mixed_bthv = mix(query, jnp.concatenate([key, common], axis=-1), value)
        else:
            mixed_bthv = self._mixed_from_cache(mix, slots, plain, rotated, short, common)
        return self.output(mixed_bthv.reshape(*mixed_bthv.shape[:2], -1))

    def _mixed_from_cache(
        self,
        mix: Callable[..., Array],
        slots: Slots,
        plain: Float[Array, "b t h _"],
        rotated: Float[Array, "b t h _"],
        short: Float[Array, "b t r"],
        common: Float[Array, "b t 1 _"],
    ) -> Float[Array, "b t h v"]:
        """Store the short vectors of new tokens, and attend to all short vectors in the cache.

        Args:
            mix: computes attention from queries, keys and values. The short vectors are the keys
                and values of a single key-value head.
            slots: the place in the cache.
            plain: the part of the queries that is not rotated.
            rotated: the rotated part of the queries.
            short: norm(c) of the new tokens.
            common: rotate(r) of the new tokens.
        """
        new = jnp.concatenate([short[:, :, None], common], axis=-1)
        (key_bsgk,) = slots.write(new)
        up = self.key_value_up.kernel[...].astype(short.dtype)
        up = up.reshape(up.shape[0], self.config.num_heads, -1)
        key_up, value_up = jnp.split(up, [self.latent.plain_size], axis=-1)
        query = jnp.concatenate([jnp.einsum("bthp,rhp->bthr", plain, key_up), rotated], axis=-1)
        mixed_bthr = mix(query, key_bsgk, key_bsgk[..., : len(up)], start=slots.start)
        return jnp.einsum("bthr,rhv->bthv", mixed_bthr, value_up)

    def _queries(self, x_btd: Float[Array, "b t d"]) -> Float[Array, "b t hk"]:
        if self.latent.query_rank is None:
            return self.query(x_btd)
        return self.query_up(self.query_norm(self.query_down(x_btd)))
