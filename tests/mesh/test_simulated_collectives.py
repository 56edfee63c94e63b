"""Collectives of a simulated mesh against those of real devices."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxzero as jz

from .both_meshes import assert_same, make_meshes

AXES = ("node", "local")


def _gathers(x):
    for axes in (AXES, AXES[::-1], ("node",)):
        for tiled in (True, False):
            yield lax.all_gather(x, axes, axis=1, tiled=tiled)


def _scatters(x):
    num = lax.psum(1, AXES)
    yield lax.psum_scatter(x, AXES, scatter_dimension=1, tiled=True)
    yield lax.psum_scatter(x[:, :num], AXES, scatter_dimension=1)
    yield lax.psum_scatter(x, AXES[::-1], scatter_dimension=0, tiled=True)
    yield lax.psum_scatter(x, "local", scatter_dimension=0, tiled=True)


def _exchanges(x):
    num = lax.psum(1, AXES)
    for split, concat in ((0, 1), (1, 0), (1, 1)):
        yield lax.all_to_all(x, AXES, split, concat, tiled=True)
        yield lax.all_to_all(x, "local", split, concat, tiled=True)
        yield lax.all_to_all(x[:num, :num], AXES, split, concat)


def _permutes(x):
    num = lax.psum(1, AXES)
    yield lax.ppermute(x, AXES, [(i, (i + 1) % num) for i in range(num)])
    yield lax.ppermute(x, AXES, [(i, i - 1) for i in range(1, num)])  # one gets zeros
    yield lax.ppermute(x, "node", [(0, 0)])


@pytest.mark.parametrize("function", [_gathers, _scatters, _exchanges, _permutes])
def test_collectives_of_the_user(function):
    """Of values that differ between devices, only between nodes, and not at all."""

    def outputs(scale, x):
        apart = x * (1 + lax.axis_index(AXES)).astype(x.dtype)
        between = x * (1 + lax.axis_index("node")).astype(x.dtype)
        weight = jnp.round(scale[0]) * jnp.ones(x.shape, x.dtype)
        return [list(function(value)) for value in (apart, between, weight)]

    x = np.arange(24 * 24, dtype=np.float32).reshape(1, 24, 24)
    results = []
    for each in make_meshes("2x3"):
        zero = jz.Zero(each)
        scale = zero.shard(np.full((24,), 3, np.float32))
        rows = np.repeat(x, each.size, axis=0)
        run = zero.apply(lambda scale, x: outputs(scale, x[0]), out_reduce="stack")
        results.append(run(scale, rows))
    assert_same(results)


def test_collectives_that_vmap_gets_wrong_are_refused():
    def in_groups(params, x):
        return lax.all_gather(x, "local", axis_index_groups=[[0], [1]])

    def at_once(params, x):
        def gather(x):
            return lax.all_gather(x, AXES)

        return lax.cond(x[0, 0] > 0, gather, lambda x: jnp.zeros((4, *x.shape)), x)

    def one_after_the_other(params, x):
        def gather(x):
            return lax.all_gather(lax.all_gather(x, "local"), "node")

        return lax.cond(x[0, 0] > 0, gather, lambda x: jnp.zeros((2, 2, *x.shape)), x)

    zero = jz.Zero(jz.make_mesh(2, simulate=4))
    params, rows = zero.shard(np.ones((4,), np.float32)), np.ones((4, 2), np.float32)
    with pytest.raises(NotImplementedError, match=r"`all_gather` over .* inside `cond`.*outside"):
        zero.apply(at_once, out_reduce="first")(params, rows)
    with pytest.raises(NotImplementedError, match=r"`all_gather` with `axis_index_groups`"):
        zero.apply(in_groups, out_reduce="first")(params, rows)
    got = zero.apply(one_after_the_other, out_reduce="first")(params, rows)
    np.testing.assert_array_equal(got, np.ones((2, 2, 1, 2)))
