"""The zoo under the presets of ZeRO++: gradients are as right as their codecs allow.

How far off a right gradient may be is derived in `zoo/_quantised.py`.
"""

import jax
import numpy as np
import pytest

import jaxzero as jz
from tests import zoo

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
@pytest.mark.one_in(3)
def test_gradients_are_within_the_codecs_error(name, preset, mesh):
    zoo.check_quantised(zoo.CASES[name], jz.Zero(zoo.make_mesh(mesh), zoo.PRESETS[preset]))


@pytest.mark.parametrize(
    "name",
    ["cond_on_data_of_one_example", "cond_on_weights_with_operands", "switch_that_picks_weights"],
)
def test_a_wrong_gradient_is_off_by_more(name):
    case = zoo.CASES[name]
    trees, batch = zoo.arguments(case, "float32")
    (_, right), sizes = zoo.expected_and_sizes(case, trees, batch, 8)
    zoo.assert_within(right, right, sizes)
    for factor in (0.0, 0.5, -1.0):
        wrong = jax.tree.map(lambda x, factor=factor: np.asarray(x * factor, x.dtype), right)
        with pytest.raises(AssertionError, match="allowed"):
            zoo.assert_within(wrong, right, sizes)
