"""Densities: normalizing flows of distrax and flowjax, and the ELBO of a NumPyro model."""

import functools

import distrax
import equinox as eqx
import flowjax.bijections
import flowjax.distributions
import flowjax.flows
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import paramax
from numpyro.infer import Trace_ELBO

from ._case import THIRD_PARTY, affine, case, dense, normal, vectors

_DIMS, _HIDDEN, _LAYERS = 6, 10, 2


def _coupling(key):
    return [
        {
            "first": dense(key, 10 * i, _DIMS, _HIDDEN),
            "second": dense(key, 10 * i + 1, _HIDDEN, 2 * _DIMS),
        }
        for i in range(_LAYERS)
    ]


@case(_coupling, vectors(_DIMS, 1), register=THIRD_PARTY)
def distrax_real_nvp(params, batch):
    def conditioner(layer, x):
        x = affine(layer["second"], jnp.tanh(affine(layer["first"], x)))
        return 0.3 * x.reshape(*x.shape[:-1], _DIMS, 2)

    def inner(params):
        return distrax.ScalarAffine(shift=params[..., 0], log_scale=jnp.tanh(params[..., 1]))

    layers = [
        distrax.MaskedCoupling(
            jnp.arange(_DIMS) % 2 == i % 2, functools.partial(conditioner, layer), inner
        )
        for i, layer in enumerate(params)
    ]
    base = distrax.Independent(distrax.Normal(jnp.zeros(_DIMS), jnp.ones(_DIMS)), 1)
    flow = distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers)))
    return -jnp.mean(flow.log_prob(batch["x"]))


def _flow(spline: bool):
    bijection = flowjax.bijections.RationalQuadraticSpline(knots=4, interval=3)
    flow = flowjax.flows.coupling_flow if spline else flowjax.flows.masked_autoregressive_flow
    options = {"transformer": bijection} if spline else {}
    base = flowjax.distributions.Normal(jnp.zeros(_DIMS))
    sizes = {"flow_layers": 2, "nn_width": _HIDDEN, "nn_depth": 1}
    return flow(jax.random.key(3), base_dist=base, **sizes, **options)


@functools.cache
def _flow_of(spline: bool):
    """Its trainable arrays, on the host, and the rest."""
    arrays, rest = eqx.partition(
        _flow(spline), eqx.is_inexact_array, is_leaf=lambda x: isinstance(x, paramax.NonTrainable)
    )
    return jax.tree.map(np.asarray, arrays), rest


def _log_prob(spline, arrays, x):
    flow = paramax.unwrap(eqx.combine(arrays, _flow_of(spline)[1]))
    return jnp.mean(flow.log_prob(x))


@case(lambda key: _flow_of(True)[0], vectors(_DIMS, 1), register=THIRD_PARTY)
def flowjax_spline_coupling_flow(params, batch):
    return -_log_prob(True, params, batch["x"])


@case(lambda key: _flow_of(False)[0], vectors(_DIMS, 1), register=THIRD_PARTY)
def flowjax_masked_autoregressive_flow(params, batch):
    return -_log_prob(False, params, batch["x"])


def _posterior(key):
    return {
        "mean": normal(key, 0, 7, 15),
        "spread": normal(key, 1, 7, 15),
        "noise": normal(key, 2, 15),
    }


@case(_posterior, vectors(7, 15), register=THIRD_PARTY)
def numpyro_elbo(params, batch):
    """Of Bayesian regression. The likelihood is scaled up to 24 examples, so that the mean over
    slices of a batch is what the whole batch gives."""
    num, rows = 24, batch["x"].shape[0]

    def model(x, y):
        with numpyro.plate_stack("weights", (7, 15)):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        scale = jax.nn.softplus(numpyro.param("noise", params["noise"]))
        with numpyro.plate_stack("data", (rows, 15)), numpyro.handlers.scale(scale=num / rows):
            numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)

    def guide(x, y):
        mean = numpyro.param("mean", params["mean"])
        spread = 0.3 * jax.nn.softplus(numpyro.param("spread", params["spread"]))
        with numpyro.plate_stack("weights", (7, 15)):
            numpyro.sample("w", dist.Normal(mean, spread))

    loss = Trace_ELBO(num_particles=2).loss
    elbo = loss(jax.random.key(0), params, model, guide, batch["x"], batch["y"])
    return jnp.asarray(elbo) / num
