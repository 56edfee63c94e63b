"""Weights that are changed before use: turned, cut, cast, normalised, put together."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import jaxzero as jz

from ._case import BFLOAT16, affine, case, cross_entropy, dense, normal, squared, tokens, vectors


@case(lambda key: {"a": normal(key, 0, 16, 8), "b": normal(key, 1, 4, 16)}, vectors(8, 4))
def transposed(params, batch):
    return squared(jnp.tanh(batch["x"] @ params["a"].T) @ params["b"].T, batch)


@case(lambda key: normal(key, 0, 3, 5, 8), vectors(8, 15))
def transposed_in_three_dims(params, batch):
    turned = jnp.transpose(params, (2, 1, 0))
    return squared((batch["x"] @ turned.reshape(8, 15)), batch)


@case(lambda key: normal(key, 0, 12, 24), vectors(8, 8))
def sliced(params, batch):
    first, second, third = params[:8, :8], params[4:, 16:], params[::2, 5:13]
    x = jnp.tanh(batch["x"] @ first)
    return squared(jnp.tanh(x @ second) @ jnp.concatenate([third, third[:2]]), batch)


@case(lambda key: normal(key, 0, 8, 24), vectors(8, 8))
def one_matrix_split_in_three(params, batch):
    query, keys, values = jnp.split(params, 3, axis=1)
    x = batch["x"]
    return squared(jax.nn.softmax((x @ query) * (x @ keys)) * (x @ values), batch)


@case(lambda key: [normal(key, i, 8, 3 + i) for i in range(3)], vectors(8, 12))
def three_matrices_in_one(params, batch):
    return squared(batch["x"] @ jnp.concatenate(params, axis=1), batch)


@case(lambda key: [normal(key, i, 8, 8) for i in range(3)], vectors(8, 8))
def stacked_from_separate_leaves(params, batch):
    stack = jnp.stack(params)
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], stack)
    return squared(x, batch)


@case(lambda key: [dense(key, i, 6, 6) for i in range(3)], vectors(6, 6))
def layers_stacked_by_tree_map(params, batch):
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    x, _ = lax.scan(lambda x, layer: (jnp.tanh(affine(layer, x)), None), batch["x"], stack)
    return squared(x, batch)


@case(lambda key: normal(key, 0, 8, 10), vectors(8, 10))
def normalised_columns(params, batch):
    w = params / jnp.linalg.norm(params, axis=0, keepdims=True)
    return squared(batch["x"] @ w, batch)


@case(lambda key: normal(key, 0, 9, 10), vectors(9, 10))
def standardised(params, batch):
    centred = params - params.mean(0, keepdims=True)
    return squared(batch["x"] @ (centred / (params.std(0, keepdims=True) + 1e-3)), batch)


@case(lambda key: {"v": normal(key, 0, 8, 6), "g": normal(key, 1, 6)}, vectors(8, 6))
def weight_normalisation(params, batch):
    norm = jnp.sqrt(jnp.sum(params["v"] ** 2, axis=0, keepdims=True))
    return squared(batch["x"] @ (params["v"] * (params["g"][None] / norm)), batch)


@case(lambda key: normal(key, 0, 8, 8), vectors(8, 8))
def spectral_norm_by_while_loop(params, batch):
    frozen = lax.stop_gradient(params)

    def improve(state):
        i, v = state
        v = frozen.T @ (frozen @ v)
        return i + 1, v / jnp.linalg.norm(v)

    start = (0, jnp.full((8,), 8**-0.5, params.dtype))
    _, v = lax.while_loop(lambda state: state[0] < 6, improve, start)
    return squared(batch["x"] @ (params / jnp.linalg.norm(params @ v)), batch)


@case(lambda key: {"w": normal(key, 0, 8, 8), "logits": normal(key, 1, 8)}, vectors(8, 8))
def softmax_exp_and_triangle(params, batch):
    gate = jax.nn.softmax(params["logits"]) * jnp.exp(params["logits"])
    return squared((batch["x"] * gate[None]) @ jnp.tril(params["w"]), batch)


@case(lambda key: normal(key, 0, 6, 6), vectors(6, 6))
def symmetrised(params, batch):
    return squared(batch["x"] @ (params + params.T), batch)


@case(
    lambda key: {"d": normal(key, 0, 6), "u": normal(key, 1, 6), "k": normal(key, 2, 2, 3)},
    vectors(6, 6),
)
def diagonal_outer_and_kronecker(params, batch):
    w = jnp.diag(params["d"]) + jnp.outer(params["u"], params["d"])
    w = w + jnp.kron(params["k"], params["k"].T)
    return squared(batch["x"] @ w, batch)


@case(lambda key: normal(key, 0, 8, 16), vectors(4, 8))
def reshaped(params, batch):
    x = jnp.einsum("nk,klm->nlm", batch["x"], params.reshape(4, 4, 8))
    return squared(jnp.tanh(x).sum(1), batch)


@case(lambda key: normal(key, 0, 15, 4), vectors(10, 6))
def reshaped_across_odd_dims(params, batch):
    return squared(batch["x"] @ params.reshape(-1).reshape(6, 10).T, batch)


@case(lambda key: normal(key, 0, 1, 8, 1, 4), vectors(8, 4))
def squeezed(params, batch):
    return squared(batch["x"] @ params[0, :, 0], batch)


@case(lambda key: {"b": normal(key, 0, 8), "c": normal(key, 1, 1, 8)}, vectors(8, 8))
def broadcast(params, batch):
    shape = batch["x"].shape
    shift = jnp.broadcast_to(params["b"], shape) + jnp.broadcast_to(params["c"], shape)
    return squared(jnp.tanh(batch["x"] + shift) * jnp.tile(params["b"], (2, 1))[:1], batch)


@case(lambda key: normal(key, 0, 4, 5), vectors(8, 10))
def tiled_repeated_rolled_flipped_padded(params, batch):
    w = jnp.tile(params, (1, 2)) + jnp.repeat(jnp.roll(params, 1, axis=0), 2, axis=1)
    w = jnp.pad(w, ((2, 2), (0, 0))) + jnp.flip(jnp.pad(w, ((0, 4), (0, 0))), axis=1)
    return squared(batch["x"] @ w, batch)


@case(lambda key: normal(key, 0, 9, 8), vectors(8, 8))
def sliced_and_updated_at_traced_places(params, batch):
    start = jnp.argmin(jnp.abs(lax.stop_gradient(params).sum(1)))
    row = lax.dynamic_slice_in_dim(params, start, 1, axis=0)
    w = lax.dynamic_update_slice_in_dim(params, 2.0 * row, 1, axis=0)
    return squared(batch["x"] @ w.at[3].set(0.0).at[:, 2].mul(3.0)[:8], batch)


@case(lambda key: normal(key, 0, 8, 8), vectors(8, 8))
def quantised_straight_through(params, batch):
    rounded = jnp.round(4 * params) / 4 * jnp.sign(jnp.abs(params) + 1)
    return squared(batch["x"] @ (params + lax.stop_gradient(rounded - params)), batch)


@case(lambda key: normal(key, 0, 8, 8), vectors(8, 8))
def half_of_it_stopped(params, batch):
    frozen = lax.stop_gradient(params)
    return squared(jnp.tanh(batch["x"] @ frozen) @ params + batch["x"] @ frozen, batch)


@case(lambda key: normal(key, 0, 8, 8), vectors(8, 8), tolerance=BFLOAT16)
def cast_to_bfloat16_and_back(params, batch):
    w = params.astype(jnp.bfloat16).astype(jnp.float32)
    return squared(jnp.tanh(batch["x"] @ w) @ w.T, batch)


@case(lambda key: [normal(key, i, 8, 8) for i in range(2)], vectors(8, 8), tolerance=BFLOAT16)
def computed_in_bfloat16(params, batch):
    x = batch["x"].astype(jnp.bfloat16)
    for w in params:
        x = jnp.tanh(x @ w.astype(jnp.bfloat16).T)
    return squared(x.astype(jnp.float32), batch)


@case(lambda key: normal(key, 0, 7, 5), vectors(5, 7), tolerance=BFLOAT16)
def cast_turned_and_cast_again(params, batch):
    w = params.T.astype(jnp.float16).reshape(5, 7, 1)[..., 0].astype(jnp.float32)
    return squared(batch["x"] @ w, batch)


@case(
    lambda key: {
        "low": normal(key, 0, 8, 8).astype(jnp.bfloat16),
        "odd": normal(key, 1, 5, 3).astype(jnp.bfloat16),
        "high": normal(key, 2, 8, 5),
    },
    vectors(8, 3),
    tolerance=BFLOAT16,
)
def bfloat16_parameters(params, batch):
    x = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["low"]).astype(jnp.float32)
    return squared(jnp.tanh(x @ params["high"]) @ params["odd"].astype(jnp.float32), batch)


@case(lambda key: normal(key, 0, 11, 6), tokens(5, 11))
def embedding_tied_to_the_output(params, batch):
    known, following = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    return cross_entropy(jnp.tanh(params[known]) @ params.T, following)


@case(lambda key: {"table": normal(key, 0, 16, 8), "out": normal(key, 1, 8, 3)}, tokens(4, 16))
def gathered_scattered_and_segmented(params, batch):
    ids = batch["tokens"]
    rows = jnp.take(params["table"], ids, axis=0, mode="clip")
    flat = jax.ops.segment_sum(rows.reshape(-1, 8), ids.reshape(-1), num_segments=16)
    flat = flat.at[ids[:, 0]].add(params["table"][ids[:, 1]] ** 2)
    per_example = jnp.tanh(rows.sum(1)) @ params["out"]
    return jnp.mean(per_example**2) + jnp.sum(flat * params["table"]) / ids.shape[0]


def _plain_token_loss(params, batch):
    known, following = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    logits = jnp.tanh(params["table"][known]) @ params["table"].T
    logits = jnp.concatenate([logits, params["table"][known] @ params["head"]], axis=0)
    logits = 2 * jnp.tanh(logits / 2)
    total = jax.nn.logsumexp(logits, axis=-1)
    return cross_entropy(logits, jnp.tile(following, (2, 1))) + 0.1 * jnp.mean(total**2)


@case(
    lambda key: {"table": normal(key, 0, 11, 6), "head": normal(key, 1, 6, 11)},
    tokens(6, 11),
    oracle=_plain_token_loss,
)
def losses_over_chunks_of_tokens(params, batch):
    known, following = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    losses = functools.partial(
        jz.softmax_cross_entropy, labels=following, chunk=2, soft_cap=2.0, z_loss=0.1
    )
    tied = losses(jnp.tanh(params["table"][known]), params["table"], vocabulary_dim=0)
    ones = jnp.ones(following.shape)
    total, weight = losses(params["table"][known], params["head"], weights=ones)
    return (jnp.mean(tied) + total / weight) / 2
