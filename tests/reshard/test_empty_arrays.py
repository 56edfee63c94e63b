"""Arrays without elements have nothing to move, whatever splits them."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from tests import zoo


def test_empty_arrays_get_their_sharding():
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    tree = {"a": np.zeros((8, 0), np.float32), "b": np.zeros((3, 0, 5), np.int32)}
    params = zero.shard(tree)
    specs = {"a": P("local"), "b": P()}
    str(jz.reshard_report(params, zero, specs=specs))
    served = jz.reshard(params, zero, specs=specs, dtype=jnp.bfloat16)
    assert served["a"].dtype == jnp.bfloat16 and served["b"].dtype == jnp.int32
    for name, x in served.items():
        assert x.shape == tree[name].shape
        assert x.sharding.is_equivalent_to(NamedSharding(zero.mesh, specs[name]), x.ndim)
