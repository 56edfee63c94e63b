"""A codec of 6 bits, defined here: nothing in the library knows it, and everything takes it."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxzero as jz
from jaxzero import extend
from jaxzero import pallas_kernels as pk
from tests import zoo

NODES, LOCAL = 2, 4
NUM = NODES * LOCAL * 161  # no piece ends with a whole block, or a whole byte


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int6(extend.BlockCodec):
    """Integers from -31 to 31 times the scale of their block; four of them in three bytes."""

    block: int = 16

    @property
    def bits(self):
        return 6

    def scale_bytes(self, num_blocks):
        return 4 * num_blocks

    def quantize(self, x_kb):
        largest_k = jnp.max(jnp.abs(x_kb), axis=-1)
        scale_k = jnp.maximum(largest_k / 31, 2.0**-126)
        scale_k = jnp.where(jnp.isfinite(largest_k), scale_k, jnp.nan)
        codes_kb = jnp.round(jnp.clip(x_kb / scale_k[..., None], -31, 31)) + 32
        scales = lax.bitcast_convert_type(scale_k, jnp.uint8)
        return codes_kb.astype(jnp.uint8), scales.reshape(*scales.shape[:-2], -1)

    def dequantize(self, codes_kb, scales):
        *rows, size = scales.shape
        scale_k = lax.bitcast_convert_type(scales.reshape(*rows, size // 4, 4), jnp.float32)
        return (codes_kb.astype(jnp.float32) - 32) * scale_k[..., None]

    def error_bound(self, x):
        return (0.5 / 31 + 2.0**-20) * self.largest(x)


CODEC = Int6()
BOTH = jz.PerAxis(node=CODEC, local=CODEC)
NEW = {"int6": CODEC, "mx": jz.MXFloat8(), "nv": jz.NVFloat4()}
# What a number loses at most, in shares of the largest of its block: half a step of integers; what
# is above 448 where a scale is for 512; half of the last step of E2M1, with a scale that is rounded
# up by a sixteenth, and the roundings of both.
SHARES = {Int6: 0.5 / 31 + 2.0**-20, jz.MXFloat8: 1 / 8, jz.NVFloat4: 1 / 6 * 17 / 16 + 2.0**-10}
each_new = pytest.mark.parametrize("codec", NEW.values(), ids=NEW)


def _zero(**options):
    config = jz.ZeroConfig(min_quantized_size=0, **options)
    return jz.Zero(zoo.make_mesh(f"{NODES}x{LOCAL}-auto"), config)


def _loss(params, rows):
    return jnp.mean(rows @ params["w"])


@functools.cache
def _numbers():
    """Weights, and for each device the row that is its gradient."""
    rng = np.random.default_rng(0)
    w = (rng.standard_t(3, NUM) / NUM).astype(np.float32)
    return w, rng.normal(size=(NODES * LOCAL, NUM)).astype(np.float32)


def _bound_below(codec, sizes):
    """A bound for all numbers up to `sizes`, whereas `error_bound` is for one of them."""
    return SHARES[type(codec)] * codec.largest(sizes)


def _gradient_bound(codec, rows):
    """Of the mean over devices: pieces are encoded, summed in a node, and encoded again."""
    each = rows.astype(np.float64).reshape(NODES, LOCAL, LOCAL, NUM // LOCAL)
    off = codec.error_bound(each).mean(1)  # of the nodes' means, which lie within
    means = (np.abs(each.mean(1)) + off).reshape(NODES, LOCAL, NODES, NUM // LOCAL // NODES)
    off = off.reshape(means.shape) + _bound_below(codec, means)
    return off.mean(0).reshape(NUM)


@each_new
@pytest.mark.parametrize("hpz", [False, True], ids=["no hpz", "hpz"])
def test_gathers_and_reductions(codec, hpz):
    w, rows = _numbers()
    both = jz.PerAxis(node=codec, local=codec)
    zero = _zero(weights=both, gradients=both, hpz=jz.HpZ(codec=codec) if hpz else None)
    value, grads = zero.value_and_grad(_loss)(zero.shard({"w": w}), rows)
    want, want_grads = jax.value_and_grad(_loss)({"w": w}, rows)
    # Every shard is encoded once, by its owner.
    off = codec.error_bound(w.reshape(NODES * LOCAL, -1)).reshape(NUM)
    assert 0 < abs(value - want) <= np.abs(rows.mean(0)) @ off + 1e-6
    error = np.abs(jax.device_get(zero.unshard(grads))["w"] - want_grads["w"])
    assert error.max() > 1e-3, "Nothing was encoded."
    assert (error <= _gradient_bound(codec, rows) + 1e-6).all()


@each_new
def test_error_feedback(codec):
    """What is lost in one step is sent in the next, so the mean over steps comes near."""
    w, rows = _numbers()
    feedback = jz.ErrorFeedback(codec, dtype=jnp.float32)
    zero = _zero(gradients=jz.PerAxis(node=feedback))
    params = zero.shard({"w": w})
    state, got = zero.init_wire_state(params), []
    step = zero.value_and_grad(_loss)
    for _ in range(4):
        _, grads, state = step(params, rows, wire_state=state)
        got.append(jax.device_get(zero.unshard(grads))["w"])
    means = np.abs(rows.astype(np.float64).reshape(NODES, LOCAL, -1).mean(1))
    means = means.reshape(NODES, NODES * LOCAL, -1)  # as nodes encode them
    left = np.zeros_like(means)
    for _ in got:
        left = _bound_below(codec, means + left)
    first, mean = (np.abs(x - rows.mean(0)) for x in (got[0], np.mean(got, 0)))
    assert (mean <= left.mean(0).reshape(NUM) / len(got) + 1e-6).all()
    assert np.linalg.norm(mean) < np.linalg.norm(first) / 2


@each_new
def test_weight_differences(codec):
    """Only the change since the last step is encoded."""
    w, rows = _numbers()
    change = np.random.default_rng(1).normal(size=NUM).astype(np.float32) / 1000
    zero = _zero(weights=jz.PerAxis(node=jz.WeightDelta(codec)), hpz=jz.HpZ(codec=None))
    state = zero.init_wire_state(zero.shard({"w": w}))
    params = zero.shard({"w": w + change})
    value, *_ = zero.value_and_grad(_loss)(params, rows, wire_state=state)
    off = codec.error_bound(change.reshape(NODES * LOCAL, -1)).reshape(NUM)
    want = _loss({"w": w + change}, rows)
    assert 0 < abs(value - want) <= np.abs(rows.mean(0)) @ off + 1e-6


@each_new
def test_plan_and_report_count_its_bytes(codec):
    w, rows = _numbers()
    both = jz.PerAxis(node=codec, local=codec)
    zero = _zero(weights=both, gradients=both, hpz=jz.HpZ(codec=codec))
    params = zero.shard({"w": w})
    plan = zero.plan(_loss, params, rows)
    for line in ("weights over node", "gradients over local", "kept slices (hpZ)"):
        assert f"{line}: {codec}" in str(plan).splitlines()
    kinds = collections.Counter()
    for x in zero.report(params, plan=plan).traffic.transfers:
        if x.purpose != "other":
            assert x.dtype == "uint8"
            kinds[x.purpose, x.axis] += x.entering_bytes
    of_slice, of_shard = (codec.num_bytes(NUM // n, jnp.float32) for n in (LOCAL, LOCAL * NODES))
    assert kinds == {
        ("weights", "node"): (NODES - 1) * of_shard,
        ("weights", "local"): (LOCAL - 1) * NODES * of_shard,
        ("gradients", "local"): (LOCAL - 1) * of_slice,
        ("gradients", "node"): (NODES - 1) * of_shard,
    }
    assert plan.slice_bytes == NODES * of_shard


@each_new
def test_stored_weights_and_checkpoints(codec, tmp_path):
    whole = {"w": zoo.normal(jax.random.key(0), 0, 3, 24, 40)}
    zero = _zero()
    frozen = zero.shard(whole, codec=codec)
    assert frozen["w"].data.dtype == jnp.uint8
    decoded = jax.device_get(zero.unshard(frozen))["w"]
    # Each layer is cut along its longer dim, each piece being a message.
    pieces = np.moveaxis(whole["w"].reshape(3, 24, 8, 5), 2, 1).reshape(3, 8, 120)
    bound = np.moveaxis(codec.error_bound(pieces).reshape(3, 8, 24, 5), 1, 2).reshape(3, 24, 40)
    assert (np.abs(decoded - whole["w"]) <= bound).all() and (decoded != whole["w"]).any()
    (row,) = zero.report(frozen).rows[:1]
    assert row.dtype == str(codec)
    assert row.device_bytes == 3 * codec.num_bytes(120, jnp.float32)
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, {"frozen": frozen})
        target = zero.abstract(lambda: whole, codec=codec)
        restored = checkpoints.restore(like={"frozen": target}).state["frozen"]
    np.testing.assert_array_equal(restored["w"].data, frozen["w"].data)
    np.testing.assert_array_equal(jax.device_get(zero.unshard(restored))["w"], decoded)


# What is wrong is refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfABlock(Int6):
    def num_bytes(self, num, dtype):
        return num * 6 / 8 + 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoScales(Int6):
    def num_bytes(self, num, dtype):
        return self._code_bytes(num)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words(Int6):
    def encode(self, x, *, seed=None):
        return super().encode(x, seed=seed).astype(jnp.uint16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoArray(Int6):
    def encode(self, x, *, seed=None):
        return super().encode(x, seed=seed), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeBlocks(Int6):
    def decode(self, message, num, dtype):
        return jnp.pad(super().decode(message, num, dtype), ((0, 0), (0, -num % 16)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlwaysWide(Int6):
    def decode(self, message, num, dtype):
        return super().decode(message, num, jnp.float16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatScales(Int6):
    def quantize(self, x_kb):
        return super().quantize(x_kb)[0], jnp.max(x_kb, axis=-1)


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (HalfABlock(), r"`HalfABlock.num_bytes` must return an int of at least 121.*got 124.75"),
        (NoScales(), r"`NoScales.encode` must return uint8\[121\].*`num_bytes`.*got uint8\[165\]"),
        (Words(), r"`Words.encode` must return uint8.*got uint16.*Change `encode`"),
        (NoArray(), r"`NoArray.encode` must return uint8.*got \("),
        (
            WholeBlocks(),
            r"`WholeBlocks.decode` must return float32\[8, 161\].*got float32\[8, 176\]",
        ),
        (AlwaysWide(), r"`AlwaysWide.decode` must return float32.*`dtype`.*got float16"),
        (FloatScales(), r"`FloatScales.quantize` must return.*uint8\[44\]; got float32\[11\]"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Int6) else "",
)
def test_wrong_codecs_are_refused_when_a_step_is_traced(codec, words):
    w, rows = _numbers()
    zero = _zero(weights=jz.PerAxis(node=codec, local=codec))
    params = zero.shard({"w": w})
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(zero.value_and_grad(_loss), params, rows)


class OnlyItself(Int6):
    """Equal to no copy."""

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithAList(Int6):
    tables: list = dataclasses.field(default_factory=list)


@pytest.mark.parametrize("codec", [OnlyItself(), WithAList()], ids=["eq", "hash"])
def test_codecs_that_are_no_values_are_refused_by_the_config(codec):
    method = "__eq__" if isinstance(codec, OnlyItself) else "__hash__"
    words = f"`{type(codec).__name__}.{method}` must.*frozen"
    for make in (
        lambda: jz.PerAxis(local=codec),
        lambda: jz.HpZ(codec=codec),
        lambda: jz.WeightDelta(codec),
        lambda: jz.ErrorFeedback(codec),
        lambda: _zero().shard({"w": np.zeros(8, np.float32)}, codec=codec),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_wrong_blocks_and_missing_methods_are_refused():
    with pytest.raises(ValueError, match="`block` of `Int6` must.*whole bytes; got 3. Take"):
        Int6(block=3)

    class NoBound(extend.Codec):
        pass

    with pytest.raises(TypeError, match="NoBound.*abstract.*error_bound"):
        NoBound()  # pyright: ignore[reportAbstractUsage]
    with pytest.raises(ValueError, match="`x` of `Int6.encode` must be floats; got int32. Send"):
        CODEC.encode(jnp.arange(4))


# Kernels say what they cannot do


@each_new
def test_there_are_no_kernels_for_it(codec):
    name = type(codec).__name__
    with pytest.raises(NotImplementedError, match=f"mosaic_gpu.*`{name}`.*kernels for int8.*xla"):
        dataclasses.replace(codec, implementation="mosaic_gpu")
    assert dataclasses.replace(codec, implementation="xla") == codec


def test_kernels_take_no_kind_for_another():
    with pytest.raises(ValueError, match='`kind` must be "int8", .*; got .int6.*extend.Codec'):
        object.__setattr__(wrong := pk.Format(), "kind", "int6")
        wrong.__post_init__()
    assert "kernels for int8" in (pk.kind_gap("mosaic_gpu", "int6") or "")
