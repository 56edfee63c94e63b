"""A function cut where its values begin to depend on active parameters equals the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxzero._program import known_part, rest_part


def _function(active, frozen, batch):
    mask = (batch > 0).astype(batch.dtype)  # of the batch alone: computed again
    hidden = jnp.tanh(batch @ frozen["w"])
    jax.debug.print("hidden {x}", x=hidden[0, 0])
    return jnp.sum(jax.jit(lambda h, a: h @ a)(hidden, active) * mask @ frozen["out"])


def _trees():
    keys = jax.random.split(jax.random.key(0), 4)
    active, w, out, batch = (jax.random.normal(key, (3, 3)) for key in keys)
    return active, {"w": w, "out": out}, batch


def test_the_parts_are_the_whole(capsys):
    active, frozen, batch = _trees()
    saved = known_part(_function, active, frozen, batch)
    jax.effects_barrier()
    assert capsys.readouterr().out == ""  # it is printed in each call of the rest
    assert sorted(x.shape for x in saved) == [(), (3, 3)]  # what is printed, and the activations
    hidden = next(x for x in saved if x.shape)
    np.testing.assert_allclose(hidden, np.tanh(batch @ frozen["w"]), rtol=1e-5)
    got = rest_part(_function, active, frozen, batch, saved)
    jax.effects_barrier()
    assert capsys.readouterr().out.startswith("hidden ")
    np.testing.assert_allclose(got, _function(active, frozen, batch), rtol=1e-5)


def test_activations_of_another_batch_are_refused():
    active, frozen, batch = _trees()
    saved = known_part(_function, active, frozen, batch)
    with pytest.raises(ValueError, match="cached activations are .* this function needs"):
        rest_part(_function, active, frozen, batch[:2], saved)
