"""Rates of the devices that are here."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

import jaxzero as jz
from jaxzero._planner import measured


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_rate_is_measured(nodes):
    mesh = jz.make_mesh(nodes, devices=jax.devices()[:4])
    cluster = jz.Cluster.measured(mesh)
    rates = cluster.rates
    assert (cluster.nodes, cluster.local) == (nodes, 4 // nodes)
    assert cluster.kind.target is None  # no compiler for CPUs that are not here
    # Wide enough for any machine: a rate in the wrong unit is outside.
    assert 1e7 < rates.flops < 1e14
    for rate in (rates.memory, rates.local, rates.node, rates.host):
        assert 1e6 < rate < 1e13
    assert 1e6 < cluster.kind.memory < 1e13


def test_a_slow_program_is_a_slow_rate():
    def slow():
        time.sleep(0.02)
        return jnp.zeros(1)

    assert 0.02 <= measured._slowest(slow) < 2
