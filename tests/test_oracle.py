"""Sharded gradients equal those of `jax.value_and_grad` on one device, for a zoo of models.

Here in float32; in float64, where nothing can hide behind rounding, in `test_oracle_x64.py`.
Each model runs on two meshes, one in each file; which ones goes round.
"""

import collections

import pytest
import zoo

import jaxzero as jz

pytestmark = pytest.mark.slow

_ROTATION = zoo.rotation("float32")


@pytest.mark.parametrize(("name", "mesh"), _ROTATION, ids=[f"{n}-{m}" for n, m in _ROTATION])
def test_gradients_equal_the_oracle(name, mesh):
    zoo.check(zoo.CASES[name], jz.Zero(zoo.make_mesh(mesh)))


def test_rotation_takes_every_model_to_two_meshes_and_every_mesh_to_four_models():
    pairs = _ROTATION + zoo.rotation("float64")
    models = collections.Counter(mesh for _, mesh in pairs)
    sizes = ("1x1", "1x8", "2x4", "4x2", "8x1", "2x3", "3x2", "2x2x2")
    for mesh in (f"{size}-{kind}" for size in sizes for kind in ("auto", "explicit")):
        assert models[mesh] >= 4, f"{mesh} meets {models[mesh]} models"
    assert set(collections.Counter(name for name, _ in set(pairs)).values()) == {2}
    assert {name for name, _ in pairs} == set(zoo.CASES)
