"""One `Zero`, and checkpoints of it, for tests of what goes wrong with them."""

import shutil

import jax
import pytest

import jaxzero as jz

from .saved import make_state


@pytest.fixture(scope="module")
def zero():
    return jz.Zero(jz.make_mesh(1, devices=jax.devices()[:2]))


@pytest.fixture(scope="module")
def source(zero, tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    with jz.Checkpoints(directory, zero) as checkpoints:
        for step in (20, 40):
            checkpoints.save(step, make_state(zero, step), extra={"step": step})
    return directory


@pytest.fixture
def directory(source, tmp_path):
    """Checkpoints of steps 20 and 40."""
    return shutil.copytree(source, tmp_path / "checkpoints")
