"""Line searches on padded leaves: `grad` and `value_fn` in true shapes, as on one device."""

import warnings

import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

from .optax_updates import assert_equal_to_one_device

pytestmark = pytest.mark.standard_promotion

SHAPES = {"up": (8, 25), "bias": (25,), "down": (25, 16)}  # 6 devices divide no dim of these
OPTIMIZERS = {
    "lbfgs": optax.lbfgs(),
    "backtracking": optax.chain(
        optax.sgd(4.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=20)
    ),
    "backtracking_with_gradients": optax.chain(
        optax.sgd(4.0),
        optax.scale_by_backtracking_linesearch(max_backtracking_steps=20, store_grad=True),
    ),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("lbfgs", "2x3-auto"),
        ("backtracking_with_gradients", "2x3-explicit"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("lbfgs", "2x3-explicit"),
                ("backtracking", "2x3-auto"),
                ("backtracking", "2x3-explicit"),
                ("backtracking_with_gradients", "2x3-auto"),
            )
        ),
    ],
)
def test_updates_equal_those_on_one_device(name, mesh):
    extras = ("value", "grad", "value_fn")
    assert_equal_to_one_device(
        name, OPTIMIZERS[name], extras, mesh, SHAPES, num_updates=3, is_wrapped=True
    )


def test_a_line_search_is_tried_on_padded_leaves_without_a_warning():
    zero = jz.Zero(zoo.make_mesh("2x3-auto"))
    params = zero.shard({leaf: np.ones(shape, np.float32) for leaf, shape in SHAPES.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero.init_optimizer(OPTIMIZERS["backtracking"], params)
