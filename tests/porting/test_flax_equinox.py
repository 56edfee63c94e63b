"""Scripts of Flax Linen, Flax NNX and Equinox before and after, and the pages that compare them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxzero as jz

from .pages import assert_page_shows_diff

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "porting"
NAMES = ("flax_linen", "flax_nnx", "equinox")
# Edits that leave no randomness, give BatchNorm the statistics of the whole batch, as on one
# device, and leave out biases before BatchNorm: what differs then is the order in which float32
# sums are rounded. The gradient of such a bias is zero but for rounding, which Adam scales to steps
# of the learning rate, so the bias takes another walk wherever sums are rounded in another order.
EXACT = {
    "flax_linen": {
        "rate=0.1": "rate=0.0",
        "bfloat16": "float32",
        "nn.Conv(16, (3, 3),": "nn.Conv(16, (3, 3), use_bias=False,",
        "nn.Dense(31,": "nn.Dense(31, use_bias=False,",
    },
    "flax_nnx": {
        "Dropout(0.1)": "Dropout(0.0)",
        "momentum=0.9": 'momentum=0.9, axis_name=("node", "local")',
        "nnx.Linear(2, 64,": "nnx.Linear(2, 64, use_bias=False,",
        "nnx.Linear(64, 31,": "nnx.Linear(64, 31, use_bias=False,",
    },
    "equinox": {
        "Dropout(0.1)": "Dropout(0.0)",
        "Linear(64, 31,": "Linear(64, 31, use_bias=False,",
    },
}
SHORT = {"range(100)": "range(10)", "step % 25 == 24": "step < 10"}
PER_DEVICE = {
    "flax_linen": {
        ', axis_name=("node", "local")': "",
        "has_aux=True": 'has_aux=True, row_statistics="device"',
    },
    "equinox": {
        '("batch", "node", "local")': '"batch"',
        "has_aux=True": 'has_aux=True, row_statistics="device"',
        'aux_reduce="first"': 'aux_reduce=jax.tree.map(lambda x: "mean" if x.ndim else "first", '
        "state)",
    },
}


def _run(script: str, edits: dict[str, str]) -> tuple[list[float], float]:
    """The losses that a script prints, and its metric."""
    source = (SCRIPTS / f"{script}.py").read_text()
    for old, new in edits.items():
        assert old in source, old
        source = source.replace(old, new)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    return losses, float(re.findall(r"accuracy ([\d.]+)", done.stdout)[0])


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("half", ["before", "after"])
def test_the_script_learns(name, half):
    losses, accuracy = _run(f"{name}_{half}", {})
    assert losses[-1] < 0.1 * losses[0] and accuracy > 0.97


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "equinox",
        pytest.param("flax_nnx", marks=pytest.mark.ci),
        pytest.param("flax_linen", marks=pytest.mark.exhaustive),
    ],
)
def test_the_losses_are_those_of_one_device(name):
    edits = {**EXACT[name], **SHORT}
    # On one device there are no axes, and the batch is whole.
    alone = {old: new for old, new in edits.items() if "axis_name" not in new}
    want, want_accuracy = _run(f"{name}_before", alone)
    got, got_accuracy = _run(f"{name}_after", edits)
    assert len(got) == len(want) == 10
    # Losses are printed with 5 decimals, that is to 1e-5. Sums of a few hundred terms in another
    # order differ by about 1e-6, and 1e-4 leaves a factor of 100 for what 10 steps make of it.
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert got_accuracy == want_accuracy


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("name", PER_DEVICE)
def test_batch_norm_of_each_device_alone_learns_too(name):
    losses, accuracy = _run(f"{name}_after", PER_DEVICE[name])
    assert losses[-1] < 0.2 * losses[0] and accuracy > 0.95


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_diff(name):
    assert_page_shows_diff(
        ROOT / "docs" / "howto" / "porting" / f"{name}.md",
        SCRIPTS / f"{name}_before.py",
        SCRIPTS / f"{name}_after.py",
    )


@pytest.mark.standard_promotion
def test_the_nnx_optimizer_of_the_page_takes_the_steps_of_optax():
    """That of Flax loses the state of padded leaves, which are pytrees, and says so in step 2."""
    page = (ROOT / "docs" / "howto" / "porting" / "flax_nnx.md").read_text()
    names = {"jax": jax, "nnx": nnx, "optax": optax}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    zero, tx = jz.Zero(jz.make_mesh(nodes=2)), optax.adamw(1e-1)
    model = zero.init(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))  # no dim of it divides
    params = nnx.state(nnx.clone(model), nnx.Param)  # variables of its own
    opt_state = zero.init_optimizer(tx, params)
    optimizer = names["Optimizer"](model, tx, wrt=nnx.Param)
    plain = nnx.Optimizer(nnx.clone(model), tx, wrt=nnx.Param)
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = zero.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x)
        optimizer.update(model, grads)
        return grads

    for i in range(3):
        grads = step(model, optimizer, x)
        updates, opt_state = tx.update(nnx.state(grads, nnx.Param), opt_state, params)
        params = optax.apply_updates(params, updates)
        # One and the same program of a few roundings each, once compiled as a whole.
        for got, want in zip(
            jax.tree.leaves((nnx.state(model), optimizer.opt_state)),
            jax.tree.leaves((params, opt_state)),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
        assert optimizer.step[...] == i + 1
    step(model, plain, x)
    with pytest.raises(ValueError, match="pytree structure error"):
        step(model, plain, x)
