"""`jaxzero train --plan auto`: what the planner chooses for these devices is what is trained."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh
from rich.console import Console

import jaxzero as jz
from jaxzero import jobs

pytestmark = pytest.mark.standard_promotion  # optax


def planned(settings: jobs.Train, console: Console, *, quantized: bool = False) -> jz.ZeroConfig:
    """The config that a job with these settings trains with."""
    setup = jobs.set_up(
        settings.checkpoint,
        settings.devices,
        jobs.Sharding(plan="auto", plan_quantized=quantized),
        settings.optimization,
        max_tokens=settings.data.max_tokens,
        console=console,
    )
    return setup.zero.config


def cluster_of(mesh: Mesh, link: float, memory: float) -> jz.Cluster:
    device = jz.Device(
        name="fake",
        flops=1e15,
        memory_bandwidth=1e12,
        memory=memory,
        local_link=1e11,
        host_link=1e10,
    )
    return jz.Cluster(nodes=mesh.shape["node"], local=mesh.shape["local"], device=device, link=link)


@pytest.fixture
def measured(monkeypatch):
    """Sets the rates that are taken as measured."""

    def set_rates(link: float, memory: float = 1e12):
        monkeypatch.setattr(jz.Cluster, "measured", lambda mesh: cluster_of(mesh, link, memory))

    return set_rates


def test_slow_links_between_nodes_are_spared(settings, console, measured):
    measured(1e6)
    config = planned(settings, console, quantized=True)
    assert config.gradients == jz.zeropp4().gradients and config.needs_wire_state
    text = console.export_text()
    assert "Plan: zeropp4" in text and "0.001 GB/s into a node" in text
    assert "ranked by lower bounds alone" in text


@pytest.mark.parametrize(("link", "is_slow"), [(1e8, True), (1e12, False)])
def test_wire_state_is_chosen_for_slow_links_only(link, is_slow):
    """Between slow links zeropp4 saves time; between fast ones its state is held for nothing."""
    mesh = jz.make_mesh(nodes=2)

    def loss(params, rows):
        return jnp.mean((rows @ params["up"] @ params["down"]) ** 2)

    plans = jz.tune(
        loss,
        lambda: {name: jnp.zeros((512, 512)) for name in ("up", "down")},
        jax.ShapeDtypeStruct((mesh.size, 512), jnp.float32),
        cluster_of(mesh, link, 1e12),
        tx=optax.adam(1e-3),
        microbatches=(1,),
        activation_budgets=False,
    )
    assert plans.best.candidate.config.needs_wire_state == is_slow


def test_nothing_is_quantized_unless_asked(settings, console, measured):
    measured(1e6)  # where zeropp4 would be chosen
    config = planned(settings, console)
    exact = jz.PerAxis()
    assert (config.weights, config.gradients, config.hpz) == (exact, exact, None)
    assert "zeropp" not in console.export_text()


def test_a_model_that_does_not_fit_is_refused(settings, console, measured):
    measured(1e9, memory=1e3)
    with pytest.raises(ValueError, match="No plan fits"):
        planned(settings, console)


def test_other_choices_beside_it_are_refused():
    with pytest.raises(ValueError, match="`plan` auto chooses `wire`; got 'float32'"):
        jobs.Sharding(plan="auto", wire="float32")
    with pytest.raises(ValueError, match="`plan_quantized` needs `plan` auto"):
        jobs.Sharding(plan_quantized=True)
    with pytest.raises(ValueError, match="`local_steps` does not go with `plan` auto"):
        jobs.Train(
            sharding=jobs.Sharding(plan="auto"),
            local=jobs.LocalOptions(local_steps=4),
            optimization=jobs.Optimization(steps=4),
        )
