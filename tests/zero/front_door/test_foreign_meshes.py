"""Arrays, and the mesh of `jax.set_mesh`, that belong to another mesh than that of `zero`."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from tests import zoo

from .helpers import assert_equal, make_rows, mean_loss, on_one_device, whole_params


@pytest.fixture
def other():
    return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))


def test_arrays_of_an_explicit_mesh_are_sharded(auto, other):
    whole = whole_params()
    split = {**whole, "table": jax.device_put(whole["table"], NamedSharding(other, P("fsdp")))}
    zoo.assert_close(auto.unshard(auto.shard(split)), whole, 0, "params")


def test_what_an_explicit_mesh_has_gathered_is_sharded_again():
    zero = jz.Zero(zoo.make_mesh("2x4-explicit"))
    whole = zero.unshard(zero.shard(whole_params()))
    zoo.assert_close(zero.unshard(zero.shard(whole)), whole_params(), 0, "params")


@pytest.mark.parametrize("spec", [P("fsdp"), P()])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f])
def test_a_batch_of_another_explicit_mesh_is_refused(auto, other, spec, wrap):
    x = jax.device_put(make_rows(auto), NamedSharding(other, spec))
    step = wrap(auto.value_and_grad(mean_loss))
    with pytest.raises(ValueError, match=r"`x`.*another mesh.*zero\.batch_spec"):
        step(auto.shard(whole_params()), x)


def test_parameters_of_another_explicit_mesh_are_refused(auto, other):
    auto.shard(whole_params())
    table = jax.device_put(whole_params()["table"], NamedSharding(other, P("fsdp")))
    with pytest.raises(ValueError, match=r"leaf `table`.*another mesh.*`zero\.shard"):
        jax.jit(auto.value_and_grad(mean_loss))({**whole_params(), "table": table}, make_rows(auto))


def test_the_mesh_of_zero_may_be_set(auto):
    with jax.set_mesh(auto.mesh):
        params = auto.shard(whole_params())
        got = jax.jit(auto.value_and_grad(mean_loss))(params, make_rows(auto))
        want = on_one_device(mean_loss)(whole_params(), np.asarray(make_rows(auto)))
        assert_equal(auto, got, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_another_mesh_that_is_set_is_refused(auto, kind):
    params, x = auto.shard(whole_params()), np.asarray(make_rows(auto))
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(kind,))):
        with pytest.raises(ValueError, match=r"node=2, local=4.*data=8.*jax\.set_mesh\(zero\.mesh"):
            jax.jit(auto.value_and_grad(mean_loss))(params, x)
        if kind == AxisType.Explicit:  # a key that is made here has this mesh in its type
            with pytest.raises(ValueError, match=r"node=2, local=4.*data=8"):
                auto.init(lambda key: jax.random.normal(key, (8, 4)), jax.random.key(0))
            with pytest.raises(ValueError, match=r"node=2, local=4.*data=8"):
                auto.init_optimizer(optax.adam(1e-3), params)
