"""ZeRO++: what is averaged, with which weights, on any mesh, in any dtype, of any shape."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo
from tests.codecs._codec_oracle import round_trip

CONFIGS = {
    "zeropp": jz.zeropp(),
    "zeropp4": jz.zeropp4(),
    "error feedback": jz.zero3(gradients=jz.PerAxis(node=jz.ErrorFeedback(), local=jz.Int8())),
    "stage 2": jz.ZeroConfig(stage=2, gradients=jz.zeropp().gradients),
    "stage 1": jz.ZeroConfig(stage=1, gradients=jz.zeropp().gradients),
    "hsdp": jz.hsdp(gradients=jz.zeropp().gradients),
}
MESHES = (("2x4-auto", 1), ("3x2-explicit", 2), ("1x8-auto", 1), ("2x3-auto", 2))
# The preset on every mesh, every other config on half of them. Not exhaustive: the preset on the
# first two, every other config on one.
PAIRS = [
    pytest.param(name, *mesh, marks=[] if j in chosen else pytest.mark.exhaustive)
    for i, name in enumerate(CONFIGS)
    for chosen in [{"zeropp": (0, 1), "stage 2": (1,), "stage 1": (1,)}.get(name, (0,))]
    for j, mesh in enumerate(MESHES if name == "zeropp" else MESHES[i % 2 :: 2])
]


def _zero(config, mesh="2x4-auto", **changes):
    changes = {"min_quantized_size": 0, **changes}
    return jz.Zero(zoo.make_mesh(mesh), dataclasses.replace(config, **changes))


def _step(zero, loss, params, batch, **options):
    """Loss and whole gradients of one step, whatever the config needs."""
    step = zero.value_and_grad(loss, **options)
    if zero.config.needs_wire_state:
        value, grads, _ = step(params, batch, wire_state=zero.init_wire_state(params))
    else:
        value, grads = step(params, batch)
    return jax.device_get(value), jax.device_get(zero.unshard(grads))


def _unrotated(hops):
    """The same codecs without rotation, which would not write a constant exactly."""
    node = hops.node
    if isinstance(node, jz.ErrorFeedback):
        node = dataclasses.replace(node, codec=dataclasses.replace(node.codec, hadamard=None))
    else:
        node = dataclasses.replace(node, hadamard=None)
    return jz.PerAxis(node=node, local=dataclasses.replace(hops.local, hadamard=None))


@pytest.mark.parametrize(("name", "mesh", "microbatches"), PAIRS)
@pytest.mark.one_in(3)
def test_one_mean_for_every_shape(name, mesh, microbatches):
    """Each device's gradient is constant, which codecs write almost exactly: so means show.

    A scale in bfloat16 is rounded up, by one part in 128 at most, on each of two hops; an
    all-reduce gathers what it has summed, which rounds once more.
    """
    shapes = {
        "matrix": (24, 16),
        "odd": (7, 5),
        "vector": (96,),
        "prime": (13,),
        "conv": (3, 3, 8, 5),
        "scalar": (),
        "one": (1, 1),
    }
    zero = _zero(CONFIGS[name], mesh, gradients=_unrotated(CONFIGS[name].gradients))
    whole = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}

    def loss(params, batch):
        return sum(jnp.mean(batch) * jnp.sum(leaf) for leaf in params.values())

    batch = np.arange(1.0, 49.0, dtype=np.float32)
    _, grads = _step(zero, loss, zero.shard(whole), batch, microbatches=microbatches)
    for key, shape in shapes.items():
        np.testing.assert_allclose(
            grads[key], np.full(shape, batch.mean()), rtol=3 / 128, err_msg=key
        )


ZEROS = {
    **CONFIGS,
    "rotated feedback": jz.zero3(gradients=jz.PerAxis(node=jz.ErrorFeedback())),
    "stochastic": jz.zero3(
        gradients=jz.PerAxis(
            node=jz.Int4(hadamard=32, rounding="stochastic"),
            local=jz.Float8(hadamard=32, rounding="stochastic"),
        )
    ),
}


_QUICK = {"zeropp": 2, "rotated feedback": 1, "stochastic": 1}


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        pytest.param(name, num, marks=[] if num == _QUICK.get(name) else pytest.mark.exhaustive)
        for name in ZEROS
        for num in (1, 2)
    ],
)
@pytest.mark.one_in(2)
def test_what_has_no_gradient_gets_none(name, microbatches):
    """A padding row, unseen tokens and masked weights, among others in one block of a codec."""
    width, seen = 40, 30  # blocks of 128 hold parts of four rows
    mask = np.tril(np.ones((width, width), np.float32))
    whole = {"rows": zoo.normal(jax.random.key(0), 0, 48, width), "w": mask * 0.1}
    ids = jax.random.randint(jax.random.key(1), (48 * microbatches,), 0, seen)

    def loss(params, ids):
        rows = params["rows"][ids] * (ids != 0).astype(jnp.float32)[:, None]
        return jnp.mean((jnp.tanh(rows @ (params["w"] * mask)) - 0.5) ** 2)

    zero = _zero(ZEROS[name])
    params, state = zero.shard(whole), {}
    if zero.config.needs_wire_state:
        state = {"wire_state": zero.init_wire_state(params)}
    step = jax.jit(zero.value_and_grad(loss, microbatches=microbatches))
    for _ in range(2):  # the second adds residuals
        _, grads, *others = step(params, ids, **state)
        state = {"wire_state": others[0]} if others else {}
        got, want = zero.unshard(grads), jax.jit(jax.grad(loss))(whole, ids)
        assert not got["rows"][0].any() and not got["rows"][seen:].any()
        assert not got["w"][mask == 0].any()
        assert np.abs(got["w"] - want["w"]).max() > 0, "Nothing was encoded."


def test_weights_that_did_not_change_are_sent_as_such():
    """Rotated differences: a weight that was not updated does not move on any node."""
    rotated = jz.PerAxis(node=jz.WeightDelta(jz.Int4(hadamard=32)))
    zero = _zero(jz.ZeroConfig(weights=rotated, hpz=jz.HpZ(codec=None)))
    w = np.asarray(zoo.normal(jax.random.key(0), 0, 64, 64))
    new = w.copy()
    new[:, ::7] += 0.01 * np.asarray(zoo.normal(jax.random.key(1), 1, 64, 10))
    state = zero.init_wire_state(zero.shard({"w": w}))
    _, grads, _ = zero.value_and_grad(lambda p, x: 0.5 * jnp.sum(p["w"] ** 2) + 0 * x.sum())(
        zero.shard({"w": new}), np.zeros(8, np.float32), wire_state=state
    )
    used = np.asarray(zero.unshard(grads)["w"])  # its own gradient
    np.testing.assert_array_equal(used[new == w], w[new == w])
    assert np.abs(used - new)[:, ::7].max() > 0, "Nothing was encoded."


def test_forward_and_backward_read_the_same_weights():
    """With gradients that travel whole, all is as if the quantised weights were the weights."""
    whole = {"w": zoo.normal(jax.random.key(0), 0, 16, 24)}
    x = zoo.normal(jax.random.key(0), 1, 48, 16, scale=1.0)

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    for mesh in ("2x4-auto", "2x3-explicit"):
        zero = _zero(jz.zeropp(), mesh, gradients=jz.PerAxis())
        params = zero.shard(whole)
        used = zero.apply(
            lambda params, x: params, in_specs=(None, zero.batch_spec), out_reduce="first"
        )(params, x)
        assert np.abs(used["w"] - whole["w"]).max() > 0
        with jax.default_matmul_precision("highest"):
            want, want_grads = jax.jit(jax.value_and_grad(loss))(jax.device_get(used), x)
            for microbatches in (1, 2):
                got, grads = _step(zero, loss, params, x, microbatches=microbatches)
                np.testing.assert_allclose(got, want, rtol=1e-5)
                zoo.assert_close(grads, jax.device_get(want_grads), 1e-5, "grads")


@pytest.mark.parametrize("preset", [jz.zeropp, jz.zeropp4])
@pytest.mark.one_in(2)
def test_bfloat16_parameters_and_gradients(preset):
    # Not rotated: what has one size stays exact.
    plain = jz.PerAxis(node=jz.Int8(), local=jz.Int8())
    zero = _zero(preset(), gradients=plain)
    whole = {"w": np.full((16, 24), 0.5, jnp.bfloat16), "b": np.zeros(24, jnp.bfloat16)}
    x = np.tile(np.array([1, -1], jnp.bfloat16), (48, 8))

    def loss(params, x):
        return jnp.mean(
            (x @ params["w"] + params["b"][None] - jnp.bfloat16(1)).astype(jnp.float32) ** 2
        )

    want = jax.device_get(jax.grad(loss)(whole, x))
    _, grads = _step(zero, loss, zero.shard(whole), x)
    for key, leaf in want.items():
        assert grads[key].dtype == jnp.bfloat16
        # All of one size: two roundings of bfloat16 scales, one of the result.
        np.testing.assert_allclose(
            np.float32(grads[key]), np.float32(leaf), rtol=3 / 128, atol=1e-6, err_msg=key
        )


@pytest.mark.parametrize("preset", [jz.zeropp, jz.zeropp4])
@pytest.mark.one_in(2)
def test_two_hops_equal_those_of_numpy(preset):
    """The presets' own gradient codecs: piece by piece what is sent, summed, and sent again."""
    nodes, local, num = 2, 4, 1280  # pieces of 320, then of 160: blocks are not full
    zero = _zero(preset())
    hops = zero.config.gradients
    each = zoo.normal(jax.random.key(0), 0, nodes, local, num, scale=1.0)  # devices' gradients
    params = zero.shard({"w": np.zeros(num, np.float32)})
    rows = each.reshape(nodes * local, num)
    _, grads = _step(zero, lambda params, rows: jnp.mean(rows @ params["w"]), params, rows)
    arrived = round_trip(hops.local, each.reshape(nodes, local, local, num // local))
    means = arrived.sum(axis=1, dtype=np.float32) / np.float32(local)  # [node, piece, numbers]
    sent = means.reshape(nodes, local, nodes, num // local // nodes)
    want = round_trip(hops.node, sent).sum(axis=0, dtype=np.float32) / np.float32(nodes)
    off = np.abs(grads["w"] - want.reshape(num))
    # A sum in another order may fall on the other side of a rounding, which changes its group.
    assert np.mean(off > 1e-5) < 0.05, "more than one group"
    assert off.max() < 1


@pytest.mark.standard_promotion  # optax
def test_clipping_sees_the_norm_of_the_mean():
    """With 8 bits in blocks of 32 the norm is off by as much as `zoo/_quantised.py` derives."""
    codec = jz.Int8(block=32, scale_dtype="float32")
    zero = _zero(jz.zero3(), "3x2-auto", gradients=jz.PerAxis(node=codec, local=codec))
    key = jax.random.key(0)
    whole = {"w": zoo.normal(key, 0, 16, 24), "b": zoo.normal(key, 1, 24)}
    batch = {"x": zoo.normal(key, 2, 48, 16, scale=1.0), "y": zoo.normal(key, 3, 48, 24, scale=1.0)}

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) - batch["y"]) ** 2)

    params = zero.shard(whole)
    _, grads = zero.value_and_grad(loss)(params, batch)
    grad = jax.jit(jax.grad(loss))
    right = grad(whole, batch)
    each = [grad(whole, jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], batch)) for i in range(6)]
    mean_norm = np.mean([optax.tree.norm(one) for one in each])
    c = 32**0.5 / 254
    allowed = (c + c * (1 + c)) * mean_norm
    assert abs(optax.tree.norm(grads) - optax.tree.norm(right)) <= allowed
    limit = float(optax.tree.norm(right)) / 2
    clip = optax.clip_by_global_norm(limit)
    clipped, _ = clip.update(grads, optax.EmptyState())
    want, _ = clip.update(right, optax.EmptyState())
    for key, leaf in jax.device_get(zero.unshard(clipped)).items():
        # Half of the gradient's own error, and half of that of the norm.
        assert np.linalg.norm(leaf - want[key]) <= allowed, key


def test_small_arrays_travel_whole():
    whole = {"layers": zoo.normal(jax.random.key(0), 0, 3, 40), "w": np.ones((8, 24), np.float32)}
    zero = _zero(jz.zeropp(), min_quantized_size=100)

    def loss(params, x):
        # One layer has 40 elements, the stack of them 120; the matrix has 192.
        h, _ = jax.lax.scan(lambda h, b: (jnp.sin(h + b[None]), None), x, params["layers"])
        return jnp.mean(h**2) + 0 * jnp.sum(params["w"])

    x = zoo.normal(jax.random.key(0), 1, 48, 40, scale=1.0)
    want = jax.device_get(jax.grad(loss)(whole, x))
    for microbatches in (1, 2):
        _, grads = _step(zero, loss, zero.shard(whole), x, microbatches=microbatches)
        np.testing.assert_allclose(grads["layers"], want["layers"], atol=1e-7)
    params = zero.shard(whole)
    transfers = zero.plan(loss, params, x).transfers
    assert {t.dtype for t in transfers if t.name.startswith("layers")} == {"float32"}
    assert {t.dtype for t in transfers if t.name == "w"} == {"uint8"}


def test_right_after_a_checkpoint_is_loaded(tmp_path):
    """Nothing of the weights that were there before is left (DeepSpeed issue 7606)."""
    whole = {"w": zoo.normal(jax.random.key(0), 0, 16, 24)}
    x = zoo.normal(jax.random.key(0), 1, 48, 16, scale=1.0)

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    for config in (jz.zeropp(), jz.zeropp4()):
        zero = _zero(config)
        params = zero.shard(whole)
        want, want_grads = _step(zero, loss, params, x)
        directory = tmp_path / str(config.needs_wire_state)
        with jz.Checkpoints(directory, zero) as checkpoints:
            checkpoints.save(1, {"params": params})
            others = jax.tree.map(lambda leaf: leaf * 3 + 1, params)
            _step(zero, loss, others, x)
            tree = checkpoints.restore(like={"params": others}).state
        got, grads = _step(zero, loss, tree["params"], x)
        assert got == want
        np.testing.assert_array_equal(grads["w"], want_grads["w"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: jz.ErrorFeedback(dtype=jnp.int8), "`dtype` of `ErrorFeedback`"),
        (lambda: jz.zero3(weights=jz.PerAxis(node=jz.ErrorFeedback())), "`weights.node`"),
        (lambda: jz.zero3(gradients=jz.PerAxis(node=jz.WeightDelta())), "`gradients.node`"),
        (lambda: jz.zero3(weights=jz.PerAxis(node=jz.WeightDelta())), "hpz=jz.HpZ"),
        (lambda: jz.ZeroConfig(stage=2, hpz=jz.HpZ()), "`hpz`"),
        (lambda: jz.ZeroConfig(split="local", hpz=jz.HpZ()), "`hpz`"),
        (lambda: jz.ZeroConfig(stage=2, weights=jz.PerAxis(local=jz.Int8())), "`weights`.*stage=2"),
        (lambda: jz.hsdp(weights=jz.PerAxis(node=jz.Int8())), "`weights.node`"),
        (lambda: jz.hsdp(gradients=jz.PerAxis(node=jz.ErrorFeedback())), "`gradients.node=Err"),
        (lambda: jz.ZeroConfig(min_quantized_size=-1), "`min_quantized_size`"),
        (
            lambda: jz.ZeroConfig(stage=1, gradients=jz.PerAxis(node=jz.ErrorFeedback())),
            "`stage` 2 or 3",
        ),
    ],
)
def test_choices_that_do_not_fit(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("config", "field", "value", "words"),
    [
        (jz.PerAxis(), "node", "int8", r"`node` of `PerAxis` must be a codec such as.*got 'int8'"),
        (jz.PerAxis(), "local", jz.Int8, r"`local` of `PerAxis`.*got <class"),
        (jz.HpZ(), "codec", 8, r"`codec` of `HpZ`.*got 8"),
        (jz.WeightDelta(), "codec", None, r"`codec` of `WeightDelta`.*got None"),
        (jz.ErrorFeedback(), "codec", "int4", r"`codec` of `ErrorFeedback`.*got 'int4'"),
        (jz.ZeroConfig(), "weights", jz.Int8(), r"`weights` must be a `jz.PerAxis\("),
        (jz.ZeroConfig(), "hpz", True, r"`hpz` must be a `jz.HpZ` or None; got True"),
    ],
)
def test_what_is_not_a_codec_is_refused(config, field, value, words):
    config = copy.copy(config)  # and not `type(config)(...)`: tests check annotations first
    object.__setattr__(config, field, value)
    with pytest.raises(ValueError, match=words):
        config.__post_init__()


@pytest.mark.parametrize("stage", [0, 1])
def test_copies_stay_copies_where_rounding_is_stochastic(stage):
    """Gradients that are whole on every device are the same on every device."""
    codec = jz.Int4(rounding="stochastic")
    zero = _zero(jz.ZeroConfig(stage=stage), gradients=jz.PerAxis(node=codec, local=codec))
    params = zero.shard({"w": zoo.normal(jax.random.key(0), 0, 16, 24)})
    x = zoo.normal(jax.random.key(0), 1, 48, 16, scale=1.0)
    _, grads = zero.value_and_grad(lambda p, x: jnp.mean(jnp.tanh(x @ p["w"])))(params, x)
    first, *others = (np.asarray(shard.data) for shard in grads["w"].addressable_shards)
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_messages_of_another_codec_or_type_are_told_apart():
    """Their arrays may have the same shape."""
    zero = _zero(jz.zero3())
    whole = {"w": zoo.normal(jax.random.key(0), 0, 16, 24)}
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), whole)
    stored = [
        (whole, zero.shard(whole, codec=jz.Int8())),
        (whole, zero.shard(whole, codec=jz.Float8())),
        (narrow, zero.shard(narrow, codec=jz.Int8())),
    ]
    assert stored[0][1]["w"].data.shape == stored[1][1]["w"].data.shape
    for given, tree in stored:
        back = zero.unshard(tree)["w"]
        assert back.dtype == given["w"].dtype
        np.testing.assert_allclose(
            np.float32(back), np.float32(given["w"]), atol=0.07 * np.abs(whole["w"]).max()
        )


def _wire_types(zero, whole, loss, x):
    """The types that weights and gradients of leaves travel in."""
    transfers = zero.plan(loss, zero.shard(whole), x).transfers
    return {(t.purpose, t.dtype) for t in transfers if t.purpose != "other"}


def test_padding_makes_nothing_large():
    def loss(params, x):
        return jnp.mean(x @ params["w"])

    zero = _zero(jz.zeropp(), min_quantized_size=120)
    x = zoo.normal(jax.random.key(0), 1, 48, 7, scale=1.0)
    small = _wire_types(zero, {"w": np.ones((7, 17), np.float32)}, loss, x)  # 119, stored as 168
    assert small == {("weights", "float32"), ("gradients", "float32")}
    assert ("weights", "uint8") in _wire_types(zero, {"w": np.ones((7, 18), np.float32)}, loss, x)


def test_a_small_slice_of_a_large_stack_travels_as_it_is_cast():
    whole = {"stack": np.ones((4, 16, 24), np.float32)}

    def loss(params, x):
        stack = params["stack"].astype(jnp.bfloat16)
        return jnp.mean((x.astype(jnp.bfloat16) @ stack[1]).astype(jnp.float32))

    x = zoo.normal(jax.random.key(0), 1, 48, 16, scale=1.0)
    zero = _zero(jz.zero3(), weights=jz.zeropp().weights, min_quantized_size=1000)
    assert ("weights", "uint16") in _wire_types(zero, whole, loss, x)
    zero = _zero(jz.zero3(), weights=jz.zeropp().weights, min_quantized_size=384)
    assert ("weights", "uint8") in _wire_types(zero, whole, loss, x)
