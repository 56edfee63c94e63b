"""The ported scripts of Keras, Haiku and NumPyro: they run, and compute what the originals do."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz

from .pages import assert_page_shows_diff

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "porting"
PACKAGES = {"keras": "keras", "haiku": "haiku", "numpyro": "numpyro"}
# What each original scores, less what another seed may cost it; guessing scores 0.1, 0.33 and 0.5.
ACCURACY = {"keras": 0.9, "haiku": 0.95, "numpyro": 0.78}

# Without what differs between devices (dropout, statistics of a device's rows), one seed must give
# one result. Each replacement is made in both scripts.
DETERMINISTIC = {
    "keras": {
        "BatchNormalization(momentum=0.9)": "LayerNormalization()",
        "layers.Dropout(0.2)": "layers.Dropout(0.0)",
        "range(4)": "range(1)",
        "make_images(0, 2048)": "make_images(0, 256)",
        'model.save(Path(tempfile.gettempdir()) / "bars.keras")': "",
    },
    "haiku": {
        "hk.next_rng_key(), 0.1, x": "hk.next_rng_key(), 0.0, x",
        "range(6)": "range(1)",
        "make_spirals(0, 2048)": "make_spirals(0, 1024)",
    },
    "numpyro": {
        "range(5)": "range(1)",
        "4096, 450": "1024, 450",
        "= svi.init(": "= jax.jit(svi.init)(",  # 200 small programs otherwise
    },
}


@pytest.fixture(params=sorted(PACKAGES))
def name(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec(PACKAGES[request.param]) is None:
        pytest.skip(f"needs {request.param}")
    return request.param


@functools.cache
def _execute(name: str, version: str) -> dict[str, Any]:
    """The variables of a script that has run here, without what differs between devices."""
    source = (SCRIPTS / f"{name}_{version}.py").read_text()
    for old, new in DETERMINISTIC[name].items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    variables: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(source, f"{name}_{version}.py", "exec"), variables)
    return variables


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("version", ["before", "after"])
def test_a_script_runs_and_learns(name: str, version: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}_{version}.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < 0.5 * losses[0]
    accuracy = re.findall(r"accuracy ([\d.]+)", done.stdout)
    assert float(accuracy[0]) > ACCURACY[name]
    assert (tmp_path / "bars.keras").is_file() == (name == "keras")


@pytest.mark.slow
@pytest.mark.one_in(2)
def test_losses_are_those_of_the_original(name: str):
    """Batch statistics of Haiku and noise of NumPyro included: they are the same everywhere."""
    before, after = _execute(name, "before"), _execute(name, "after")
    assert len(before["losses"]) == len(after["losses"]) >= 4
    np.testing.assert_allclose(after["losses"][:4], before["losses"][:4], rtol=1e-4)
    # Of 450 test points a few may lie on the boundary to within what rounding adds up to.
    assert abs(after["correct"] - before["correct"]) <= 4


def test_the_page_shows_the_diff():
    for name in PACKAGES:
        before, after = (SCRIPTS / f"{name}_{version}.py" for version in ("before", "after"))
        assert_page_shows_diff(ROOT / "docs" / "howto" / "porting" / f"{name}.md", before, after)


# NumPyro: whether a mean over devices is an ELBO is a matter of how the model is written.


def _check(zero, got, want):
    (loss, grads), (want_loss, want_grads) = got, want
    # 128 rows and 64 latent variables are summed in another order, in float32.
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(zero.unshard(grads)), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * max(1, np.abs(y).max()))


@pytest.mark.ci
@pytest.mark.standard_promotion
def test_the_mean_over_devices_is_an_elbo():
    """With one key for all devices that of one device; else the mean of those of 8 samples."""
    pytest.importorskip("numpyro")
    script, key = _execute("numpyro", "after"), jax.random.key(3)
    zero, loss_fn, params = script["zero"], script["loss_fn"], script["params"]
    whole = jax.device_get(zero.unshard(params))
    batch = {name: x[:128] for name, x in script["train"].items()}

    want = jax.jit(jax.value_and_grad(loss_fn))(whole, key, batch)
    _check(zero, jax.jit(zero.value_and_grad(loss_fn))(params, key, batch), want)

    def loss_of_all_devices(params):
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(8))
        rows = jax.tree.map(lambda x: jnp.asarray(x).reshape(8, 16, *x.shape[1:]), batch)
        return jnp.mean(jax.vmap(loss_fn, (None, 0, 0))(params, keys, rows))

    def loss_of_a_device(params, key, batch):
        return loss_fn(params, jz.fold_in_device(key), batch)

    want = jax.jit(jax.value_and_grad(loss_of_all_devices))(whole)
    _check(zero, jax.jit(zero.value_and_grad(loss_of_a_device))(params, key, batch), want)


@pytest.mark.standard_promotion
def test_a_plate_of_the_rows_alone_divides_the_likelihood_by_the_number_of_devices():
    """What the page warns of: the mean is prior + likelihood / 8, as if most rows were lost."""
    numpyro = pytest.importorskip("numpyro")
    dist, elbo = numpyro.distributions, numpyro.infer.Trace_ELBO()
    zero, key, params = jz.Zero(jz.make_mesh(nodes=2)), jax.random.key(0), {"loc": jnp.float32(0.7)}
    batch = {"x": jnp.linspace(-1, 1, 64), "y": jnp.linspace(-2, 2, 64)}

    def model(x, y, size):
        weight = numpyro.sample("weight", dist.Normal(0, 1))
        with numpyro.plate("rows", size or len(x), subsample_size=len(x)):
            numpyro.sample("y", dist.Normal(weight * x, 1), obs=y)

    def guide(x, y, size):
        loc = numpyro.param("loc", jnp.float32(0.5))
        numpyro.sample("weight", dist.Normal(loc, 0.1))

    def loss_fn(params, key, batch, size):
        return elbo.loss(key, params, model, guide, batch["x"], batch["y"], size)

    def mean(size):
        return zero.apply(lambda p, k, b: loss_fn(p, k, b, size))(zero.shard(params), key, batch)

    whole = loss_fn(params, key, batch, None)
    twice = loss_fn(params, key, batch, 128)  # the likelihood counts twice
    np.testing.assert_allclose(mean(64), whole, rtol=1e-5)
    np.testing.assert_allclose(mean(128), twice, rtol=1e-5)
    np.testing.assert_allclose(mean(None), whole - 7 / 8 * (twice - whole), rtol=1e-5)
