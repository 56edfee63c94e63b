"""ZeRO++: what is averaged, with which weights, on any mesh, in any dtype, of any shape."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zoo

import jaxzero as jz

CONFIGS = {
    "zeropp": jz.zeropp(),
    "zeropp4": jz.zeropp4(),
    "error feedback": jz.zero3(gradients=jz.Hops(node=jz.ErrorFeedback(), local=jz.Int8())),
    "stage 2": jz.ZeroConfig(stage=2, gradients=jz.zeropp().gradients),
    "stage 1": jz.ZeroConfig(stage=1, gradients=jz.zeropp().gradients),
    "hsdp": jz.hsdp(gradients=jz.zeropp().gradients),
}
MESHES = (("2x4-auto", 1), ("3x2-explicit", 2), ("1x8-auto", 1), ("2x3-auto", 2))


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


@pytest.mark.parametrize(("mesh", "microbatches"), MESHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_mean_for_every_shape(name, mesh, microbatches):
    """Each device's gradient is constant, which codecs write almost exactly: so means show.

    A scale in bfloat16 is rounded up, by one part in 128 at most, on each of two hops; an
    all-reduce gathers what it has summed, which rounds once more. A rotated group has one large
    coefficient, of sqrt(32); what shares its block is off by half a step of that, sqrt(32) / 14.
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
    zero = _zero(CONFIGS[name], mesh)
    whole = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}

    def loss(params, batch):
        return sum(jnp.mean(batch) * jnp.sum(leaf) for leaf in params.values())

    batch = np.arange(1.0, 49.0, dtype=np.float32)
    allowed = 0.45 if "+H32" in str(zero.config.gradients.node) else 3 / 128
    _, grads = _step(zero, loss, zero.shard(whole), batch, microbatches=microbatches)
    for key, shape in shapes.items():
        np.testing.assert_allclose(
            grads[key], np.full(shape, batch.mean()), rtol=allowed, err_msg=key
        )


def test_forward_and_backward_read_the_same_weights():
    """With gradients that travel whole, all is as if the quantised weights were the weights."""
    whole = {"w": zoo.normal(jax.random.key(0), 0, 16, 24)}
    x = zoo.normal(jax.random.key(0), 1, 48, 16, scale=1.0)

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    for mesh in ("2x4-auto", "2x3-explicit"):
        zero = _zero(jz.zeropp(), mesh, gradients=jz.Hops())
        params = zero.shard(whole)
        used = zero.apply(
            lambda params, x: params, in_specs=(None, zero.batch_spec), out_reduce="first"
        )(params, x)
        assert np.abs(used["w"] - whole["w"]).max() > 0
        with jax.default_matmul_precision("highest"):
            want, want_grads = jax.value_and_grad(loss)(jax.device_get(used), x)
            for microbatches in (1, 2):
                got, grads = _step(zero, loss, params, x, microbatches=microbatches)
                np.testing.assert_allclose(got, want, rtol=1e-5)
                zoo.assert_close(grads, jax.device_get(want_grads), 1e-5, "grads")


@pytest.mark.parametrize("preset", [jz.zeropp, jz.zeropp4])
def test_bfloat16_parameters_and_gradients(preset):
    plain = jz.Hops(node=jz.Int8(), local=jz.Int8())  # not rotated: what has one size stays exact
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


@pytest.mark.standard_promotion  # optax
def test_clipping_sees_the_norm_of_the_mean():
    """The global norm is off by no more than the gradients are, leaf by leaf."""
    zero = _zero(jz.zeropp(), "3x2-auto")
    key = jax.random.key(0)
    whole = {"w": zoo.normal(key, 0, 16, 24), "b": zoo.normal(key, 1, 24)}
    batch = {"x": zoo.normal(key, 2, 48, 16, scale=1.0), "y": zoo.normal(key, 3, 48, 24, scale=1.0)}

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) - batch["y"]) ** 2)

    params = zero.shard(whole)
    _, grads = zero.value_and_grad(loss)(params, batch)
    clipped, _ = optax.clip_by_global_norm(1e-3).update(grads, optax.EmptyState())
    np.testing.assert_allclose(optax.tree.norm(clipped), 1e-3, rtol=1e-5)
    want = jax.grad(loss)(whole, batch)
    lost = jax.tree.map(lambda a, b: a - b, jax.device_get(zero.unshard(grads)), want)
    norm, right = optax.tree.norm(grads), optax.tree.norm(want)
    assert abs(norm - right) <= optax.tree.norm(lost) + 1e-6
    assert optax.tree.norm(lost) <= 0.25 * right  # int4, twice, blocks of 128: 0.1 to 0.2


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
            tree, _ = checkpoints.restore(like={"params": others})
        got, grads = _step(zero, loss, tree["params"], x)
        assert got == want
        np.testing.assert_array_equal(grads["w"], want_grads["w"])


def test_frozen_weights_stored_as_messages():
    """LoRA on quantised weights: exactly as if the decoded weights were frozen."""
    key = jax.random.key(0)
    whole = {"w": zoo.normal(key, 0, 3, 24, 24), "norm": np.ones(24, np.float32)}
    adapters = {"a": zoo.normal(key, 1, 24, 2), "b": zoo.normal(key, 2, 2, 24)}
    x = zoo.normal(key, 3, 48, 24, scale=1.0)

    def loss(adapters, frozen, x):
        def layer(h, w):
            return jnp.tanh(h @ (w + adapters["a"] @ adapters["b"])) * frozen["norm"][None], None

        return jnp.mean(jax.lax.scan(layer, x, frozen["w"])[0] ** 2)

    for config, mesh in ((jz.zero3(), "2x4-auto"), (jz.zeropp(), "2x3-explicit")):
        zero = _zero(config, mesh, gradients=jz.Hops(), min_quantized_size=100)
        frozen = zero.shard(whole, codec=jz.Int8(block=64))
        assert frozen["w"].dtype == jnp.uint8 and frozen["norm"].dtype == jnp.float32
        held = frozen["w"].addressable_shards[0].data.nbytes * zero.mesh.size
        assert held < 1.2 * whole["w"].size
        decoded = jax.device_get(zero.unshard(frozen))
        assert 0 < np.abs(decoded["w"] - whole["w"]).max() <= np.abs(whole["w"]).max() / 250
        specs = (None, None, zero.batch_spec)
        params = zero.shard(adapters)
        _, grads = zero.value_and_grad(loss, in_specs=specs)(params, frozen, x)
        with jax.default_matmul_precision("highest"):
            want = jax.device_get(jax.grad(loss)(jax.device_get(zero.unshard(params)), decoded, x))
        # The adapters are too small to be quantised under `zeropp`.
        zoo.assert_close(jax.device_get(zero.unshard(grads)), want, 1e-5, "grads")
        with pytest.raises(ValueError, match=r"leaf `w`.*int8.*argnums"):
            zero.value_and_grad(loss, argnums=1, in_specs=specs)(params, frozen, x)
    with pytest.raises(ValueError, match="stage 3"):
        _zero(jz.ddp()).shard(whole, codec=jz.Int8())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: jz.ErrorFeedback(dtype=jnp.int8), "`dtype` of `ErrorFeedback`"),
        (lambda: jz.zero3(weights=jz.Hops(node=jz.ErrorFeedback())), "`weights.node`"),
        (lambda: jz.zero3(gradients=jz.Hops(node=jz.Difference())), "`gradients.node`"),
        (lambda: jz.zero3(weights=jz.Hops(node=jz.Difference())), "hpz=jz.HpZ"),
        (lambda: jz.ZeroConfig(stage=2, hpz=jz.HpZ()), "`hpz`"),
        (lambda: jz.ZeroConfig(split="local", hpz=jz.HpZ()), "`hpz`"),
        (lambda: jz.ZeroConfig(min_quantized_size=-1), "`min_quantized_size`"),
        (
            lambda: jz.ZeroConfig(stage=1, gradients=jz.Hops(node=jz.ErrorFeedback())),
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
        (jz.Hops(), "node", "int8", r"`node` of `Hops` must be a codec such as.*got 'int8'"),
        (jz.Hops(), "local", jz.Int8, r"`local` of `Hops`.*got <class"),
        (jz.HpZ(), "codec", 8, r"`codec` of `HpZ`.*got 8"),
        (jz.Difference(), "codec", None, r"`codec` of `Difference`.*got None"),
        (jz.ErrorFeedback(), "codec", "int4", r"`codec` of `ErrorFeedback`.*got 'int4'"),
        (jz.ZeroConfig(), "weights", jz.Int8(), r"`weights` must be a `jz.Hops\("),
        (jz.ZeroConfig(), "hpz", True, r"`hpz` must be a `jz.HpZ` or None; got True"),
    ],
)
def test_what_is_not_a_codec_is_refused(config, field, value, words):
    config = copy.copy(config)  # and not `type(config)(...)`: tests check annotations first
    object.__setattr__(config, field, value)
    with pytest.raises(ValueError, match=words):
        config.__post_init__()
