"""The same training step three ways: on one device, as GSPMD FSDP, and with jaxzero.

A pre-norm transformer in plain JAX with tied embeddings, and Adam. GSPMD splits parameters
and optimizer state over all devices too (`_gspmd`), and its batch as jaxzero does; where weights
are gathered and gradients reduced is then the compiler's choice. jaxzero is compiled with
`jz.compiler_options`, the others as XLA does by default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

import jaxzero as jz

from . import _gspmd


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The model and its batch."""

    layers: int = 12
    width: int = 256
    heads: int = 4
    vocabulary: int = 4096
    rows: int = 32
    length: int = 64
    layers_in: Literal["loop", "scan"] = "loop"
    remat: bool = True


@dataclasses.dataclass(frozen=True)
class Peer:
    """A compiled step and its arguments, on the devices where it runs."""

    name: str
    compiled: Any
    state: tuple[Any, Any]
    batch: Any


def init(size: Size, key: jax.Array) -> dict[str, Any]:
    """Parameters; with `layers_in="scan"` those of all layers stacked."""
    keys = jax.random.split(key, size.layers + 1)

    def layer(key):
        names = {"q": 1, "k": 1, "v": 1, "o": 1, "up": 4}
        leaves = {
            name: jax.random.normal(k, (size.width, wide * size.width)) * size.width**-0.5
            for (name, wide), k in zip(names.items(), jax.random.split(key, 5), strict=True)
        }
        down = jax.random.normal(key, (4 * size.width, size.width)) * (4 * size.width) ** -0.5
        return {
            **leaves,
            "down": down,
            "norm1": jnp.ones(size.width),
            "norm2": jnp.ones(size.width),
        }

    layers = jax.vmap(layer)(keys[1:]) if size.layers_in == "scan" else [layer(k) for k in keys[1:]]
    table = jax.random.normal(keys[0], (size.vocabulary, size.width)) * 0.02
    return {"embedding": table, "layers": layers}


def _norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _block(size: Size, x, p):
    def heads(name):
        return (_norm(x, p["norm1"]) @ p[name]).reshape(*x.shape[:2], size.heads, -1)

    attended = jax.nn.dot_product_attention(heads("q"), heads("k"), heads("v"), is_causal=True)
    x = x + attended.reshape(x.shape) @ p["o"]
    return x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def loss(size: Size, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token. `tokens`: int32 `[rows, length + 1]`."""

    def block(x, p):
        return _block(size, x, p)

    block = jax.checkpoint(block, prevent_cse=size.layers_in == "loop") if size.remat else block
    x = params["embedding"][tokens[:, :-1]]
    if size.layers_in == "scan":
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = block(x, p)
    logits = x @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def peers(size: Size, zero: jz.Zero, names: tuple[str, ...]) -> list[Peer]:
    """Compile the named peers: "single", "gspmd", "jaxzero"."""
    tx = optax.adam(1e-3)
    tokens = jax.random.randint(jax.random.key(1), (size.rows, size.length + 1), 0, size.vocabulary)
    made = []
    for name in names:
        if name == "single":
            params = init(size, jax.random.key(0))
            state, batch, out = (params, tx.init(params)), tokens, None
        else:
            state = _split_state(name, size, zero, tx)
            batch = jax.device_put(tokens, NamedSharding(zero.mesh, zero.batch_spec))
            out = (*jax.tree.map(lambda x: x.sharding, state), None)
        ours = name == "jaxzero"
        step = _step(zero.value_and_grad if ours else jax.value_and_grad, size, tx)
        options = jz.compiler_options(jax.devices()[0].platform) if ours else None
        jitted = jax.jit(step, out_shardings=out, compiler_options=options)
        compiled = jitted.lower(*state, batch).compile()
        made.append(Peer(name, compiled, state, batch))
    return made


def _split_state(
    name: str, size: Size, zero: jz.Zero, tx: optax.GradientTransformation
) -> tuple[Any, Any]:
    """Parameters and optimizer state, split as the peer's users would."""

    def initial() -> Any:
        return init(size, jax.random.key(0))

    if name == "gspmd":
        params = _gspmd.init(initial, mesh=zero.mesh)
        return params, _gspmd.init(tx.init, params, mesh=zero.mesh)
    params = zero.init(initial)
    return params, zero.init_optimizer(tx, params)


def _step(value_and_grad: Callable, size: Size, tx: optax.GradientTransformation) -> Callable:
    def step(params, opt_state, tokens):
        value, grads = value_and_grad(lambda p, t: loss(size, p, t))(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def device_bytes(peer: Peer) -> int:
    """Bytes of parameters and optimizer state on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(peer.state))
