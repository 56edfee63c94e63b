"""Freezing the first layers: the oracle is one device with `stop_gradient` on them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

NUM_LAYERS, WIDTH, ROWS = 6, 12, 48
TOLERANCE = 1e-5  # as the zoo's, for float32


def _init(two_valued=False):
    key = jax.random.key(0)
    shapes = {"embed": (20, WIDTH), "head": (WIDTH,)}
    tree = {name: zoo.normal(key, i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    layers = {
        "w": zoo.normal(key, 2, NUM_LAYERS, WIDTH, WIDTH),
        "b": zoo.normal(key, 3, NUM_LAYERS, WIDTH),
    }
    tree["layers"] = layers
    if two_valued:
        tree = jax.tree.map(lambda x: np.where(x < 0, -0.25, 0.25).astype(np.float32), tree)
    return jax.tree.map(np.asarray, tree)


def _as_list(tree):
    layers = [jax.tree.map(lambda x, i=i: x[i], tree["layers"]) for i in range(NUM_LAYERS)]
    return {**tree, "layers": layers}


def _layer(x, layer):
    return x + jnp.tanh(x @ layer["w"] + layer["b"][None]), None


def _scanned(params, batch):
    x = params["embed"][batch["ids"]]
    x, _ = jax.lax.scan(jax.checkpoint(_layer), x, params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def _listed(params, batch):
    x = params["embed"][batch["ids"]]
    for layer in params["layers"]:
        x, _ = jax.checkpoint(_layer)(x, layer)
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def _batch():
    key = jax.random.key(1)
    ids = jax.random.randint(key, (ROWS,), 0, 20)
    return {"ids": np.asarray(ids), "y": np.asarray(zoo.normal(key, 1, ROWS))}


def _model(kind, two_valued=False):
    """Loss, parameters and the path of the layers."""
    tree = _init(two_valued)
    return (_scanned, tree, "layers") if kind == "scan" else (_listed, _as_list(tree), "layers.*")


def _stop(tree, prefix):
    """The tree with `stop_gradient` on what a freezing of `prefix` layers freezes."""
    stop = jax.lax.stop_gradient
    layers = tree["layers"]
    if isinstance(layers, list):
        layers = [stop(x) if i < prefix else x for i, x in enumerate(layers)]
    else:
        layers = jax.tree.map(lambda x: jnp.concatenate([stop(x[:prefix]), x[prefix:]]), layers)
    return {**tree, "embed": stop(tree["embed"]) if prefix else tree["embed"], "layers": layers}


def _active_part(grads, prefix):
    layers = grads["layers"]
    if isinstance(layers, list):
        layers = [None if i < prefix else x for i, x in enumerate(layers)]
        layers = [{"w": None, "b": None} if x is None else x for x in layers]
    elif prefix == NUM_LAYERS:
        layers = {"w": None, "b": None}
    else:
        layers = jax.tree.map(lambda x: x[prefix:], layers)
    return {**grads, "embed": None if prefix else grads["embed"], "layers": layers}


@functools.cache
def _stopped(loss, prefix):
    return jax.jit(jax.value_and_grad(lambda tree, batch: loss(_stop(tree, prefix), batch)))


def _oracle(loss, tree, prefix, batch):
    with jax.default_matmul_precision("highest"):
        value, grads = jax.device_get(_stopped(loss, prefix)(tree, batch))
    return value, _active_part(grads, prefix)


def _assert_bits_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(
    ("kind", "prefix", "mesh"),
    [
        ("scan", 0, "2x4-auto"),
        ("scan", 1, "2x3-explicit"),  # six devices: padded leaves
        ("scan", 4, "2x4-explicit"),
        ("scan", NUM_LAYERS, "2x3-auto"),
        ("list", 1, "2x4-auto"),
        ("list", 4, "2x3-explicit"),
    ],
)
@pytest.mark.one_in(2)
def test_loss_and_gradients_are_those_of_stop_gradient(kind, prefix, mesh):
    loss, tree, layers = _model(kind)
    zero = jz.Zero(zoo.make_mesh(mesh))
    params = zero.shard(tree)
    freezing = zero.freeze(params, prefix, layers=layers, before="embed")
    active, frozen = freezing.split(params)
    before = jax.device_get(zero.unshard(frozen)) if prefix else None
    step = zero.value_and_grad(freezing.wrap(loss), microbatches=1 + prefix % 2)
    with jax.default_matmul_precision("highest"):
        value, grads = jax.jit(step)(active, frozen, _batch())
    want_value, want_grads = _oracle(loss, tree, prefix, _batch())
    zoo.assert_close(jax.device_get(value), want_value, TOLERANCE, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), want_grads, TOLERANCE, "grads")
    if prefix:
        _assert_bits_equal(jax.device_get(zero.unshard(frozen)), before)
    joined = freezing.join(active, frozen)
    _assert_bits_equal(joined, params)
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, joined, params)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(
    ("kind", "preset"),
    [("scan", "zeropp"), ("list", "zeropp"), pytest.param("scan", "zeropp4", marks=pytest.mark.ci)],
)
@pytest.mark.one_in(2)
def test_under_zeropp_gradients_are_within_the_codecs_bound(kind, preset):
    loss, tree, layers = _model(kind, two_valued=True)
    zero = jz.Zero(zoo.make_mesh("2x4-auto"), zoo.PRESETS[preset])
    freezing = zero.freeze(zero.shard(tree), 2, layers=layers, before="embed")
    active, frozen = freezing.split(zero.shard(tree))
    batch = _batch()
    state = zero.init_wire_state(active) if zero.config.needs_wire_state else None
    step = zero.value_and_grad(freezing.wrap(loss))
    value, grads, *_ = step(active, frozen, batch, wire_state=state)
    want_value, want = _oracle(loss, tree, 2, batch)
    num = ROWS // 8
    slices = [jax.tree.map(lambda x, i=i: x[i * num : (i + 1) * num], batch) for i in range(8)]
    each = [_oracle(loss, tree, 2, x)[1] for x in slices]
    sizes = jax.tree.map(lambda *xs: float(np.mean([np.linalg.norm(x) for x in xs])), *each)
    np.testing.assert_allclose(value, want_value, rtol=TOLERANCE)
    zoo.assert_within(jax.device_get(zero.unshard(grads)), want, sizes, tolerance=TOLERANCE)


@pytest.mark.parametrize("kind", ["scan", "list"])
def test_frozen_layers_are_gathered_once_and_never_reduced(kind):
    loss, tree, layers = _model(kind)
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard(tree)
    freezing = zero.freeze(params, 4, layers=layers, before="embed")
    planned = zero.plan(freezing.wrap(loss), *freezing.split(params), _batch())
    if kind == "list":
        for i in range(NUM_LAYERS):
            steps = [x.action for x in planned.steps if x.name == f"layers.{i}.w"]
            # The last layer is held until backward: its bucket is small, and sent so early.
            num = 1 if i < 4 else 2 if i == NUM_LAYERS - 1 else 3
            assert (len(steps), steps.count("reduce")) == (num, i >= 4), planned
        return
    plan = str(planned)
    lines = [x for x in plan.splitlines() if "layers.w[i]" in x]
    reduced = [x for x in lines if "reduce" in x]
    of_frozen = [x for x in lines if " x4 " in x]
    assert len(of_frozen) == 1 and "all-gather" in of_frozen[0], plan
    assert len(reduced) == 1 and " x2 " in reduced[0], plan
    assert len(lines) == 4, plan  # frozen: forward; active: forward, backward, reduction


def test_frozen_layers_leave_no_residuals():
    """The loop over them returns its carry only; each loop over active layers stacks residuals."""
    loss, tree, layers = _model("scan")
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard(tree)
    freezing = zero.freeze(params, 4, layers=layers, before="embed")
    active, frozen = freezing.split(params)
    whole = jax.device_get((zero.unshard(active), zero.unshard(frozen)))
    joint = jax.make_jaxpr(jax.value_and_grad(freezing.wrap(loss)))(*whole, _batch())
    loops = [x for x in joint.eqns if x.primitive.name == "scan"]
    lengths = [x.params["length"] for x in loops]
    assert sorted(lengths) == [2, 2, 4], lengths
    first = loops[lengths.index(4)]
    assert [x.aval.shape for x in first.outvars] == [(ROWS, WIDTH)]


def test_an_active_embedding_gets_its_gradient_through_frozen_layers():
    loss, tree, layers = _model("scan")
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard(tree)
    freezing = zero.freeze(params, 3, layers=layers, before=())
    value_and_grad = zero.value_and_grad(freezing.wrap(loss))
    with jax.default_matmul_precision("highest"):
        _, grads = value_and_grad(*freezing.split(params), _batch())
        want = jax.device_get(jax.jit(jax.grad(loss))(tree, _batch()))
    want["layers"] = jax.tree.map(lambda x: x[3:], want["layers"])
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want), TOLERANCE, "grads")


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("kind", "mesh", "tx"),
    [
        ("scan", "2x3-explicit", optax.adamw(1e-2, eps=1e-2)),
        ("list", "2x4-auto", optax.sgd(1e-3, momentum=0.9)),
    ],
)
@pytest.mark.one_in(2)
def test_training_with_a_split_optimizer_is_training_with_zero_updates(kind, mesh, tx):
    """One whole step, freeze, two steps, thaw, one whole step; as `optax.masked` does it."""
    loss, tree, layers = _model(kind)
    zero = jz.Zero(zoo.make_mesh(mesh))
    params, batch = zero.shard(tree), _batch()
    opt_state = zero.init_optimizer(tx, params)
    freezing = zero.freeze(params, 2, layers=layers, before="embed")

    @jax.jit
    def whole_step(params, opt_state):
        _, grads = zero.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def frozen_step(active, opt_state, frozen):
        _, grads = zero.value_and_grad(freezing.wrap(loss))(active, frozen, batch)
        updates, opt_state = tx.update(grads, opt_state, active)
        return optax.apply_updates(active, updates), opt_state

    with jax.default_matmul_precision("highest"):
        params, opt_state = whole_step(params, opt_state)
        (active, frozen), (state, kept) = (
            freezing.split(params),
            freezing.split_optimizer(tx, opt_state),
        )
        assert jax.tree.structure(state) == jax.tree.structure(zero.init_optimizer(tx, active))
        for _ in range(2):
            active, state = frozen_step(active, state, frozen)
        params = freezing.join(active, frozen)
        opt_state = freezing.join_optimizer(tx, state, kept)
        params, opt_state = whole_step(params, opt_state)
        want = _train_on_one_device(loss, tree, tx, batch, ["whole", 2, 2, "whole"])
    zoo.assert_close(jax.device_get(zero.unshard(params)), want, 1e-4, "params")


def _train_on_one_device(loss, tree, tx, batch, steps):
    """Whole steps, and steps in which what is frozen keeps its parameters and its moments."""
    params, state = tree, jax.device_get(tx.init(tree))
    like_params = jax.tree.structure(params)

    def merged(new, old, prefix):
        part = _active_part(new, prefix)
        layers = new["layers"]
        if isinstance(layers, list):
            layers = [*old["layers"][:prefix], *layers[prefix:]]
        else:
            layers = jax.tree.map(
                lambda n, o: np.concatenate([o[:prefix], n[prefix:]]), layers, old["layers"]
            )
        return {**part, "embed": old["embed"], "layers": layers}

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for prefix in steps:
        new, new_state = jax.device_get(step(params, state))
        if prefix != "whole":
            new = merged(new, params, prefix)
            new_state = jax.tree.map(
                lambda n, o, prefix=prefix: merged(n, o, prefix) if isinstance(n, dict) else n,
                new_state,
                state,
                is_leaf=lambda x: jax.tree.structure(x) == like_params,
            )
        params, state = new, new_state
    return params


def test_statistics_that_no_layer_owns_are_refused():
    """Adafactor's factors of a matrix `[layers, width]` are means over layers."""
    tree = {"layers": {"b": np.ones((8, 16), np.float32)}}
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard(tree)
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    with jax.numpy_dtype_promotion("standard"):
        opt_state = zero.init_optimizer(tx, params)
        freezing = zero.freeze(params, 4, layers="layers", before=())
        with pytest.raises(NotImplementedError, match=r"layers\.b.*frozen in part.*init_optimizer"):
            freezing.split_optimizer(tx, opt_state)


def test_evaluation_and_structs():
    loss, tree, layers = _model("scan")
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard(tree)
    freezing = zero.freeze(params, 3, layers=layers, before="embed")
    active, frozen = freezing.split(params)
    got = zero.apply(freezing.wrap(loss))(active, frozen, _batch())
    np.testing.assert_allclose(got, loss(tree, _batch()), rtol=TOLERANCE)
    structs = freezing.split(zero.abstract(lambda: tree))
    for struct, part in zip(structs, (active, frozen), strict=True):
        described = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), part)
        assert described == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), struct)


def test_what_is_frozen_is_printed():
    _, tree, layers = _model("scan")
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    text = str(zero.freeze(zero.shard(tree), 2, layers=layers, before="embed"))
    num = 20 * WIDTH + 2 * (WIDTH**2 + WIDTH)
    total = 20 * WIDTH + WIDTH + 6 * (WIDTH**2 + WIDTH)
    assert f"2 of 6 layers are frozen: {num} of {total:,} parameters" in text
    assert re.search(r"frozen +embed", text) and re.search(r"active +head", text)
    assert re.search(r"rows 0-1 +layers\.w", text)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("scan", {"prefix": 7}, "`prefix` must be a number of layers from 0 to 6; got 7"),
        ("scan", {"prefix": -1}, "`prefix` must be .* got -1"),
        ("scan", {"prefix": True}, "`prefix` must be .* got True"),
        ("scan", {"layers": "blocks"}, "`layers` names 'blocks', and no leaf is there. .*embed"),
        ("scan", {"layers": "layers.*"}, "`layers` names 'layers.*', and no leaf is there"),
        ("scan", {"layers": "lay*.*"}, "`layers` may have one `\\*`"),
        ("scan", {"layers": ()}, "`layers` must name the layers"),
        ("scan", {"layers": ("layers", "embed")}, "all of one length; got .*'embed': 20"),
        ("scan", {"before": "stem"}, "`before` names 'stem', and no leaf is there"),
        # Where annotations are checked, None is refused before.
        ("scan", {"before": None}, "`before` must be a path .* got None|'before'"),
        ("scan", {"before": "layers"}, r"`before` names 'layers', which holds `layers\.b`"),
        ("list", {"layers": "layers"}, r"can be a list of 6 layers. Write 'layers\.\*'"),
        ("list", {"layers": "layers.0"}, "as a stack of layers, whose arrays have one leading dim"),
    ],
)
def test_mistakes_name_the_argument(kind, arguments, message):
    _, tree, layers = _model(kind)
    if arguments.get("layers") == "layers.0":
        tree["layers"][0]["b"] = np.zeros(5, np.float32)
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard(tree)
    given = {"prefix": 2, "layers": layers, "before": "embed", **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        zero.freeze(params, **given)


def test_trees_of_others_are_refused():
    loss, tree, layers = _model("scan")
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard(tree)
    with pytest.raises(ValueError, match="Make the tree with"):
        zero.freeze(tree, 2, layers=layers, before="embed")
    freezing = zero.freeze(params, 2, layers=layers, before="embed")
    other = zero.freeze(params, 3, layers=layers, before="embed")
    with pytest.raises(ValueError, match=r"`active` is not a tree of this freezing.*layers\.b"):
        other.join(*freezing.split(params))
    with pytest.raises(ValueError, match="`params` is not a tree of this freezing"):
        freezing.split(zero.shard({"embed": tree["embed"]}))
    with pytest.raises(ValueError, match="traced.*outside of `jax.jit`"):
        jax.jit(freezing.split)(params)
    encoded_zero = jz.Zero(
        zoo.make_mesh("2x4-auto"), dataclasses.replace(jz.zero3(), min_quantized_size=0)
    )
    encoded = encoded_zero.shard(tree, codec=jz.Int8(block=32))
    with pytest.raises(ValueError, match=r"stored as messages.*never trained"):
        encoded_zero.freeze(encoded, 2, layers=layers, before="embed")


def test_batches_are_named_as_in_the_loss():
    """The wrapped loss has two trees in front, and the same names after them."""
    loss, tree, layers = _model("scan")

    def weighted(params, batch, weights):
        return loss(params, batch) * jnp.sum(weights)

    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard(tree)
    freezing = zero.freeze(params, 2, layers=layers, before="embed")
    step = zero.value_and_grad(freezing.wrap(weighted), batch_argnums="batch")
    weights = np.ones(16, np.float32)
    value, _ = step(*freezing.split(params), _batch(), weights)
    np.testing.assert_allclose(value, 16 * loss(tree, _batch()), rtol=TOLERANCE)
