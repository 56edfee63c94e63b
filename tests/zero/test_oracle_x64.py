"""The same as `test_oracle.py` in float64, where nothing can hide behind rounding.

Every third model, to keep the suite short; `make test-exhaustive` runs the others.
"""

import pytest

import jaxzero as jz
from tests import zoo

pytestmark = pytest.mark.slow


def _parameter(name, mesh, always):
    # Flax asks what float32 and the input's dtype promote to, which "strict" refuses.
    is_flax = name.startswith(("nnx_", "linen_"))
    marks = [pytest.mark.standard_promotion] if is_flax else []
    marks += [] if always else [pytest.mark.exhaustive]
    return pytest.param(name, mesh, id=f"{name}-{mesh}", marks=marks)


@pytest.mark.parametrize(("name", "mesh"), [_parameter(*each) for each in zoo.rotation("float64")])
@pytest.mark.one_in(6)
def test_gradients_equal_the_oracle_in_float64(name, mesh):
    zoo.check(zoo.CASES[name], jz.Zero(zoo.make_mesh(mesh)), "float64")
