"""Flax models, NNX and Linen: in loops, scans, with remat, with batch statistics."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from ._case import AXES, case, cross_entropy, filled, images, sequences, squared, tokens, vectors

WIDTH = 8


class _Cached:
    """An NNX model as functions of its state: the structure is built once, when first needed."""

    def __init__(self, build):
        self.build = build

    @functools.cached_property
    def split(self):
        return nnx.split(nnx.eval_shape(lambda: self.build(nnx.Rngs(0))), nnx.Param)

    def init(self, key):
        return filled(key, self.split[1])

    def __call__(self, state):
        return nnx.merge(self.split[0], state)


class _Mlp(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(7, 12, rngs=rngs)
        self.norm = nnx.LayerNorm(12, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(12, 12, rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(12, 3, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = x + jax.nn.gelu(layer(x))
        return self.last(x)


_mlp = _Cached(_Mlp)


@case(_mlp.init, vectors(7, 3))
def nnx_mlp(params, batch):
    return squared(_mlp(params)(batch["x"]), batch)


def _attention(query, key, value, mask=None, **_):
    """Softmax attention in the dtype of its inputs, where Flax's own takes float32."""
    scores = jnp.einsum("...thd,...shd->...hts", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("...hts,...shd->...thd", weights, value)


class _Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, WIDTH, decode=False, attention_fn=_attention, keep_rngs=False, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, 12, rngs=rngs)
        self.down = nnx.Linear(12, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0], dtype=bool))
        return x + self.down(jax.nn.silu(self.up(x)))


class _Decoder(nnx.Module):
    """Its output layer is its embedding (no `nnx.Embed`: it remembers the dtype it was made in)."""

    def __init__(self, rngs, scanned):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (11, WIDTH)))
        self.scanned = scanned
        if scanned:
            self.blocks = nnx.vmap(lambda rngs: _Block(rngs))(rngs.split(3))
        else:
            self.blocks = nnx.List([_Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed[...][tokens]
        if self.scanned:
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.blocks
            )
        else:
            for block in self.blocks:
                x = nnx.remat(lambda block, x: block(x))(block, x)
        return x @ self.embed[...].T


_decoder = _Cached(functools.partial(_Decoder, scanned=False))
_scanned_decoder = _Cached(functools.partial(_Decoder, scanned=True))


@case(_decoder.init, tokens(5, 11))
def nnx_decoder_with_remat(params, batch):
    logits = _decoder(params)(batch["tokens"][:, :-1])
    return cross_entropy(logits, batch["tokens"][:, 1:])


@case(_scanned_decoder.init, tokens(5, 11))
def nnx_decoder_in_a_scan(params, batch):
    logits = _scanned_decoder(params)(batch["tokens"][:, :-1])
    return cross_entropy(logits, batch["tokens"][:, 1:])


class _ConvNet(nnx.Module):
    def __init__(self, rngs, axes):
        self.conv = nnx.Conv(2, 6, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.9, axis_name=axes, rngs=rngs)
        self.head = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.conv(x)))
        return self.head(x.mean((1, 2)))


@functools.cache
def _conv_net(axes=AXES):
    model = nnx.eval_shape(lambda: _ConvNet(nnx.Rngs(0), axes))
    return nnx.split(model, nnx.Param, nnx.BatchStat)


def _conv_loss(axes):
    def loss(params, stats, batch):
        stats = jax.tree.map(lambda x: x, stats)  # variables that this trace may change
        model = nnx.merge(_conv_net(axes)[0], params, stats)
        value = cross_entropy(model(batch["image"]), batch["label"])
        return value, nnx.state(model, nnx.BatchStat)

    return loss


@case(
    lambda key: filled(key, _conv_net()[1:]),
    images(4, 2, 4),
    trees=2,
    has_aux=True,
    oracle=_conv_loss(None),
)
def nnx_conv_net_with_synchronised_batch_norm(params, stats, batch):
    return _conv_loss(AXES)(params, stats, batch)


class _LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.LayerNorm()(nn.tanh(nn.Dense(10)(x)))
        return nn.Dense(3)(x)


def _linen_init(model, *shape, dtype=jnp.float32):
    x = jax.ShapeDtypeStruct(shape, dtype)
    return lambda key: filled(key, jax.eval_shape(model.init, jax.random.key(0), x))


@case(_linen_init(_LinenMlp(), 1, 7), vectors(7, 3))
def linen_mlp(variables, batch):
    return squared(_LinenMlp().apply(variables, batch["x"]), batch)


class _LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(2, deterministic=True)(y, mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(12)(x))), None


class _LinenDecoder(nn.Module):
    remat: bool
    stacking_dim: int = 0

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(11, WIDTH)
        block = nn.remat(_LinenBlock, prevent_cse=False) if self.remat else _LinenBlock
        blocks = nn.scan(
            block, {"params": self.stacking_dim}, split_rngs={"params": True}, length=3
        )
        x, _ = blocks()(embed(ids), None)
        return embed.attend(x)


def _linen_decoder(name: str, model: _LinenDecoder):
    def loss(variables, batch):
        logits = model.apply(variables, batch["tokens"][:, :-1])
        return cross_entropy(logits, batch["tokens"][:, 1:])

    loss.__name__ = name
    case(_linen_init(model, 1, 4, dtype=jnp.int32), tokens(5, 11))(loss)


_linen_decoder("linen_decoder_in_a_scan", _LinenDecoder(remat=False))
_linen_decoder("linen_decoder_in_a_scan_with_remat", _LinenDecoder(remat=True))
_linen_decoder("linen_decoder_stacked_on_dim_one", _LinenDecoder(remat=True, stacking_dim=1))


class _LinenConvNet(nn.Module):
    axes: tuple[str, ...] | None

    @nn.compact
    def __call__(self, x):
        for features in (6, 5):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name=self.axes)(x))
        return nn.Dense(4)(x.mean((1, 2)))


def _linen_conv_loss(axes):
    def loss(params, stats, batch):
        logits, new = _LinenConvNet(axes).apply(
            {"params": params, "batch_stats": stats}, batch["image"], mutable="batch_stats"
        )
        return cross_entropy(logits, batch["label"]), new["batch_stats"]

    return loss


def _linen_conv_init(key):
    variables = _linen_init(_LinenConvNet(None), 2, 4, 4, 2)(key)
    return variables["params"], variables["batch_stats"]


@case(_linen_conv_init, images(4, 2, 4), trees=2, has_aux=True, oracle=_linen_conv_loss(None))
def linen_conv_net_with_synchronised_batch_norm(params, stats, batch):
    return _linen_conv_loss(AXES)(params, stats, batch)


class _LinenRecurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.RNN(nn.OptimizedLSTMCell(6, param_dtype=x.dtype))(x)
        return nn.Dense(3)(nn.RNN(nn.GRUCell(5, param_dtype=x.dtype))(h)[:, -1])


@case(_linen_init(_LinenRecurrent(), 1, 4, 5), sequences(4, 5, 3))
def linen_recurrent(variables, batch):
    return squared(_LinenRecurrent().apply(variables, batch["x"]), batch)
