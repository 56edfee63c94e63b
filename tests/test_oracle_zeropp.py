"""The zoo under the presets of ZeRO++: gradients are as right as their codecs allow.

How far off a right gradient may be is derived in `zoo/_quantised.py`.
"""

import pytest
import zoo

import jaxzero as jz

pytestmark = pytest.mark.slow

_EACH = [
    pytest.param(
        name,
        preset,
        mesh,
        id=f"{name}-{preset}-{mesh}",
        marks=() if always else (pytest.mark.exhaustive,),
    )
    for name, preset, mesh, always in zoo.preset_rotation(tuple(zoo.PRESETS))
]


@pytest.mark.parametrize(("name", "preset", "mesh"), _EACH)
def test_gradients_are_within_the_codecs_error(name, preset, mesh):
    zoo.check_quantised(zoo.CASES[name], jz.Zero(zoo.make_mesh(mesh), zoo.PRESETS[preset]))
