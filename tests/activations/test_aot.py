"""Activations of unrolled layers, compiled for H200s: repeated segments stay in backward."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxzero as jz
from benchmarks.compiled._h200 import h200_mesh
from benchmarks.shared import _llama

pytestmark = pytest.mark.standard_promotion

LAYERS = 6


@pytest.fixture(scope="module", autouse=True)
def _needs_compiler():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")


def _step(size: _llama.LlamaSize, budget: int | None) -> tuple[int, int]:
    """Bytes of temporaries, and of what the plan keeps."""
    activations = jz.Activations(budget_bytes=budget)
    zero = jz.Zero(h200_mesh(1, 8), dataclasses.replace(jz.zero3(), activations=activations))
    params = zero.abstract(lambda key: _llama.init(size, key), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((16, 1024), jnp.int32)

    def loss(params, tokens):
        return _llama.loss(size, params, tokens)

    with jax.numpy_rank_promotion("allow"):
        lowered = jax.jit(zero.value_and_grad(loss)).lower(params, tokens)
        residuals = zero.plan(loss, params, tokens).residuals
    compiled = lowered.compile(compiler_options=jz.compiler_options("cuda"))
    kept = (x for x in residuals if x.action == "keep")
    return compiled.memory_analysis().temp_size_in_bytes, sum(x.num_bytes for x in kept)


def test_memory_of_unrolled_layers():
    size = _llama.LlamaSize(
        layers=LAYERS, width=512, hidden=1024, heads=8, vocabulary=512, unrolled=True
    )
    everything, _ = _step(dataclasses.replace(size, keeps="everything"), None)
    by_hand, _ = _step(size, None)  # `jax.checkpoint` of each layer
    least, kept = _step(dataclasses.replace(size, keeps="everything"), 0)
    assert least <= 1.05 * by_hand
    # Of a layer that is repeated, and of one whose gradients are not reduced yet.
    assert least - kept <= 2 * everything / LAYERS
