"""Parts of models by themselves."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxzero.models._parts import dropout


def test_dropout_keeps_the_mean():
    x = jnp.full((1000,), 3.0)
    dropped = dropout(x, 0.2, jax.random.key(0))
    np.testing.assert_allclose(np.unique(dropped), [0, 3 / 0.8], rtol=1e-6)
    # Of 1000 draws: within 5 standard deviations.
    assert abs(np.mean(dropped == 0) - 0.2) < 5 * np.sqrt(0.2 * 0.8 / 1000)
    np.testing.assert_array_equal(dropout(x, 0.2, None), x)
