"""`jz.attention`, whole and with tokens split over devices, against sums written out in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType

import jaxzero as jz

pytestmark = pytest.mark.standard_promotion  # `jax.nn.dot_product_attention` is not strict

ROWS, TOKENS, SIZE = 2, 32, 6
METHODS = ("gather", "heads", "ring")
# Options of `jz.attention`, beside the number of query heads and key-value heads.
CASES = {
    "all": ({}, 4, 4),
    "causal": ({"is_causal": True}, 4, 4),
    "window": ({"is_causal": True, "local_window_size": 5}, 4, 4),
    "both sides": ({"local_window_size": (3, 7)}, 4, 4),
    "grouped, cap": ({"is_causal": True, "softcap": 1.5, "scale": 0.7}, 8, 4),
    "segments": ({"is_causal": True, "segments": True}, 8, 4),
    "padding": ({"mask": True}, 4, 4),
    "padding, segments": ({"mask": True, "segments": True, "softcap": 2.0}, 8, 4),
}
SEGMENTS = np.repeat([[1, 2, 3, 0], [5, 5, 7, 7]], TOKENS // 4, axis=1).astype(np.int32)
SEEN = np.arange(TOKENS) < np.array([[19], [32]])


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def written_out(query, key, value, options):
    """The same by sums over all keys, one head after the other."""
    heads, groups = query.shape[2], key.shape[2]
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    seen = np.ones((ROWS, TOKENS, TOKENS), bool)
    size = options.get("local_window_size")
    if size is not None:
        before, after = (size, size) if isinstance(size, int) else size
        seen &= (distance <= before) & (distance >= -after)
    if options.get("is_causal"):
        seen &= distance >= 0
    if "segments" in options:
        seen &= (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS[:, None] != 0)
    if "mask" in options:
        seen &= SEEN[:, None]
    outs = []
    for head in range(heads):
        group = head // (heads // groups)
        logits = query[:, :, head] @ jnp.swapaxes(key[:, :, group], 1, 2)
        logits = logits * options.get("scale", SIZE**-0.5)
        if "softcap" in options:
            logits = options["softcap"] * jnp.tanh(logits / options["softcap"])
        powers = jnp.where(seen, jnp.exp(logits), 0)
        total = powers.sum(-1, keepdims=True)
        outs.append((powers / jnp.where(total == 0, 1, total)) @ value[:, :, group])
    return jnp.stack(outs, axis=2), seen.any(-1)


def drawn(heads, groups):
    keys = jax.random.split(jax.random.key(heads), 4)
    shapes = [(ROWS, TOKENS, n, SIZE) for n in (heads, groups, groups, heads)]
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def check(case, mesh, chunk=None, method=None):
    """Compare values and the gradients of a weighted sum, at queries that see a key."""
    options, heads, groups = CASES[case]
    *arrays, weights = drawn(heads, groups)
    given = {k: x for k, x in options.items() if k not in ("segments", "mask")}
    if "segments" in options:
        given["segments"] = jnp.asarray(SEGMENTS)
    if "mask" in options:
        given["mask"] = jnp.asarray(SEEN)[:, None, None]

    def want(*arrays):
        mixed, has_keys = written_out(*arrays, options)
        return jnp.sum(jnp.where(has_keys[:, :, None, None], mixed, 0) * weights), mixed

    def got(*arrays):
        split = [jz.split_tokens(x) for x in arrays]
        mixed = jz.attention(*split, chunk=chunk, method=method, **given)
        _, has_keys = written_out(*arrays, options)
        return jnp.sum(jnp.where(has_keys[:, :, None, None], mixed, 0) * weights), mixed

    def both(function):
        def run(*arrays):
            return jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True)(*arrays)

        return jax.jit(run)

    (_, mixed), gradients = both(want)(*arrays)
    if mesh is None:
        (_, found), found_gradients = both(got)(*arrays)
    else:
        with jax.set_mesh(mesh):
            (_, found), found_gradients = both(got)(*arrays)
    _, has_keys = written_out(*arrays, options)
    assert np.isfinite(found).all()
    close = {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(found[has_keys], mixed[has_keys], **close)
    for x, y in zip(found_gradients, gradients, strict=True):
        np.testing.assert_allclose(x, y, **close)


def devices(tokens):
    return jz.make_mesh(nodes=1, tokens=tokens, devices=jax.devices()[:tokens])


@pytest.mark.parametrize(
    "chunk", [7, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (None, 4, 100))]
)
@pytest.mark.parametrize("case", CASES)
def test_on_one_device(case, chunk):
    check(case, None, chunk)


_SPLIT = [
    pytest.param(*each, marks=[] if i % 4 == 0 else pytest.mark.exhaustive)
    for i, each in enumerate(itertools.product(CASES, METHODS, (2, 4)))
]


@pytest.mark.parametrize(("case", "method", "tokens"), _SPLIT)
def test_with_tokens_split_over_devices(case, method, tokens):
    check(case, devices(tokens), chunk=(3, 100)[tokens == 2], method=method)


def test_values_of_another_size_and_more_keys_than_queries():
    query, key, value, _ = drawn(4, 4)
    value = value[..., :3]
    want = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", query[:, :8], key) * SIZE**-0.5)
    want = jnp.einsum("bhts,bshv->bthv", want, value)
    found = jz.attention(query[:, :8], key, value, chunk=5)
    np.testing.assert_allclose(found, want, rtol=1e-12)
    with jax.set_mesh(devices(4)):
        found = jax.jit(jz.attention)(query[:, :8], key, value)
    np.testing.assert_allclose(found, want, rtol=1e-12)


def test_a_bias_is_added_by_jax_where_tokens_are_split_too():
    query, key, value, _ = drawn(8, 4)
    bias = jax.random.normal(jax.random.key(5), (ROWS, 8, TOKENS, TOKENS))
    want = jax.jit(jax.nn.dot_product_attention, static_argnames="is_causal")
    want = want(query, key, value, bias, is_causal=True)
    for method in (None, "gather", "heads"):
        with jax.set_mesh(devices(4)):
            run = jax.jit(lambda *x, m=method: jz.attention(*x, is_causal=True, method=m))
            np.testing.assert_allclose(run(query, key, value, bias), want, rtol=1e-5, atol=1e-5)


def test_without_the_axis_short_rows_are_those_of_jax():
    arrays = [x.astype(jnp.float32) for x in drawn(4, 4)[:3]]
    ours = jax.jit(lambda *x: jz.attention(*x, is_causal=True)).lower(*arrays).as_text()
    theirs = jax.jit(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True)).lower(*arrays)
    assert ours == theirs.as_text()


@pytest.mark.parametrize(
    ("method", "collective", "others"),
    [
        ("gather", "all-gather", {"collective-permute"}),
        ("heads", "all-to-all", {"all-gather", "collective-permute", "all-reduce"}),
        ("ring", "collective-permute", {"all-gather", "all-reduce"}),
    ],
)
def test_each_way_sends_by_its_collective(method, collective, others):
    arrays = drawn(4, 4)[:3]
    mesh = devices(4)

    def loss(*arrays):
        mixed = jz.attention(*map(jz.split_tokens, arrays), is_causal=True, method=method)
        return jnp.sum(jz.split_tokens(mixed) ** 2)

    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "tokens"))
    arrays = [jax.device_put(x, spec) for x in arrays]
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), out_shardings=(spec,) * 3)
        text = text.lower(*arrays).compile().as_text()
    assert text is not None and f" {collective}(" in text
    assert not {x for x in others if f" {x}(" in text}


def causal(query, key, value):
    """Sums over all earlier keys."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    at = jnp.arange(query.shape[1])
    logits = jnp.einsum("bthk,bshk->bhts", query, key) * SIZE**-0.5
    powers = jnp.where(at[:, None] >= at[None], jnp.exp(logits), 0)
    return jnp.einsum("bhts,bshv->bthv", powers / powers.sum(-1, keepdims=True), value)


@pytest.fixture
def library(monkeypatch):
    """cuDNN is not here: in its place, such sums, and the shapes that are given to them.

    Like its calls, they cannot be partitioned by the compiler.
    """
    shapes = []

    def refuse(*_):
        raise AssertionError("the compiler is asked to partition a call of a library")

    @custom_partitioning
    def unsplit(query, key, value):
        return causal(query, key, value)

    unsplit.def_partition(refuse, refuse, sharding_rule="a b c d, a b e d, a b e d -> a b c d")

    @jax.custom_vjp
    def mixed(*arrays):
        return unsplit(*arrays)

    def backward(arrays, given):
        return jax.vjp(causal, *arrays)[1](given)

    mixed.defvjp(lambda *arrays: (unsplit(*arrays), arrays), backward)

    def attend(query, key, value, *_, implementation="cudnn", is_causal, **options):
        assert implementation == "cudnn" and is_causal
        shapes.append((query.shape, key.shape))
        return mixed(query, key, value)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    return shapes


@pytest.mark.parametrize("groups", [4, 1])
def test_a_library_gets_whole_rows_of_some_heads_on_each_device(library, groups):
    """In a training step, in a loop and its backward. One key-value head goes to all devices.

    A function that is given as `implementation` is called likewise, with no such argument.
    """
    implementation = "cudnn" if groups == 4 else jax.nn.dot_product_attention
    width, sizes = 4 * SIZE, np.cumsum([4, groups])

    def layer(attend, x, w):
        heads = jnp.split((x @ w).reshape(*x.shape[:2], -1, SIZE), sizes, axis=2)
        return x + attend(*heads).reshape(x.shape), None

    def loss(attend, params, x):
        y, _ = jax.lax.scan(jax.checkpoint(functools.partial(layer, attend)), x, params)
        return jnp.mean(y**2)

    def ours(*heads):
        heads = (jz.split_tokens(x) for x in heads)
        return jz.attention(*heads, is_causal=True, implementation=implementation)

    params = jax.random.normal(jax.random.key(0), (2, width, width + 2 * groups * SIZE)) / width
    x = jax.random.normal(jax.random.key(1), (ROWS, TOKENS, width))
    zero = jz.Zero(jz.make_mesh(nodes=2, tokens=2, devices=jax.devices()[:4]))
    value, gradients = jax.jit(zero.value_and_grad(functools.partial(loss, ours)))(
        zero.shard(params), x
    )
    want, of_params = jax.jit(jax.value_and_grad(functools.partial(loss, causal)))(params, x)
    np.testing.assert_allclose(value, want, rtol=1e-12)
    np.testing.assert_allclose(gradients, of_params, rtol=1e-12, atol=1e-12)
    assert set(library) == {((1, TOKENS, 2, SIZE), (1, TOKENS, max(groups // 2, 1), SIZE))}


def test_memory_is_linear_in_tokens():
    def temporaries(num):
        x = jax.ShapeDtypeStruct((1, num, 2, 8), jnp.float32)
        step = jax.grad(lambda *x: jz.attention(*x, is_causal=True, chunk=64).sum(), (0, 1, 2))
        return jax.jit(step).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 2.2 * temporaries(1024)


def test_hidden_blocks_take_no_time():
    def program(**options):
        x = jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.float32)
        return str(jax.make_jaxpr(lambda *x: jz.attention(*x, chunk=32, **options))(x, x, x))

    assert "length=256" in program()  # pairs of 16 blocks
    causal = program(is_causal=True)
    assert "length=120" in causal  # below the diagonal
    assert "length=16" in causal
    assert "length=31" in program(is_causal=True, local_window_size=31)


def test_mistakes():
    query, key, value, _ = drawn(4, 2)
    with pytest.raises(ValueError, match=r"`query` must have a multiple; got \(2, 32, 3, 6\)"):
        jz.attention(query[:, :, :3], key, value)
    with pytest.raises(ValueError, match="`segments` must have the rows and tokens"):
        jz.attention(query, key, value, segments=jnp.zeros((2, 31), jnp.int32))
    for softcap in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="`softcap` must be positive and finite"):
            jz.attention(query, key, value, softcap=softcap)
    with pytest.raises(ValueError, match="`chunk` must be a number of tokens"):
        jz.attention(query, key, value, chunk=0)
    with pytest.raises(ValueError, match="have no `bias`"):
        jz.attention(query, key, value, jnp.zeros((1, 1, 32, 32)), softcap=1.0)
    # A `TypeError` where annotations are checked.
    with pytest.raises((ValueError, TypeError), match='`method` must be "gather"|method'):
        jz.attention(query, key, value, method="ulysses")  # pyright: ignore[reportArgumentType]
    with pytest.raises((ValueError, TypeError), match="`mask` must be boolean|mask"):
        jz.attention(query, key, value, mask=jnp.zeros((2, 1, 1, 32)), chunk=8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Leave `method` out"):
        jz.attention(query, key, value, implementation="cudnn", method="gather")
    with pytest.raises(ValueError, match=r"`implementation` must return an array of shape \(2, 32"):
        jz.attention(query, key, value, implementation=lambda query, *_, **__: query[:, :3])
    with jax.set_mesh(devices(4)):
        with pytest.raises(ValueError, match="`query` has 22 tokens.* Pad rows"):
            jax.jit(jz.attention)(query[:, :22], key, value)
        with pytest.raises(ValueError, match='"heads"` needs a number of key-value heads'):
            jax.jit(lambda *x: jz.attention(*x, method="heads"))(query, key, value)
        with pytest.raises(ValueError, match="needs as many keys as queries; got 32 keys and 8"):
            jax.jit(lambda *x: jz.attention(*x, method="ring"))(query[:, :8], key, value)
        with pytest.raises(ValueError, match="each of the 4 devices along `tokens` has some of"):
            jax.jit(lambda *x: jz.attention(*x, implementation="cudnn"))(
                query[:, :, :2], key, value
            )
    explicit = jax.make_mesh((1, 1, 4), ("node", "local", "tokens"), (AxisType.Explicit,) * 3,
                             devices=jax.devices()[:4])  # fmt: skip
    with jax.set_mesh(explicit), pytest.raises(ValueError, match="must be automatic"):
        jz.attention(query, key, value)
