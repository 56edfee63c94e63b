"""What backward repeats: its bits, what is left out, and where it is put."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxzero._activations import priced, unrolled
from jaxzero._activations.loops import Pair
from jaxzero._activations.min_cut import Choice, Part
from jaxzero._activations.unrolled import Forward
from jaxzero._hlo import Rates
from jaxzero._program import Barrier, Block, Operation, Value

from .test_activations import (
    LAYERS,
    MODELS,
    ROWS,
    TOKENS,
    WIDTH,
    _check,
    batch,
    bytes_of,
    head,
    init,
    loss_of,
    residuals,
    zero_of,
)


def _attention(x: jax.Array, w: Any) -> jax.Array:
    scores = jnp.einsum("btd,bsd->bts", x @ w["mix"], x)
    return x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)


def _mlp(x: jax.Array, w: Any) -> jax.Array:
    h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["gain"][None, None]
    return x + jax.nn.gelu(h @ w["up"]) @ w["down"]


@pytest.mark.parametrize(("layer", "most"), [(_mlp, 0.0), (_attention, 2**-24)])
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_the_unchanged_program(name, layer, most):
    """In float32, of a norm and an MLP; where softmax is computed again, not.

    XLA for CPUs fuses a softmax that is kept with other operations than one that is repeated, and
    rounds its quotient or its product apart.
    """

    loss = loss_of(name, layer)
    params = jax.tree.map(lambda x: x.astype(np.float32), init())
    steps = []
    for zero in (zero_of(None), zero_of(0)):
        step = jax.jit(zero.value_and_grad(loss))(zero.shard(params), batch())
        steps.append(jax.device_get(step))
    differ = jax.tree.map(lambda x, y: np.abs(x - y).max(), *steps)
    assert max(jax.tree.leaves(differ)) <= most
    assert bytes_of(residuals(zero_of(0), loss, "recompute")) > 0


def test_host_memory_is_refused_without_a_loop():
    with pytest.raises(NotImplementedError, match="`host=True` .* no loop of the loss does"):
        residuals(zero_of(10**4, host=True), MODELS["unrolled"])
    fits = residuals(zero_of(10**9, host=True), MODELS["unrolled"])
    assert fits == residuals(zero_of(10**9), MODELS["unrolled"])


@pytest.mark.parametrize("name", MODELS)
def test_what_backward_reads_at_once_is_not_repeated(name):
    """The logits, `[rows of a device, tokens, 32]`, which backward reads first."""
    again = residuals(zero_of(0), MODELS[name], "recompute")
    assert again and not [x for x in again if x.shape == (ROWS // 4, TOKENS, 32)]


def _backward(monkeypatch: Any, loss: Any, budget: int) -> tuple[Forward, Choice, list[Operation]]:
    """What is chosen outside of loops, and the operations of backward then."""
    repeating, made = unrolled.repeating, []

    def noted(forward: Forward, choice: Choice) -> Block:
        made.append((forward, choice, repeating(forward, choice)))
        return made[-1][-1]

    monkeypatch.setattr(unrolled, "repeating", noted)
    residuals(zero_of(budget), loss)
    ((forward, choice, block),) = made
    return forward, choice, [*block.operations[forward.end :]]


def test_backward_reads_what_is_kept_behind_a_barrier(monkeypatch):
    """Without it XLA would keep two copies: the value, and its transpose for forward's products."""
    forward, choice, backward = _backward(monkeypatch, MODELS["unrolled"], 50_000)
    read = {x for op in backward if not isinstance(op, Barrier) for x in op.values}
    assert {*choice.kept} & {*forward.wanted} and not {*choice.kept} & read


def test_gradients_pass_the_barrier_of_the_next_segment(monkeypatch):
    """Else XLA for CPUs fuses their sums along residual connections, and holds all terms."""
    *_, backward = _backward(monkeypatch, MODELS["unrolled"], 0)
    barriers = [i for i, x in enumerate(backward) if isinstance(x, Barrier)]
    for i in barriers:
        made = {x for operation in backward[:i] for x in operation.outputs}
        read = {x for operation in backward[i + 1 :] for x in operation.values}
        assert (ROWS // 4, TOKENS, WIDTH) not in {x.shape for x in made & read}
    assert len(barriers) >= LAYERS


@pytest.mark.parametrize("name", ["unrolled", "added"])
def test_gradients_are_reduced_where_they_are_without_a_budget(name):
    """In "added" two weights have one gradient: each is reduced by itself, layer by layer."""

    def added(p: Any, ids: jax.Array) -> jax.Array:
        layers = p["layers"]["mix"], p["layers"]["more"]
        body = lambda x, w: (x + jnp.tanh(x @ (w[0] + w[1])), None)  # noqa: E731
        return head(p, lax.scan(body, p["embed"][ids], layers)[0], ids)

    def params() -> Any:
        made = init()
        made["layers"]["more"] = 2 * made["layers"]["mix"]
        return made

    loss, where = MODELS.get(name, added), []
    for zero in (zero_of(None), zero_of(0)):
        found = zero.plan(loss, zero.abstract(params), batch()).top.gradients
        loops = [len(x.reduces) for x in found.loops.values()]
        where.append((sorted(x.shape for x in found.reduces), loops, [*found.at_end]))
    assert where[0] == where[1]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA for CPUs drops barriers")
def test_memory_of_unrolled_layers():
    """On CPUs no more than with a `jax.checkpoint` of each layer; for H200s see `test_aot`."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jnp.sin(jnp.tanh(x @ w) @ w.T) * jnp.exp(-x)

    temporaries = []
    for budget, layer_of in ((0, layer), (None, jax.checkpoint(layer)), (None, layer)):

        def loss(p: Any, x: jax.Array, layer: Any = layer_of) -> jax.Array:
            for w in p:
                x = layer(x, w)
            return jnp.mean(x**2)

        zero = zero_of(budget)
        params = zero.abstract(lambda: [jnp.zeros((64, 256))] * 12)
        step = jax.jit(zero.value_and_grad(loss)).lower(params, np.zeros((8192, 64), np.float32))
        temporaries.append(step.compile().memory_analysis().temp_size_in_bytes)
    least, by_hand, everything = temporaries
    assert least <= 1.05 * by_hand and 2 * least < everything


def test_a_residual_that_is_read_early_does_not_begin_its_segment(monkeypatch):
    """Backward of each layer reads a product of the first segment, which no layer's forward reads.

    The barrier of that segment, of all that is kept in it, would come with the last layer's.
    """

    @jax.custom_vjp
    def doubled(x: jax.Array, first: jax.Array) -> jax.Array:
        del first
        return 2 * x

    doubled.defvjp(lambda x, first: (2 * x, first), lambda first, g: (2 * g, g * first))

    def loss(p: Any, ids: jax.Array) -> jax.Array:
        x = first = p["embed"][ids] @ p["layers"]["mix"][0]
        for i in range(LAYERS):
            w = jax.tree.map(lambda w, i=i: w[i], p["layers"])
            x = doubled(_mlp(x, w), first)
        return head(p, x, ids)

    forward, choice, backward = _backward(monkeypatch, loss, 10**9)
    first = next(x for op in forward.block.operations if op.products for x in op.outputs)
    assert first in choice.kept
    barriers = [x.values for x in backward if isinstance(x, Barrier)]
    assert [len(x) for x in barriers if first in x][0] == 2  # and what backward has reached
    assert max(map(len, barriers)) > 2


@pytest.mark.parametrize(
    ("name", "width", "is_kept"),
    [("scanned", 960, False), ("scanned", 992, True), ("unrolled", 960, True)],
)
def test_products_are_kept_that_take_longer_than_to_keep_them(name, width, is_kept):
    """In 16 bits, a product of `n` terms takes `2 n / 700e12` seconds for each element.

    To write and to read it takes 4 bytes at 4.3 TB/s, and the copies into the stack of a loop and
    out of it 8 more, together as long as 977 terms.
    """
    layer = lambda x, w: x + jnp.tanh(x @ w)  # noqa: E731

    def loss(p: Any, x: jax.Array) -> jax.Array:
        if name == "scanned":
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, p)
        else:
            for i in range(LAYERS):
                x = layer(x, p[i])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    zero = zero_of(2**40)
    params = zero.abstract(lambda: jnp.zeros((LAYERS, width, width), jnp.bfloat16))
    x = jax.ShapeDtypeStruct((2**20, width), jnp.bfloat16)
    found = zero.plan(loss, params, x).residuals
    assert any(x.action == "recompute" and x.flops for x in found) is not is_kept


def test_of_many_places_few_are_tried(monkeypatch):
    """In each group of places that with the least alive, so that time grows with the program."""
    cuts, tried = unrolled._cuts, []

    def noted(ends: list[int], *args: Any) -> list[int]:
        tried.append(len(ends))
        return cuts(ends, *args)

    monkeypatch.setattr(unrolled, "_cuts", noted)
    everywhere = residuals(zero_of(0), MODELS["unrolled"])
    monkeypatch.setattr(unrolled, "_PLACES", 8)
    assert residuals(zero_of(0), MODELS["unrolled"]) == everywhere
    assert tried[0] > 16 and tried[1] <= 8


def test_joins_are_made_again(monkeypatch):
    """Where a cut is behind one, as of skip connections, what is joined is kept in its place."""

    def behind_joins(forward: Forward) -> list[int]:
        operations = forward.block.operations[: forward.end]
        made = [x.outputs[0].shape[-1:] for x in operations]
        joins = [x.name == "concatenate" for x in operations]
        return [i for i, (x, y) in enumerate(zip(made, joins, strict=True)) if y and x == (32,)]

    def loss(p: Any, ids: jax.Array) -> jax.Array:
        x = first = p["embed"][ids]
        for i in range(4):
            w = jax.tree.map(lambda w, i=i: w[i], p["layers"])
            joined = jnp.concatenate([_mlp(x, w), first], -1)
            x = joined @ jnp.concatenate([w["mix"], w["mix"]])
        return head(p, x, ids)

    monkeypatch.setattr(Forward, "_segments", behind_joins)
    kept = residuals(zero_of(0), loss)
    assert kept and not [x for x in kept if x.shape[-1] == 32]
    params = jax.tree.map(lambda x: x.astype(np.float32), init())
    zeros = zero_of(None), zero_of(0)
    steps = [jax.jit(x.value_and_grad(loss))(x.shard(params), batch()) for x in zeros]
    for x, y in zip(*map(jax.tree.leaves, steps), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_what_a_layer_makes_last_does_not_go_to_host_memory(monkeypatch):
    """Here a byte is copied in the time of five operations of a product.

    Behind "up", `[b, t, 4 d]`, are the `8 d d` operations of "down" for each token, too few for its
    `32 d` bytes with `d = 16`. The products behind "mix" hide its `8 d` bytes.
    """
    monkeypatch.setattr(priced, "_MIN_HOST", 1)
    monkeypatch.setattr(priced, "RATES", Rates(host=Rates().flops / 5))
    in_host, pairs = priced._in_host, []

    def noted(pair: Pair, part: Part, choice: Choice, link: float) -> list[Value]:
        pairs.append((pair, part))
        return in_host(pair, part, choice, link)

    monkeypatch.setattr(priced, "_in_host", noted)
    with jax.enable_x64(True):
        residuals(zero_of(0), MODELS["scanned"])
        pair, part = pairs[0]
        operations = pair.forward.body.operations
        made = [x.outputs[0] for x in operations if x.name == "dot_general"]
        mix, up = (next(x for x in made if x.shape[-1] == num) for num in (WIDTH, 4 * WIDTH))
        assert in_host(pair, part, Choice([mix, up], []), 1.0) == [mix]


@pytest.mark.parametrize("host", [False, True])
def test_views_of_weights_are_no_activations(monkeypatch, host):
    """Backward gathers weights anyway, and scales or casts them again, whatever a gather costs."""
    monkeypatch.setattr(priced, "_MIN_HOST", 1)
    monkeypatch.setattr(priced, "RATES", Rates(host=1e15, local=1e9))
    loss = loss_of("scanned", lambda x, w: _mlp(x, jax.tree.map(lambda w: 2 * w, w)))
    zero = zero_of(25_000, host=host)
    plan = zero.plan(loss, zero.abstract(init), batch())
    weights = {(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH,)}
    assert plan.residuals and not weights & {x.shape for x in plan.residuals}
    if not host:
        _check(zero, loss)


def test_an_error_names_the_least_of_what_was_tried(monkeypatch):
    """Though what is chosen at a higher price held more."""
    at, tried = priced.PricedProgram.at, []

    def more_at_high_prices(program: Any, price: float, *given: Any) -> priced.Chosen:
        chosen = at(program, price, *given)
        tried.append(round(1e15 * price))
        chosen.__dict__["num_bytes"] = tried[-1]
        return chosen

    monkeypatch.setattr(priced.PricedProgram, "at", more_at_high_prices)
    with pytest.raises(ValueError, match=r"less than the \d+ bytes") as error:
        residuals(zero_of(1), MODELS["scanned"])
    assert f"less than the {min(tried)} bytes" in str(error.value) and tried[-1] > tried[0]


def test_masks_are_made_where_they_are_read():
    """The plan takes them for arrays, and reduces gradients where a layer holds little, as it does
    with a `jax.checkpoint` of each layer."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        scores = jnp.einsum("btd,bsd->bts", x @ w["mix"], x)
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None]
        scores = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
        return x + jnp.einsum("bts,bsd->btd", scores, x) @ w["mix"], None

    ids = jax.ShapeDtypeStruct((ROWS, 512), jnp.int32)
    early = []
    for budget, body in ((0, layer), (None, jax.checkpoint(layer))):

        def loss(p: Any, ids: jax.Array, body: Any = body) -> jax.Array:
            x, _ = lax.scan(body, p["embed"][ids], p["layers"])
            return head(p, x, ids)

        zero = zero_of(budget)
        plan = zero.plan(loss, zero.abstract(init), ids)
        early.append([len(x.body.reduce_early) for x in plan.top.loops.values()])
    assert [x[-1] for x in early] == [1, 1]
