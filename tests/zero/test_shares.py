"""`shares`: nodes run different numbers of micro-batches; results equal those of one device."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from tests import zoo

_ROWS = 13  # of the batch: of 18 that are computed, on 2 x 2 devices
_SHARES = (2, 1)
_PRESETS = {
    "zero3": jz.zero3(),
    "ddp": jz.ddp(),
    "hsdp": jz.hsdp(),
    "stage2": jz.ZeroConfig(stage=2),
    "no_prefetch": jz.ZeroConfig(schedule=jz.CommSchedule(prefetch=0)),
    "offload": jz.ZeroConfig(
        offload=jz.Offload(weights=True, gradients=True, optimizer=True, min_size=0)
    ),
    "budget": dataclasses.replace(
        jz.zero3(), activations=jz.Activations(budget_bytes=0, override=True)
    ),
    **zoo.PRESETS,
}


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
    """How many rows each micro-batch of each device has, without padding."""
    num = 2 * sum(_SHARES) * microbatches // max(_SHARES)
    each, left, counts = -(-_ROWS // num), _ROWS, []
    for _ in range(num):
        counts.append(min(left, each))
        left -= counts[-1]
    return counts


def _step(preset, scanned, mesh, microbatches=2, loss=_loss, **options):
    """A sharded step with its arguments, and its wire state if the preset needs one."""
    zero = jz.Zero(zoo.make_mesh(mesh), _PRESETS[preset])
    params = zero.shard(_params(scanned))
    batch = jz.pad_batch(_batch(), zero, microbatches=microbatches, shares=_SHARES)
    options = {"weighted": True, **options}
    step = zero.value_and_grad(loss, microbatches=microbatches, shares=_SHARES, **options)
    needs = zero.config.needs_wire_state
    state = {"wire_state": zero.init_wire_state(params)} if needs else {}
    return zero, step, (params, batch), state


_FEW = [("zero3", True, "auto", 2), ("budget", True, "explicit", 2)]
_IN_CI = [
    ("zero3", False, "explicit", 4),
    ("zeropp", True, "explicit", 2),
    ("zeropp4", False, "auto", 4),
    ("ddp", True, "auto", 2),
    ("budget", False, "auto", 4),
    ("hsdp", True, "auto", 2),
    ("stage2", False, "explicit", 2),
    ("no_prefetch", True, "auto", 2),
    ("offload", True, "auto", 4),
]
_ALL = [
    (preset, scanned, kind, microbatches)
    for preset in ("zero3", "zeropp", "zeropp4")
    for scanned in (True, False)
    for kind in ("auto", "explicit")
    for microbatches in (2, 4)
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
    if preset == "budget":
        options = {"microbatches": microbatches, "weighted": True, "shares": _SHARES}
        residuals = zero.plan(_loss, *args, **options).residuals
        assert {x.action for x in residuals} == {"keep", "recompute"}
    if preset in zoo.PRESETS:
        zoo.assert_within(got, want, _sizes(rows, microbatches))
    else:
        zoo.assert_close(got, want, 1e-5, "grads")


def test_nodes_run_a_loop_of_their_own_without_waiting_for_others():
    _, step, args, _ = _step("zero3", True, "2x2-auto", 4)
    program = zoo.hlo_program(jax.jit(step).lower(*args).compile().as_text())

    def called(name):
        for instruction in program.computations[name].instructions:
            yield f"{instruction.name} = {instruction.text}"
            for names in instruction.called.values():
                for each in names:
                    yield from called(each)

    everywhere = [x for each in program.computations.values() for x in each.instructions]
    loops = [x for x in everywhere if x.op == "while" and x.trips is None]
    assert len(loops) == 1
    inside = set(called(loops[0].called["body"][0]))
    sent = zoo.hlo.collectives("\n".join(inside))
    assert sent and all(set(x.groups) == {(0, 1), (2, 3)} for x in sent)
    others = {f"{x.name} = {x.text}" for x in everywhere if x.op != "while"} - inside
    assert any((0, 2) in x.groups for x in zoo.hlo.collectives("\n".join(others)))


@pytest.mark.parametrize(("codec", "num_bytes"), [(None, 4), (jz.Cast(jnp.bfloat16), 2)])
def test_node_slices_are_kept_as_they_are_received(codec, num_bytes):
    zero = jz.Zero(zoo.make_mesh("2x2-auto"), jz.zero3(weights=jz.PerAxis(node=codec)))
    params = zero.shard(_params(True))
    batch = jz.pad_batch(_batch(), zero, microbatches=2, shares=_SHARES)
    options = {"microbatches": 2, "weighted": True, "shares": _SHARES}
    plan = zero.plan(_loss, params, batch, **options)
    elements = sum(x.size for x in jax.tree.leaves(_params(True)))
    assert plan.slice_bytes == elements // 2 * num_bytes  # two devices in a node
    axes = {bool(x.microbatches): set() for x in plan.transfers}
    for x in plan.transfers:
        axes[bool(x.microbatches)].add(x.axis)
    assert axes[True] == {"local"} and "node" in axes[False]


def test_effects_and_collectives_inside_a_node():
    ran = collections.Counter()

    def loss(params, batch):
        rows, weights = batch
        jax.debug.callback(lambda node: ran.update([int(node)]), jax.lax.axis_index("node"))
        outputs = _features(params, rows["tokens"]) @ params["head"]
        errors = jnp.mean((outputs - rows["wanted"]) ** 2, (1, 2))
        spread = jax.lax.pmax(jnp.max(rows["wanted"]), "local")  # of the node's micro-batch
        return jnp.sum(weights * errors) * jax.lax.stop_gradient(spread), jnp.sum(weights)

    meant = {"row_statistics": "device"}  # the maximum of a node
    _, step, (params, batch), _ = _step("zero3", True, "2x2-auto", 4, loss, **meant)
    got, _ = step(params, batch)
    jax.effects_barrier()
    assert ran == {0: 2 * 4, 1: 2 * 2}

    rows, weights = jax.tree.map(lambda x: np.asarray(x).reshape(2, 2, 4, -1, *x.shape[1:]), batch)
    total = 0.0
    for node, num in enumerate((4, 2)):
        for number in range(num):
            wanted = rows["wanted"][node, :, number]
            for device in range(2):
                outputs = _features(_params(True), rows["tokens"][node, device, number])
                errors = jnp.mean((outputs @ _params(True)["head"] - wanted[device]) ** 2, (1, 2))
                total += float(weights[node, device, number] @ errors * wanted.max())
    zoo.assert_close(jax.device_get(got), np.float32(total / _ROWS), 1e-5, "loss")


@pytest.mark.ci
def test_means_without_weights_are_over_all_micro_batches():
    batch = jax.tree.map(lambda x: x[:12], _batch())

    def loss(params, batch):
        outputs = _features(params, batch["tokens"]) @ params["head"]
        return jnp.mean((outputs - batch["wanted"]) ** 2)

    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    rows, weights = jz.pad_batch(batch, zero, microbatches=2, shares=_SHARES)
    assert weights.tolist() == [1] * 8 + [1, 1, 0, 0] * 2
    want_loss, want = jax.value_and_grad(loss)(_params(True), batch)
    step = zero.value_and_grad(loss, microbatches=2, shares=_SHARES)
    got_loss, grads = step(zero.shard(_params(True)), rows)
    zoo.assert_close(jax.device_get(got_loss), want_loss, 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want), 1e-5, "grads")


def test_aux_is_combined_over_the_micro_batches_that_run():
    def loss(params, batch):
        counted = batch[1].sum()
        aux = {"rows": len(batch[1]), "counted": counted, "first": counted, "least": -counted}
        aux["key"] = jax.random.key(3)
        return (params["head"].sum() * counted, counted), {**aux, "mean": counted}

    how = {
        "rows": "sum",
        "counted": "sum",
        "first": "first",
        "least": "max",
        "mean": "mean",
        "key": "first",
    }
    _, step, args, _ = _step("zero3", True, "2x2-auto", 2, loss, has_aux=True, aux_reduce=how)
    (_, aux), _ = step(*args)
    assert jax.random.key_data(aux.pop("key")).tolist() == [0, 3]
    want = {"rows": 18, "counted": 13, "first": 3, "least": 0, "mean": 13 / 6}
    assert {k: float(x) for k, x in aux.items()} == pytest.approx(want)

    def positive(params, batch):
        return (params["head"].sum() * batch[1].sum(), batch[1].sum()), -1.0 - batch[1].sum()

    options = {"has_aux": True, "aux_reduce": "max"}
    _, step, args, _ = _step("zero3", True, "2x2-auto", 2, positive, **options)
    assert float(step(*args)[0][1]) == -1.0

    bad = {**how, "first": "stack"}
    _, step, args, _ = _step("zero3", True, "2x2-auto", 2, loss, has_aux=True, aux_reduce=bad)
    with pytest.raises(ValueError, match=r"aux leaf `first` is combined by 'stack'"):
        step(*args)


def test_pad_batch_puts_the_micro_batches_that_run_first():
    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    rows, weights = jz.pad_batch(np.arange(10), zero, microbatches=2, shares=(2, 1))
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9, 9, 9]
    assert weights.tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    rows, weights = jz.pad_batch(np.arange(11), zero, microbatches=4, shares=(1, 2))
    assert rows.tolist() == [0, 1, 1, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8, 9, 10, 10]
    assert weights.tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0]
    assert len(jz.pad_batch(np.arange(10), zero, rows=32, microbatches=2, shares=(4, 2))[0]) == 32
    for rows in (8, 20):
        with pytest.raises(ValueError, match="multiple of 8 of which 6 in each 8"):
            jz.pad_batch(np.arange(10), zero, rows=rows, microbatches=2, shares=(2, 1))
    for name, value in (("microbatches", 0), ("microbatches", -1), ("rows", 16.0)):
        # Where annotations are checked, those of a wrong type are refused before.
        with pytest.raises((ValueError, TypeError), match=f"`{name}` must be an integer|'{name}'"):
            jz.pad_batch(np.arange(10), zero, **{name: value})
    even, weights = jz.pad_batch(np.arange(8), zero, shares=(3, 3))
    assert even.tolist() == list(range(8)) and weights.tolist() == [1] * 8


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"shares": (2, 1, 1)}, ValueError, r"number of nodes is 2; got \(2, 1, 1\)"),
        ({"shares": (2, 0)}, ValueError, r"at least 1 for each node.*got \(2, 0\)"),
        # Where annotations are checked, those of a wrong type are refused before.
        ({"shares": 2}, (ValueError, TypeError), "an integer of at least 1 for each node|'shares'"),
        ({"shares": (2.0, 1.0)}, (ValueError, TypeError), "an integer of at least 1|'shares'"),
        ({"shares": (6, 4)}, ValueError, r"`shares=\(3, 2\)` it must be a multiple of 3"),
        ({"halves": True}, NotImplementedError, "does not work with `halves=True`"),
    ],
)
def test_options_that_do_not_go_together(options, error, match):
    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    with pytest.raises(error, match=match):
        zero.value_and_grad(_loss, **{"microbatches": 2, "shares": (2, 1), **options})


def test_other_mesh_axes_are_refused():
    zero = jz.Zero(zoo.make_mesh("2x2x2-auto"))
    with pytest.raises(NotImplementedError, match=r"with the mesh axes \['tensor'\]"):
        zero.value_and_grad(_loss, microbatches=2, shares=(2, 1))


def _with_psum(params, batch):
    total, weight = _loss(params, batch)
    return total / jax.lax.psum(1.0 * weight, ("node", "local")), weight


def _with_nested_pmean(params, batch):
    total, weight = _loss(params, batch)
    _, means = jax.lax.scan(lambda x, _: (x, jax.lax.pmean(x, "node")), total, length=2)
    return means.sum(), weight


def _with_permutation(params, batch):
    total, weight = _loss(params, batch)
    return jax.lax.ppermute(total, "local", [(0, 1), (1, 0)]), weight


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (_with_psum, r"`psum.*` over \('node', 'local'\) at .*test_shares.py.* may wait"),
        (_with_nested_pmean, r"`psum.*` over \('node',\) at .*may wait"),
        (_with_permutation, r"`ppermute` over \('local',\) at .*may wait"),
    ],
)
def test_collectives_that_may_wait_for_other_nodes_are_refused(loss, match):
    _, step, args, _ = _step("zero3", True, "2x2-auto", loss=loss)
    with pytest.raises(NotImplementedError, match=match):
        jax.eval_shape(step, *args)


def test_local_steps_train_each_node_with_the_same_rows():
    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    gradients = zero.value_and_grad(_loss, microbatches=2, weighted=True, shares=(2, 1))

    def step(params, opt_state, batch):
        loss, _ = gradients(params, batch)
        return params, opt_state, loss

    params = zero.shard(_params(True))
    rounds = zero.local_steps(step, every=1)
    batch = jax.tree.map(lambda x: x[None], jz.pad_batch(_batch(), zero, rows=16))
    with pytest.raises(ValueError, match="In `zero.local_steps` every node trains by itself"):
        rounds(rounds.init(params, ()), batch)
