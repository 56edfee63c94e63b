"""What the report says is copied from and to host memory is what the compiled program copies."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxzero as jz
from benchmarks.compiled._h200 import h200_mesh
from benchmarks.compiled._host_copies import host_copies
from jaxzero._hlo.host_memory import compile_with_host_memory

LAYERS, WIDTH, TOKENS = 5, 256, 512
OFFLOAD = jz.Offload(weights=True, gradients=True, optimizer=True, min_size=2**14)


def _init(key):
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (TOKENS, WIDTH)),
        "layers": {
            "up": jax.random.normal(keys[1], (LAYERS, WIDTH, 2 * WIDTH), jnp.bfloat16),
            "down": jax.random.normal(keys[2], (LAYERS, 2 * WIDTH, WIDTH)),
            "scale": jnp.ones((LAYERS, WIDTH)),  # smaller than `min_size`
        },
    }


def _loss(params, tokens):
    def layer(h, weights):
        inner = jnp.tanh((h * weights["scale"][None, None]) @ weights["up"].astype(h.dtype))
        return h + inner @ weights["down"], None

    h, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][tokens], params["layers"])
    return jnp.mean(h**2)


CONFIGS = {"zero3": jz.zero3(), "zeropp": jz.zeropp()}


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")
    return h200_mesh(2, 8)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("config", "window", "options"),
    [
        ("zero3", 2, {}),
        ("zeropp", 1, {}),
        ("zeropp", 1, {"microbatches": 2}),  # node slices are made in the first
    ],
)
def test_bytes_are_those_of_the_compiled_program(mesh, config, window, options):
    offload = dataclasses.replace(OFFLOAD, window=window)
    zero = jz.Zero(mesh, dataclasses.replace(CONFIGS[config], offload=offload))
    params = zero.abstract(_init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((32, 64), jnp.int32)
    with jax.numpy_rank_promotion("allow"):
        opt_state = zero.init_optimizer(optax.adam(1e-3), params)
        report = zero.report(params, opt_state, zero.plan(_loss, params, tokens, **options))
        step = jax.jit(zero.value_and_grad(_loss, **options), keep_unused=True)
        compiled = compile_with_host_memory(step, (params, tokens), mesh)
    copies = host_copies(compiled.as_text())
    traffic = report.host_traffic
    parts = ("forward", "backward")
    assert sum(x.from_host * x.trips for x in copies) == sum(
        traffic.num_bytes("device", part) for part in parts
    )
    assert sum(x.to_host * x.trips for x in copies) == sum(
        traffic.num_bytes("host", part) for part in parts
    )
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes == report.host_bytes("parameters")
    assert memory.host_output_size_in_bytes == report.host_bytes("gradients")
    rows = tokens.size * tokens.dtype.itemsize // mesh.size  # of the batch
    assert memory.argument_size_in_bytes == report.device_bytes("parameters") + rows
