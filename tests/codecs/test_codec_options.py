"""`Cast`, and what a user sees of codecs: names, equality, wrong options, float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz

from . import _codec_oracle as oracle
from ._examples import E5M2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
@pytest.mark.parametrize(
    ("sent", "wire"),
    [(jnp.float32, np.float32), (jnp.bfloat16, np.uint16), (jnp.float8_e5m2, np.uint8)],
)
def test_a_cast_sends_what_it_says(dtype, sent, wire):
    """Narrower or wider, whatever it is given; and floats of 8 and 16 bits as integers."""
    codec = jz.Cast(sent)
    x = np.random.default_rng(0).normal(size=(3, 11)) * 30
    x = jnp.asarray(x.astype(dtype))
    message = codec.encode(x, seed=1)
    assert message.dtype == wire and message.shape == x.shape
    assert codec.num_bytes(11, dtype) == message.nbytes / 3
    np.testing.assert_array_equal(codec.decode(message, 11, dtype), x.astype(sent).astype(dtype))
    assert codec.is_used_for(11, dtype, 1000) == (dtype != sent)
    with pytest.raises(ValueError, match="`x` of `Cast.encode` must be floats; got int32"):
        codec.encode(jnp.arange(4))


def test_codecs_are_values():
    assert jz.Int4(scale_dtype="float32") == jz.Int4(scale_dtype=jnp.float32)
    assert len({jz.Int8(), jz.Int8(block=256), jz.Int8(block=128), jz.Int4(block=256)}) == 3
    assert str(jz.Int8()) == "int8/256"
    assert str(jz.Int4(hadamard=32)) == "int4/128+H32"
    assert str(jz.Int4(rounding="stochastic")) == "int4/128+SR"
    assert str(jz.Float8(dtype=E5M2)) == "float8_e5m2/256"
    assert str(jz.Cast(jnp.bfloat16)) == "bfloat16"


@pytest.mark.parametrize("kind", [jz.Int8, jz.Int4, jz.Float8])
@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("block", 100, "power of two from 32 to 8192; got 100"),
        ("block", 16, "power of two from 32 to 8192; got 16"),
        ("block", 16384, "power of two from 32 to 8192; got 16384"),
        ("rounding", "up", '"nearest", or "stochastic".*got \'up\''),
        ("hadamard", 64, "32.*or `None`.*got 64"),
        ("scale_dtype", "float16", "`jnp.bfloat16` or `jnp.float32`; got 'float16'"),
        ("scale_dtype", "half a byte", "`jnp.bfloat16` or `jnp.float32`; got 'half a byte'"),
    ],
)
def test_wrong_options(kind, option, value, remedy):
    codec = kind()  # and not `kind(**{option: value})`, since tests check annotations first
    object.__setattr__(codec, option, value)
    with pytest.raises(ValueError, match=f"`{option}` of `{kind.__name__}` must be.*{remedy}"):
        codec.__post_init__()


def test_wrong_dtypes():
    with pytest.raises(ValueError, match="`dtype` of `Float8`.*`jnp.float8_e5m2`; got.*bfloat16"):
        jz.Float8(dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="`x` of `Int8.encode` must be floats; got int32. Send"):
        jz.Int8().encode(jnp.arange(4))
    with pytest.raises(ValueError, match="`dtype` of `Cast` must be a float type"):
        jz.Cast(jnp.int8)


@pytest.mark.parametrize("codec", [jz.Int8(), jz.Int4(), jz.Float8()])
def test_float64_beyond_float32(codec):
    """Finite numbers stay finite; what is not is seen."""
    with jax.enable_x64(True):
        x = np.array([1e300, -1e300, 1.0, 0.0])
        got = oracle.round_trip(codec, x)
        largest = float(jnp.finfo(np.float32).max)
        np.testing.assert_allclose(got, [largest, -largest, 0, 0], rtol=1 / 64)
        assert np.isnan(oracle.round_trip(codec, np.array([np.inf, 1.0]))).all()


@pytest.mark.parametrize(("size", "is_encoded"), [(127, False), (128, True)])
def test_a_plan_says_where_nothing_is_encoded(size, is_encoded):
    """128 * 128 numbers are as many as `min_quantized_size`; of a toy model users should know."""
    zero = jz.Zero(jz.make_mesh(nodes=2), jz.zeropp())
    params = zero.abstract(lambda: {"w": jnp.zeros((128, size))})
    plan = zero.plan(lambda p, x: jnp.mean(x @ p["w"]), params, np.zeros((8, 128), np.float32))
    note = "" if is_encoded else " (nothing is encoded; `min_quantized_size` is 16384)"
    weights, gradients = ("int8/256", "int4/128+H32") if is_encoded else ("float32", "float32")
    assert plan.codecs == (
        *(f"weights over {axis}: {weights}{note}" for axis in ("node", "local")),
        *(f"gradients over {axis}: {gradients}{note}" for axis in ("node", "local")),
        f"kept slices (hpZ): int8/256{note}",
    )
