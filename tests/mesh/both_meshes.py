"""A real mesh and a simulated one of the same shape, and what both of them gave."""

import jax
import numpy as np

import jaxzero as jz
from tests import zoo


def make_meshes(name):
    """The real mesh and the simulated one."""
    nodes, local = map(int, name.split("x"))
    num = nodes * local
    real = jz.make_mesh(nodes, devices=jax.devices()[:num])
    return real, jz.make_mesh(nodes, simulate=num)


def assert_same(results, tolerance=0.0):
    real, simulated = jax.device_get(results)
    if tolerance:
        zoo.assert_close(simulated, real, tolerance, "simulated")
        return
    assert jax.tree.structure(real) == jax.tree.structure(simulated)
    for x, y in zip(jax.tree.leaves(real), jax.tree.leaves(simulated), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
