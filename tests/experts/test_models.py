"""Decoders whose experts stay split equal themselves on one device, expert by expert."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxzero as jz
from jaxzero.models import Decoder, DecoderConfig, apply_by_group, expert_leaves
from tests.models import tiny_models
from tests.models.drawn import drawn

pytestmark = pytest.mark.standard_promotion

IDS = np.random.default_rng(0).integers(0, 37, (16, 7)).astype(np.int32)
CHANGED: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-moe": {"num_experts": 8},
    "gpt-oss": {"num_local_experts": 8},
    "deepseek": {"n_shared_experts": 1},
}


def config_of(name: str, folder: Any, **options: Any) -> DecoderConfig:
    model_type, fields = tiny_models.DECODERS[name]
    content = {"model_type": model_type, **fields, **CHANGED[name]}
    (folder / "config.json").write_text(json.dumps(content))
    scanned = name != "deepseek"  # whose first layer is dense
    return dataclasses.replace(DecoderConfig.from_json(folder), scan_layers=scanned, **options)


def _loss(graph: Any, params: Any, ids: Any) -> Any:
    logits = nnx.merge(graph, params)(ids)
    labels = ids[:, 1:]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], labels))


def _check(zero: jz.Zero, config: DecoderConfig) -> None:
    graph, params = drawn(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    one_by_one = dataclasses.replace(config, expert_loop="scan", remat="none")
    graph_of_one, _ = drawn(lambda: Decoder(one_by_one, rngs=nnx.Rngs(0)))
    want = jax.jit(jax.value_and_grad(functools.partial(_loss, graph_of_one)))(params, IDS)
    step = jax.jit(zero.value_and_grad(functools.partial(_loss, graph)))
    loss, grads = step(zero.shard(params), IDS)
    found = loss, zero.unshard(grads)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * max(np.abs(y).max(), 1e-3))


def _ungathered(nodes: int, config: DecoderConfig) -> jz.Zero:
    _, params = drawn(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    leaves = expert_leaves(params)
    assert len(leaves) == (6 if config.experts.bias else 3)
    layout = jz.Ungathered(leaves, dim=int(config.scan_layers))
    return jz.Zero(jz.make_mesh(nodes), jz.ZeroConfig(ungathered=layout))


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        pytest.param(name, nodes, marks=[] if i % 2 == k else pytest.mark.exhaustive)
        for i, name in enumerate(CHANGED)
        for k, nodes in enumerate((4, 2))
    ],
)
@pytest.mark.one_in(4)
def test_families(name: str, nodes: int, tmp_path):
    """2 and 4 ways, in scans, in lists of layers, and with `remat`."""
    remat = "full" if nodes == 2 else "none"
    config = config_of(name, tmp_path, remat=remat)
    zero = _ungathered(nodes, config)
    _check(zero, config)
    graph, params = drawn(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    plan = zero.plan(functools.partial(_loss, graph), zero.shard(params), IDS)
    parts = [part for x in plan.transfers for part in x.by_leaf()]
    sent = [x for x in parts if x.name.removesuffix("[i]") in zero.config.ungathered.patterns]
    assert sent and {x.axis for x in sent} == {"node"}


@pytest.mark.parametrize(
    "name", ["mixtral", pytest.param("deepseek", marks=pytest.mark.exhaustive)]
)
def test_gathered_experts_by_sorting(name: str, tmp_path):
    _check(jz.Zero(jz.make_mesh(2)), config_of(name, tmp_path, expert_loop="ragged"))


@pytest.mark.parametrize(
    "sizes", [[0, 37, 0, 3, 20], [0, 0, 0, 0, 0], [60, 0, 0, 4, 0], [1, 1, 1, 1, 1]]
)
@pytest.mark.one_in(2)
def test_apply_by_group(sizes: list[int]):
    """Equals a product for each group, with rows that belong to none."""
    random = np.random.default_rng(0)
    args = [random.normal(size=size) for size in ((64, 3), (5, 3, 4), (64,))]
    numbers = np.repeat(np.arange(5), sizes)

    def run(x, w, weights):
        function = lambda w, x: jnp.sin(x @ w)  # noqa: E731
        return apply_by_group(function, w, x, jnp.asarray(sizes, jnp.int32), weights)

    def dense(x, w, weights):
        y = jnp.sin(jnp.einsum("md,mdo->mo", x[: len(numbers)], w[numbers]))
        y = y * weights[: len(numbers), None]
        return jnp.concatenate([y, jnp.zeros((64 - len(numbers), 4))])

    with jax.enable_x64(True):
        args = [jnp.asarray(x) for x in args]
        found, wanted = (
            (f(*args), jax.grad(lambda *args, f=f: jnp.sum(jnp.exp(f(*args))), (0, 1, 2))(*args))
            for f in (run, dense)
        )
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_leaves_without_a_part_for_each_group_are_refused():
    with pytest.raises(ValueError, match=r"shape \(8, 4\) for 2 groups.*name it in"):
        apply_by_group(
            lambda w, x: x @ w[:, None],
            jnp.zeros((8, 4)),
            jnp.zeros((6, 4)),
            jnp.asarray([2, 3], jnp.int32),
            jnp.ones(6),
        )
