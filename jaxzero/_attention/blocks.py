"""Compute exact attention in blocks of queries and keys, with memory linear in tokens.

    o_i = sum_j exp(x_ij - L_i) v_j,    L_i = log sum_j exp(x_ij),    x_ij = cap(scale q_i k_j)

A loop goes over the pairs of blocks in which some query sees some key. For each query it carries
the running maximum of x, the sum of exponentials and the weighted sum of values. Forward keeps o
and L; backward computes the x of each pair again:

    p = exp(x - L);    dv = p^T do;    ds = p (do v^T - (do . o - dL))
    dq = scale ds k;   dk = scale ds^T q

(FlashAttention, https://arxiv.org/abs/2205.14135). Queries come in parts, one for each device along
the mesh axis `tokens`. All devices run the same loop. If tokens are dealt out in turn, token x of
part p of P is at position x P + p: then a causal mask hides the same blocks in each part (striped
attention, https://arxiv.org/abs/2311.09431). Either each part has all keys, or it begins with its
own keys, and keys go around in a ring (https://arxiv.org/abs/2310.01889): in step r, part p has the
keys of part p - r.

Dimensions: b rows, p parts, t queries of a part, s keys of a part, g key-value heads, n query heads
for each, k size of queries and keys, v size of values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .._sums import widened
from .form import Form, pairs_of_blocks, some_seen

_NOT_SEEN = -1e30  # below every logit, and finite, so that a difference of two of them is a number


class Keys(NamedTuple):
    """The keys of each part, with their values and marks; `Form.marks` says what marks mean."""

    key: Float[Array, "b p s g k"]
    value: Float[Array, "b p s g v"]
    marks: Int[Array, "b p s"]


class Queries(NamedTuple):
    """The queries of each part, with their marks, and traced limits of the keys that they see."""

    query: Float[Array, "b p t g n k"]
    marks: Int[Array, "b p t"]
    reach: Int[Array, ""] | None = None  # query i sees keys j with `|i - j| < reach`; None: all
    start: Int[Array, ""] | None = None  # is added to the positions of queries; None: 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_in_blocks(
    form: Form, queries: Queries, keys: Keys
) -> tuple[Float[Array, "b p t g n v"], Float[Array, "b p t g n"]]:
    """Compute attention, and the logarithm of each query's softmax denominator.

    Args:
        form: which keys are seen, and the formula.
        queries: the queries of each part. Their number is at most `form.chunk`, or a multiple of
            it.
        keys: the keys of each part, whose number is limited in the same way.

    Returns:
        For each query, the weighted sum of values, in the dtype of the values, and the logarithm,
        in 32 bits or more. For a query that sees no key they are 0 and a large negative number.
    """
    return _forward(form, queries, keys)[0]


def _forward(form: Form, queries: Queries, keys: Keys) -> tuple[tuple[Array, Array], Any]:
    loop = _Loop(form, queries, keys)
    *lead, _ = queries.query.shape
    wide = widened(queries.query.dtype)
    start = (
        form.placed(jnp.zeros((*lead, keys.value.shape[-1]), wide)),
        form.placed(jnp.full(lead, _NOT_SEEN, wide)),
        form.placed(jnp.zeros(lead, wide)),
    )

    def pair(sums: tuple[Array, ...], block: _Block, keys: Keys) -> tuple[Array, ...]:
        mixed, largest, total = sums
        logits, _ = block.logits(form, queries, keys)
        old = block.of_queries(largest)
        new = jnp.maximum(old, _to_queries(jnp.max(logits, axis=-1)))
        exponentials = _exp_of_difference(logits, new)
        kept = jnp.exp(old - new)
        value = block.of_keys(keys.value)
        # Rounded to the dtype of values, as FlashAttention does: a product of 16-bit operands.
        added = _product("bpgnts,bpsgv->bptgnv", exponentials.astype(value.dtype), value)
        return (
            block.set(mixed, block.of_queries(mixed) * kept[..., None] + added),
            block.set(largest, new),
            block.set(
                total, block.of_queries(total) * kept + _to_queries(jnp.sum(exponentials, axis=-1))
            ),
        )

    mixed, largest, total = loop.over_keys(start, pair)
    total = jnp.where(total == 0, 1, total)  # a query that sees no key
    out = (mixed / total[..., None]).astype(keys.value.dtype)
    logarithm = largest + jnp.log(total)
    return (out, logarithm), (queries, keys, out, logarithm)


def _backward(
    form: Form,
    saved: tuple[Queries, Keys, Array, Array],
    given: tuple[Array, Array],
) -> tuple[Queries, Keys]:
    queries, keys, out, logarithm = saved
    gradient, of_logarithm = map(form.placed, given)
    wide = logarithm.dtype
    products = jnp.sum(gradient.astype(wide) * out.astype(wide), axis=-1) - of_logarithm
    loop = _Loop(form, queries, keys)

    def pair(sums: tuple[Array, ...], block: _Block, keys: Keys) -> tuple[Array, ...]:
        of_query, of_key, of_value = sums
        logits, slope = block.logits(form, queries, keys)
        probabilities = _exp_of_difference(logits, block.of_queries(logarithm))
        of_mixed = block.of_queries(gradient)
        of_logits = _product("bptgnv,bpsgv->bpgnts", of_mixed, block.of_keys(keys.value))
        of_logits = probabilities * (of_logits - _to_logits(block.of_queries(products)))
        # As in forward, operands of products have the dtype of the arrays.
        of_logits = (of_logits * slope * form.scale).astype(queries.query.dtype)
        probabilities = probabilities.astype(of_mixed.dtype)
        query, key = block.of_queries(queries.query), block.of_keys(keys.key)
        return (
            block.add(of_query, _product("bpgnts,bpsgk->bptgnk", of_logits, key)),
            block.add_to_keys(of_key, _product("bpgnts,bptgnk->bpsgk", of_logits, query)),
            block.add_to_keys(of_value, _product("bpgnts,bptgnv->bpsgv", probabilities, of_mixed)),
        )

    start = tuple(
        form.placed(jnp.zeros(x.shape, wide)) for x in (queries.query, keys.key, keys.value)
    )
    of_query, of_key, of_value = loop.over_keys(start, pair, num_of_queries=1)
    none: Any = functools.partial(np.zeros, dtype=jax.dtypes.float0)
    of_data = (None if x is None else none(()) for x in (queries.reach, queries.start))
    return (
        Queries(of_query.astype(queries.query.dtype), none(queries.marks.shape), *of_data),
        Keys(
            of_key.astype(keys.key.dtype), of_value.astype(keys.value.dtype), none(keys.marks.shape)
        ),
    )


attend_in_blocks.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A pair of a block of queries and a block of keys: their starts in each part, and sizes."""

    query_start: Array
    key_start: Array
    num_queries: int
    num_keys: int
    step: Array  # of the ring
    is_edge: bool  # whether some query does not see some key
    # `Form.placed`. Without it the compiler chooses how the arrays of a loop are split, and then
    # exchanges blocks in each iteration.
    placed: Callable[[Array], Array]

    def of_queries(self, x: Array) -> Array:
        x = self.placed(x)
        return self.placed(lax.dynamic_slice_in_dim(x, self.query_start, self.num_queries, axis=2))

    def of_keys(self, x: Array) -> Array:
        x = self.placed(x)
        return self.placed(lax.dynamic_slice_in_dim(x, self.key_start, self.num_keys, axis=2))

    def set(self, x: Array, block: Array) -> Array:
        block = self.placed(block)
        return self.placed(lax.dynamic_update_slice_in_dim(x, block, self.query_start, axis=2))

    def add(self, x: Array, block: Array) -> Array:
        return self.set(x, self.of_queries(x) + block)

    def add_to_keys(self, x: Array, block: Array) -> Array:
        block = self.of_keys(x) + self.placed(block)
        return self.placed(lax.dynamic_update_slice_in_dim(x, block, self.key_start, axis=2))

    def logits(
        self, form: Form, queries: Queries, keys: Keys
    ) -> tuple[Float[Array, "b p g n t s"], Array | float]:
        """Return the logits of the pair, and the derivative of the soft cap at each of them.

        Where a query does not see a key, the logit is `_NOT_SEEN`.
        """
        # The barrier makes what is seen depend on an array. Otherwise it depends on constants only,
        # and JAX and XLA compute it before the loop, for all pairs: a byte for each query and key.
        starts = self.query_start, self.key_start
        query, starts = lax.optimization_barrier((self.of_queries(queries.query), starts))
        logits = _product("bptgnk,bpsgk->bpgnts", query, self.of_keys(keys.key))
        logits, slope = logits * form.scale, 1.0
        if form.softcap is not None:
            ratio = jnp.tanh(logits / form.softcap)
            logits, slope = form.softcap * ratio, 1 - ratio * ratio
        if not self.is_edge:
            return logits, slope
        seen = self._seen(form, queries, keys, starts)[:, :, None, None]
        return jnp.where(seen, logits, jnp.asarray(_NOT_SEEN, logits.dtype)), slope

    def _seen(
        self, form: Form, queries: Queries, keys: Keys, starts: tuple[Array, Array]
    ) -> Bool[Array, "_ p t s"]:
        num_parts = queries.query.shape[1]
        parts = jnp.arange(num_parts, dtype=jnp.int32)
        sources = (parts - self.step) % num_parts if form.is_ring else parts
        query_index = starts[0] + jnp.arange(self.num_queries, dtype=jnp.int32)
        key_index = starts[1] + jnp.arange(self.num_keys, dtype=jnp.int32)
        at = _places(form.query_places, query_index, parts)[:, :, None]
        distance = at - _places(form.key_places, key_index, sources)[:, None]
        distance = distance if queries.start is None else distance + queries.start
        seen = jnp.ones(distance.shape, bool)
        if queries.reach is not None:
            seen = jnp.abs(distance) < queries.reach
        if form.before is not None:
            seen = seen & (distance <= form.before)
        if form.after is not None:
            seen = seen & (distance >= -form.after)
        seen = seen[None]
        if form.marks is not None:
            of_keys = self.of_keys(keys.marks)[:, :, None]
            seen = seen & (of_keys != 0)
            if form.marks == "segments":
                seen = seen & (self.of_queries(queries.marks)[..., None] == of_keys)
        return seen


class _Loop:
    """The loop over the pairs of blocks in which queries see keys."""

    def __init__(self, form: Form, queries: Queries, keys: Keys):
        self.form, self.keys, self.start = form, keys, queries.start
        self.num_parts, num_queries, num_keys = *queries.query.shape[1:3], keys.key.shape[2]
        self.num_steps = self.num_parts if form.is_ring else 1
        self.sizes = min(num_queries, form.chunk), min(num_keys, form.chunk)
        # Two lists of pairs, `[pairs, 2]`: pairs in which all queries see all keys, which need no
        # mask, and pairs in which queries may see some keys. If marks, `reach` or `start` decide,
        # which are not known when tracing, all pairs are in the second list.
        if self.start is not None:
            shape = -(-num_queries // self.sizes[0]), -(-num_keys // self.sizes[1])
            self.pairs = np.empty((0, 2), np.int32), np.argwhere(np.ones(shape)).astype(np.int32)
            return
        pairs = pairs_of_blocks(form, num_queries, num_keys, self.num_parts, self.sizes)
        if form.marks is not None or queries.reach is not None:
            pairs = pairs[0][:0], np.concatenate(pairs)
        self.pairs = pairs

    def over_keys(
        self,
        sums: tuple[Array, ...],
        pair: Callable[..., tuple[Array, ...]],
        num_of_queries: int = 3,
    ) -> tuple[Array, ...]:
        """Add up sums over all pairs of blocks; in a ring, with the keys of each part in turn.

        Args:
            sums: the running sums, which the loop carries.
            pair: takes the sums, a `_Block` and the keys; returns the sums with the block's terms.
            num_of_queries: how many of `sums`, the first ones, belong to queries. The rest belongs
                to keys, and travels with them.

        Returns:
            The sums over all pairs.
        """
        last = self.num_steps - 1
        if not last:
            return self._over_pairs(sums, self.keys, jnp.int32(0), pair)

        def step(carry: Any, number: Array) -> tuple[Any, None]:
            sums, keys = carry
            following = self._passed_on(keys)  # while this step computes
            sums = self._over_pairs(sums, keys, number, pair)
            # Otherwise XLA sends keys and sums in one message, which has to wait for the sums.
            sums, (key, value) = lax.optimization_barrier((sums, following[:2]))
            following = Keys(key, value, following.marks)
            travelling = self._passed_on(sums[num_of_queries:])
            return ((*sums[:num_of_queries], *travelling), following), None

        numbers = jnp.arange(last, dtype=jnp.int32)
        (sums, keys), _ = lax.scan(step, (sums, self.keys), numbers)
        sums = self._over_pairs(sums, keys, jnp.int32(last), pair)
        return (*sums[:num_of_queries], *self._passed_on(sums[num_of_queries:]))

    def _passed_on(self, tree: Any) -> Any:
        def pass_on(x: Array) -> Array:
            is_sent = x.ndim > 3 or self.form.marks is not None  # other marks are constants
            return self.form.placed(jnp.roll(x, 1, axis=1), "permute" if is_sent else None)

        return jax.tree.map(pass_on, tree)

    def _over_pairs(
        self,
        sums: tuple[Array, ...],
        keys: Keys,
        step: Array,
        pair: Callable[..., tuple[Array, ...]],
    ) -> tuple[Array, ...]:
        num_queries, num_keys = self.sizes

        def body(
            sums: tuple[Array, ...], numbers: Array, is_edge: bool
        ) -> tuple[tuple[Array, ...], None]:
            starts = numbers * jnp.asarray([num_queries, num_keys], jnp.int32)
            sizes = num_queries, num_keys
            block = _Block(starts[0], starts[1], *sizes, step, is_edge, self.form.placed)
            if self.start is None:
                return pair(sums, block, keys), None
            run = functools.partial(pair, block=block, keys=keys)
            is_seen = self._is_seen(block, self.start)
            return lax.cond(is_seen, run, lambda sums: sums, sums), None

        for is_edge, pairs in zip((False, True), self.pairs, strict=True):
            if len(pairs):
                run = functools.partial(body, is_edge=is_edge)
                sums, _ = lax.scan(run, sums, jnp.asarray(pairs))
        return sums

    def _is_seen(self, block: _Block, start: Array) -> Any:
        """Return whether any query of `block` may see any key of it, if query 0 is at `start`."""
        factor, offset = self.form.query_places
        first = block.query_start * factor + start
        last = first + (block.num_queries - 1) * factor + offset * (self.num_parts - 1)
        return some_seen(
            self.form, (first, last), (block.key_start, block.key_start + block.num_keys - 1)
        )


def _exp_of_difference(
    logits: Float[Array, "b p g n t s"], of_queries: Float[Array, "b p t g n"]
) -> Float[Array, "b p g n t s"]:
    """Return `exp(logits - of_queries)`, and 0 where a query does not see a key.

    It is also 0 for a query that has seen no key at all, whose `of_queries` is `_NOT_SEEN`.
    """
    return jnp.exp(logits - _to_logits(jnp.maximum(of_queries, _NOT_SEEN / 2)))


def _product(dims: str, x: Array, y: Array) -> Array:
    """Compute an einsum of two arrays, summed in 32 bits or more."""
    return jnp.einsum(dims, x, y, preferred_element_type=widened(x.dtype))


def _places(places: tuple[int, int], index: Array, parts: Array) -> Int[Array, "p x"]:
    factor, offset = places
    return index[None] * factor + parts[:, None] * offset


def _to_queries(x: Float[Array, "b p g n t"]) -> Float[Array, "b p t g n"]:
    return jnp.moveaxis(x, -1, 2)


def _to_logits(x: Float[Array, "b p t g n"]) -> Float[Array, "b p g n t 1"]:
    return jnp.moveaxis(x, 2, -1)[..., None]
