"""Compiling for absent GPUs: how near a proxy is, and what is kept on disk."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxzero as jz
from benchmarks.compiled._h200 import h200_mesh
from benchmarks.shared import _llama
from jaxzero import tune
from jaxzero._hlo import timeline
from jaxzero._planner.bounder import Bounder
from jaxzero._planner.candidates import enumerate_candidates
from jaxzero._planner.compiles import Compiler
from jaxzero._planner.job import Job
from jaxzero._planner.ranking import ranked
from jaxzero._planner.search import Search

pytestmark = pytest.mark.standard_promotion
CLUSTER = jz.Cluster(nodes=1, local=2, device="h100")


@pytest.fixture(scope="module", autouse=True)
def _needs_compiler():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")
    jax.config.update("jax_platforms", "cpu")  # or JAX, finding no GPU, drops its compiler too


def init():
    return {"layers": jnp.ones((2, 256, 256))}


def loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"])
    return jnp.mean(x**2)


def test_proxies_and_the_disk(tmp_path):
    batch = jax.ShapeDtypeStruct((2**18, 256), jnp.float32)
    job = Job({"": loss}, init, batch, optax.sgd(1e-3), {})
    candidates = enumerate_candidates(CLUSTER, ("",), (1, 2, 4, 8), False)
    candidate = next(x for x in candidates if x.preset == "zero3")
    compiler = Compiler(job, CLUSTER, tmp_path)
    full = compiler.compile(candidate, is_proxy=False)
    proxy = compiler.compile(candidate, is_proxy=True)
    assert full.temporary > 0
    assert abs(proxy.temporary - full.temporary) < 0.02 * full.temporary
    assert full.seconds_to_compile > 0
    # Autotuning, which is left out, changes how kernels are unrolled, and nothing that is read.
    tuned = compiler._lowered(candidate).compile(compiler_options=jz.compiler_options("cuda"))
    assert tuned.memory_analysis().temp_size_in_bytes == full.temporary
    rates = CLUSTER.rates
    assert timeline(tuned.as_text(), rates).seconds == full.timeline(rates).seconds

    again = Compiler(job, CLUSTER, tmp_path)
    known = again.compile(candidate, is_proxy=True)
    assert known.seconds_to_compile == 0
    assert (known.text, known.temporary) == (proxy.text, proxy.temporary)

    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    assert again.compile(candidate, is_proxy=True).seconds_to_compile > 0
    assert again.compile(candidate, is_proxy=True).seconds_to_compile == 0


def test_one_row_for_two_devices():
    """The program that is compiled computes half of the tokens on each."""

    def shared(params, batch):
        def layer(x, w):
            return jnp.tanh(jz.split_tokens(x) @ w), None

        return jnp.mean(jax.lax.scan(layer, batch, params["layers"])[0] ** 2)

    batch = jax.ShapeDtypeStruct((1, 2048, 256), jnp.float32)
    job = Job({"": shared}, init, batch, optax.sgd(1e-3), {})
    candidates = enumerate_candidates(CLUSTER, ("",), (), False, tokens={2: [1]})
    candidate = next(x for x in candidates if x.preset == "zero3")
    text = Compiler(job, CLUSTER, None).compile(candidate, is_proxy=True).text
    assert "f32[1024,256]" in text and "2048,256]" not in text


def test_the_key_on_disk_has_the_device(tmp_path):
    """The program is emitted alike for both devices; what is compiled of it is not."""
    batch = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    job = Job({"": loss}, init, batch, optax.sgd(1e-3), {})
    found = []
    for device in ("h100", "h200"):
        cluster = jz.Cluster(nodes=1, local=2, device=device)
        candidate = next(enumerate_candidates(cluster, ("",), (1, 2, 4), False))
        compiler = Compiler(job, cluster, tmp_path)
        found.append((compiler.key(candidate), compiler.file_name(candidate, is_proxy=True)))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_the_step_of_local_steps_is_the_program_of_one_node(tmp_path):
    """It is compiled as for a cluster of one node, and shares that file on disk."""
    batch = jax.ShapeDtypeStruct((32, 256), jnp.float32)
    two = dataclasses.replace(CLUSTER, nodes=2)
    job = Job({"": loss}, init, batch, optax.sgd(1e-3), {})
    ways = (jz.diloco(every=4), jz.streaming_diloco(every=4, fragments=2, delay=1))
    found = list(enumerate_candidates(two, ("",), (1,), False, ways))
    first, second = (next(x for x in found if x.local_steps is way) for way in ways)
    compiler = Compiler(job, two, tmp_path)
    known = compiler.compile(first, is_proxy=True)
    assert known.seconds_to_compile > 0
    assert known.timeline(two.rates).node_bytes == 0
    assert compiler.compile(second, is_proxy=True).seconds_to_compile == 0

    alone = Compiler(job.of_one_node(2), CLUSTER, tmp_path)
    (same,) = (x for x in enumerate_candidates(CLUSTER, ("",), (1,), False) if x.name == "ddp")
    assert same == first.program[0]
    assert alone.compile(same, is_proxy=True).seconds_to_compile == 0


@pytest.fixture(scope="module")
def step():
    """A lowered step of ZeRO-3 whose messages take about as long as what it computes.

    It has XLA's own options: with `jz.compiler_options` nothing is left to gain here.
    """
    size = _llama.LlamaSize(layers=16, width=1024, hidden=2816, heads=8, vocabulary=4096)
    zero = jz.Zero(h200_mesh(2, 8))
    params = zero.abstract(functools.partial(_llama.init, size), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((32, 2048), jnp.int32)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        function = zero.value_and_grad(functools.partial(_llama.loss, size))
        return jax.jit(function).lower(params, tokens)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="there XLA estimates durations itself")
def test_a_scheduler_that_knows_durations_waits_less(step):
    cluster = jz.Cluster(nodes=2, local=8, device="h200", link=25e9)
    before = timeline(step.compile().as_text(), cluster.rates)
    after = timeline(jz.compile_for(step, cluster).as_text(), cluster.rates)
    assert after.launches == before.launches
    assert after.seconds <= 0.9 * before.seconds


def test_a_cluster_of_another_size_is_refused(step):
    with pytest.raises(ValueError, match=r"`cluster` has 8 devices \(2 x 4\); `lowered` is for 16"):
        jz.compile_for(step, jz.Cluster(nodes=2, local=4))


ROWS, TOKENS, WIDTH, LAYERS = 32, 256, 512, 6


def mixer(width=WIDTH):
    """An MLP-mixer, which no estimate was set on."""
    z = jnp.zeros
    return {
        "patches": z((48, width)),
        "blocks": {
            "tokens": z((LAYERS, TOKENS, TOKENS)),
            "up": z((LAYERS, width, 4 * width)),
            "down": z((LAYERS, 4 * width, width)),
            "scale": z((LAYERS, width)),
        },
        "head": z((width, 1000)),
    }


def classify(params, batch, wrapped=jax.checkpoint):
    def block(x, w):
        w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
        x = x + jnp.einsum("btc,c,ts->bsc", x, w["scale"], w["tokens"])
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x = batch["patches"] @ params["patches"].astype(jnp.bfloat16)
    x, _ = jax.lax.scan(wrapped(block), x, params["blocks"])
    logits = jnp.mean(x.astype(jnp.float32), axis=1) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["classes"]).mean()


def test_the_choice_is_the_best_of_all_compiled_plans(tmp_path):
    """Within 2%, where stages are best, at 1.25 GB/s into a node, and where they are not."""
    batch = {
        "patches": jax.ShapeDtypeStruct((ROWS, TOKENS, 48), jnp.bfloat16),
        "classes": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    }
    job = Job({"": classify}, mixer, batch, optax.adamw(1e-4), {})
    slow = jz.Cluster(nodes=2, local=2, device="h100", link=1.25e9)
    candidates = list(enumerate_candidates(slow, ("",), (2,), quantized=False, layers="blocks"))
    compiler = Compiler(job, slow, tmp_path)
    compiled = {x.name: compiler.compile(x, is_proxy=False) for x in candidates}
    for link, has_stages in ((1.25e9, True), (400e9, False)):
        cluster = dataclasses.replace(slow, link=link)
        bounder = Bounder(job, cluster, is_absent=True)
        seconds = {
            x.name: bounder.bounds(x).predicted(
                compiled[x.name].timeline(cluster.rates).seconds, 0.0
            )[0]
            for x in candidates
        }
        plans = tune(
            classify,
            mixer,
            batch,
            cluster,
            quantized=False,
            microbatches=(2,),
            layers="blocks",
            activation_budgets=False,
            cache=tmp_path,
        )
        assert seconds[plans.best.candidate.name] <= 1.02 * min(seconds.values())
        assert (plans.stages is not None) == has_stages
        restricted = min(seconds[x.name] for x in candidates if x.stages == 1)
        assert (min(seconds.values()) < 0.8 * restricted) == has_stages


def test_a_budget_is_chosen_where_it_is_best(tmp_path):
    """Of all compiled plans that fit in 60% of what the loss keeps by itself, or within 3%."""
    batch = {
        "patches": jax.ShapeDtypeStruct((8 * ROWS, TOKENS, 48), jnp.bfloat16),
        "classes": jax.ShapeDtypeStruct((8 * ROWS,), jnp.int32),
    }
    loss = functools.partial(classify, wrapped=lambda block: block)
    # At this width a matrix product takes longer than to write and read its result, so that several
    # budgets differ.
    wide = functools.partial(mixer, 4 * WIDTH)
    job = Job({"": loss}, wide, batch, optax.adamw(1e-4), {})
    search = Search(
        job, CLUSTER, 1e12, "step_time", None, 0.0, lambda line: None, tries_budgets=True
    )
    candidates = enumerate_candidates(CLUSTER, ("",), (1,), False)
    search._bound([x for x in candidates if x.name == "zero3, prefetch 1"])
    compiler = Compiler(job, CLUSTER, tmp_path)
    memory, seconds = {}, {}
    for x, bounds in search.bounds.items():
        compiled = compiler.compile(x, is_proxy=False)
        memory[x] = bounds.with_temporaries(compiled.temporary)
        seconds[x] = bounds.predicted(compiled.timeline(CLUSTER.rates).seconds, 0.0)[0]
    whole = next(x for x in memory if x.activation_budget is None)
    limit = 0.6 * memory[whole]
    assert len(memory) > 2 and memory[whole] == max(memory.values())
    search = dataclasses.replace(search, compiler=compiler, limit=limit, deadline=math.inf)
    search.run([])
    best = ranked(search)[0].candidate
    assert best.activation_budget is not None
    assert seconds[best] <= 1.03 * min(seconds[x] for x in seconds if memory[x] <= limit)
