"""Losses written with other libraries: gradients equal those of one device.

They come with the extra `zoo`. What such libraries do with the types of arrays, with custom
primitives and with loops is beyond what our own models would think of. Solvers run in float64,
where how often they iterate cannot hide an error.
"""

import importlib

import jax
import pytest

import jaxzero as jz
from tests import zoo

pytest.importorskip("diffrax", reason="needs jaxzero[zoo]")

for theme in ("solvers", "densities", "networks"):
    importlib.import_module(f"tests.zoo._third_party_{theme}")

# They promote dtypes and ranks as JAX does by default.
pytestmark = [pytest.mark.slow, pytest.mark.standard_promotion]

_MESHES = ("2x4-auto", "2x3-explicit", "2x3-auto", "2x4-explicit")  # 2x3 pads everything
_IN_DOUBLE = ("diffrax", "equinox", "optimistix", "lineax")


@pytest.fixture(autouse=True)
def _ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


# Compiling takes longest where a solver has many stages. These are left to `.ci/run` altogether,
# and what else is left to it for the others is, for them, `make test-exhaustive`.
_COSTLY = {
    "diffrax_neural_ode",
    "diffrax_neural_ode_with_adaptive_steps",
    "diffrax_neural_ode_solved_backwards",
    "diffrax_neural_sde",
    "flowjax_spline_coupling_flow",
    "optimistix_least_squares",
}
_QUANTISED_ALWAYS = {"lineax_dense_solve", "haiku_with_state", "numpyro_elbo"}


def _each(turn, always):
    """(case, mesh) for every case; `turn` says which mesh it meets."""
    meshes = {name: _MESHES[(i + turn) % 4] for i, name in enumerate(zoo.THIRD_PARTY)}
    for name, mesh in meshes.items():
        rank = (name not in always) + (name in _COSTLY)
        marks = [(), pytest.mark.ci, pytest.mark.exhaustive][rank]
        yield pytest.param(name, mesh, id=f"{name}-{mesh}", marks=marks)


_TWO_MESHES = [*_each(0, zoo.THIRD_PARTY), *_each(1, ())]


@pytest.mark.parametrize(("name", "mesh"), _TWO_MESHES)
@pytest.mark.one_in(3)
def test_gradients_equal_those_of_one_device(name, mesh):
    dtype = "float64" if name.startswith(_IN_DOUBLE) else "float32"
    zoo.check(zoo.THIRD_PARTY[name], jz.Zero(zoo.make_mesh(mesh)), dtype)


@pytest.mark.parametrize(("name", "mesh"), list(_each(2, _QUANTISED_ALWAYS)))
@pytest.mark.one_in(2)
def test_quantised_gradients_are_within_the_codecs_error(name, mesh):
    zero = jz.Zero(zoo.make_mesh(mesh), zoo.PRESETS["zeropp"])
    zoo.check_quantised(zoo.THIRD_PARTY[name], zero)
