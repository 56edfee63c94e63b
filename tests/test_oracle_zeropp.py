"""The zoo under the presets of ZeRO++: gradients are as right as their codecs allow.

How far off a right gradient may be is derived in `zoo/_quantised.py`.
"""

import pytest
import zoo

import jaxzero as jz

pytestmark = pytest.mark.slow

_ROTATION = zoo.preset_rotation(tuple(zoo.PRESETS))


@pytest.mark.parametrize(
    ("name", "preset", "mesh"), _ROTATION, ids=["-".join(each) for each in _ROTATION]
)
def test_gradients_are_within_the_codecs_error(name, preset, mesh):
    zoo.check_quantised(zoo.CASES[name], jz.Zero(zoo.make_mesh(mesh), zoo.PRESETS[preset]))
