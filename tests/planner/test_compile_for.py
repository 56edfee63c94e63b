"""Programs that have no use for predicted durations."""

import jax
import jax.numpy as jnp
import pytest

import jaxzero as jz


def test_a_program_for_cpus_is_refused():
    lowered = jax.jit(jnp.sin).lower(jnp.ones(8))
    with pytest.raises(ValueError, match=r"`lowered` must be a program for GPUs; it is for cpu"):
        jz.compile_for(lowered, jz.Cluster(nodes=1, local=1))
