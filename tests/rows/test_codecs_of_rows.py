"""Codecs of rows: each row is encoded by itself, within bounds that `zero.verify` knows too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz

from .models import ROWS, send_rows


@pytest.fixture(autouse=True)
def _any_saving(monkeypatch):
    send_rows(monkeypatch)
    with jax.enable_x64(True):
        yield


ROTATED, INT8 = jz.Int4(block=32, hadamard=32), jz.Int8(block=32)
CODECS = {  # the codec of each axis, and a table that is split on rows or on columns
    "same": (jz.PerAxis(node=INT8, local=INT8), (64, 32), {}),
    "other": (jz.PerAxis(node=ROTATED, local=INT8), (64, 32), {}),
    "columns": (jz.PerAxis(node=ROTATED, local=INT8), (62, 256), {}),
    "one axis": (jz.PerAxis(node=jz.NVFloat4()), (64, 32), {}),
    "hsdp": (jz.PerAxis(node=INT8, local=INT8), (64, 32), {"split": "local"}),
    "hsdp columns": (jz.PerAxis(node=INT8, local=ROTATED), (62, 32), {"split": "local"}),
}


def _bounds(codecs, rows, *, once: bool) -> np.ndarray:
    """How far rows may be off: each passes both codecs, or if equal one of them."""
    off = np.zeros_like(rows)
    for codec in dict.fromkeys(codecs) if once else codecs:
        off += 0 if codec is None else codec.error_bound(np.abs(rows) + off)
    return off


@pytest.mark.parametrize("case", CODECS)
def test_codecs_of_weights_and_gradients_encode_rows(case):
    """Rows that are read, bags of them, and gradients, within the bounds of the codecs."""
    codecs, shape, options = CODECS[case]
    zero = jz.Zero(
        jz.make_mesh(nodes=2),
        jz.ZeroConfig(
            weights=jz.PerAxis(local=codecs.local) if options else codecs,
            gradients=codecs,
            min_quantized_size=100,
            **options,
        ),
    )
    random = np.random.default_rng(0)
    table = random.normal(size=shape) * 10 ** random.uniform(-3, 3, (shape[0], 1))
    ids = random.integers(0, 6, (ROWS, 4))  # duplicates, on one device and on several
    factors = random.normal(size=(ROWS, 4, shape[1])) * 10 ** random.uniform(-3, 3, (ROWS, 4, 1))
    stored = zero.shard({"t": table})
    zeros = zero.shard({"t": np.zeros(shape)})

    def read(params, batch):
        rows = params["t"][batch["ids"]]
        return rows, params["t"][batch["ids"]].sum(1)

    def loss(params, batch):
        return jnp.mean(jnp.sum(params["t"][batch["ids"]] * batch["factors"], axis=(1, 2)))

    batch = {"ids": ids, "factors": factors}
    plan = zero.plan(loss, zeros, batch)
    entering = {"node": 0, "local": 0}
    for x in plan.transfers:
        if x.name == "t":
            entering[x.axis] += x.entering_bytes
    assert entering == plan.rows[0].rows
    rows, bags = jax.jit(zero.apply(read))(stored, batch)
    in_order = [codecs.local] + ([] if options else [codecs.node])
    bound = _bounds(in_order, table, once=False)
    error = np.abs(rows - table[ids])
    assert np.all(error <= bound[ids] * 1.001) and np.max(error) > 0
    # A bag is the sum of parts, one of each device: each at most the sum of the largest rows.
    bound = 4 * np.max(_bounds(in_order, np.max(np.abs(table[:6]), 0)[None] * 4, once=False))
    assert np.all(np.abs(bags - table[ids].sum(1)) <= bound)

    grads = zero.unshard(jax.jit(zero.value_and_grad(loss))(zeros, batch)[1])["t"]
    sent = factors * 8 / ROWS  # of the loss of one of 8 devices
    order = [codecs.local, codecs.node] if shape[0] == 62 else [codecs.node, codecs.local]
    off = _bounds(order, sent.reshape(-1, shape[1]), once=True).reshape(sent.shape)
    want, bound = np.zeros(shape), np.full(shape, 1e-12)
    np.add.at(want, ids, sent / 8)
    np.add.at(bound, ids, off / 8 * 1.001)
    assert np.all(np.abs(grads - want) <= bound) and np.max(np.abs(grads - want)) > 1e-9


def test_verify_bounds_rows():
    """The cotangents of each row cancel on each device: they are off by more than their sum is."""
    zero = jz.Zero(jz.make_mesh(nodes=2), dataclasses.replace(jz.zeropp(), min_quantized_size=100))
    random = np.random.default_rng(0)
    params = {"t": random.normal(size=(64, 32))}
    a, b = random.normal(size=(2, 64, 32))
    batch = {"ids": np.repeat(np.arange(64)[:, None], 3, 1), "x": np.stack([a, b, -a - b], 1)}

    def loss(params, batch):
        return jnp.mean(jnp.sin(params["t"][batch["ids"]]) * batch["x"])

    report = zero.verify(loss, zero.shard(params), batch, variations=False)
    assert report.ok, report
    assert {x.kind for x in report.checks} >= {"loss, encoded", "gradient, encoded"}


def test_verify_bounds_a_tied_table():
    """Its head arrives in blocks of several rows, of which every eighth is a thousand times larger
    than the others."""
    zero = jz.Zero(jz.make_mesh(nodes=2), dataclasses.replace(jz.zeropp(), min_quantized_size=100))
    random = np.random.default_rng(0)
    table, is_small = random.normal(size=(256, 32)), np.arange(256) % 8 > 0
    table[~is_small] *= 1000
    params = {"t": table, "w": random.normal(size=(32, 32)) / 6}
    batch = {"ids": random.integers(0, 32, (16, 4)) * 8 + 3, "x": random.normal(size=(16, 1))}

    def loss(params, batch):
        of_head = jnp.sin(params["t"] @ params["w"]) * is_small[:, None].astype(float)
        of_rows = jnp.sin(params["t"][batch["ids"]].sum(1))
        return jnp.mean(of_rows * batch["x"]) + jnp.mean(of_head**2)

    stored = zero.shard(params)
    assert [x.name for x in zero.plan(loss, stored, batch).rows] == ["t"]
    report = zero.verify(loss, stored, batch, variations=False)
    assert report.ok, report


@pytest.mark.parametrize(
    ("case", "readers"), [("same", 8), ("other", 8), ("columns", 8), ("same", 1)]
)
def test_noise_of_codecs_of_rows(case, readers):
    """`zero.codec_noise` expects as much of it as there is, of rows that have noise themselves."""
    codecs, (rows, width), _ = CODECS[case]
    config = dataclasses.replace(jz.zero3(gradients=codecs), min_quantized_size=100)
    zero, exact = (jz.Zero(jz.make_mesh(nodes=2), x) for x in (config, jz.zero3()))
    noise = np.random.default_rng(0).normal(size=(readers * rows, width))
    batch = {"ids": np.tile(np.arange(rows), readers), "x": noise}  # so many devices read a row

    def loss(params, batch):
        return jnp.mean((params["t"][batch["ids"]] * batch["x"]).sum(1))

    params = zero.shard({"t": np.zeros((rows, width))})
    plan = zero.plan(loss, params, batch)
    assert [(x.name, x.is_alone) for x in plan.rows] == [("t", True)]
    coded, whole = (jax.jit(x.value_and_grad(loss))(params, batch)[1]["t"] for x in (zero, exact))
    added = float(jnp.sum((coded - whole) ** 2))

    def expected(**options):
        noise_of_mean = width / rows / readers  # its squared norm; there is no signal
        of_noise, of_signal = zero.codec_noise({"t": coded}, **options)
        if options:  # all of it is of messages of devices
            np.testing.assert_allclose(8 * of_signal, of_noise, rtol=1e-6)
        return float(of_noise) * noise_of_mean

    # Errors go with the largest of 32 numbers, whose square has a relative deviation of 0.4. The
    # estimate is of 62 rows and more, whose blocks are independent.
    np.testing.assert_allclose(expected(rows=plan.rows), added, rtol=5 * 0.4 / rows**0.5)
    if case == "same" and readers > 1:  # sums are encoded on both axes, and rows once
        assert expected() > 1.8 * added


def test_noise_of_rows_of_a_tied_table_is_not_known():
    zero = jz.Zero(jz.make_mesh(nodes=2), jz.zeropp())

    def loss(params, ids):
        return jnp.mean(params["t"][ids] @ params["t"].T)

    params = zero.shard({"t": np.zeros((64, 32))})
    rows = zero.plan(loss, params, np.arange(ROWS)).rows
    with pytest.raises(NotImplementedError, match="not known for `t` of `rows`.*Leave out"):
        zero.codec_noise(params, rows=rows)


def test_rows_of_values_are_not_encoded():
    """`gradient_reduce` says that a leaf is a value; here a row of it is read."""

    @jax.custom_vjp
    def scaled(x, scales, ids):
        return x * scales[ids]

    def forward(x, scales, ids):
        return scaled(x, scales, ids), (x, scales, ids)

    def backward(kept, cotangent):
        x, scales, ids = kept
        return cotangent * scales[ids], jnp.zeros_like(scales).at[ids].max(jnp.abs(x)), None

    scaled.defvjp(forward, backward)

    def loss(params, batch):
        x = jnp.tanh(params["w"][None] * batch["x"])
        return jnp.mean(scaled(x, params["s"], batch["ids"]))

    random = np.random.default_rng(0)
    params = {"s": random.normal(size=(64, 8)), "w": random.normal(size=8)}
    batch = {"ids": random.integers(0, 64, ROWS), "x": random.normal(size=(ROWS, 8))}
    zero = jz.Zero(jz.make_mesh(nodes=2), dataclasses.replace(jz.zeropp(), min_quantized_size=100))
    options, stored = {"gradient_reduce": {"s": "max", "w": "mean"}}, zero.shard(params)
    assert [x.name for x in zero.plan(loss, stored, batch, **options).rows] == ["s"]
    value, _ = jax.jit(zero.value_and_grad(loss, **options))(stored, batch)
    np.testing.assert_allclose(value, loss(params, batch), rtol=1e-12)
