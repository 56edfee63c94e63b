"""`shares`: nodes with different numbers of rows; loss and gradients equal those of one device."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from jaxzero._hlo.instructions import parse
from tests import zoo

_ROWS = 13  # of the batch: with shares (2, 1) on 2 x 2 devices, of 18 or 24 that are computed
_SHARES = (2, 1)
_PRESETS = {"zero3": jz.zero3(), "ddp": jz.ddp(), **zoo.PRESETS}


def _layer(x, p):
    scores = jnp.einsum("btd,bsd->bts", x, x)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    scores = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.tanh(jnp.einsum("bts,bsd->btd", scores, x) @ p["w"] + p["b"][None, None])


def _features(params, tokens):
    x, layer = params["table"][tokens], jax.checkpoint(_layer)
    if isinstance(params["layers"], dict):
        return jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])[0]
    for p in params["layers"]:
        x = layer(x, p)
    return x


def _loss(params, batch):
    batch, weights = batch
    outputs = _features(params, batch["tokens"]) @ params["head"]
    return jnp.sum(weights * jnp.mean((outputs - batch["wanted"]) ** 2, (1, 2))), jnp.sum(weights)


@functools.cache
def _params(scanned):
    """Parameters of two values only, so that quantization is exact under every preset."""
    random = np.random.default_rng(0)

    def leaf(*shape):
        return np.where(random.integers(0, 2, shape), 0.25, -0.25).astype(np.float32)

    layers = {"w": leaf(3, 16, 16), "b": leaf(3, 16)}
    split = [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(3)]
    return {"table": leaf(11, 16), "layers": layers if scanned else split, "head": leaf(16, 8)}


@functools.cache
def _batch():
    random = np.random.default_rng(1)
    wanted = random.normal(size=(_ROWS, 6, 8)).astype(np.float32)
    return {"tokens": random.integers(0, 11, (_ROWS, 6)), "wanted": wanted}


@functools.cache
def _oracle(scanned):
    """The mean loss over all rows, its gradient, and each row's gradient, on one device."""
    params, batch, ones = _params(scanned), _batch(), np.ones(_ROWS, np.float32)

    def total(params, batch, weights):
        return _loss(params, (batch, weights))[0]

    with jax.default_matmul_precision("highest"):
        loss, grads = jax.jit(jax.value_and_grad(total))(params, batch, ones)
        eye = np.eye(_ROWS, dtype=np.float32)
        rows = jax.vmap(lambda weights: jax.grad(total)(params, batch, weights))(eye)
    loss, grads = jax.tree.map(lambda x: np.asarray(x) / _ROWS, (loss, grads))
    return loss, grads, jax.device_get(rows)


def _sizes(rows, microbatches):
    """For each leaf, the sum of the norms of all gradients that are sent, over all rows.

    Codecs and rounding err in proportion to it.
    """
    counts = [rows_of for rows_of in _counts(microbatches) if rows_of]
    ends = np.cumsum(counts)

    def size(x):
        parts = [x[end - num : end].sum(0) for end, num in zip(ends, counts, strict=True)]
        return float(sum(np.linalg.norm(part) for part in parts)) / _ROWS

    return jax.tree.map(size, rows)


def _counts(microbatches):
    """How many rows each device has in each micro-batch, without padding."""
    unit = -(-_ROWS // (2 * sum(_SHARES) * microbatches))
    left, counts = _ROWS, []
    for share in np.repeat(_SHARES, 2 * microbatches):
        counts.append(min(left, int(share) * unit))
        left -= counts[-1]
    return counts


def _step(preset, scanned, mesh, microbatches=1, loss=_loss, **options):
    """A sharded step with its arguments, and its wire state if the preset needs one."""
    zero = jz.Zero(zoo.make_mesh(mesh), _PRESETS[preset])
    params = zero.shard(_params(scanned))
    batch = jz.pad_batch(_batch(), zero, microbatches=microbatches, shares=_SHARES)
    step = zero.value_and_grad(
        loss, microbatches=microbatches, weighted=True, shares=_SHARES, **options
    )
    needs = zero.config.needs_wire_state
    state = {"wire_state": zero.init_wire_state(params)} if needs else {}
    return zero, step, (params, batch), state


_FEW = [("zero3", True, "auto", 2)]
_IN_CI = [
    ("zero3", False, "explicit", 1),
    ("zeropp", True, "explicit", 1),
    ("zeropp4", False, "auto", 2),
    ("ddp", True, "auto", 1),
]
_ALL = [
    (preset, scanned, kind, microbatches)
    for preset in ("zero3", "zeropp", "zeropp4")
    for scanned in (True, False)
    for kind in ("auto", "explicit")
    for microbatches in (1, 2)
]


@pytest.mark.parametrize(
    ("preset", "scanned", "kind", "microbatches"),
    [
        *_FEW,
        *(pytest.param(*x, marks=pytest.mark.ci) for x in _IN_CI),
        *(pytest.param(*x, marks=pytest.mark.exhaustive) for x in _ALL if x not in _FEW + _IN_CI),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(preset, scanned, kind, microbatches):
    want_loss, want, rows = _oracle(scanned)
    with jax.default_matmul_precision("highest"):
        zero, step, args, state = _step(preset, scanned, f"2x2-{kind}", microbatches)
        loss, grads, *_ = step(*args, **state)
    zoo.assert_close(jax.device_get(loss), want_loss, 1e-5, "loss")
    got = jax.device_get(zero.unshard(grads))
    if preset in zoo.PRESETS:
        zoo.assert_within(got, want, _sizes(rows, microbatches))
    else:
        zoo.assert_close(got, want, 1e-5, "grads")


def test_collectives_are_outside_of_branches_and_products_inside():
    _, step, args, _ = _step("zero3", True, "2x2-auto", 2)
    program = parse(jax.jit(step).lower(*args).compile().as_text())

    def called(name):
        yield from (program.computations[name].instructions)
        for instruction in program.computations[name].instructions:
            for names in instruction.called.values():
                for each in names:
                    yield from called(each)

    everywhere = [x for each in program.computations.values() for x in each.instructions]
    branches = [x for x in everywhere if x.op == "conditional"]
    inside = [x for c in branches for name in c.called["branch_computations"] for x in called(name)]
    sends = re.compile("all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute")
    assert any(sends.match(x.op) for x in everywhere)
    assert not [x.text for x in inside if sends.match(x.op)]
    products = {x.name for x in everywhere if x.op == "dot"}
    assert products and products == {x.name for x in inside if x.op == "dot"}
    results = [0, 0]  # elements of the products in each branch
    for c in branches:
        for i, name in enumerate(c.called["branch_computations"]):
            dots = (x for x in called(name) if x.op == "dot")
            results[i] += sum(shape.size for x in dots for shape in x.results)
    assert results[1] < 0.8 * results[0]  # half, but for the gradients of weights


@pytest.mark.ci
def test_constants_are_those_of_a_nodes_own_rows():
    batch = {"tokens": _batch()["tokens"][:12], "wanted": _batch()["wanted"][:12]}

    def loss(params, batch):  # no row of padding is computed, so none needs a weight of 0
        outputs = _features(params, batch[0]["tokens"]) @ params["head"]
        num = len(batch[0]["wanted"])
        return jnp.mean((outputs - batch[0]["wanted"]) ** 2) * num, num

    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    rows = jz.pad_batch(batch, zero, shares=_SHARES)
    assert rows[1].sum() == 12 and len(rows[1]) == 16
    want_loss, want = jax.value_and_grad(lambda p: loss(p, (batch,))[0] / 12)(_params(True))
    step = zero.value_and_grad(loss, weighted=True, shares=_SHARES)
    got_loss, grads = step(zero.shard(_params(True)), rows)
    zoo.assert_close(jax.device_get(got_loss), want_loss, 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want), 1e-5, "grads")


def test_aux_is_a_sum_or_that_of_the_first_device():
    def loss(params, batch):
        rows = {"rows": len(batch[1]), "counted": batch[1].sum(), "first": batch[1].sum()}
        return (params["head"].sum() * batch[1].sum(), batch[1].sum()), rows

    how = {"rows": "sum", "counted": "sum", "first": "first"}
    _, step, args, _ = _step("zero3", True, "2x2-auto", 1, loss, has_aux=True, aux_reduce=how)
    (_, aux), _ = step(*args)
    assert {k: float(x) for k, x in aux.items()} == {"rows": 18, "counted": 13, "first": 6}

    bad = {**how, "first": "mean"}
    _, step, args, _ = _step("zero3", True, "2x2-auto", 1, loss, has_aux=True, aux_reduce=bad)
    with pytest.raises(ValueError, match=r"aux leaf `first` is combined by 'mean'"):
        step(*args)


def test_pad_batch_puts_the_rows_of_a_node_first():
    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    rows, weights = jz.pad_batch(np.arange(10), zero, microbatches=2, shares=(2, 1))
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9, 9, 9, 9, 9]
    assert weights.tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0]
    assert len(jz.pad_batch(np.arange(10), zero, rows=32, shares=(4, 2))[0]) == 32
    for rows in (8, 20):
        with pytest.raises(ValueError, match="multiple of 8 of which 6 in each 8"):
            jz.pad_batch(np.arange(10), zero, rows=rows, shares=(2, 1))
    even, weights = jz.pad_batch(np.arange(8), zero, shares=(3, 3))
    assert even.tolist() == list(range(8)) and weights.tolist() == [1] * 8


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"shares": (2, 1, 1)}, ValueError, r"number of nodes is 2; got \(2, 1, 1\)"),
        ({"shares": (2, 0)}, ValueError, r"at least 1 for each node.*got \(2, 0\)"),
        ({"shares": 2}, ValueError, "an integer of at least 1 for each node"),
        ({"shares": (2.0, 1.0)}, ValueError, "an integer of at least 1"),
        ({"weighted": False}, ValueError, "`shares` needs `weighted=True`"),
        ({"halves": True}, NotImplementedError, "does not work with `halves=True`"),
    ],
)
def test_options_that_do_not_go_together(options, error, match):
    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    with pytest.raises(error, match=match):
        zero.value_and_grad(_loss, **{"weighted": True, "shares": (2, 1), **options})


def test_offload_and_other_axes_are_refused():
    config = dataclasses.replace(jz.zero3(), offload=jz.Offload(optimizer=True))
    for zero, match in (
        (jz.Zero(zoo.make_mesh("2x2-auto"), config), "does not work with `Offload`"),
        (jz.Zero(zoo.make_mesh("2x2x2-auto")), r"does not work with the mesh axes \['tensor'\]"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            zero.value_and_grad(_loss, weighted=True, shares=(2, 1))


def _with_psum(params, batch):
    total, weight = _loss(params, batch)
    return total / jax.lax.psum(1.0 * weight, ("node", "local")), weight


def _with_print(params, batch):
    jax.debug.print("{}", batch[1].sum())
    return _loss(params, batch)


def _with_a_branch(params, batch):
    total, weight = _loss(params, batch)
    return (total if len(batch[1]) > 4 else jnp.sin(total)), weight


def _with_scaled_gradients(params, batch):
    params = jax.tree.map(lambda x: x / len(batch[1]), params)
    return _loss(params, batch)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (_with_psum, "`psum.*` at .*test_shares.py.* is not computed by all devices alike"),
        (_with_print, "`debug_.*` at .*is not computed by all devices alike"),
        (_with_a_branch, "traces must differ in sizes only"),
        (_with_scaled_gradients, "works on shards"),
    ],
)
def test_functions_that_differ_by_rows_are_refused(loss, match):
    _, step, args, _ = _step("zero3", True, "2x2-auto", loss=loss)
    with pytest.raises(NotImplementedError, match=match):
        jax.eval_shape(step, *args)


def test_batches_that_cannot_be_divided():
    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    params = zero.shard(_params(True))
    step = zero.value_and_grad(_loss, weighted=True, shares=(2, 1))
    with pytest.raises(ValueError, match="must be a multiple of 8. Pad it"):
        step(params, jz.pad_batch(_batch(), zero, rows=20))
    spec = jax.sharding.PartitionSpec("local")
    step = zero.value_and_grad(_loss, weighted=True, shares=(2, 1), in_specs=(None, spec))
    with pytest.raises(ValueError, match=r"split by .*local.*`zero.batch_spec` or not at all"):
        step(params, jz.pad_batch(_batch(), zero, shares=(2, 1)))
    step = zero.value_and_grad(_loss, weighted=True, shares=(2, 1), batch_argnums=())
    with pytest.raises(ValueError, match="no argument is a batch"):
        step(params, jz.pad_batch(_batch(), zero, shares=(2, 1)))


def test_local_steps_train_each_node_with_the_same_rows():
    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    gradients = zero.value_and_grad(_loss, weighted=True, shares=(2, 1))

    def step(params, opt_state, batch):
        loss, _ = gradients(params, batch)
        return params, opt_state, loss

    params = zero.shard(_params(True))
    rounds = zero.local_steps(step, every=1)
    batch = jax.tree.map(lambda x: x[None], jz.pad_batch(_batch(), zero, rows=16))
    with pytest.raises(ValueError, match="In `zero.local_steps` every node trains by itself"):
        rounds(rounds.init(params, ()), batch)
