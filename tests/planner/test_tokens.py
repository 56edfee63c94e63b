"""Devices that share rows, among the plans: which there are, for which losses, and which is best.

Meshes are of fake CPU devices here, and programs are not compiled; `test_aot` compiles them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from jaxzero._hlo import Timeline
from jaxzero._planner import bounder
from jaxzero._planner.bounds import Bounds
from jaxzero._planner.candidates import enumerate_candidates, microbatches_by_tokens
from jaxzero._planner.compiles import Compiled
from jaxzero._planner.job import Job
from jaxzero._planner.plans import Plans
from jaxzero._planner.ranking import ranked
from jaxzero._planner.search import Search
from jaxzero._program import matrix_flops

CLUSTER = jz.Cluster(nodes=2, local=4, device="h100", link=25e9)
WIDTH, TOKENS = 256, 16
GB = 1e9


def init():
    random = np.random.default_rng(0)
    return {"layers": jnp.asarray(random.normal(size=(2, WIDTH, 3 * WIDTH)) / 16, jnp.float32)}


def loss(params, batch, split=jz.split_tokens):
    def layer(x, w):
        x = split(x)
        heads = (x @ w).reshape(*x.shape[:2], 3, 4, -1)
        mixed = jz.attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
        return x + mixed.reshape(x.shape), None

    x, _ = jax.lax.scan(layer, batch, params["layers"])
    return jnp.mean((x - batch[:, ::-1]) ** 2)


def by_token(params, batch):
    """A loss that leaves tokens where they are."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[:, :WIDTH]), None), batch, params["layers"])
    return jnp.mean(x**2)


def rows(num):
    return jax.ShapeDtypeStruct((num, TOKENS, WIDTH), jnp.float32)


@pytest.fixture
def fake_devices(monkeypatch):
    def mesh(cluster, **axes):
        return jz.make_mesh(cluster.nodes, devices=jax.devices()[: cluster.num_devices], **axes)

    monkeypatch.setattr(bounder, "absent_mesh", mesh)


class Compiler:
    """Programs that take 1.2 of their bound, and `size` GB of temporaries by micro-batch."""

    def __init__(self, search, size):
        self.search, self.size = search, size

    def key(self, candidate):
        return candidate.name

    def compile(self, candidate, *, is_proxy):
        del is_proxy
        seconds = 1.2 * self.search.bounds[candidate].gradients
        return Answer("", int(self.size / candidate.microbatches * GB), 0, 0.0, seconds)


@dataclasses.dataclass(frozen=True)
class Answer(Compiled):
    seconds: float = 0.0

    def timeline(self, rates):
        del rates
        return Timeline(seconds=self.seconds)


def searched(losses, num_rows, microbatches=(1, 2, 4), size=16):
    """The plans of these losses for a cluster whose devices have 5 GB."""
    job = Job(losses, init, rows(num_rows), optax.sgd(1e-3), {})
    deadline = time.monotonic() + 60
    search = Search(job, CLUSTER, 5 * GB, "step_time", None, deadline, lambda line: None)
    search.compiler = Compiler(search, size)
    shared = microbatches_by_tokens(num_rows, CLUSTER, microbatches)
    whole = shared.pop(1, [])
    search.run(enumerate_candidates(CLUSTER, tuple(losses), whole, False, tokens=shared))
    return Plans(CLUSTER, 5 * GB, ranked(search), 0, tuple(search.notes), 0, 0)


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        (16, {1: [1, 2], 2: [4], 4: [8]}),
        (8, {1: [1], 2: [2], 4: [4]}),
        (4, {2: [1], 4: [2]}),
        (2, {4: [1]}),
        (24, {1: [1], 2: [2], 4: [4]}),
        (6, {4: [1]}),  # three rows for each group of four, which 2 and 4 do not divide
        (1, {}),
    ],
)
def test_as_few_devices_share_a_row_as_micro_batches_need(num_rows, expected):
    found = microbatches_by_tokens(num_rows, CLUSTER, (1, 2, 4, 8))
    assert found == expected
    for num, numbers in found.items():
        for k in numbers:
            assert math.gcd(num_rows, CLUSTER.num_devices // num * k) == 8 // num * k


def test_what_is_enumerated():
    cluster = dataclasses.replace(CLUSTER, host_memory=1e12)
    plans = [*enumerate_candidates(cluster, ("",), (1,), True, tokens={2: [2], 4: [4]})]
    shared = [x for x in plans if x.tokens > 1]
    assert {(x.tokens, x.microbatches) for x in shared} == {(2, 2), (4, 4)}
    assert {x.preset for x in shared} == {"zero3", "hsdp", "zeropp"}
    assert {x.offload for x in shared} == {"", "optimizer", "all"}
    assert "zero3, prefetch 1, 2 micro-batches, tokens over 2" in {x.name for x in shared}
    assert len({x.program for x in plans}) > len({x.program for x in shared})
    assert [*enumerate_candidates(cluster, ("",), (), False, layers="layers", tokens={4: [1]})]


@pytest.mark.usefixtures("fake_devices")
@pytest.mark.ci
def test_rows_that_do_not_fit_are_shared():
    """16 GB of activations for each row: a quarter fits, so four devices share each."""
    plans = searched({"": loss}, 8)
    assert (plans.tokens, plans.microbatches) == (4, 4)
    assert "jz.make_mesh(nodes=2, tokens=4)" in plans.code
    assert searched({"": loss}, 8, size=1).tokens is None
    # The answer, pasted, is a step.
    names = {"jz": jz, "dataclasses": dataclasses, "loss_fn": loss}
    with jax.enable_x64(True):
        batch = np.random.default_rng(1).normal(size=rows(8).shape)
        params = jax.tree.map(lambda x: x.astype(jnp.float64), init())
        exec(plans.code, names)
        value, grads = jax.jit(names["loss_and_grads"])(names["zero"].shard(params), batch)
        one_device = jax.value_and_grad(functools.partial(loss, split=lambda x: x))
        want, want_grads = jax.jit(one_device)(params, batch)
        np.testing.assert_allclose(value, want, rtol=1e-12)
        found, wanted = names["zero"].unshard(grads)["layers"], want_grads["layers"]
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12 * abs(wanted).max())


@pytest.mark.usefixtures("fake_devices")
def test_losses_that_split_no_tokens_have_no_such_plans():
    plans = searched({"alone": by_token}, 8, size=1)
    assert {row.candidate.tokens for row in plans.rows} == {1}
    assert not plans.notes
    both = searched({"alone": by_token, "shared": loss}, 2, microbatches=(1,), size=1)
    assert {(row.candidate.loss, row.candidate.tokens) for row in both.rows} == {("shared", 4)}
    assert any("alone" in note and "jz.split_tokens" in note for note in both.notes)
    with pytest.raises(NotImplementedError, match="by `jz.split_tokens` in each layer. Without"):
        searched({"": by_token}, 2)


@pytest.mark.usefixtures("fake_devices")
def test_bounds_are_those_of_a_device():
    """The same bytes enter a node, whoever shares rows in it; all its devices compute."""
    job = Job({"": loss}, init, rows(8), optax.sgd(1e-3), {})
    found = enumerate_candidates(CLUSTER, ("",), (1,), False, tokens={2: [1]})
    plans = {x.tokens: x for x in found if x.name.startswith("zero3, prefetch 1")}
    bounds = {}
    for num, plan in plans.items():
        one = bounder.Bounder(job, CLUSTER, is_absent=True).bounds(plan)
        assert isinstance(one, Bounds)
        bounds[num] = one
    assert bounds[2].node_bytes == bounds[1].node_bytes
    assert bounds[2].memory == bounds[1].memory


@pytest.mark.usefixtures("fake_devices")
def test_operations_are_those_of_all_devices():
    zero = jz.Zero(jz.make_mesh(nodes=2, tokens=4))
    step = zero.value_and_grad(by_token)
    counted = matrix_flops(step, zero.abstract(init), rows(8))
    assert counted == 2 * 3 * (2 * 8 * TOKENS * WIDTH * WIDTH)  # layers, products of each
