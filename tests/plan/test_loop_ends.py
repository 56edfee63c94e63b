"""The ends of pipelined loops: between nodes nothing is sent in vain, and no bit changes."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

import jaxzero as jz
from tests import zoo
from tests.zero.offload_policy import offload_only

WIDTH = 16
CONFIGS = {
    "zero3": jz.zero3(),
    "zeropp": dataclasses.replace(jz.zeropp(), min_quantized_size=WIDTH),
    "hpz": jz.ZeroConfig(hpz=jz.HpZ(codec=None)),
    "hsdp": jz.hsdp(),
    "stage 2": jz.ZeroConfig(stage=2),
}
UNITS, ENDS = jz.CommSchedule(prefetch=0), jz.CommSchedule(separate_ends=True)
DEFAULT, WHOLE = jz.CommSchedule(), jz.CommSchedule(separate_ends=False)


def _zero(config, schedule=UNITS, nodes=2, **mesh):
    return jz.Zero(
        jz.make_mesh(nodes, **mesh), dataclasses.replace(CONFIGS[config], schedule=schedule)
    )


def _init(num_layers):
    def init(key):
        up, down, bias = (jax.random.normal(each, (num_layers, WIDTH, WIDTH)) for each in
                          jax.random.split(key, 3))  # fmt: skip
        scale = WIDTH**-0.5
        return {"layers": {"up": up * scale, "down": down * scale, "bias": bias[:, 0]}}

    return init


@functools.cache
def _whole(num_layers):
    return jax.device_get(jax.jit(_init(num_layers))(jax.random.key(0)))


def _layer(x, weights):
    made = jnp.tanh(x @ weights["up"] + weights["bias"].reshape(1, WIDTH)) @ weights["down"]
    return x + made, jnp.mean(made)


_MEANT = {"row_statistics": "device"}  # the squares of means over the rows of a device


def _loss(params, x, reverse=False):
    x, means = jax.lax.scan(jax.checkpoint(_layer), x, params["layers"], reverse=reverse)
    return jnp.mean(x**2) + jnp.sum(means**2)


def _loss_back(params, x):
    return _loss(params, x, reverse=True)


def _experts(params):
    """The layers' weights as those of layers of eight experts."""
    return jax.tree.map(lambda w: w.reshape(-1, 8, *w.shape[1:]), params)


def _experts_loss(params, x):
    """Experts in each of the layers, one after the other."""
    x, _ = jax.lax.scan(lambda x, layer: jax.lax.scan(_layer, x, layer), x, params["layers"])
    return jnp.mean(x**2)


def _init_experts(num_layers):
    return lambda key: _experts(_init(8 * num_layers)(key))


ROWS = np.linspace(-1, 1, 32 * WIDTH, dtype=np.float32).reshape(32, WIDTH)


def _plan(zero, num_layers, loss=_loss, init=_init):
    params = zero.abstract(init(num_layers), jax.random.key(0))
    return zero.plan(loss, params, ROWS)


def _between_nodes(plan):
    """For each leaf, what a device receives from other nodes in a step, in bytes."""
    sent = collections.Counter()
    for transfer in plan.transfers:
        for x in transfer.by_leaf():
            if x.axis == "node":
                sent[x.purpose, x.name] += x.entering_bytes * x.trips
    return sent


@pytest.mark.parametrize("num_layers", [8, 9])
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.one_in(2)
def test_a_pipelined_loop_sends_each_layer_as_often_as_a_plain_one(config, nodes, num_layers):
    ahead = _plan(_zero(config, ENDS, nodes), num_layers)
    assert any(loop.is_pipelined for loop in ahead.top.loops.values())
    plain = _between_nodes(_plan(_zero(config, UNITS, nodes), num_layers))
    assert _between_nodes(ahead) == plain != {}


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.one_in(2)
def test_a_loop_inside_another_does_so_by_default(config, nodes):
    def sent(schedule):
        return _between_nodes(
            _plan(_zero(config, schedule, nodes), 3, _experts_loss, _init_experts)
        )

    ahead, plain = sent(DEFAULT), sent(UNITS)
    assert ahead == plain != {}
    assert sum(sent(WHOLE).values()) > sum(plain.values())


@pytest.mark.parametrize("schedule", [DEFAULT, WHOLE, UNITS])
def test_a_loop_inside_another_makes_node_slices(schedule):
    """The loop over experts gathers them between nodes; nothing is gathered before the program."""
    plan = _plan(_zero("hpz", schedule), 3, _experts_loss, _init_experts)
    node = [x for x in plan.transfers if x.axis == "node" and x.purpose == "weights"]
    assert max(x.trips for x in node) >= 3 * 6  # some experts may be sent before the inner loop
    assert min(x.trips for x in node) >= 3


@pytest.mark.parametrize(
    ("config", "microbatches"),
    [("zero3", 1), pytest.param("zeropp", 1, marks=pytest.mark.exhaustive), ("zeropp", 2)],
)
@pytest.mark.parametrize(
    ("schedule", "loss", "init"), [(ENDS, _loss, _init), (DEFAULT, _experts_loss, _init_experts)]
)
@pytest.mark.one_in(3)
def test_so_does_the_compiled_program(config, microbatches, schedule, loss, init):
    """Bytes into a node, of all collectives and all iterations of loops."""
    entering = []
    for each in (schedule, UNITS):
        zero = _zero(config, each)
        params = zero.abstract(init(8), jax.random.key(0))
        step = jax.jit(zero.value_and_grad(loss, microbatches=microbatches, **_MEANT))
        found = zoo.hlo.collectives(step.lower(params, ROWS).compile().as_text())
        entering.append(sum(x.node_bytes(4) * x.trips for x in found if x.crosses(4)))
    assert entering[0] == entering[1] > 0


def _cut(plan):
    return [(loop.num_first, loop.num_last) for loop in plan.top.loops.values()]


def test_iterations_are_cut_off_for_each_axis():
    """Forward hands its last buckets to backward, unless it makes node slices (hpZ)."""
    assert _cut(_plan(_zero("zero3", ENDS), 8)) == [(0, 0), (2, 2)]
    assert _cut(_plan(_zero("zero3", ENDS, 8), 4)) == [(0, 0), (1, 1)]
    assert _cut(_plan(_zero("zeropp", ENDS), 8)) == [(0, 2), (2, 0)]
    assert _cut(_plan(_zero("hsdp", ENDS), 8)) == [(0, 0), (2, 0)]


def test_each_end_is_a_loop_with_one_body():
    """So it is compiled once, and XLA reuses the memory of one iteration for the next."""
    zero = _zero("zero3", ENDS)
    params = zero.abstract(_init(8), jax.random.key(0))
    program = jax.jit(zero.value_and_grad(_loss, **_MEANT)).trace(params, ROWS).jaxpr
    assert sorted(_scan_lengths(program.jaxpr)) == [2, 2, 4, 8]


def _scan_lengths(jaxpr):
    lengths = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            lengths.append(equation.params["length"])
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            lengths += _scan_lengths(inner) if hasattr(inner, "eqns") else []
    return lengths


def test_a_loop_that_sends_nothing_between_nodes_is_whole():
    assert _cut(_plan(_zero("zero3", ENDS, 1), 8)) == [(0, 0), (0, 0)]


def test_loops_of_the_program_are_whole_by_default():
    assert _cut(_plan(_zero("zero3", DEFAULT), 8)) == [(0, 0), (0, 0)]
    schedule = jz.CommSchedule()
    object.__setattr__(schedule, "separate_ends", 1)  # past annotations, where these are checked
    with pytest.raises(ValueError, match="`separate_ends` .* must be True, False or None; got 1"):
        schedule.__post_init__()


@pytest.mark.standard_promotion
@pytest.mark.parametrize(("num_layers", "num_last"), [(8, 1), (2, 1), (1, 0)])
def test_the_last_iteration_of_a_loop_that_updates_is_cut_off(num_layers, num_last):
    offload = jz.Offload(weights=True, optimizer=True, min_size=WIDTH)
    zero = jz.Zero(jz.make_mesh(2), jz.ZeroConfig(offload=offload))
    tx, params = optax.adam(1e-3), zero.abstract(_init(num_layers), jax.random.key(0))
    plans = [
        zero.plan(_loss, params, ROWS),
        zero.plan(_loss, params, ROWS, tx=tx, opt_state=zero.init_optimizer(tx, params)),
    ]
    assert [_cut(plan)[-1:] for plan in plans] == [[(0, 0)], [(0, num_last)]]


def _kept_in_host(params, x):
    """Layers whose inputs backward copies from host memory."""

    def layer(x, weights):
        return _layer(checkpoint_name(x, "x"), weights)

    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=offload_only("x")), x, params["layers"])
    return jnp.mean(x**2)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("loss", "init"),
    [(_kept_in_host, _init), (_experts_loss, _init_experts)],
    ids=["host", "loops"],
)
def test_loops_that_update_keep_their_ends_if_they_copy_activations_or_hold_loops(loss, init):
    offload = jz.Offload(weights=True, optimizer=True, min_size=WIDTH)
    zero = jz.Zero(jz.make_mesh(2), jz.ZeroConfig(offload=offload))
    tx, params = optax.adam(1e-3), zero.abstract(init(8), jax.random.key(0))
    plan = zero.plan(loss, params, ROWS, tx=tx, opt_state=zero.init_optimizer(tx, params))
    assert [*plan.top.loops.values()][-1].updates
    assert _cut(plan) == [(0, 0), (0, 0)]


def test_short_loops_and_loops_that_hold_loops_keep_their_ends():
    assert _cut(_plan(_zero("zero3", ENDS), 7)) == [(0, 0), (0, 0)]
    # Gradients of a loop inside another cross nodes after it, all layers at once.
    for schedule, ends in ((ENDS, (0, 2)), (DEFAULT, (0, 2)), (WHOLE, (0, 0))):
        nested = _plan(_zero("zero3", schedule), 16, _experts_loss, _init_experts)
        assert set(_cut(nested)) == {(0, 0)}
        inside = [x for loop in nested.top.loops.values() for x in loop.body.loops.values()]
        assert {(x.num_first, x.num_last) for x in inside} == {ends}


BITS = [
    ("zero3", 9, 1, 2, _loss),
    ("zero3", 16, 1, 2, _experts_loss),
    ("zeropp", 16, 2, 2, _experts_loss),
    ("zero3", 8, 1, 2, _loss_back),
    ("zero3", 5, 1, 8, _loss),
    ("zeropp", 9, 1, 2, _loss),
    ("hpz", 8, 2, 2, _loss_back),
    ("hsdp", 8, 1, 2, _loss),
]
# Cases on a mesh of each kind; `make test-exhaustive` has all on both.
AUTO, EXPLICIT = BITS[:5], BITS[5:7]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "num_layers", "microbatches", "nodes", "loss", "axis_type"),
    [
        pytest.param(*case, kind, marks=[] if is_run else pytest.mark.exhaustive)
        for case in BITS
        for kind, is_run in ((AxisType.Auto, case in AUTO), (AxisType.Explicit, case in EXPLICIT))
    ],
)
@pytest.mark.one_in(3)
def test_bits_are_those_of_a_plain_loop(config, num_layers, microbatches, nodes, loss, axis_type):
    results = []
    for schedule in (ENDS, UNITS):
        zero = _zero(config, schedule, nodes, axis_type=axis_type)
        whole = _whole(num_layers)
        params = zero.shard(_experts(whole) if loss is _experts_loss else whole)
        got = jax.jit(zero.value_and_grad(loss, microbatches=microbatches, **_MEANT))(params, ROWS)
        results.append(jax.device_get((got[0], zero.unshard(got[1]))))
    jax.tree.map(np.testing.assert_array_equal, *results)
