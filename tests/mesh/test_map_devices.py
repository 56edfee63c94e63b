"""Pieces of arrays on a simulated mesh against those of real devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxzero._mesh.mesh import AXES, map_devices

from .both_meshes import assert_same, make_meshes


@pytest.mark.parametrize("mesh", ["2x4", "2x3", "1x8", "8x1", "1x1"])
def test_devices_get_and_give_the_same_pieces(mesh):
    specs = [
        P(("local", "node")),
        P(("node", "local")),
        P(None, ("local", "node")),
        P("local", None, "node"),
        P("node", "local"),
        P(None, "node"),
        P(None, None, ("local",)),
        P(),
    ]
    x = np.arange(24 * 24 * 24, dtype=np.float32).reshape(24, 24, 24)

    def on_device(xs):
        number = lax.axis_index(AXES).astype(jnp.float32)
        same = [x + 1 for x in xs]
        return {"own": [x * number for x in xs[:-1]], "same": (same, None)}

    results = [
        jax.jit(
            map_devices(
                on_device,
                each,
                in_specs=(specs,),
                out_specs={"own": specs[:-1], "same": (specs, P())},
            )
        )([x] * len(specs))
        for each in make_meshes(mesh)
    ]
    # What is not split is the first device's, on a real mesh as well.
    assert_same(results)
