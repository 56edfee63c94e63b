"""SimiGrad against `optax.MultiSteps`, against noise that is known, and against its own formulas
in numpy float64."""

import copy
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import jaxzero as jz
from benchmarks.compiled import _hlo
from jaxzero._simigrad import settings
from jaxzero._simigrad import similarity as _similarity

_PARAMS = {"a": np.linspace(-1, 1, 12).reshape(3, 4), "b": {"c": np.linspace(1, 2, 5)}}


def _params(dtype=jnp.float32):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), _PARAMS)


def _gradients(number, seed=0, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    return [
        jax.tree.map(lambda x: jnp.asarray(random.normal(1, 1, x.shape), dtype), _PARAMS)
        for _ in range(number)
    ]


def _simigrad(inner=None, **options):
    options = {"target_similarity": 0.5, "initial": 4, "max_steps": 8} | options
    return jz.simigrad(optax.sgd(0.1) if inner is None else inner, **options)


def _feed(tx, gradients, params=None, state=None, extras=None):
    """The updates, and the states after them, of a jitted loop."""
    params = _params() if params is None else params
    state = tx.init(params) if state is None else state

    @jax.jit
    def step(gradient, state, params, extras):
        new, state = tx.update(gradient, state, params, **extras)
        return new, state, optax.apply_updates(params, new)

    updates, states = [], []
    for i, gradient in enumerate(gradients):
        new, state, params = step(gradient, state, params, extras[i] if extras else {})
        updates.append(new)
        states.append(state)
    return updates, states


def _flat(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def _cosine(x, y):
    return float(x @ y / math.sqrt((x @ x) * (y @ y)))


def _assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# Equality with what it replaces.


def _halved(count):
    """No arithmetic that XLA could round in two ways."""
    return jnp.where(count < 2, 0.25, 0.125)


_OPTIMIZERS = {
    "sgd": lambda: optax.sgd(_halved, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "clip_adam": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=_halved),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("name", "steps", "dtype"),
    [(name, 3, jnp.float32) for name in _OPTIMIZERS]
    + [("adamw", 1, jnp.float32), ("adamw", 4, jnp.bfloat16)],
)
def test_a_pinned_batch_equals_multi_steps_to_the_bit(name, steps, dtype):
    gradients = _gradients(4 * steps, dtype=dtype)
    multi = optax.MultiSteps(_OPTIMIZERS[name](), steps)
    want, _ = _feed(multi, gradients, _params(dtype))
    tx = _simigrad(_OPTIMIZERS[name](), initial=steps, min_steps=steps, max_steps=steps)
    got, states = _feed(tx, gradients, _params(dtype))
    _assert_same_bits(got, want)
    stats = jz.simigrad_stats(states[-1])
    assert stats["updates"] == 4 and stats["seen"] == 4 * steps
    assert stats["unmeasured"] == (4 if steps == 1 else 0) and stats["skipped"] == 0
    for i, update in enumerate(got):
        assert bool(np.any(_flat(update))) == ((i + 1) % steps == 0), "zero until the batch is full"


# As optax has it.


def _struct(x):
    return jnp.shape(x), jnp.result_type(x), getattr(x, "weak_type", None)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("groups", [None, {"a": "first", "b": "second"}])
@pytest.mark.parametrize(
    "rule", ["walk", "jump", jz.JumpRule(average="ema"), jz.WalkRule(window=3)]
)
def test_the_state_keeps_its_types(rule, groups):
    tx = _simigrad(optax.adamw(1e-2), rule=rule, groups=groups, lr_scaling="sqrt")
    state = tx.init(_params())
    abstract = jax.eval_shape(tx.init, _params())
    new, after = jax.eval_shape(tx.update, _params(), state, _params())
    assert jax.tree.map(_struct, abstract) == jax.tree.map(_struct, state)
    assert jax.tree.map(_struct, after) == jax.tree.map(_struct, state)
    assert jax.tree.map(_struct, new) == jax.tree.map(_struct, _params())


def test_an_inner_state_that_would_widen_keeps_its_type():
    def widen(updates, state, params=None):
        return updates, state.astype(jnp.float32) + 1

    inner = optax.GradientTransformation(lambda params: jnp.zeros([], jnp.bfloat16), widen)
    _, states = _feed(_simigrad(inner), _gradients(4))
    assert states[-1].inner.dtype == jnp.bfloat16 and states[-1].inner == 1


@pytest.mark.standard_promotion
def test_inside_chain_masked_and_inject_hyperparams():
    own = _simigrad(optax.adam(1e-2), lr_scaling="sqrt", rule="jump")
    want, states = _feed(own, _gradients(12))
    wanted = jz.simigrad_stats(states[-1])

    def check(tx, scale=1.0):
        got, states = _feed(tx, _gradients(12))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(_flat(x), scale * _flat(y), rtol=2**-22)
        _assert_same_bits(jz.simigrad_stats(states[-1]), wanted)

    check(optax.chain(own, optax.scale(0.5)), 0.5)
    check(optax.masked(own, jax.tree.map(lambda x: True, _PARAMS)))
    injected = optax.inject_hyperparams(jz.simigrad)(
        optax.adam(1e-2),
        target_similarity=0.5,
        initial=4,
        max_steps=8,
        lr_scaling="sqrt",
        rule="jump",
    )
    check(injected)
    assert optax.tree.get(injected.init(_params()), "target_similarity") == 0.5


@pytest.mark.standard_promotion
def test_a_masked_part_is_neither_changed_nor_measured():
    tx = optax.masked(_simigrad(), {"a": True, "b": {"c": False}})
    gradients = _gradients(4)
    updates, states = _feed(tx, gradients)
    np.testing.assert_array_equal(_flat(updates[0]["a"]), 0)
    _assert_same_bits(updates[0]["b"], gradients[0]["b"])  # handed on, as optax has it
    halves = [np.mean([_flat(g["a"]) for g in part], 0) for part in (gradients[:2], gradients[2:])]
    got = jz.simigrad_stats(states[-1])["similarity"]
    np.testing.assert_allclose(got, _cosine(*halves), atol=1e-6)


def _sharded(axis_type, tx):
    zero = jz.Zero(jz.make_mesh(nodes=2, axis_type=axis_type))
    params = zero.init(lambda: {"w": jnp.ones((16, 8)), "b": jnp.ones(8), "s": jnp.ones([])})
    return zero, params, zero.init_optimizer(tx, params)


def _loss(params, batch):
    return params["s"] * jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


def _batch(zero, i):
    batch = jnp.asarray(np.random.default_rng(i).normal(size=(16, 16)), jnp.float32)
    return jax.device_put(batch, jax.NamedSharding(zero.mesh, zero.batch_spec))


_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


@pytest.mark.standard_promotion
@_TYPES
def test_sharded_gradients(axis_type):
    """Layout of the state, donation, and the numbers of one device."""
    tx = _simigrad(optax.adam(1e-2), rule="jump", groups=lambda path: path, target_similarity=0.1)
    zero, params, state = _sharded(axis_type, tx)
    whole, plain = jax.device_get(params), tx.init(jax.device_get(params))

    traced = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        traced.append(1)
        _, grads = zero.value_and_grad(_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def step_of_one(params, state, batch):
        updates, state = tx.update(jax.grad(_loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    before = jax.tree.map(lambda x: x.sharding, state)
    types = jax.tree.map(jax.typeof, state)
    for i in range(9):
        batch = _batch(zero, i)
        old = state
        params, state = step(params, state, batch)
        whole, plain = step_of_one(whole, plain, jax.device_get(batch))
        assert all(x.is_deleted() for x in jax.tree.leaves(old)), "Not all of it was donated."
        assert jax.tree.map(jax.typeof, state) == types
        jax.tree.map(
            lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim) or pytest.fail(x),
            state,
            before,
        )
    assert state.mean["w"].sharding.is_equivalent_to(params["w"].sharding, 2)
    assert len(traced) == 1, "The type of an output differs from that of the input."
    got, want = jz.simigrad_stats(state), jz.simigrad_stats(plain)
    assert got["updates"] >= 2 and got["steps"] == want["steps"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), got, want)


@pytest.mark.standard_promotion
@_TYPES
def test_only_scalars_travel(axis_type):
    tx = _simigrad(optax.adam(1e-2), groups=lambda path: path)

    def compiled(tx):
        zero, params, state = _sharded(axis_type, tx)

        @jax.jit
        def step(params, state, batch):
            _, grads = zero.value_and_grad(_loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return _hlo.collectives(step.lower(params, state, _batch(zero, 0)).compile().as_text())

    def sizes(found):
        return sorted((c.op, s.size) for c in found for s in c.results if s.size > 1)

    ours, theirs = (
        compiled(tx),
        compiled(optax.MultiSteps(optax.adam(1e-2), 4).gradient_transformation()),
    )
    assert sizes(ours) == sizes(theirs)
    # And those not for each micro-batch: they are in a branch, not in the program itself.
    _, params, state = _sharded(axis_type, tx)
    text = jax.jit(tx.update).lower(params, state, params).compile().as_text()
    branches, program = text.split("\nENTRY")
    assert not _hlo.collectives("ENTRY" + program)
    (sums,) = _hlo.collectives(branches)
    leaves = len(jax.tree.leaves(params))
    assert sums.op == "all-reduce" and len(sums.results) <= 3 * leaves
    assert all(s.size == 1 for s in sums.results)


@pytest.mark.standard_promotion
def test_a_checkpoint_in_the_middle_of_a_batch(tmp_path):
    tx = _simigrad(
        optax.adam(1e-2), rule="jump", groups={"a": "x", "b": "y"}, min_steps=4, lr_scaling="sqrt"
    )
    gradients, params = _gradients(16), _params()
    _, states = _feed(tx, gradients[:6], params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", states[-1])
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, params))
    assert states[-1].updates == 1 and states[-1].count == 2
    _assert_same_bits(restored, states[-1])
    want = _feed(tx, gradients[6:], params, states[-1])
    got = _feed(tx, gradients[6:], params, restored)
    _assert_same_bits(got, want)


# What is measured, against numpy.


@pytest.mark.parametrize("steps", [2, 3, 6, 7])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_similarity_and_noise_scale_of_one_batch(steps, is_weighted):
    gradients = _gradients(steps, seed=steps)
    weights = np.arange(1.0, steps + 1) if is_weighted else np.ones(steps)
    extras = [{"weight": np.int32(w)} if is_weighted else {} for w in weights]
    tx = _simigrad(optax.sgd(1.0), initial=steps)
    updates, states = _feed(tx, gradients, extras=extras)
    flat, cut = np.stack([_flat(g) for g in gradients]), steps // 2
    w1, w2 = weights[:cut].sum(), weights[cut:].sum()
    g1, g2 = weights[:cut] @ flat[:cut] / w1, weights[cut:] @ flat[cut:] / w2
    cosine, total = _cosine(g1, g2), w1 + w2
    # The angle of equal halves, from that of these.
    tangent = math.tan(math.acos(cosine)) * math.sqrt(4 * w1 * w2) / total
    want = math.copysign(math.cos(math.atan(tangent)), cosine)
    stats = jz.simigrad_stats(states[-1])
    # float32: a few roundings of numbers near 1, over `steps` additions.
    np.testing.assert_allclose(stats["similarity"], want, atol=8 * steps * 2**-24)
    noise = (g1 - g2) @ (g1 - g2) * w1 * w2 / total
    np.testing.assert_allclose(stats["noise_scale"], noise / (g1 @ g2), rtol=1e-4)
    assert np.isnan(stats["noise_scale_error"]) and stats["seen"] == total
    np.testing.assert_allclose(_flat(updates[-1]), -(weights @ flat) / total, atol=1e-6)


def test_halves_of_the_only_micro_batch():
    random = np.random.default_rng(0)
    halves = [[random.normal(1, 1, x.shape) for x in jax.tree.leaves(_PARAMS)] for _ in range(2)]
    tree = jax.tree.structure(_PARAMS)

    def products(x, y):
        return tree.unflatten([jnp.float32(np.sum(a * b)) for a, b in zip(x, y, strict=True)])

    first, second = halves
    by_leaf = (products(first, first), products(second, second), products(first, second))
    totals = tuple(sum(jax.tree.leaves(part)) for part in by_leaf)
    gradient = tree.unflatten([jnp.float32((a + b) / 2) for a, b in zip(*halves, strict=True)])
    want = _cosine(_flat(first), _flat(second))
    for given in (by_leaf, totals):
        tx = _simigrad(initial=1, target_similarity=0.99)
        _, states = _feed(tx, 3 * [gradient], extras=3 * [{"halves": given}])
        assert [int(s.steps) for s in states] == [2, 2, 1]
        np.testing.assert_allclose(states[0].similarity, want, atol=1e-6)
        # Halves of two micro-batches are those that were accumulated: here they are the same.
        np.testing.assert_allclose(states[2].similarity, 1, atol=1e-6)
    tx = _simigrad(initial=1, groups={"a": "x", "b": "y"})
    _, states = _feed(tx, [gradient], extras=[{"halves": by_leaf}])
    groups = jz.simigrad_stats(states[0])["groups"]
    np.testing.assert_allclose(
        groups["x"]["similarity"], _cosine(_flat(first[:1]), _flat(second[:1])), atol=1e-6
    )


def test_one_micro_batch_alone_says_nothing():
    _, states = _feed(_simigrad(initial=1), _gradients(3))
    stats = jz.simigrad_stats(states[-1])
    assert stats["unmeasured"] == 3 and stats["steps"] == 1 and stats["skipped"] == 0
    assert np.isnan(stats["similarity"]) and np.isnan(stats["noise_scale"])
    # No rule goes where it could not come back from.
    _, states = _feed(_simigrad(initial=2, target_similarity=0.0), 8 * _gradients(1))
    assert {int(s.steps) for s in states} == {2} and states[-1].unmeasured == 0


@pytest.mark.parametrize("combine", ["mean", "median", "min"])
def test_groups(combine):
    gradients = [g | {"frozen": jnp.zeros(2)} for g in _gradients(4)]
    params = _params() | {"frozen": jnp.zeros(2)}
    labels = {"a": "x", "b": "y", "frozen": "z"}
    by_path = {"a": "x", "b.c": "y", "frozen": "z"}
    want = {}
    for label, name in (("x", "a"), ("y", "b")):
        flat = np.stack([_flat(g[name]) for g in gradients])
        want[label] = _cosine(flat[:2].mean(0), flat[2:].mean(0))
    combined = {"mean": np.mean, "median": np.median, "min": np.min}[combine](list(want.values()))
    for groups in (labels, by_path.__getitem__):
        tx = _simigrad(groups=groups, combine=combine, target_similarity=0.99)
        _, states = _feed(tx, gradients, params)
        stats = jz.simigrad_stats(states[-1])
        assert stats["steps"] == 5 and stats["skipped"] == 0
        np.testing.assert_allclose(stats["similarity"], combined, atol=1e-6)
        for label, similarity in want.items():
            np.testing.assert_allclose(stats["groups"][label]["similarity"], similarity, atol=1e-6)
        assert np.isnan(stats["groups"]["z"]["similarity"]), "nothing was measured of it"


def test_complex_gradients():
    random = np.random.default_rng(0)
    gradients = [random.normal(1, 1, 6) + 1j * random.normal(0, 1, 6) for _ in range(2)]
    tx = _simigrad(initial=2)
    params = jnp.zeros(6, jnp.complex64)
    _, states = _feed(tx, [jnp.asarray(g, jnp.complex64) for g in gradients], params)
    x, y = (np.concatenate([g.real, g.imag]) for g in gradients)
    np.testing.assert_allclose(states[-1].similarity, _cosine(x, y), atol=1e-6)


def test_averages_and_standard_error_equal_their_definitions():
    random = np.random.default_rng(1)
    decay, number = 0.8, 12
    products = random.uniform(2, 3, (number, 3)) - [0, 0, 1.5]
    halves = random.uniform(1, 4, (number, 2))
    moments = _similarity.new_moments()
    add = jax.jit(_similarity.add_to_moments, static_argnums=3)
    for p, h in zip(products, halves, strict=True):
        p, h = (x.astype(np.float32) for x in (p, h))
        moments = add(
            moments,
            _similarity.Products(*map(jnp.asarray, p)),
            _similarity.Halves(*map(jnp.asarray, h)),
            decay,
        )
    signal = products[:, 2]
    noise = (products[:, :2].sum(1) - 2 * signal) * halves.prod(1) / halves.sum(1)
    v = decay ** np.arange(number)[::-1]
    scale = np.sum(v * noise) / np.sum(v * signal)
    q = np.sum(v**2) / np.sum(v) ** 2
    square = np.average((noise - scale * signal) ** 2, weights=v)
    error = math.sqrt(square * q / (1 - q)) / np.average(signal, weights=v)
    np.testing.assert_allclose(_similarity.noise_scale(moments), scale, rtol=1e-5)
    np.testing.assert_allclose(_similarity.noise_scale_error(moments), error, rtol=1e-4)


def test_seen_counts_beyond_float32():
    """2^24 + 1 is no float32: adding 1 to 2^24 over and over gives 2^24."""
    tx = _simigrad(initial=1, min_steps=1, max_steps=1)
    weights = [2.0**24, *[1.0] * 9]
    extras = [{"weight": np.float32(w)} for w in weights]
    _, states = _feed(tx, 10 * _gradients(1), extras=extras)
    assert float(states[-1].seen) + float(states[-1].seen_rest) == sum(weights)


# Learning rates.


@pytest.mark.parametrize("scaling", ["sqrt", "linear", None])
def test_learning_rates_follow_the_batch_and_count_what_was_seen(scaling):
    tx = _simigrad(
        optax.sgd(1.0),
        initial=2,
        target_similarity=0.999,
        lr_scaling=scaling,
        schedule=lambda seen: 1 / (1 + seen),
    )
    gradients = _gradients(9)
    updates, states = _feed(tx, gradients)
    start = 0
    for steps in (2, 3, 4):  # the walk: one more each time
        flat = np.mean([_flat(g) for g in gradients[start : start + steps]], 0)
        factor = {"sqrt": math.sqrt(steps / 2), "linear": steps / 2, None: 1}[scaling]
        stop = start + steps
        assert states[stop - 1].seen == stop
        np.testing.assert_allclose(
            _flat(updates[stop - 1]), -flat * factor / (1 + start), rtol=1e-5, atol=1e-6
        )
        start = stop


# Rules.


def test_the_walk_is_that_of_the_paper():
    sizes = np.arange(1, 20_000)

    def walk(similarity):
        return jax.vmap(
            lambda steps: jz.WalkRule().wanted(
                jnp.float32(similarity), steps, steps, jnp.float32(0.5), jz.WalkRule().init()
            )[0]
        )(jnp.asarray(sizes, jnp.float32))

    np.testing.assert_array_equal(walk(0.4), [max(n + 1, int(1.1 * n)) for n in sizes.tolist()])
    np.testing.assert_array_equal(walk(0.6), [min(n - 1, int(0.9 * n)) for n in sizes.tolist()])
    np.testing.assert_array_equal(walk(0.5), sizes)


def test_averages_of_rules():
    values = [0.1, 0.8, 0.2, 0.9, 0.4]
    rule, decay = jz.WalkRule(window=3), 1 - 2 / 4

    def steps(rule):
        memory, found = rule.init(), []
        for value in values:
            ten = jnp.float32(10)
            wanted, memory = rule.wanted(jnp.float32(value), ten, ten, jnp.float32(0.5), memory)
            found.append(float(wanted))
        return found

    medians = [np.median(values[max(0, i - 2) : i + 1]) for i in range(5)]
    assert steps(rule) == [11 if m < 0.5 else 9 for m in medians]
    weights = [decay ** np.arange(i + 1)[::-1] for i in range(5)]
    means = [np.average(values[: i + 1], weights=weights[i]) for i in range(5)]
    assert steps(jz.WalkRule(window=3, average="ema")) == [11 if m < 0.5 else 9 for m in means]


@pytest.mark.parametrize(
    ("similarity", "steps", "want"),
    [(0.5, 10, 10), (0.25, 10, 30), (0.8, 100, 25), (0.01, 10, 40), (-0.3, 10, 40), (1.0, 80, 20)],
)
def test_the_jump_solves_the_closed_form_within_its_bound(similarity, steps, want):
    rule = jz.JumpRule()
    steps = jnp.float32(steps)
    for per_step in (1.0, 7.0):  # the unit of weight does not matter
        got, _ = rule.wanted(
            jnp.float32(similarity), steps, per_step * steps, jnp.float32(0.5), rule.init()
        )
        assert got == want


# Known noise: a quadratic, and Gaussian noise of another spectrum.

_DIM = 2**15
_CURVATURE = np.geomspace(1, 0.1, _DIM)
_SPREAD = np.geomspace(1, 3, _DIM)


def _noise(scale, num_microbatches, dim=_DIM, seed=0):
    """Curvature, and draws of the noise of one unit of weight: tr(Sigma) / |H x|^2 is `scale`."""
    curvature, spread = (x[:: _DIM // dim] for x in (_CURVATURE, _SPREAD))
    spread = spread * math.sqrt(scale * np.sum(curvature**2) / np.sum(spread**2))
    draws = np.random.default_rng(seed).standard_normal((num_microbatches, dim), np.float32)
    return jnp.asarray(curvature, jnp.float32), jnp.asarray(draws * spread.astype(np.float32))


@functools.partial(jax.jit, static_argnums=0)
def _train(tx, curvature, draws, weights=None):
    """Sizes and statistics after each micro-batch, at a point that does not move."""
    params = jnp.ones_like(curvature)
    weights = jnp.ones(len(draws)) if weights is None else weights

    def one(state, given):
        draw, weight = given
        gradient = curvature * params + draw / jnp.sqrt(weight)
        _, state = tx.update(gradient, state, params, weight=weight)
        return state, jz.simigrad_stats(state)

    return jax.lax.scan(one, tx.init(params), (draws, weights))[1]


def _at_updates(stats):
    return {
        k: np.asarray(v)[np.asarray(stats["count"]) == 0] for k, v in stats.items() if k != "groups"
    }


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 1, 1), (1, 2, 3, 10)])
def test_similarity_and_noise_scale_of_known_noise(weights):
    steps, scale = len(weights), 6.0
    tx = _simigrad(optax.sgd(0.0), initial=steps, min_steps=steps, max_steps=steps)
    stats = _at_updates(_train(tx, *_noise(scale, 40 * steps), jnp.float32(40 * weights)))
    want = 1 / (1 + 2 * scale / sum(weights))
    np.testing.assert_allclose(np.mean(stats["similarity"]), want, rtol=0.05)
    np.testing.assert_allclose(stats["noise_scale"][-1], scale, rtol=0.05)
    assert abs(stats["noise_scale"][-1] - scale) < 5 * stats["noise_scale_error"][-1]


def test_the_standard_error_is_that_of_many_runs():
    number, scale = 200, 10.0
    tx = _simigrad(optax.sgd(0.0), initial=8, min_steps=8, max_steps=8, noise_window=10)

    curvature, draws = _noise(scale, number * 8 * 30, dim=512)

    def last(draws):
        stats = _train(tx, curvature, draws)
        return stats["noise_scale"][-1], stats["noise_scale_error"][-1]

    scales, errors = jax.lax.map(last, draws.reshape(number, 8 * 30, 512))
    # A standard deviation of 200 values is known to 1 / sqrt(2 * 200) = 5%; three times that. So is
    # their mean, to a fourteenth of it; the bias of a ratio is of second order in its error.
    np.testing.assert_allclose(np.sqrt(np.mean(errors**2)), np.std(scales), rtol=0.15)
    np.testing.assert_allclose(np.mean(scales), scale, atol=4 * np.std(scales) / math.sqrt(number))


@pytest.mark.parametrize("rule", ["jump", jz.JumpRule(average="ema", window=3)])
@pytest.mark.parametrize(("initial", "wanted"), [(4, 48), (200, 40)])
def test_the_jump_settles_in_three_updates(rule, initial, wanted):
    target = 0.5
    scale = wanted * (1 - target) / (2 * target)
    tx = _simigrad(
        optax.sgd(0.0), target_similarity=target, initial=initial, max_steps=400, rule=rule
    )
    sizes = _at_updates(_train(tx, *_noise(scale, 500)))["steps"]
    assert len(sizes) >= 6
    np.testing.assert_allclose(sizes[2:], wanted, rtol=0.05)


@pytest.mark.parametrize(("initial", "wanted"), [(20, 96), (96, 20)])
def test_the_walk_settles(initial, wanted):
    target = 0.25
    scale = wanted * (1 - target) / (2 * target)
    tx = _simigrad(optax.sgd(0.0), target_similarity=target, initial=initial, max_steps=400)
    expected, size = 0, initial  # the paper's rule without noise
    while (size < wanted) == (initial < wanted):
        size = max(size + 1, int(1.1 * size)) if size < wanted else min(size - 1, int(0.9 * size))
        expected += 1
    sizes = _at_updates(_train(tx, *_noise(scale, 2200, dim=2**13)))["steps"]
    reached = 1 + int(np.argmax(sizes >= wanted if initial < wanted else sizes <= wanted))
    formula = abs(math.log(wanted / initial)) / math.log(1.1)
    assert abs(reached - expected) <= 2 and abs(reached - formula) <= 4
    # Up and down by a tenth, and by what a cosine of so many numbers is uncertain.
    assert len(sizes) >= reached + 8
    np.testing.assert_allclose(sizes[reached:], wanted, rtol=0.2)
    np.testing.assert_allclose(np.mean(sizes[reached:]), wanted, rtol=0.1)


# What is not a number.


@pytest.mark.parametrize("rule", ["walk", "jump"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, None])
def test_what_is_not_finite_changes_nothing_and_is_counted(bad, rule):
    gradients = _gradients(12)
    if bad is None:  # no gradient at all: its direction is 0 / 0
        gradients[4:8] = 4 * [jax.tree.map(jnp.zeros_like, gradients[0])]
    else:
        gradients[5]["a"] = gradients[5]["a"].at[1, 1].set(bad)
    tx = _simigrad(rule=rule, target_similarity=0.5, min_steps=4, max_steps=4)
    updates, states = _feed(tx, gradients)
    before, after = states[3], states[7]
    assert before.skipped == 0 and after.skipped == 1 and after.updates == 2
    for name in ("steps", "similarity", "moments", "memory", "unmeasured"):
        _assert_same_bits(getattr(after, name), getattr(before, name))
    # The next batch starts clean.
    want = -0.1 * np.mean([_flat(g) for g in gradients[8:]], 0)
    np.testing.assert_allclose(_flat(updates[-1]), want, rtol=1e-5, atol=1e-7)
    assert states[-1].skipped == 1 and np.isfinite(states[-1].similarity)


def test_a_micro_batch_without_examples_is_left_out():
    gradients = _gradients(4)
    gradients[1] = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), gradients[1])
    extras = [{"weight": np.float32(w)} for w in (3, 0, 2, 1)]
    updates, states = _feed(_simigrad(optax.sgd(1.0)), gradients, extras=extras)
    flat = np.stack([_flat(gradients[i]) for i in (0, 2, 3)])
    np.testing.assert_allclose(_flat(updates[-1]), -(np.array([3, 2, 1]) @ flat) / 6, atol=1e-6)
    assert states[-1].skipped == 0 and states[-1].seen == 6


# Mistakes.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_similarity": 1.0}, "`target_similarity` is a cosine.*got 1.0"),
        ({"target_similarity": -0.1}, "`target_similarity`.*got -0.1"),
        ({"target_similarity": "high"}, "`target_similarity`.*got 'high'"),
        ({"initial": 0}, "`initial` is a number of micro-batches.*got 0"),
        ({"initial": 2.5}, "`initial`.*got 2.5"),
        ({"max_steps": True}, "`max_steps`.*got True"),
        ({"max_steps": 2**25}, "`max_steps`.*to 16777216"),
        ({"initial": 9}, "`initial` must lie between.*initial=9, min_steps=1, max_steps=8"),
        ({"min_steps": 5}, "`initial` must lie between.*min_steps=5"),
        ({"rule": "run"}, '`rule` must be "walk", "jump".*got \'run\''),
        ({"rule": jz.WalkRule}, "`rule` must be"),
        ({"lr_scaling": "log"}, '`lr_scaling` must be "sqrt", "linear" or None'),
        ({"combine": "max"}, '`combine` must be "mean"'),
        ({"noise_window": 1}, "`noise_window`.*got 1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        _simigrad(**options)


def test_wrong_types():
    # Not through `jz.simigrad`: in tests, its annotations are checked first.
    with pytest.raises(TypeError, match="`inner` must be an optax transform.*got float"):
        settings.check_inner(0.1)
    with pytest.raises(ValueError, match='`rule` must be "walk", "jump".*got 0.1'):
        settings.check_rule(0.1)


@pytest.mark.parametrize(
    ("rule", "field", "value", "message"),
    [
        (jz.WalkRule(), "growth", 1, "`growth` of `WalkRule`.*got 1 and 0.9"),
        (jz.WalkRule(), "shrink", 1.5, "`growth` of `WalkRule`.*got 1.1 and 1.5"),
        (jz.WalkRule(), "window", 0, "`window` of `WalkRule` counts updates.*got 0"),
        (jz.JumpRule(), "window", 2.5, "`window` of `JumpRule`.*got 2.5"),
        (jz.JumpRule(), "max_change", 1, "`max_change` of `JumpRule`.*got 1"),
        (jz.JumpRule(), "average", "mode", "`average` of `JumpRule`.*got 'mode'"),
    ],
)
def test_wrong_rules(rule, field, value, message):
    rule = copy.copy(rule)  # and not `jz.WalkRule(...)`: tests check annotations first
    object.__setattr__(rule, field, value)
    with pytest.raises(ValueError, match=message):
        rule.__post_init__()


@pytest.mark.parametrize(
    ("options", "gradient", "extras", "message"),
    [
        ({}, {"a": jnp.ones(3)}, {}, "`updates` must be a tree like the parameters"),
        ({}, {"a": jnp.ones(3), "b": {"c": jnp.ones(5)}}, {}, r"shape \(3,\) at `a`.*\(3, 4\)"),
        ({}, None, {"weight": jnp.ones(2)}, r"`weight` must be a real scalar.*\(2,\)"),
        ({}, None, {"halves": (1.0, 2.0)}, "`halves` must be from.*got tuple of 2"),
        ({}, None, {"codec_noise": 0.01}, "`codec_noise` must be from.*got 0.01"),
        ({}, None, {"codec_noise": (0.01, jnp.ones(2))}, "`codec_noise` must be from"),
        ({}, None, {"halves": 1.0}, "`halves` must be from.*got float"),
        ({}, None, {"halves": (1.0, 2.0, jnp.ones(3))}, r"`halves` must be three scalars"),
        ({"groups": lambda p: p}, None, {"halves": (1.0, 2.0, 1.0)}, "three trees like the grad"),
        ({"groups": len}, None, {}, "`groups` must give each leaf a label.*got 1 for `a`"),
    ],
)
def test_wrong_updates(options, gradient, extras, message):
    with pytest.raises(ValueError, match=message):
        tx = _simigrad(**options)
        tx.update(_params() if gradient is None else gradient, tx.init(_params()), **extras)


def test_stats_of_a_state_without_simigrad():
    with pytest.raises(ValueError, match="`state` must hold one state of `simigrad`.*with 0"):
        jz.simigrad_stats(optax.sgd(0.1).init(_params()))
    state = _simigrad().init(_params())
    with pytest.raises(ValueError, match="got tuple with 2"):
        jz.simigrad_stats((state, state))
