"""What a loss says of shardings, other programs and Python: it works, or we say what to do.

Each model here is one layer; what it asks for must not change its gradients.
"""

import functools

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from tests import zoo
from tests.zero.compiles import COMPILES

AXES = ("node", "local")
MESHES = ("2x4-auto", "2x3-auto", "2x4-explicit", "2x2x2-auto")
each_mesh = pytest.mark.parametrize("mesh", MESHES)


def _params():
    key = jax.random.key(0)
    return {"w": zoo.normal(key, 0, 8, 16), "v": zoo.normal(key, 1, 16, 15)}


def _x(rows=48):
    return zoo.normal(jax.random.key(1), 0, rows, 8, scale=1.0)


def _loss(params, x, ask=lambda h: h):
    return jnp.mean((ask(jnp.tanh(x @ params["w"])) @ params["v"] - 1.0) ** 2)


def _check(zero, ask, x=None):
    """Gradients are those of the loss that asks for nothing."""
    x, whole = _x() if x is None else x, _params()
    want = jax.device_get(jax.jit(jax.value_and_grad(_loss))(whole, x))
    loss = functools.partial(_loss, ask=ask)
    value, grads = zero.value_and_grad(loss)(zero.shard(whole), x)
    zoo.assert_close(jax.device_get(value), want[0], 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), want[1], 1e-5, "grads")


def _zero(mesh):
    return jz.Zero(zoo.make_mesh(mesh))


def _refused(zero, ask, match, error=ValueError):
    with pytest.raises(error, match=match) as caught:
        _check(zero, ask)
    assert "zero.value_and_grad" in str(caught.value)


# Shardings.


@each_mesh
def test_a_constraint_on_the_batch_holds_already(mesh):
    zero = _zero(mesh)
    with jax.set_mesh(zero.mesh):
        _check(zero, lambda h: lax.with_sharding_constraint(h, P(AXES)))


def _in_a_while_loop(h, sharding):
    def step(carry):
        i, h = carry
        return i + 1, lax.with_sharding_constraint(h, sharding)

    start = (jnp.asarray(0), h)
    loop = eqxi.while_loop(lambda carry: carry[0] < 3, step, start, max_steps=3, kind="bounded")
    return loop[1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda h, s: lax.with_sharding_constraint(h, s),
        lambda h, s: jax.jit(lambda h: h, in_shardings=s, out_shardings=s)(h),
        lambda h, s: jax.device_put(h, s),
        lambda h, s: lax.scan(
            lambda h, _: (lax.with_sharding_constraint(h, s), None), h, None, length=2
        )[0],
        lambda h, s: lax.custom_linear_solve(
            lambda h: lax.with_sharding_constraint(2 * h, s),
            2 * h,
            lambda _, y: y / 2,
            symmetric=True,
        ),
        lambda h, s: jax.checkpoint(lambda h: lax.with_sharding_constraint(h, s))(h),
        _in_a_while_loop,
    ],
    ids=["constraint", "jit", "device_put", "scan", "linear_solve", "remat", "while"],
)
@pytest.mark.parametrize("mesh", ["2x4-auto", "2x2x2-auto"])
@pytest.mark.one_in(2)
def test_our_axes_are_taken_out_of_what_is_asked(mesh, ask):
    zero = _zero(mesh)
    rows = 8 * 8  # so that what one device has divides by the number of devices, as `jit` asks
    others = ("tensor",) if "tensor" in zero.mesh.shape else ()
    sharding = NamedSharding(zero.mesh, P(AXES, *others))
    _check(zero, lambda h: ask(h, sharding), _x(rows))


def test_a_split_that_is_not_there_is_warned_of():
    zero = _zero("2x4-auto")
    sharding = NamedSharding(zero.mesh, P(None, "local"))
    with pytest.warns(UserWarning, match="asks to split dim 1 .* every device has the full array"):
        _check(zero, lambda h: lax.with_sharding_constraint(h, sharding))


@pytest.mark.parametrize(
    ("mesh", "ask"),
    [
        ("2x4-explicit", lambda h, s: lax.with_sharding_constraint(h, s)),
        ("2x4-auto", lambda h, s: jax.sharding.reshard(h, s)),
        ("2x4-auto", lambda h, s: jax.device_put(h, s)),  # 6 rows here, which 8 does not divide
        ("2x4-auto", lambda h, s: jnp.einsum("bi->bi", h, out_sharding=s)),
    ],
)
def test_what_jax_refuses_is_explained(mesh, ask):
    zero = _zero(mesh)
    sharding = NamedSharding(zero.mesh, P(AXES))
    _refused(zero, lambda h: ask(h, sharding), "Remove its requests for shardings.*JAX said")


def test_closing_over_an_array_on_a_mesh():
    ones = np.ones(16, np.float32)
    for mesh in ("2x4-auto", "2x4-explicit"):
        zero = _zero(mesh)
        split = jax.device_put(ones, NamedSharding(zero.mesh, P("node")))

        def ask(h, split=split):
            return h * split[None]

        if mesh == "2x4-auto":
            with pytest.warns(UserWarning, match="closes over an array .* every device holds all"):
                _check(zero, ask)
        else:
            _refused(zero, ask, "Pass it as an argument, or `jax.device_get` it")


# A `shard_map` of its own.


def _doubled(h, **options):
    return jax.shard_map(lambda h: 2 * h, **options)(h) / 2


@each_mesh
def test_over_our_axes(mesh):
    zero = _zero(mesh)
    options = {"in_specs": P(), "out_specs": P()}
    remedy = "cannot call `jax.shard_map` .* Call the function itself"
    _refused(zero, lambda h: _doubled(h, mesh=zero.mesh, **options), remedy)
    with jax.set_mesh(zero.mesh):
        _refused(zero, lambda h: _doubled(h, axis_names={"local"}, **options), remedy)
    options = {"in_specs": P("node"), "out_specs": P("node")}
    _refused(zero, lambda h: _doubled(h, mesh=zero.mesh, **options), remedy)


def test_over_another_mesh():
    other = jax.make_mesh(
        (1,), ("other",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    options = {"mesh": other, "in_specs": P(), "out_specs": P()}
    _refused(_zero("2x4-auto"), lambda h: _doubled(h, **options), "or over another mesh")
    zero = jz.Zero(jz.make_mesh(2, simulate=4))
    _refused(zero, lambda h: _doubled(h, **options), "or over another mesh")


def test_over_a_third_axis():
    zero = _zero("2x2x2-auto")
    options = {"in_specs": P(None, "tensor"), "out_specs": P(None, "tensor")}
    _check(zero, lambda h: _doubled(h, mesh=zero.mesh, axis_names={"tensor"}, **options))


# Python.


def _printing(**options):
    def ask(h):
        jax.debug.print("{}", h[0, 0], **options)
        return h

    return ask


@pytest.mark.parametrize(
    ("mesh", "num"),
    [("2x4-auto", 8), ("2x3-explicit", 6), ("2x2x2-auto", 4)],  # once for each of our axes
)
def test_prints_of_all_devices_have_no_order(mesh, num, capfd):
    zero = _zero(mesh)
    _refused(zero, _printing(ordered=True), "what several devices print has no order")
    _check(zero, _printing())
    jax.effects_barrier()
    assert len(capfd.readouterr().out.split()) == num


def test_ordered_callbacks():
    def ask(h):
        jax.debug.callback(lambda x: None, h[0, 0], ordered=True)
        return h

    _refused(_zero("2x4-auto"), ask, "`debug_callback` with `ordered=True`")
    _refused(jz.Zero(jz.make_mesh(2, simulate=4)), ask, "`debug_callback` with `ordered=True`")
    _check(_zero("1x1-auto"), ask)  # a single device has an order
    _check(_zero("1x1-auto"), _printing(ordered=True))


@pytest.mark.parametrize("ordered", [False, True])
def test_every_device_calls_back(ordered):
    seen = []

    def ask(h):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        first = lax.stop_gradient(h[0, 0])
        zero = io_callback(
            lambda x: seen.append(float(x)) or np.float32(0), shape, first, ordered=ordered
        )
        return h + zero

    _check(_zero("2x4-auto"), ask)
    jax.effects_barrier()
    assert len(set(seen)) == len(seen) == 8
    _refused(_zero("2x2x2-auto"), ask, "needs a mesh of", NotImplementedError)


# What only a program of several devices could get wrong.


def test_the_device_is_known_inside_opaque_loops():
    """`axis_index` is lowered by the mesh in its context, where an axis is automatic."""
    for mesh in ("2x2x2-auto", "2x4-explicit"):
        zero = _zero(mesh)

        def ask(h):
            def step(carry):
                return carry[0] + 1, carry[1] + lax.axis_index(AXES)

            start = (jnp.asarray(0), jnp.asarray(0))
            total = lax.while_loop(lambda carry: carry[0] < 3, step, start)[1]
            right = total == 3 * lax.axis_index(AXES)
            return jnp.where(right, h, jnp.nan)

        _check(zero, ask)


def test_solvers_on_simulated_devices():
    def ask(h):
        def step(carry):
            return carry[0] + 1, jnp.tanh(carry[1])

        start = (jnp.asarray(0), h)
        loop = eqxi.while_loop(lambda x: x[0] < 2, step, start, max_steps=4, kind="checkpointed")
        return loop[1]

    whole, x = _params(), _x()
    loss = functools.partial(_loss, ask=ask)
    want = jax.device_get(jax.value_and_grad(loss)(whole, x))
    zero = jz.Zero(jz.make_mesh(2, simulate=4))
    value, grads = zero.value_and_grad(loss)(zero.shard(whole), x)
    zoo.assert_close(jax.device_get(value), want[0], 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), want[1], 1e-5, "grads")


def test_what_is_closed_over_is_no_constant_of_the_program():
    """So a call with other values finds the program compiled."""
    zero = _zero("2x4-auto")
    params, x = zero.shard(_params()), _x()
    values, compiled = [], []
    for scale in (jnp.arange(16.0)[None], jnp.ones((1, 16))):
        loss = functools.partial(_loss, ask=lambda h, scale=scale: h * scale)
        before = len(COMPILES)
        value, _ = zero.value_and_grad(loss)(params, x)
        compiled.append(len(COMPILES) - before)
        values.append(float(value))
    assert compiled[0] > compiled[1] == 0
    assert values[0] != values[1]
