"""Losses with a solver inside: diffrax, optimistix, lineax, and Equinox's own loops."""

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jax import lax

from ._case import THIRD_PARTY, affine, case, dense, normal, squared, vectors

_WIDTH, _HIDDEN, _OUTPUTS = 6, 9, 15


def _dynamics(key):
    return {
        "first": dense(key, 0, _WIDTH, _HIDDEN),
        "second": dense(key, 1, _HIDDEN, _WIDTH),
        "readout": dense(key, 2, _WIDTH, _OUTPUTS),
    }


def _field(t, y, params):
    hidden = jnp.tanh(affine(params["first"], y))
    return affine(params["second"], hidden) * jnp.cos(t).astype(y.dtype)


def _solved(params, start, **options):
    """The end of the path, of one example, that `_field` leads along."""
    options = {"solver": diffrax.Heun(), "args": params, **options}
    term = diffrax.ODETerm(_field)
    return diffrax.diffeqsolve(term, t0=0.0, t1=1.0, dt0=0.2, y0=start, **options).ys[-1]


def _readout(params, ends, batch):
    return squared(affine(params["readout"], ends), batch)


@case(_dynamics, vectors(_WIDTH, _OUTPUTS), register=THIRD_PARTY)
def diffrax_neural_ode(params, batch):
    return _readout(params, jax.vmap(lambda x: _solved(params, x))(batch["x"]), batch)


@case(_dynamics, vectors(_WIDTH, _OUTPUTS), register=THIRD_PARTY)
def diffrax_neural_ode_with_adaptive_steps(params, batch):
    control = diffrax.PIDController(rtol=1e-3, atol=1e-4)
    options = {"solver": diffrax.Tsit5(), "stepsize_controller": control}
    ends = jax.vmap(lambda x: _solved(params, x, **options))(batch["x"])
    return _readout(params, ends, batch)


@case(_dynamics, vectors(_WIDTH, _OUTPUTS), register=THIRD_PARTY)
def diffrax_neural_ode_solved_backwards(params, batch):
    adjoint = diffrax.BacksolveAdjoint()
    ends = jax.vmap(lambda x: _solved(params, x, adjoint=adjoint))(batch["x"])
    return _readout(params, ends, batch)


@case(_dynamics, vectors(_WIDTH, _OUTPUTS), register=THIRD_PARTY)
def diffrax_neural_sde(params, batch):
    def end(x):
        noise = diffrax.VirtualBrownianTree(0.0, 1.0, 0.1, (_WIDTH,), jax.random.key(0))
        diffusion = diffrax.ControlTerm(lambda t, y, _: lx.DiagonalLinearOperator(0.1 * y), noise)
        terms = diffrax.MultiTerm(diffrax.ODETerm(_field), diffusion)
        options = {"solver": diffrax.Euler(), "args": params}
        return diffrax.diffeqsolve(terms, t0=0.0, t1=1.0, dt0=0.25, y0=x, **options).ys[-1]

    return _readout(params, jax.vmap(end)(batch["x"]), batch)


@case(_dynamics, vectors(_WIDTH, _OUTPUTS), register=THIRD_PARTY)
def equinox_checkpointed_while_loop(params, batch):
    def step(carry):
        i, x = carry
        return i + 1, x + 0.3 * _field(i / 5, x, params)

    start = (jnp.asarray(0), batch["x"])
    _, ends = eqxi.while_loop(lambda x: x[0] < 5, step, start, max_steps=8, kind="checkpointed")
    return _readout(params, ends, batch)


@case(_dynamics, vectors(_WIDTH, _OUTPUTS), register=THIRD_PARTY)
def equinox_checked_for_nan_under_a_checkpoint(params, batch):
    @eqx.filter_checkpoint
    def layer(x):
        x = x + _field(0.5, x, params)
        return eqx.error_if(x, ~jnp.isfinite(x).all(), "not finite")

    x, _ = lax.scan(lambda x, _: (layer(x), None), batch["x"], None, length=3)
    return _readout(params, x, batch)


def _equilibrium(key):
    return {"z": normal(key, 0, 8, 8, scale=0.1), **dense(key, 1, 8, 12), "x": normal(key, 9, 5, 8)}


@case(_equilibrium, vectors(5, 12), register=THIRD_PARTY)
def optimistix_deep_equilibrium(params, batch):
    """The fixed point of a layer, differentiated by the implicit function theorem."""

    def residual(z, x):
        return z - jnp.tanh(z @ params["z"] + x)

    def root(x):
        solver = optx.Newton(rtol=1e-6, atol=1e-6)
        start = jnp.zeros_like(x)
        return optx.root_find(residual, solver, start, x, max_steps=16, throw=False).value

    z = jax.vmap(root)(batch["x"] @ params["x"])
    return squared(affine({"w": params["w"], "b": params["b"]}, z), batch)


@case(_equilibrium, vectors(5, 12), register=THIRD_PARTY)
def optimistix_fixed_point(params, batch):
    def image(z, x):
        return jnp.tanh(z @ params["z"] + x)

    def point(x):
        solver = optx.FixedPointIteration(rtol=1e-6, atol=1e-6)
        return optx.fixed_point(image, solver, jnp.zeros_like(x), x, max_steps=64).value

    z = jax.vmap(point)(batch["x"] @ params["x"])
    return squared(affine({"w": params["w"], "b": params["b"]}, z), batch)


@case(_equilibrium, vectors(5, 12), register=THIRD_PARTY)
def optimistix_least_squares(params, batch):
    """Codes that explain an input best, by Levenberg-Marquardt."""

    def residuals(z, x):
        return jnp.concatenate([z + jnp.tanh(z @ params["z"]) - x, 0.5 * z])

    def code(x):
        solver = optx.LevenbergMarquardt(rtol=1e-7, atol=1e-7)
        start = jnp.zeros_like(x)
        return optx.least_squares(residuals, solver, start, x, max_steps=32, throw=False).value

    z = jax.vmap(code)(batch["x"] @ params["x"])
    return squared(affine({"w": params["w"], "b": params["b"]}, z), batch)


def _system(key):
    return {
        "a": normal(key, 0, 8, 8, scale=0.2),
        "x": normal(key, 1, 5, 8),
        "y": normal(key, 2, 8, 15),
    }


@case(_system, vectors(5, 15), register=THIRD_PARTY)
def lineax_dense_solve(params, batch):
    operator = lx.MatrixLinearOperator(3 * jnp.eye(8, dtype=params["a"].dtype) + params["a"])
    x = jax.vmap(lambda b: lx.linear_solve(operator, b).value)(batch["x"] @ params["x"])
    return squared(x @ params["y"], batch)


@case(_system, vectors(5, 15), register=THIRD_PARTY)
def lineax_conjugate_gradients_of_a_function(params, batch):
    def apply(v):
        return 3 * v + params["a"] @ (params["a"].T @ v)

    def solve(b):
        structure = jax.ShapeDtypeStruct(b.shape, b.dtype)
        operator = lx.FunctionLinearOperator(apply, structure, lx.positive_semidefinite_tag)
        tolerance = 1e-6 if b.dtype == jnp.float32 else 1e-14
        solver = lx.CG(rtol=tolerance, atol=tolerance)
        return lx.linear_solve(operator, b, solver, throw=False).value

    return squared(jax.vmap(solve)(batch["x"] @ params["x"]) @ params["y"], batch)
