"""Which dim of a leaf is split over 8 devices, and what a user says about it."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero as jz


def _dim(shape):
    zero = jz.Zero(jz.make_mesh(2))
    parameters, _ = zero.report(zero.abstract(lambda: jnp.zeros(shape))).rows
    return parameters.dim


def test_a_stack_of_layers_keeps_its_first_dim_whole():
    assert _dim((24, 1024, 4096)) == _dim((24, 1024)) == 1


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((512, 2048), 0),
        ((256, 2048), 0),
        ((248, 2048), 1),  # may be layers
        ((1001, 2048), 1),
        ((512, 1024, 2048), 1),  # experts, or a convolution
        ((4096, 32, 128), 0),  # a matrix whose features are cut into heads
        ((1001, 2049), 1),  # neither divides: the larger needs least padding
    ],
)
def test_of_the_long_dims_of_a_matrix_the_first_is_cut(shape, dim):
    assert _dim(shape) == dim


def test_specs_may_not_name_our_axes():
    zero = jz.Zero(jz.make_mesh(2))
    with pytest.raises(ValueError, match="`specs` may name only mesh axes other than"):
        zero.shard({"w": np.ones((8, 8), np.float32)}, specs=P("node"))


def test_small_leaves_can_stay_whole():
    zero = jz.Zero(jz.make_mesh(2), jz.ZeroConfig(param_persistence_threshold=100))
    params = zero.shard(
        {"small": np.ones((9, 11), np.float32), "large": np.ones((8, 16), np.float32)}
    )
    assert params["small"].sharding.spec == P()
    assert params["large"].sharding.spec == P(None, ("local", "node"))
