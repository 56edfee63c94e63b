"""A decoder in Flax NNX: one block and a config compute GPT-2, Llama and later families.

    x = embedding(ids)
    x = layer(x)            for each layer; see `_block`
    logits = head(norm(x))

Modules do not depend on devices; `jz.Zero` splits whatever parameters they hold. They hold no
random state either: a call has dropout if it is given a key.

Dimensions: b batch, t tokens, d hidden, v vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from .._cross_entropy import softmax_cross_entropy
from .._mesh import num_token_parts, split_tokens
from ._attention import is_among, make_linear, turns_if, window_if
from ._block import Block, scaled
from ._cache import Cache, Slots, check_room, make_cache
from ._decoder_config import DecoderConfig
from ._experts import Routers
from ._layers import make_layers, run_layers
from ._parts import as_indices, dropout, make_norm, split_key
from ._rope import Turns, no_turns, turns
from ._router_losses import RouterBalance


class Decoder(nnx.Module):
    """A decoder, which maps token ids to the logits of the next token at every position.

    Build it under `nnx.eval_shape` when the parameters come from a checkpoint: then no random
    weights are ever made.

    Example:
        ```python
        loaded = interop.load_decoder(
            directory, dtype="float32", compute_dtype="bfloat16", scan_layers=True
        )
        params = zero.shard(loaded.params)
        logits = nnx.merge(loaded.graph, params)(ids)
        ```
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = self._table(config.vocabulary_size, rngs)
        self.positions = None if config.rope else self._table(config.max_length, rngs)
        self.layers = make_layers(
            lambda rngs, i: Block(config, i, rngs=rngs),
            config.num_layers,
            kind=lambda i: config.experts is not None and i in config.experts.dense_layers,
            scanned=config.scan_layers,
            rngs=rngs,
        )
        self.norm = make_norm(config, config.hidden_size, rngs)
        self.head = (
            None
            if config.tied_head
            else make_linear(config, config.hidden_size, config.vocabulary_size, False, rngs)
        )

    def _table(self, num_rows: int, rngs: nnx.Rngs) -> nnx.Embed:
        return nnx.Embed(
            num_rows,
            self.config.hidden_size,
            embedding_init=nnx.initializers.normal(self.config.initializer_range),
            dtype=jnp.dtype(self.config.compute_dtype),
            rngs=rngs,
        )

    def __call__(
        self,
        ids: Int[Array, "b t"],
        mask: Bool[Array, "b t"] | None = None,
        *,
        segments: Int[Array, "b t"] | None = None,
        positions: Int[Array, "b t"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "b t v"]:
        """Compute logits, in `compute_dtype`.

        Args:
            ids: token ids. With one that is not in the vocabulary, such as -1, logits are NaN.
            mask: True for tokens, False for padding. No token attends to padding, so it does not
                change the logits of the tokens; the logits of padding are meaningless. None if
                there is no padding.
            segments: for documents that are packed in a row, instead of `mask`: the number of each
                token's document, and 0 for padding. A token sees only tokens of its own document.
            positions: index of each token; 0, 1, 2, ... if left out, also with padding on the left.
                With `segments` they start again in each document, which has to be contiguous.
            dropout_key: turns dropout on, at the rates of the config. Give each device its own
                (`jz.fold_in_device`).

        Raises:
            ValueError: positions are learned, and there are more tokens than positions; or both
                `mask` and `segments` are given.
        """
        hidden = self.hidden(
            ids, mask, segments=segments, positions=positions, dropout_key=dropout_key
        )
        return self.logits(hidden)

    def hidden(
        self,
        ids: Int[Array, "b t"],
        mask: Bool[Array, "b t"] | None = None,
        *,
        segments: Int[Array, "b t"] | None = None,
        positions: Int[Array, "b t"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "b t d"]:
        """Compute the normalized vectors after the last layer, which `logits` takes.

        The arguments are those of a call of the decoder.
        """
        return self._vectors(ids, mask, segments, positions, dropout_key, None)[0]

    def hidden_and_balance(
        self,
        ids: Int[Array, "b t"],
        mask: Bool[Array, "b t"] | None = None,
        *,
        segments: Int[Array, "b t"] | None = None,
        positions: Int[Array, "b t"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "b t d"], RouterBalance]:
        """Compute the vectors of `hidden`, and how evenly each layer's router chooses experts.

        Returns:
            The vectors; and the `RouterBalance` over the tokens of all devices, with a leading dim
            for layers, which is 0 in layers without experts.

        Raises:
            ValueError: the model has no experts.
        """
        if self.config.experts is None:
            raise ValueError("This decoder has no experts, whose balance could be computed.")
        start = Routers.start(self.config.num_layers, self.config.experts.num_experts)
        return self._vectors(ids, mask, segments, positions, dropout_key, start)

    def _vectors(
        self,
        ids: Int[Array, "b t"],
        mask: Bool[Array, "b t"] | None,
        segments: Int[Array, "b t"] | None,
        positions: Int[Array, "b t"] | None,
        dropout_key: Key[Array, ""] | None,
        balance: RouterBalance | None,
    ) -> tuple[Float[Array, "b t d"], Any]:
        if mask is not None and segments is not None:
            raise ValueError(
                "Give `mask` or `segments`, not both: segment 0 is padding, as False in a mask."
            )
        if positions is None:
            positions = jnp.arange(ids.shape[1])[None]
            if segments is not None:
                positions = positions - _first_columns(segments)
        x_btd, _, balance = self._run(ids, mask, positions, dropout_key, None, segments, balance)
        return x_btd, balance

    def make_cache(self, batch_size: int, num_columns: int) -> Cache:
        """Make an empty cache for `extend`; see the function `make_cache`, which takes a config."""
        return make_cache(self.config, batch_size, num_columns)

    def extend(
        self, cache: Cache, ids: Int[Array, "b t"], mask: Bool[Array, "b t"] | None = None
    ) -> tuple[Float[Array, "b t d"], Cache]:
        """Append tokens to those in the cache, and compute their vectors as `hidden` does.

        The positions of tokens are counted from each row's first one, without padding, as
        transformers does it in `generate`. A sliding window counts columns: for a model that has
        one, padding must lie to the left of a row's first token.

        Args:
            cache: from `make_cache` or the last call. Donate it to the jitted step that this is
                called in; then it is written in place.
            ids: the next t tokens of each row: a prompt, or one token.
            mask: False for padding, which no token ever sees. None if there is no padding.

        Returns:
            The normalized vectors after the last layer, and the cache with the new tokens. If the
            tokens do not fit and the length of the cache is traced, all vectors are NaN.

        Raises:
            ValueError: the tokens are known not to fit, or have another batch size than the cache.
        """
        check_room(cache, ids)
        mask = jnp.ones(ids.shape, bool) if mask is None else mask
        positions = cache.mask.sum(axis=1, dtype=jnp.int32)[:, None] + jnp.cumsum(
            mask, axis=1, dtype=jnp.int32
        )
        x_btd, cache, _ = self._run(ids, mask, jnp.maximum(positions - 1, 0), None, cache)
        fits = cache.length <= cache.mask.shape[1]
        return jnp.where(fits, x_btd, jnp.nan), cache

    def decode(
        self, cache: Cache, ids: Int[Array, "b t"], mask: Bool[Array, "b t"] | None = None
    ) -> tuple[Float[Array, "b v"], Cache]:
        """Append tokens to a cache as `extend` does; return the logits after the last column."""
        x_btd, cache = self.extend(cache, ids, mask)
        return self.logits(x_btd[:, -1:])[:, 0], cache

    def _run(
        self,
        ids: Int[Array, "b t"],
        mask: Bool[Array, "b t"] | None,
        positions: Int[Array, "_ t"],
        dropout_key: Key[Array, ""] | None,
        cache: Cache | None,
        segments: Int[Array, "b t"] | None = None,
        balance: RouterBalance | None = None,
    ) -> tuple[Float[Array, "b t d"], Any, Any]:
        """Compute the normalized vectors after the last layer.

        The arguments are those of `__call__` and `extend`, and `balance`, from `Routers.start`.

        Returns:
            The vectors; the cache with the new tokens, or None if `cache` is None; and `balance`
            with the measurements of all layers filled in, or None if `balance` is None.
        """
        config = self.config
        embedding_key, layers_key = split_key(dropout_key, 2)
        mask = mask if segments is None else segments != 0
        x_btd = self._embed(as_indices(ids, mask, config.vocabulary_size), positions)
        x_btd = dropout(x_btd, config.embedding_dropout, embedding_key)
        # With a cache, new tokens may be fewer than the devices that split them: then each has all.
        divides = cache is None or ids.shape[1] % num_token_parts() == 0
        split = split_tokens if divides else lambda x: x
        all_turns = [turns(rope, positions) for rope in (config.rope, config.sliding_rope) if rope]
        seen: Any = mask if segments is None else segments
        if cache is not None:
            seen = jax.lax.dynamic_update_slice(cache.mask, seen, (jnp.int32(0), cache.length))
        num_columns = ids.shape[1] if cache is None else cache.mask.shape[1]

        def step(block: Block, carry: tuple[Array, Any, Any], i: int | Array):
            x_btd, held, balance = carry
            routers = None if balance is None else Routers(balance, i, mask)
            slides = is_among(config.sliding_layers, i, config.num_layers)
            slots = None if cache is None else Slots(held, i, cache.length)
            x_btd = block(
                x_btd,
                seen,
                window=window_if(slides, config.sliding_window, num_columns),
                turns=_turns_of_layer(config, all_turns, i, slides),
                dropout_key=None if layers_key is None else jax.random.fold_in(layers_key, i),
                slots=slots,
                routers=routers,
            )
            held = None if slots is None else slots.layers
            return split(x_btd), held, None if routers is None else routers.balance

        remat = config.remat if cache is None else "none"
        start = (split(x_btd), None if cache is None else cache.layers, balance)
        x_btd, held, balance = run_layers(self.layers, step, start, config.num_layers, remat)
        if cache is not None:
            cache = Cache(held, seen, cache.length + ids.shape[1])
        return self.norm(x_btd), cache, balance

    def logits(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Compute the logits of the next token for vectors of `hidden`, of all tokens or some."""
        logits = self.embedding.attend(hidden) if self.head is None else self.head(hidden)
        logits = scaled(logits, self.config.logit_scale)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def cross_entropy(
        self,
        hidden: Float[Array, "b t d"],
        labels: Int[Array, "b t"],
        weights: Any = None,
        *,
        chunk: int = 1024,
        z_loss: float = 0.0,
    ) -> Any:
        """Compute the cross-entropy of `logits(hidden)` with labels, in chunks of tokens.

        The logits never exist all at once, and they are not rounded to 16 bits. This is
        `jz.softmax_cross_entropy` with the head, the scale and the cap of the config.

        Args:
            hidden: from `hidden`.
            labels: the token that follows each vector.
            weights: a factor of each loss, `[b, t]`, or None.
            chunk: tokens of each row whose logits exist at the same time.
            z_loss: coefficient of the squared logarithm of the softmax's denominator.

        Returns:
            With `weights`, the sum of the weighted losses and the sum of the weights, which
            `zero.value_and_grad(..., weighted=True)` needs; without, the loss of each token, `[b,
            t]`.
        """
        head = self.embedding.embedding if self.head is None else self.head.kernel
        return softmax_cross_entropy(
            hidden,
            head[...],
            labels,
            weights,
            chunk=chunk,
            vocabulary_dim=0 if self.head is None else 1,
            scale=self.config.logit_scale,
            soft_cap=self.config.logit_softcap,
            z_loss=z_loss,
        )

    def _embed(self, ids: Int[Array, "b t"], positions: Int[Array, "_ t"]) -> Array:
        x_btd = scaled(self.embedding(ids), self.config.embedding_scale)
        if self.positions is None:
            return x_btd
        if ids.shape[1] > self.config.max_length:
            raise ValueError(
                f"`ids` holds {ids.shape[1]} tokens per row, the model has positions for "
                f"{self.config.max_length}. Cut the texts into shorter pieces."
            )
        return x_btd + self.positions(positions)


def _first_columns(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Return, for each token, the column of the first token of its segment."""
    columns = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    starts = jnp.where(segments[:, 1:] != segments[:, :-1], columns[:, 1:], 0)
    return jax.lax.cummax(jnp.pad(starts, ((0, 0), (1, 0))), axis=1)


def _turns_of_layer(
    config: DecoderConfig, all_turns: list[Turns], i: int | Array, slides: bool | Array
) -> Turns | None:
    stays = is_among(config.unrotated_layers, i, config.num_layers)
    if not all_turns or stays is True:
        return None
    chosen = all_turns[0] if len(all_turns) == 1 else turns_if(slides, all_turns[1], all_turns[0])
    return turns_if(stays, no_turns(chosen), chosen)
