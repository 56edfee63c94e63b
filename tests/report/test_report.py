"""The report's bytes are those that the arrays take."""

import io

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

import jaxzero as jz

pytestmark = pytest.mark.standard_promotion  # optax


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_are_those_of_the_arrays(stage):
    zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:6]), jz.ZeroConfig(stage=stage))
    tree = {"w": np.ones((7, 5), np.float32), "b": np.ones(12, np.float32), "s": np.float32(1)}
    params = zero.shard(tree)
    opt_state = zero.init_optimizer(optax.adam(1e-3), params)
    report = zero.report(params, opt_state)
    for kind, arrays in (("parameters", params), ("optimizer state", opt_state)):
        leaves = jax.tree.leaves(arrays)
        held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
        assert report.device_bytes(kind) == held
    assert report.total_bytes("parameters") == sum(x.nbytes for x in tree.values())
    assert report.as_dict()["bytes"]["parameters"]["per_device"] == report.device_bytes(
        "parameters"
    )


def test_it_prints():
    zero = jz.Zero(jz.make_mesh(2))
    out = io.StringIO()
    zero.report(zero.shard({"kernel": np.ones((7, 5), np.float32)})).print(Console(file=out))
    assert "kernel" in out.getvalue()
    assert "dim 0" in out.getvalue()
