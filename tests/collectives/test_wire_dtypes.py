"""The types of messages: as the config asks, as the plan prints, and as the program has them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz

F32, BF16, F16 = (jz.Cast(x) for x in (jnp.float32, jnp.bfloat16, jnp.float16))
SIZE = 32


def _both(codec):
    return jz.PerAxis(node=codec, local=codec)


def _loss(params, x):
    """The gradient of each leaf is made in 16 bits or in the leaf's own type."""
    narrow = jnp.float16 if params["w"].dtype == jnp.float16 else jnp.bfloat16
    return jnp.mean(jnp.square((x.astype(narrow) @ params["w"].astype(narrow)).astype(x.dtype)))


def _params(dtype):
    return {"w": jax.random.normal(jax.random.key(0), (SIZE, SIZE)).astype(dtype)}


def _sent(dtype, **config):
    """Per purpose and axis, what the plan prints, and the types of payloads in the program."""
    zero = jz.Zero(jz.make_mesh(nodes=2), jz.ZeroConfig(min_quantized_size=1, **config))
    params, x = zero.shard(_params(dtype)), jnp.ones((8, SIZE))
    plan = zero.plan(_loss, params, x)
    text = jax.jit(zero.value_and_grad(_loss)).lower(params, x).as_text()
    kinds = {"weights": "all_gather", "gradients": "all_to_all|reduce_scatter"}
    in_program = {
        what: sorted(re.findall(rf'"stablehlo\.(?:{op})"[^\n]*-> tensor<[\dx]*x(\w+)>', text))
        for what, op in kinds.items()
    }
    noted = {
        what: sorted(_MLIR[t.dtype] for t in plan.transfers if t.purpose == what) for what in kinds
    }
    assert in_program == noted, "The ledger has other types than the program."
    return set(plan.codecs), {what: set(types) for what, types in in_program.items()}


_MLIR = {"uint8": "ui8", "uint16": "ui16", "float32": "f32"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize(("codec", "wire"), [(F32, "f32"), (BF16, "ui16"), (F16, "ui16")])
def test_gradients_are_sent_as_asked(dtype, codec, wire):
    """Whatever they are made in: FSDP2's `reduce_dtype`."""
    lines, types = _sent(dtype, gradients=_both(codec))
    assert lines == {f"gradients over {axis}: {codec}" for axis in ("node", "local")}
    assert types["gradients"] == {wire}


def test_each_axis_has_its_own_type():
    lines, types = _sent("bfloat16", gradients=jz.PerAxis(node=F32))
    assert lines == {"gradients over node: float32"} and types["gradients"] == {"ui16", "f32"}
    lines, types = _sent("bfloat16", gradients=jz.PerAxis(node=jz.Int4(), local=F32))
    assert types["gradients"] == {"ui8", "f32"}
    assert lines == {"gradients over node: int4/128", "gradients over local: float32"}


@pytest.mark.parametrize(
    ("dtype", "codec", "line", "wire"),
    [
        ("bfloat16", F32, "bfloat16", "ui16"),
        ("float8_e4m3fn", BF16, "float8_e4m3fn", "ui8"),
        ("float16", BF16, "float16", "ui16"),
        ("bfloat16", jz.Int8(), "int8/256", "ui8"),
    ],
)
def test_weights_are_never_sent_wider_than_they_are(dtype, codec, line, wire):
    lines, types = _sent(dtype, weights=_both(codec))
    assert lines == {f"weights over {axis}: {line}" for axis in ("node", "local")}
    assert types["weights"] == {wire}


def test_the_plan_names_what_is_sent_without_the_codec():
    zero = jz.Zero(jz.make_mesh(nodes=2), jz.zeropp())

    def loss(params, x):
        return jnp.mean(jnp.square(x @ params["w"] * params["scale"].astype(x.dtype)[None]))

    params = {"w": jnp.ones((128, 128)), "scale": jnp.ones((128,), jnp.bfloat16)}
    codecs = zero.plan(loss, zero.shard(params), jnp.ones((8, 128))).codecs
    assert set(codecs[2:4]) == {
        f"gradients over {axis}: int4/128+H32, bfloat16" for axis in ("node", "local")
    }


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("config", [jz.zero3, jz.hsdp], ids=lambda x: x.__name__)
def test_sums_sent_in_float32_are_not_rounded(config, microbatches):
    """Against a sum in float64 of what the devices made in bfloat16."""

    def loss(params, x):
        return (params["w"].astype(jnp.bfloat16) * x.astype(jnp.bfloat16)[0]).sum(dtype=x.dtype)

    x = jax.random.normal(jax.random.key(1), (8 * microbatches, SIZE))
    want = np.asarray(x.astype(jnp.bfloat16), np.float64).mean(0)

    def error(gradients):
        zero = jz.Zero(jz.make_mesh(nodes=2), config(gradients=gradients))
        step = zero.value_and_grad(loss, microbatches=microbatches)
        _, grads = step(zero.shard({"w": jnp.ones((SIZE,))}), x)
        return np.abs(np.asarray(zero.unshard(grads)["w"]) - want).max()

    # 16 additions and a division in float32.
    assert error(_both(F32)) <= 17 * 2.0**-24 * np.abs(x).max()
    if (config, microbatches) == (jz.zero3, 1):
        assert error(_both(None)) > 2.0**-12
