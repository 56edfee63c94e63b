"""Layers that are alike are traced once, and what is traced once is recorded for each of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from jaxzero._collectives import Ledger, for_alike, labelled, recording
from jaxzero._collectives.alike import alike_once
from jaxzero._collectives.primitives import all_gather
from jaxzero._execute import block, token_parts
from jaxzero._mesh import emit, equations_inside, loop_order, rewrite
from jaxzero._program import Operation, trace

WIDTH = 16


def _init(layers: int):
    return [{"w": jnp.eye(WIDTH) * (1 + i / 9), "b": jnp.full(WIDTH, i / 7)} for i in range(layers)]


def _loss(params, x):
    for layer in params:
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w["w"] + w["b"][None]))(x, layer)
    return jnp.mean(x**2)


def _traced(layers: int, config):
    zero = jz.Zero(jz.make_mesh(nodes=2), config)
    params = zero.abstract(functools.partial(_init, layers))
    return jax.jit(zero.value_and_grad(_loss)).trace(params, jnp.ones((16, WIDTH)))


def _counting(monkeypatch, module, name):
    """Count the calls of a function."""
    calls, function = [], getattr(module, name)

    @functools.wraps(function)
    def counted(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


@pytest.mark.parametrize("config", [jz.zero3(), jz.zeropp()], ids=["zero3", "zeropp"])
def test_messages_of_alike_layers_are_traced_once(monkeypatch, config):
    names = ("start_gather", "gather_hop", "start_reduction", "reduce_next_axis")
    calls = {x: _counting(monkeypatch, token_parts, x) for x in names}
    numbers = []
    for layers in (6, 12):
        for x in calls.values():
            x.clear()
        _traced(layers, config)
        numbers.append({x: len(y) for x, y in calls.items()})
    assert numbers[0] == numbers[1] and all(numbers[0].values())


def test_operations_are_traced_once(monkeypatch):
    bound = _counting(monkeypatch, Operation, "bind")
    evaluated = _counting(monkeypatch, loop_order._Order, "run")
    runs = _counting(monkeypatch, block, "emit")
    equations = _traced(6, jz.zero3()).jaxpr.eqns
    assert runs and not evaluated
    names = {y.primitive.name for x in equations for y in equations_inside(x)}
    assert "dot_general" in names and "copies" not in names, "what stands for others is left"
    assert not {x.name for (x, *_) in bound} & {"dot_general", "tanh", "mul"}


def test_a_function_that_layers_share_is_rewritten_once():
    layer = jax.jit(jnp.sin)
    closed = jax.make_jaxpr(lambda x: layer(layer(layer(x))))(1.0)
    seen = []

    def renamed(equation):
        seen.append(equation.primitive.name)
        is_sine = equation.primitive.name == "sin"
        return equation.replace(primitive=jax.lax.cos_p) if is_sine else equation

    new = rewrite(closed, renamed)
    names = [y.primitive.name for x in new.jaxpr.eqns for y in equations_inside(x)]
    assert seen.count("sin") == 1 and names.count("cos") == 3 and "sin" not in names
    assert rewrite(closed, lambda equation: equation) is closed


def test_each_layer_has_transfers_of_its_own():
    zero = jz.Zero(jz.make_mesh(nodes=2), jz.zeropp())
    params = zero.abstract(functools.partial(_init, 5))
    plan = zero.plan(_loss, params, jnp.ones((16, WIDTH)))
    for purpose in ("weights", "gradients"):
        sent = [y for x in plan.transfers if x.purpose == purpose for y in x.by_leaf()]
        bytes_of = {i: [] for i in range(5)}
        for x in sent:
            bytes_of[int(x.name.split(".")[0])].append((x.axis, x.num_bytes))
        assert len(bytes_of[0]) > 1
        # The first and the last layer are gathered once, or hold weights between two uses.
        assert sorted(bytes_of[1]) == sorted(bytes_of[2]) == sorted(bytes_of[3])


def test_results_are_those_of_plain_jax():
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params, x = _init(5), jax.random.normal(jax.random.key(0), (16, WIDTH))
    loss, grads = jax.jit(zero.value_and_grad(_loss))(zero.shard(params), x)
    wanted = jax.value_and_grad(_loss)(params, x)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6)


def test_what_a_function_closes_over_is_its_own():
    """Two functions with equal arguments, or one that reads another array, are not alike."""

    def run(x, y):
        def scaled(z):
            return z * y  # an array of the trace

        with alike_once():
            return for_alike(jnp.sin, x), for_alike(jnp.cos, x), for_alike(scaled, x)

    x, y = jnp.arange(3.0), jnp.float32(2)
    for got, wanted in zip(jax.jit(run)(x, y), (jnp.sin(x), jnp.cos(x), x * y), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_a_copy_is_recorded_with_its_own_names():
    mesh = jz.make_mesh(nodes=2)
    ledger = Ledger(dict(mesh.shape))

    def run(x):
        with alike_once(), recording(ledger):
            for names in (("a", "b"), ("c", "d")):
                with labelled("weights", *names):
                    x = x + for_alike(all_gather, x, "node", 0, (1, 3)).sum()
        return x

    spec = jax.sharding.PartitionSpec(("node", "local"))
    jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)).trace(jnp.ones(8))
    parts = [[name for name, _ in x.parts] for x in ledger.transfers]
    assert parts == [["a", "b"], ["c", "d"]]


def test_equations_are_emitted_as_they_were_traced():
    """Also those of a cached inner `jit`, whose variables occur twice, and with numbers in them."""
    inner = jax.jit(lambda x, scale: jnp.tanh(x) * scale)

    def function(x):
        return inner(inner(x, 2.0) - 1, 3.0).astype(jnp.bfloat16)

    x = jnp.linspace(-1, 1, 5)
    traced, _ = trace(function, x)

    def again(x):
        values = dict(zip(traced.inputs, [x], strict=True))
        read = lambda atom: getattr(atom, "value", None) if atom not in values else values[atom]  # noqa: E731
        made = emit(((y.equation, y.inputs, y.outputs) for y in traced.operations), read)
        return made[traced.outputs[0]]

    got, wanted = jax.make_jaxpr(again)(x), jax.make_jaxpr(function)(x)
    assert [str(y) for y in got.out_avals] == [str(y) for y in wanted.out_avals]
    np.testing.assert_array_equal(jax.jit(again)(x), jax.jit(function)(x))
