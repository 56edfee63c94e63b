"""What one GPU must compute: kernels the bits of `jax.numpy`, steps the gradients of plain JAX.

JAX_PLATFORMS=cpu,cuda python -m pytest tests/gpu
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from jaxzero import pallas_kernels as pk

pytestmark = [pytest.mark.gpu, pytest.mark.standard_promotion]
KINDS = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")
NUM, PEERS = 2**16, 8
LAYERS, WIDTH, ROWS = 4, 256, 32


@pytest.fixture(scope="module")
def gpu():
    """The first GPU, on which arrays of a test are made."""
    device = jax.devices("gpu")[0]
    with jax.default_device(device):
        yield device


# Kernels.


def operations(format, implementation):
    how = {"implementation": implementation}
    return {
        "quantize": lambda x, m: pk.quantize(x, format, seed=3, **how),
        "dequantize": lambda x, m: pk.dequantize(
            m[:1], format, outer=1, inner=NUM, dtype=jnp.bfloat16, **how
        ),
        "dequantize_sum": lambda x, m: pk.dequantize_sum(m, format, num=NUM, **how),
        "dequantize_sum_requantize": lambda x, m: pk.dequantize_sum_requantize(
            m, format, format, seed=3, shape=(1, 1, NUM), divisor=PEERS, **how
        ),
    }


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", list(operations(None, None)))
def test_kernels_give_the_bits_of_jax_numpy(gpu, operation, kind, rounding):
    format = pk.Format(kind=kind, block=256, rounding=rounding)
    x, messages = sent(format)
    want, got = (
        np.asarray(jax.jit(operations(format, how)[operation])(x, messages))
        for how in ("xla", "mosaic_gpu")
    )
    assert want.dtype == got.dtype and want.shape == got.shape
    np.testing.assert_array_equal(want.view(np.uint8), got.view(np.uint8))


def test_what_kernels_decode_is_within_half_a_step(gpu):
    """A block of n-bit integers has the scale max / (2^(n-1) - 1), here rounded up to bfloat16."""
    format = pk.Format(kind="int8", block=256)
    x, _ = sent(format)
    how = {"implementation": "mosaic_gpu"}
    decode = functools.partial(
        pk.dequantize, format=format, outer=1, inner=NUM, dtype=jnp.float32, **how
    )
    got = np.asarray(jax.jit(lambda x: decode(pk.quantize(x, format, **how)))(x), np.float64)
    blocks = np.asarray(x, np.float64).reshape(-1, 256)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 127 * (1 + 2.0**-7)
    assert np.all(np.abs(got.reshape(-1, 256) - blocks) <= scale / 2 * (1 + 2.0**-7))


def sent(format):
    """Numbers, and the messages of all peers."""
    x = jax.random.normal(jax.random.key(0), (1, PEERS, NUM), jnp.bfloat16)
    encode = jax.jit(lambda x: pk.quantize(x, format, seed=3, implementation="xla"))
    return x[:, :1], jnp.concatenate([encode(x[:, i : i + 1]) for i in range(PEERS)])


# Steps.


def init(key):
    return {
        "embedding": jax.random.normal(key, (64, WIDTH)),
        "layers": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) * WIDTH**-0.5,
        "odd": jax.random.normal(key, (7, 3)),
    }


def loss(params, tokens):
    @jax.checkpoint
    def layer(h, weight):
        return h + jnp.tanh(jnp.matmul(h, weight, precision="highest")), None

    h, _ = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    return jnp.mean(h**2) + 1e-3 * jnp.sum(params["odd"] ** 2)


@pytest.fixture(scope="module")
def tokens(gpu):
    return jax.random.randint(jax.random.key(1), (ROWS,), 0, 64)


@pytest.mark.parametrize("config", [jz.zero3(), jz.zeropp(), jz.ddp()], ids=str)
def test_gradients_are_those_of_plain_jax(gpu, tokens, config):
    zero = jz.Zero(jz.make_mesh(1, devices=[gpu]), config)
    params = zero.init(init, jax.random.key(0))
    got = jax.jit(zero.value_and_grad(loss))(params, tokens)
    want = jax.jit(jax.value_and_grad(loss))(init(jax.random.key(0)), tokens)
    # Each is a sum of at most ROWS x WIDTH products, in two orders.
    np.testing.assert_allclose(got[0], want[0], rtol=2.0**-23 * (ROWS * WIDTH) ** 0.5)
    for x, y in zip(jax.tree.leaves(zero.unshard(got[1])), jax.tree.leaves(want[1]), strict=True):
        largest = float(jnp.abs(y).max())
        np.testing.assert_allclose(x, y, rtol=0, atol=2.0**-23 * (ROWS * WIDTH) ** 0.5 * largest)


def test_steps_with_offload_are_those_without(gpu, tokens):
    offload = jz.Offload(weights=True, gradients=True, optimizer=True, min_size=0)
    losses = {}
    for name, config in {
        "device": jz.zero3(),
        "host": dataclasses.replace(jz.zero3(), offload=offload),
    }.items():
        zero, tx = jz.Zero(jz.make_mesh(1, devices=[gpu]), config), optax.adamw(1e-2)
        params = zero.init(init, jax.random.key(0))
        opt_state = zero.init_optimizer(tx, params)
        if name == "host":
            assert params["layers"].sharding.memory_kind == "pinned_host"
        value_and_grad = zero.value_and_grad(loss)

        def step(params, opt_state, tokens, zero=zero, tx=tx, value_and_grad=value_and_grad):
            value, grads = value_and_grad(params, tokens)
            return value, *zero.apply_gradients(tx, grads, opt_state, params)

        run = jax.jit(step, donate_argnums=(0, 1))
        losses[name] = []
        for _ in range(4):
            value, params, opt_state = run(params, opt_state, tokens)
            losses[name].append(float(value))
    assert losses["host"][-1] < losses["host"][0]
    np.testing.assert_allclose(losses["host"], losses["device"], rtol=1e-5)
