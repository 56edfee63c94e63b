"""`Zero.verify`: its report, its bounds and its errors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxzero as jz
from jaxzero._collectives import comm_spec
from jaxzero._execute import mean_gradients
from jaxzero._verify import each_device, one_device
from jaxzero._verify.roundings import moved
from jaxzero._verify.samples import NUM_SAMPLES, QUANTILE
from jaxzero._zero import verified_call


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


BATCH = {"x": _normal(16, 8), "y": _normal(16, 4, seed=1)}


def _loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)


@pytest.fixture
def zero():
    return jz.Zero(jz.make_mesh(nodes=2))


@pytest.fixture
def params(zero):
    return zero.shard({"w": _normal(8, 4)})


def test_the_report_says_what_was_compared(zero, params):
    said = []

    def with_aux(params, batch):
        return _loss(params, batch), {"largest": jnp.max(batch["x"]), "device": jnp.ones(())}

    report = zero.verify(
        with_aux,
        params,
        BATCH,
        tx=optax.sgd(0.1),
        has_aux=True,
        aux_reduce={"largest": "max", "device": "first"},
        float64=True,
        progress=said.append,
    )
    assert report.ok and not report.cause and not report.first
    kinds = {(check.name, check.kind) for check in report.checks}
    assert kinds == {("loss", "loss"), ("aux largest", "aux"), ("w", "gradient"), ("w", "update")}
    assert "aux device is that of one device" in report.notes[0]
    assert [x.matters for x in report.variations] == [False, False]
    for rounding in report.roundings:  # float32 is within its own rounding of float64
        assert 0 <= rounding.of_step < 1e-5 and rounding.of_reference < 1e-5
    assert len(said) == 2 and "holds at least" in said[0] and report.memory == said[1]
    text = str(report)
    assert "The step computes what one device would" in text and "from float64" in text
    assert json.loads(json.dumps(report.as_dict()))["ok"]
    report.raise_if_wrong()


def test_with_codecs_their_error_is_told_from_an_error(params):
    codec = jz.Int8(block=32, scale_dtype="float32")
    config = jz.ZeroConfig(gradients=jz.PerAxis(node=codec), min_quantized_size=0)
    zero = jz.Zero(jz.make_mesh(nodes=2), config)
    report = zero.verify(_loss, zero.shard({"w": _normal(8, 4)}), BATCH, variations=False)
    report.raise_if_wrong()
    plain, encoded = (
        next(x for x in report.checks if x.kind == kind)
        for kind in ("gradient", "gradient, encoded")
    )
    assert encoded.difference > 100 * plain.difference and encoded.bound > 100 * plain.bound
    kinds = {x.kind for x in zero.verify(
        _loss, zero.shard({"w": _normal(8, 4)}), BATCH, codecs=False, variations=False
    ).checks}  # fmt: skip
    assert kinds == {"loss", "gradient"}


def test_value_and_update(zero, params):
    report = zero.verify(
        _loss, params, BATCH, tx=optax.sgd(0.1), in_one_program=True, variations=False
    )
    report.raise_if_wrong()
    assert "update" in {x.kind for x in report.checks}


_INT8 = jz.Int8(block=32, scale_dtype="float32")
_ENCODED = jz.ZeroConfig(
    weights=jz.PerAxis(node=_INT8), gradients=jz.PerAxis(node=_INT8), min_quantized_size=0
)


def _weighted(params, batch):
    error = (jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2
    return jnp.sum(error), jnp.sum(batch["y"][:, 0] > 0).astype(jnp.float32)


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        (_loss, None),
        pytest.param(_weighted, None, marks=pytest.mark.exhaustive),
        pytest.param(_loss, _ENCODED, marks=pytest.mark.exhaustive),
        pytest.param(_weighted, _ENCODED, marks=pytest.mark.exhaustive),
    ],
)
def test_shares(loss, config):
    zero = jz.Zero(jz.make_mesh(nodes=2), config)
    batch = {"x": _normal(36, 8), "y": _normal(36, 4, seed=1)}
    options = dict(microbatches=2, shares=(2, 1))
    padded, _ = jz.pad_batch(batch, zero, **options)
    # Rows that are not counted are NaN: if one were read, every sum would be NaN.
    padded = {name: np.where(_is_padding(padded), np.nan, x) for name, x in padded.items()}
    report = zero.verify(
        loss, zero.shard({"w": _normal(8, 4)}), padded, weighted=loss is _weighted, **options
    )
    report.raise_if_wrong()
    assert [x.name for x in report.variations] == ["rows on other devices"]
    kinds = {x.kind for x in report.checks}
    assert ("gradient, encoded" in kinds) == (config is not None)


def _is_padding(padded):
    """Of 48 rows the last three of each six on the devices of the second node."""
    return ((np.arange(48) >= 24) & (np.arange(48) % 6 >= 3))[:, None]


def test_rows_that_meet_on_a_device_with_shares(zero, params):
    def loss(params, batch):
        return _loss(params, {"x": batch["x"], "y": batch["y"] - batch["y"].mean()})

    options = dict(microbatches=2, shares=(2, 1))
    batch, _ = jz.pad_batch({"x": _normal(36, 8), "y": _normal(36, 4)}, zero, **options)
    report = zero.verify(loss, params, batch, variations=False, **options)
    assert report.cause == "rows" and "first operation that differs is `sub`" in report.first


@pytest.mark.parametrize("nodes", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("loss", [_loss, pytest.param(_weighted, marks=pytest.mark.exhaustive)])
def test_halves(nodes, loss):
    zero = jz.Zero(jz.make_mesh(nodes=nodes))
    params = {"w": _normal(8, 4)}
    report = zero.verify(
        loss, zero.shard(params), BATCH, halves=True, weighted=loss is _weighted, variations=False
    )
    report.raise_if_wrong()
    sizes = {x.name: x.size for x in report.checks if x.kind == "half-batches"}

    def gradient(rows):  # the oracle: the gradient of half the rows
        part = {name: x[rows] for name, x in BATCH.items()}
        if loss is _loss:
            return jax.grad(_loss)(params, part)["w"]
        return jax.grad(lambda w, b: _weighted(w, b)[0] / _weighted(w, b)[1])(params, part)["w"]

    g1, g2 = gradient(slice(0, 8)), gradient(slice(8, 16))
    want = {"w first": g1 * g1, "w second": g2 * g2, "w cross": g1 * g2}
    assert set(sizes) == {*want, "share"}
    for name, product in want.items():
        assert sizes[name] == pytest.approx(abs(float(product.sum())), rel=1e-5)


def test_a_wrong_product_of_half_batches_is_found(zero, params, monkeypatch):
    products = mean_gradients._products

    def changed(x, copies):
        return products(x, copies).at[2].multiply(1.001)

    monkeypatch.setattr(mean_gradients, "_products", changed)
    report = zero.verify(_loss, params, BATCH, halves=True, variations=False)
    assert report.cause == "halves" and [x.name for x in report.wrong] == ["w cross"]


def test_a_micro_batch_that_does_not_count_is_found(zero, params, monkeypatch):
    """A mean over all micro-batches, also those that devices of a slow node do not run."""
    monkeypatch.setattr(comm_spec.CommSpec, "num_runs", lambda self, microbatches: 8 * microbatches)
    options = dict(microbatches=2, shares=(2, 1))
    batch, _ = jz.pad_batch({"x": _normal(36, 8), "y": _normal(36, 4)}, zero, **options)
    report = zero.verify(_loss, params, batch, variations=False, **options)
    assert report.cause == "step" and not report.ok


def test_errors(zero, params):
    with pytest.raises(ValueError, match="`reference` must be a device of this process"):
        zero.verify(_loss, params, BATCH, reference=3)
    with pytest.raises(ValueError, match="JAX has no platform 'nothing'"):
        zero.verify(_loss, params, BATCH, reference="nothing")
    with pytest.raises(ValueError, match="`tx` updates the tree of one argument"):
        zero.verify(_loss, params, BATCH, tx=optax.sgd(0.1), argnums=(0,))
    with pytest.raises(ValueError, match="`in_one_program` verifies `value_and_update`"):
        zero.verify(_loss, params, BATCH, in_one_program=True)

    with pytest.raises(ValueError, match="leave out `argnums`, `halves` and `shares`"):
        zero.verify(_loss, params, BATCH, tx=optax.sgd(1.0), in_one_program=True, halves=True)

    def step(params, opt_state, batch):
        return params, opt_state, {}

    with pytest.raises(ValueError, match="local_steps=rounds.method"):
        zero.verify(zero.local_steps(step, every=1), params, BATCH)


@pytest.mark.parametrize(
    ("config", "is_random", "num_steps", "num_samples"),
    [
        (None, False, 3, 1),
        (_ENCODED, False, 4, 2),
        pytest.param(_ENCODED, True, 4, 3, marks=pytest.mark.ci),
    ],
)
@pytest.mark.one_in(2)
def test_what_it_costs(config, is_random, num_steps, num_samples, monkeypatch):
    steps, samples, parts, compiled = [], [], [], []

    def count(owner, name, found, of=lambda x: x):
        function = getattr(owner, name)

        def counted(self, *args, **kwargs):
            found.append(of(self))
            return function(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(verified_call.VerifiedCall, "step", steps)
    count(one_device.OneDevice, "samples", samples)
    count(each_device.EachDevice, "_parts", parts)
    count(jax.stages.Lowered, "compile", compiled, of=lambda x: x.as_text())

    def loss(params, batch, key=None):
        x = batch["x"]
        if key is not None:
            x = jnp.where(jax.random.bernoulli(jz.fold_in_device(key), 0.5, x.shape), x, 0)
        return _loss(params, batch | {"x": x})

    zero = jz.Zero(jz.make_mesh(nodes=2), config)
    params = zero.shard({"w": _normal(8, 4)})
    compiled.clear()
    keys = [jax.random.key(0)] if is_random else []
    zero.verify(loss, params, BATCH, *keys, tx=optax.sgd(0.1)).raise_if_wrong()
    assert (len(steps), len(samples)) == (num_steps, num_samples)
    assert len(parts) == (config is not None) + is_random  # traced once for each of its programs
    programs = [x for x in compiled if "@main()" not in x]  # not those that compute nothing
    assert len(programs) == len(set(programs)) >= 3


def test_a_function_that_is_float32_only(zero, params):
    def narrow(params, batch):
        start = jnp.zeros(batch["y"].shape, jnp.float32)  # a carry that float64 would widen
        x, _ = lax.scan(lambda x, _: (x + batch["x"] @ params["w"], None), start, length=2)
        return jnp.mean(x**2)

    zero.verify(narrow, params, BATCH, variations=False).raise_if_wrong()
    with pytest.raises(ValueError, match="does not run in float64"):
        zero.verify(narrow, params, BATCH, float64=True, variations=False)


def _spread(function, *args):
    """The bound of the largest element of the first result, and the samples."""
    right = np.asarray(function(*args), np.float64)
    with jax.numpy_dtype_promotion("standard"):
        run = jax.jit(lambda args, seed: moved(function, args, seed, False)[0])
        samples = [np.asarray(run(args, jnp.uint32(i + 1))) for i in range(NUM_SAMPLES)]
    sizes = [np.max(np.abs(x - right)) for x in samples]
    return QUANTILE * np.sqrt(np.mean(np.square(sizes))), samples


def test_the_bound_of_a_sum_holds_for_every_order_and_is_near_the_worst():
    x = _normal(1000)
    bound, _ = _spread(jnp.sum, x)
    orders = [np.random.default_rng(i).permutation(x) for i in range(50)]
    sums = [np.cumsum(order, dtype=np.float32)[-1] for order in orders]
    assert max(sums) - min(sums) <= bound
    assert bound <= 1000 * 2.0**-24 * np.sum(np.abs(x), dtype=np.float64)


def test_a_sum_that_cancels_has_the_bound_of_its_terms():
    x = np.abs(_normal(1000))
    whole, _ = _spread(jnp.sum, x)
    cancelled, _ = _spread(lambda x: jnp.sum(x) - jnp.sum(x * 1.0001), x)
    assert cancelled >= whole / 10


def test_what_is_exact_is_not_moved():
    def exact(x):
        products = 3 * x
        counts = jnp.sum((x > 0).astype(jnp.float32))
        is_largest = products == jnp.max(jnp.concatenate([3 * x, 3 * x]))
        return counts + jnp.sum(is_largest.astype(jnp.float32)) * 64 + jnp.sum(x * 0)

    bound, samples = _spread(exact, _normal(200))
    assert bound == 0.0 and samples[0] == exact(_normal(200))


def test_loops_and_branches_are_moved_inside():
    def looped(x):
        def body(i, x):
            return lax.cond(i % 2 == 0, jnp.tanh, jnp.sin, x)

        return lax.fori_loop(0, 3, body, lax.scan(lambda x, _: (x * 1.1, x), x, length=4)[0])

    bound, samples = _spread(looped, _normal(50))
    assert 1e-7 < bound < 1e-4
    assert len({x.tobytes() for x in samples}) == NUM_SAMPLES
