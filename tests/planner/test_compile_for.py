"""A profile of predicted durations, and programs that have no use for one."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxzero as jz
from jaxzero._hlo import Rates, durations
from tests.report.test_timeline import _HLO


def test_durations_are_those_of_the_timeline():
    """In microseconds: 1 ms for 4096 bytes inside a node or 8192 into it, and 1 ms to start."""
    rates = Rates(flops=1e12, memory=8192e3, local=4096e3, node=8192e3, num_local=2, launch=1e-3)
    profile = durations(_HLO, rates)
    found = dict(re.findall(r'costs { name: "(\S+)" cost_us: (\S+) }\n', profile))
    assert set(found) == {"s", "y", "done", "z", "loop"}
    assert {name: float(x) for name, x in found.items()} == pytest.approx(
        {"s": 2000, "y": 1000, "done": 0, "z": 2000, "loop": 5 * 4000}
    )


def test_a_loop_of_unknown_length_has_no_duration():
    with pytest.raises(ValueError, match="no known trip count"):
        durations(_HLO.replace("known_trip_count", "other"), Rates(num_local=2))


def test_a_program_for_cpus_is_refused():
    lowered = jax.jit(jnp.sin).lower(jnp.ones(8))
    with pytest.raises(ValueError, match=r"`lowered` must be a program for GPUs; it is for cpu"):
        jz.compile_for(lowered, jz.Cluster(nodes=1, local=1))
