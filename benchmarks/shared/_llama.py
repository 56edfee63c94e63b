"""A decoder like Llama or Mamba, scanned or unrolled, for programs that are only compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import jaxzero as jz
from jaxzero.models import apply_by_group

Params = Any
# What forward keeps of a layer for backward.
Policy = Literal["nothing", "everything", "dots", "dots_without_batch_dims", "names", "offload"]
_saveable = jax.checkpoint_policies
POLICIES: dict[Policy, Callable[..., Any]] = {
    "nothing": _saveable.nothing_saveable,
    "dots": _saveable.dots_saveable,
    "dots_without_batch_dims": _saveable.dots_with_no_batch_dims_saveable,
    "names": _saveable.save_only_these_names("attention", "mlp"),
    "offload": _saveable.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
EXPERTS = ("gate", "up", "down")  # the leaves of experts, `[layers, experts, ...]`
_FILTER = 4  # numbers that the convolution of Mamba sees, of each channel


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaSize:
    """By default Llama-7B (https://arxiv.org/abs/2302.13971, table 2)."""

    layers: int = 32
    width: int = 4096
    hidden: int = 11008
    heads: int = 32
    kv_heads: int | None = None  # fewer, each for several heads; None: as many
    vocabulary: int = 32000
    experts: int = 0  # of a mixture of experts; 0: a dense MLP
    choices: int = 2  # experts of a token
    sorts_tokens: bool = False  # gathered experts compute their own tokens; else each all tokens
    state: int = 0  # numbers of state for each of `hidden`: layers of Mamba; 0: layers of Llama
    unrolled: bool = False
    tied: bool = False  # whether the embedding is the head too
    rank: int = 0  # of the adapters of `init_adapters`
    keeps: Policy = "nothing"  # of each layer, until backward
    long: bool = False  # rows: attention in blocks, tokens split where the mesh has the axis
    implementation: Literal["cudnn"] | None = None  # of attention of long rows; None: blocks


def init(size: LlamaSize, key: Array) -> Params:
    """Parameters in float32; of unrolled layers a list."""
    shapes = _mamba_shapes(size) if size.state else _llama_shapes(size)
    width = size.width

    def layer(key: Array) -> Params:
        keys = jax.random.split(key, len(shapes))
        weights = {
            name: jax.random.normal(k, shape) * shape[-2] ** -0.5
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        norms = ("norm1",) if size.state else ("norm1", "norm2")
        return weights | {name: jnp.ones(width) for name in norms}

    first, second, third = jax.random.split(key, 3)
    keys = jax.random.split(third, size.layers)
    params = {
        "embedding": jax.random.normal(first, (size.vocabulary, width)) * 0.02,
        "layers": [layer(k) for k in keys] if size.unrolled else jax.vmap(layer)(keys),
        "norm": jnp.ones(width),
    }
    if not size.tied:
        params["head"] = jax.random.normal(second, (width, size.vocabulary)) * width**-0.5
    return params


def init_adapters(size: LlamaSize, key: Array) -> Params:
    """Adapters of scanned projections of attention, in float32 (https://arxiv.org/abs/2106.09685).

    Two stacks of factors for each projection, (layers, rows, rank) and (layers, rank, columns).
    """
    adapters = {}
    for name, (rows, columns) in _llama_shapes(size).items():
        if name in ("query", "key", "value", "out"):
            down = jax.random.normal(key, (size.layers, rows, size.rank)) * rows**-0.5
            up = jnp.zeros((size.layers, size.rank, columns))
            adapters |= {f"{name}_down": down, f"{name}_up": up}
    return adapters


def init_bfloat16(size: LlamaSize, key: Array) -> Params:
    """Parameters that are not trained, as they are stored."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), init(size, key))


def _llama_shapes(size: LlamaSize) -> dict[str, tuple[int, ...]]:
    width, hidden = size.width, size.hidden
    grouped = width * (size.kv_heads or size.heads) // size.heads
    experts = (size.experts,) if size.experts else ()
    shapes = {
        "query": (width, width),
        "key": (width, grouped),
        "value": (width, grouped),
        "out": (width, width),
        "gate": (*experts, width, hidden),
        "up": (*experts, width, hidden),
        "down": (*experts, hidden, width),
    }
    if experts:
        shapes["router"] = (width, size.experts)
    return shapes


def _mamba_shapes(size: LlamaSize) -> dict[str, tuple[int, ...]]:
    width, hidden, rank = size.width, size.hidden, size.width // 16
    return {
        "in": (width, 2 * hidden),
        "filter": (_FILTER, hidden),
        "step_in": (hidden, rank),
        "step_out": (rank, hidden),
        "state": (hidden, 2 * size.state),
        "decay": (hidden, size.state),
        "skip": (1, hidden),
        "out": (hidden, width),
    }


def num_parameters(size: LlamaSize) -> int:
    """How many numbers `init` makes."""
    tree = jax.eval_shape(lambda key: init(size, key), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def loss(
    size: LlamaSize,
    params: Params,
    tokens: Int[Array, "b t"],
    constrain: Callable[[Array], Array] | None = None,
    on_devices: Callable[[Callable], Callable] | None = None,
) -> Float[Array, ""]:
    """Mean cross-entropy of the next token; computed in bfloat16.

    Args:
        size: of the model.
        params: from `init`.
        tokens: of a batch.
        constrain: called on the activations after every layer, and on the logits; in a model of
            long rows on queries, keys and values, `[rows, tokens, heads, size]`, in place of
            the latter. None: `jz.split_tokens` and `jz.attention` in a model of long rows.
        on_devices: makes of a function of activations, scores, choices and experts one that each
            device runs on its own; for experts that are split by hand.
    """
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    attend = _attend(size, constrain)
    constrain = constrain or (jz.split_tokens if size.long else lambda x: x)
    x = constrain(params["embedding"][tokens])
    mlp = functools.partial(_experts, size, on_devices) if size.experts else _mlp

    def layer(x, weights):
        if size.state:
            return constrain(_state_space(x, weights)), None
        return constrain(mlp(_attention(x, weights, size, attend), weights)), None

    if size.keeps != "everything":
        layer = jax.checkpoint(layer, policy=POLICIES[size.keeps])
    if size.unrolled:
        for weights in params["layers"]:
            x, _ = layer(x, weights)
    else:
        x, _ = jax.lax.scan(layer, x, params["layers"])
    head = params["embedding"].T if size.tied else params["head"]
    if size.long:
        labels = jnp.roll(tokens, -1, axis=1)
        is_last = jnp.arange(tokens.shape[1]) == tokens.shape[1] - 1
        weights = jnp.broadcast_to(~is_last, tokens.shape)
        total, weight = jz.softmax_cross_entropy(
            _norm(x, params["norm"]), head, labels, weights, chunk=8192
        )
        return total / weight
    logits = constrain(_norm(x, params["norm"]) @ head)
    log_probabilities = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    picked = jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1)
    return -jnp.mean(picked)


def lora_loss(
    size: LlamaSize,
    adapters: Params,
    base: Params,
    tokens: Int[Array, "b t"],
    constrain: Callable[[Array], Array] | None = None,
) -> Float[Array, ""]:
    """The loss of a model with `adapters` beside the projections of its layers."""
    layers = base["layers"] | adapters
    return loss(size, base | {"layers": layers}, tokens, constrain)


def _norm(x: Array, scale: Array) -> Array:
    variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + 1e-5).astype(x.dtype) * scale


def _attend(size: LlamaSize, constrain: Callable[[Array], Array] | None) -> Callable[..., Array]:
    """Causal attention; with `constrain`, as a program of sharding constraints has it."""
    if not size.long:
        return functools.partial(jax.nn.dot_product_attention, is_causal=True)
    options: Any = {"is_causal": True, "implementation": size.implementation}
    if constrain is None:
        return functools.partial(jz.attention, **options)

    def attend(*arrays: Array) -> Array:
        return constrain(jax.nn.dot_product_attention(*map(constrain, arrays), **options))

    return attend


def _attention(x: Array, weights: Params, size: LlamaSize, attend: Callable[..., Array]) -> Array:
    y, head = _norm(x, weights["norm1"]), size.width // size.heads
    kv_heads = size.kv_heads or size.heads
    query = _project(y, weights, "query").reshape(*x.shape[:2], size.heads, head)
    key, value = (
        _project(y, weights, name).reshape(*x.shape[:2], kv_heads, head)
        for name in ("key", "value")
    )
    mixed = attend(query, key, value)
    return x + checkpoint_name(_project(mixed.reshape(x.shape), weights, "out"), "attention")


def _project(x: Array, weights: Params, name: str) -> Array:
    made = x @ weights[name]
    if (down := f"{name}_down") in weights:
        made = made + x @ weights[down] @ weights[f"{name}_up"]
    return made


def _mlp(x: Array, weights: Params) -> Array:
    y = _norm(x, weights["norm2"])
    hidden = jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])
    return x + checkpoint_name(hidden @ weights["down"], "mlp")


def _experts(
    size: LlamaSize,
    on_devices: Callable[[Callable], Callable] | None,
    x: Array,
    weights: Params,
) -> Array:
    """A mixture of experts (Switch Transformers, https://arxiv.org/abs/2101.03961).

    Every expert computes every token, and the best `size.choices` of a token are weighted: more
    arithmetic than a mixture needs, with the same weights. Experts that stay on their devices, or
    `size.sorts_tokens`, compute their own tokens only.
    """
    y = _norm(x, weights["norm2"])
    scores = jax.nn.softmax((y @ weights["router"]).astype(jnp.float32))
    best, numbers = jax.lax.top_k(scores, size.choices)
    own = {name: weights[name] for name in EXPERTS}
    if on_devices is not None or size.sorts_tokens or len(own["gate"]) < size.experts:
        function = functools.partial(_by_own_experts, size.experts)
        function = function if on_devices is None else on_devices(function)
        return x + function(y, best.astype(y.dtype), numbers, own)
    chosen = jnp.where(scores >= best[..., -1:], scores, 0).astype(y.dtype)

    def expert(total, one):
        gate, up, down, share = one
        return total + share[..., None] * ((jax.nn.silu(y @ gate) * (y @ up)) @ down), None

    shares = jnp.moveaxis(chosen, -1, 0)
    stacks = (*own.values(), shares)
    return jax.lax.scan(expert, x, stacks)[0]


def _by_own_experts(num: int, y: Array, best: Array, numbers: Array, own: Params) -> Array:
    """Apply to each token its experts, out of `num`, on the devices that hold them."""

    def expert(one: Params, rows: Array) -> Array:
        return (jax.nn.silu(rows @ one["gate"]) * (rows @ one["up"])) @ one["down"]

    sent = (x.reshape(-1, x.shape[-1]) for x in (y, numbers, best))
    made, _ = jz.exchange_tokens(
        functools.partial(apply_by_group, expert, own),
        *sent,
        num_experts=num,
        num_local=len(own["gate"]),
    )
    return made.reshape(y.shape)


def _state_space(x: Array, weights: Params) -> Array:
    """A layer of Mamba (https://arxiv.org/abs/2312.00752, algorithm 2), scanned in parallel."""
    inside, gate = jnp.split(_norm(x, weights["norm1"]) @ weights["in"], 2, axis=-1)
    padded = jnp.pad(inside, ((0, 0), (_FILTER - 1, 0), (0, 0)))
    taps = (padded[:, i : i + x.shape[1]] * weights["filter"][i] for i in range(_FILTER))
    inside = jax.nn.silu(sum(taps, start=jnp.zeros_like(inside)))
    step = (inside @ weights["step_in"] @ weights["step_out"]).astype(jnp.float32)
    step = jax.nn.softplus(step)[..., None]
    read, write = jnp.split((inside @ weights["state"]).astype(jnp.float32), 2, axis=-1)
    kept = jnp.exp(-step * jnp.exp(weights["decay"].astype(jnp.float32)))  # [b, t, hidden, state]
    written = step * inside[..., None].astype(jnp.float32) * write[:, :, None]

    def then(first, second):
        return first[0] * second[0], first[1] * second[0] + second[1]

    _, states = jax.lax.associative_scan(then, (kept, written), axis=1)
    made = jnp.einsum("bths,bts->bth", states, read).astype(x.dtype)
    made = (made + inside * weights["skip"]) * jax.nn.silu(gate)
    return x + made @ weights["out"]
