"""One `Zero` on each mesh of the tests of the front door."""

from __future__ import annotations

import pytest

import jaxzero as jz
from tests import zoo

_MESHES = ("2x4-explicit", "2x3-auto")  # and "2x4-auto", where one mesh is enough


@pytest.fixture(scope="module", params=_MESHES)
def zero(request):
    return jz.Zero(zoo.make_mesh(request.param))


@pytest.fixture(scope="module")
def auto():
    return jz.Zero(zoo.make_mesh("2x4-auto"))
