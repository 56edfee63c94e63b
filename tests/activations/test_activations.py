"""Activations under a budget: results of the unchanged program, and less memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxzero as jz
from jaxzero._hlo import Rates
from tests import zoo

LAYERS, WIDTH, TOKENS, ROWS = 4, 16, 8, 16
# What XLA fuses differs with what is computed again, so that sums of 128 terms are rounded apart.
_TOLERANCE = 1e-13


@pytest.fixture(autouse=True)
def _copies_are_free(monkeypatch):
    """Products of so narrow layers take less time than copies into a stack and out of it."""
    monkeypatch.setattr("jaxzero._activations.min_cut.STACKED", 0.0)


def zero_of(budget: int | None, host: bool = False, preset: Any = jz.zero3, **mesh: Any) -> jz.Zero:
    activations = jz.Activations(budget_bytes=budget, host=host)
    mesh = {"nodes": 2, "devices": jax.devices()[:4]} | mesh
    return jz.Zero(jz.make_mesh(**mesh), dataclasses.replace(preset(), activations=activations))


def init() -> Any:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) / 4

    layers = {"up": draw(LAYERS, WIDTH, 4 * WIDTH), "down": draw(LAYERS, 4 * WIDTH, WIDTH)}
    layers |= {"gain": 1 + draw(LAYERS, WIDTH), "mix": draw(LAYERS, WIDTH, WIDTH)}
    return {"embed": draw(32, WIDTH), "layers": layers, "head": draw(WIDTH, 32)}


def batch() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 32, (ROWS, TOKENS), np.int32)


def _layer(x: jax.Array, w: Any) -> jax.Array:
    h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["gain"][None, None]
    scores = jnp.einsum("btd,bsd->bts", h @ w["mix"], h)
    scores = jnp.where(jnp.tril(jnp.ones((1, TOKENS, TOKENS), bool)), scores, -1e9)
    x = x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), h)
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def head(p: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], ids).mean()


def loss_of(form: str, layer: Any) -> Any:
    """The loss of a model whose layers are "scanned" or "unrolled"."""

    def loss(p: Any, ids: jax.Array) -> jax.Array:
        x = p["embed"][ids]
        if form == "scanned":
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, p["layers"])
        else:
            for i in range(LAYERS):
                x = layer(x, jax.tree.map(lambda w, i=i: w[i], p["layers"]))
        return head(p, x, ids)

    return loss


MODELS = {form: loss_of(form, _layer) for form in ("scanned", "unrolled")}


def _check(zero: jz.Zero, loss: Any, **options: Any) -> None:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        params, ids = init(), batch()
        of_one = {k: x for k, x in options.items() if k != "microbatches"}
        want = jax.jit(jax.value_and_grad(loss, **of_one))(params, ids)
        value, grads = jax.jit(zero.value_and_grad(loss, **options))(zero.shard(params), ids)
        zoo.assert_close((value, zero.unshard(grads)), want, _TOLERANCE, "step")


def residuals(zero: jz.Zero, loss: Any, action: str = "keep") -> list[Any]:
    residuals = zero.plan(loss, zero.abstract(init), batch()).residuals
    return [x for x in residuals if x.action == action]


def bytes_of(residuals: Any) -> int:
    return sum(x.num_bytes for x in residuals)


@pytest.mark.parametrize(
    "budget", [0, 24_000, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (50_000, 10**9))]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_one_device(name, budget):
    zero = zero_of(budget)
    _check(zero, MODELS[name])
    assert bytes_of(residuals(zero, MODELS[name])) <= budget or budget == 0


@pytest.mark.parametrize("name", MODELS)
def test_more_is_kept_and_less_repeated_for_more_bytes(name):
    zeros = [zero_of(budget) for budget in (0, 24_000, 50_000, 10**9)]
    kept = [bytes_of(residuals(zero, MODELS[name])) for zero in zeros]
    again = [bytes_of(residuals(zero, MODELS[name], "recompute")) for zero in zeros]
    assert kept == sorted(kept) and kept[0] < kept[-1]
    assert again == sorted(again, reverse=True) and again[0] > again[-1]


def test_the_least_of_a_scanned_model_is_what_its_layers_pass_on():
    kept = residuals(zero_of(0), MODELS["scanned"])
    assert max(kept, key=lambda x: x.num_bytes).shape == (ROWS // 4, TOKENS, WIDTH)
    assert sum(x.layers == LAYERS and x.num_bytes > 4096 for x in kept) == 1


def test_memory_of_the_compiled_step():
    """What XLA holds grows with the layers as what the plan keeps, which is a third of everything.

    Beside it XLA holds what one layer takes, forward and backward, which differs between versions.
    Outside of loops that is tested in `test_repeated` and `test_aot`.
    """
    loss, zero = MODELS["scanned"], zero_of(0)
    ids = np.zeros((64 * ROWS, TOKENS), np.int32)
    temporaries, kept = [], []
    for times in (1, 3):
        params = init()
        params["layers"] = jax.tree.map(
            lambda w, n=times: np.tile(w, (n, 1, 1)[: w.ndim]), params["layers"]
        )
        params = zero.abstract(lambda p=params: p)
        step = jax.jit(zero.value_and_grad(loss)).lower(params, ids)
        temporaries.append(step.compile().memory_analysis().temp_size_in_bytes)
        kept.append(
            bytes_of(x for x in zero.plan(loss, params, ids).residuals if x.action == "keep")
        )
    assert temporaries[1] - temporaries[0] == pytest.approx(kept[1] - kept[0], rel=1e-2)
    everything = zero_of(10**9).plan(loss, params, ids).residuals
    assert 3 * kept[1] < bytes_of(x for x in everything if x.action == "keep")


@pytest.mark.parametrize(
    "options",
    [{"microbatches": 2}, {"has_aux": True, "microbatches": 2}],
    ids=["microbatches", "aux"],
)
def test_with_options_of_a_step(options):
    def loss(p, ids):
        value = MODELS["scanned"](p, ids)
        return (value, jnp.mean(ids.astype(value.dtype))) if "has_aux" in options else value

    _check(zero_of(24_000), loss, **options)


@pytest.mark.parametrize("preset", [lambda: jz.pipeline(2), jz.hsdp], ids=["stages", "hsdp"])
def test_with_other_layouts(preset):
    _check(zero_of(40_000, preset=preset), MODELS["scanned"])


def test_stages_keep_less_of_each_microbatch():
    loose, tight = (zero_of(x, preset=lambda: jz.pipeline(2)) for x in (10**9, 0))
    assert 3 * bytes_of(residuals(tight, MODELS["scanned"])) < bytes_of(
        residuals(loose, MODELS["scanned"])
    )


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_with_a_third_axis(kind):
    _check(jz.Zero(zoo.make_mesh(f"2x2-{kind}"), zero_of(0).config), MODELS["unrolled"])


def test_devices_that_share_rows_keep_a_part():
    def loss(p, ids):
        x, _ = lax.scan(
            lambda x, w: (jz.split_tokens(_layer(x, w)), None),
            jz.split_tokens(p["embed"][ids]),
            p["layers"],
        )
        return head(p, x, ids)

    whole = residuals(zero_of(0), loss)
    split = residuals(zero_of(0, devices=jax.devices(), tokens=2), loss)
    assert [x.shape for x in whole] == [x.shape for x in split]
    assert 2 * bytes_of(split) == bytes_of(whole)


@pytest.mark.filterwarnings("ignore::jaxzero.RowsMixedWarning")
def test_random_bits_are_made_again_from_their_keys():
    def loss(p, ids):
        def body(carry, w):
            x, key = carry
            key, mine = jax.random.split(key)
            return (
                _layer(x * jax.random.bernoulli(mine, 0.8, (1, *x.shape[1:])).astype(x.dtype), w),
                key,
            ), None

        start = p["embed"][ids], jax.random.key(7)
        (x, _), _ = lax.scan(body, start, p["layers"])
        return head(p, x, ids)

    _check(zero_of(0), loss)
    masks = [x for x in residuals(zero_of(0), loss) if x.dtype in ("bool", "uint32")]
    assert bytes_of(masks) < LAYERS * TOKENS * WIDTH


def _counted(calls: list[int]) -> Any:
    def twice(x: jax.Array) -> np.ndarray:
        calls.append(1)
        return np.asarray(2 * x)

    return twice


@pytest.mark.parametrize("name", MODELS)
def test_python_is_not_called_again(name):
    """What it returns is kept, as backward reads it: in loops and outside of them."""
    calls: list[int] = []

    def layer(x: jax.Array, w: Any) -> jax.Array:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        scale = jax.pure_callback(_counted(calls), like, lax.stop_gradient(x))
        return _layer(x * jnp.tanh(scale), w)

    loss, zero = loss_of(name, layer), zero_of(0)
    jax.block_until_ready(zero.value_and_grad(loss)(zero.shard(init()), batch()))
    assert len(calls) == 4 * LAYERS


@pytest.mark.parametrize("name", MODELS)
def test_an_offloading_policy_of_the_model_stays(name):
    """Its copies in host memory count nothing, and are not computed again."""
    names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["x"]}
    places = {"offload_src": "device", "offload_dst": "pinned_host"}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(**names, **places)
    layer = jax.checkpoint(lambda x, w: _layer(checkpoint_name(x, "x"), w), policy=policy)
    loss = loss_of(name, layer)
    of_a_layer = ROWS // 4 * TOKENS * WIDTH * 4
    assert bytes_of(residuals(zero_of(0), loss)) < 2 * of_a_layer
    _check(zero_of(0), loss)


@pytest.mark.parametrize("length", [0, 1])
def test_loops_of_hardly_any_layers(length):
    def loss(p, ids):
        layers = jax.tree.map(lambda w: w[:length], p["layers"])
        x, _ = lax.scan(lambda x, w: (_layer(x, w), None), p["embed"][ids], layers)
        return head(p, x, ids)

    _check(zero_of(0), loss)


@pytest.mark.parametrize(
    ("preset", "mesh"), [(lambda: jz.pipeline(2), {}), (jz.zero3, {"simulate": 4})]
)
def test_host_memory_is_refused_where_there_is_none(preset, mesh):
    with pytest.raises((ValueError, NotImplementedError), match="`host=True`"):
        zero_of(10**6, host=True, preset=preset, **({"devices": None} | mesh if mesh else {}))


def test_collectives_of_the_loss_are_not_repeated():
    def loss(p, ids, mean=lambda x: x):
        def body(x, w):
            return _layer(x - mean(jnp.mean(x, (0, 1), keepdims=True)), w), None

        x, _ = lax.scan(body, p["embed"][ids], p["layers"])
        return head(p, x, ids)

    with jax.enable_x64(True):
        params, ids, zero = init(), batch(), zero_of(0)
        over = lambda p, ids: loss(p, ids, lambda x: lax.pmean(x, ("node", "local")))  # noqa: E731
        want = jax.jit(jax.value_and_grad(loss))(params, ids)
        value, grads = jax.jit(zero.value_and_grad(over))(zero.shard(params), ids)
        zoo.assert_close((value, zero.unshard(grads)), want, _TOLERANCE, "step")
    plain = zero_of(None)
    counts = {
        str(jax.make_jaxpr(x.value_and_grad(over))(params, ids)).count("psum")
        for x in (zero, plain)
    }
    assert len(counts) == 1


def test_what_a_checkpoint_recomputes_is_not_kept():
    def loss(p, ids):
        body = jax.checkpoint(lambda x, w: (_layer(x, w), None))
        x, _ = lax.scan(body, p["embed"][ids], p["layers"])
        return head(p, x, ids)

    kept = residuals(zero_of(10**9), loss)
    assert sum(x.layers == LAYERS for x in kept) == 1
    _check(zero_of(10**9), loss)
    override = jz.Activations(budget_bytes=10**9, override=True)
    zero = jz.Zero(zero_of(0).mesh, dataclasses.replace(jz.zero3(), activations=override))
    of_layers = [
        [x for x in residuals(*each) if x.layers > 1]
        for each in ((zero, loss), (zero_of(10**9), MODELS["scanned"]))
    ]
    assert of_layers[0] == of_layers[1]
    _check(zero, loss)


def test_value_and_update():
    loss, tx = MODELS["scanned"], optax.sgd(0.1)
    with jax.enable_x64(True):
        params, ids, zero = init(), batch(), zero_of(0)
        _, grads = jax.jit(jax.value_and_grad(loss))(params, ids)
        want = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
        sharded = zero.shard(params)
        _, new, _ = jax.jit(zero.value_and_update(loss, tx))(
            sharded, zero.init_optimizer(tx, sharded), ids
        )
        zoo.assert_close(zero.unshard(new), want, _TOLERANCE, "parameters")


def test_copies_in_host_memory(monkeypatch):
    """The largest values wait there, as far as products take longer than copies."""
    monkeypatch.setattr("jaxzero._activations.priced._MIN_HOST", 1)
    monkeypatch.setattr("jaxzero._activations.priced.RATES", Rates(host=1e15))
    zero = zero_of(24_000, host=True)
    _check(zero, MODELS["scanned"])
    in_host = residuals(zero, MODELS["scanned"], "host")
    assert bytes_of(in_host) > 0 and all(x.layers == LAYERS for x in in_host)
    kept, of_device = (bytes_of(residuals(x, MODELS["scanned"])) for x in (zero, zero_of(24_000)))
    assert kept <= 24_000 and kept + bytes_of(in_host) > 1.3 * of_device
    least = residuals(zero_of(0, host=True), MODELS["scanned"])  # where all stacks are there
    assert all(len(x.shape) < 4 for x in least)


def test_a_plan_names_each_residual_and_its_line():
    plan = zero_of(24_000).plan(MODELS["scanned"], zero_of(0).abstract(init), batch())
    lines = [x for x in str(plan).splitlines() if x.startswith("activation")]
    kept = bytes_of(x for x in plan.residuals if x.action == "keep") / 2**10
    assert f"{kept:.2f} KiB kept" in lines[-1] and "GFLOP" in lines[-1]
    assert any("kept" in x and __file__ in x for x in lines)
    assert any("recomputed" in x and "GFLOP" in x and "(_layer)" in x for x in lines)


def test_a_report_has_what_is_kept(capsys):
    zero = zero_of(24_000)
    params = zero.abstract(init)
    plan = zero.plan(MODELS["scanned"], params, batch())
    zero.report(params, plan=plan).print(detail="state")
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "activations" in x)
    assert f"{bytes_of(residuals(zero, MODELS['scanned'])) / 2**10:.2f} KiB" in line


def test_a_budget_that_is_too_small_says_what_remains():
    with pytest.raises(ValueError, match="less than the .* bytes that a device keeps") as error:
        residuals(zero_of(100), MODELS["scanned"])
    assert f"[{ROWS // 4}, {TOKENS}, {WIDTH}] x{LAYERS}" in str(error.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(({"budget_bytes": x}, "budget_bytes") for x in (-1, 1.5)),
        *(({"budget_bytes": 10, x: y}, x) for x, y in {"host": 1, "override": "yes"}.items()),
        ({"host": True}, "needs `budget_bytes`"),
    ],
)
def test_bad_options(options: Any, match):
    # Where annotations are checked, those of a wrong type are refused before.
    with pytest.raises((ValueError, TypeError), match=match):
        jz.Activations(**options)


_LOWERED = {"implicit_fixed_point"}  # has what JAX 0.12 replaces before it compiles
_EXHAUSTIVE = pytest.mark.exhaustive
_ZOO = [
    pytest.param(name, id=name, marks=[] if i % 24 == 0 or name in _LOWERED else _EXHAUSTIVE)
    for i, name in enumerate(zoo.CASES)
]


@pytest.mark.slow
@pytest.mark.parametrize("name", _ZOO)
def test_the_zoo_with_the_least_that_can_be_kept(name):
    case = zoo.CASES[name]
    config = dataclasses.replace(jz.zero3(), activations=jz.Activations(budget_bytes=0))
    zoo.check(case, jz.Zero(zoo.make_mesh("2x4-auto"), config))
