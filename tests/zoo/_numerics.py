"""Operations with rules of their own: linear algebra, sorting, transforms in transforms."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
from jax import lax

from ._case import case, cross_entropy, images, normal, sequences, squared, vectors


def _positive(w):
    return w @ w.T + 4 * jnp.eye(w.shape[0], dtype=w.dtype)


@case(lambda key: {"w": normal(key, 0, 6, 6), "v": normal(key, 1, 6)}, vectors(6, 6))
def cholesky_solve_and_logdet(params, batch):
    matrix = _positive(params["w"])
    solved = jsp.linalg.cho_solve((jnp.linalg.cholesky(matrix), True), params["v"])
    return squared(batch["x"] + solved[None], batch) + 0.1 * jnp.linalg.slogdet(matrix)[1]


@case(lambda key: normal(key, 0, 5, 5), vectors(5, 5))
def qr_inverse_and_eigenvalues(params, batch):
    orthogonal, _ = jnp.linalg.qr(params + 3 * jnp.eye(5, dtype=params.dtype))
    spread = jnp.diag(jnp.arange(5, dtype=params.dtype))
    values = jnp.linalg.eigvalsh(0.1 * (params + params.T) + spread)
    inverse = jnp.linalg.inv(_positive(params))
    return squared(batch["x"] @ orthogonal @ inverse, batch) + jnp.sum(jnp.tanh(values))


@case(lambda key: {"w": normal(key, 0, 8, 12), "v": normal(key, 1, 10)}, vectors(8, 3))
def sorted_and_top_k(params, batch):
    scores = batch["x"] @ params["w"]
    best, _ = lax.top_k(scores, 3)
    order = jnp.argsort(lax.stop_gradient(params["v"]))
    ranked = jnp.sort(params["v"])[:3] * params["v"][order][-3:]
    return squared(best * ranked[None] + jnp.median(scores, axis=1)[:, None], batch)


@case(lambda key: {"in": normal(key, 0, 4, 8, 6), "out": normal(key, 1, 4, 6, 8)}, vectors(8, 8))
def einsum_over_stacked_experts(params, batch):
    hidden = jnp.tanh(jnp.einsum("nd,edf->enf", batch["x"], params["in"]))
    return squared(jnp.einsum("enf,efd->nd", hidden, params["out"]) / 4, batch)


@case(lambda key: {"decay": normal(key, 0, 8), "w": normal(key, 1, 8, 4)}, sequences(6, 8, 4))
def associative_scan_with_learned_decay(params, batch):
    decay = jnp.broadcast_to(jax.nn.sigmoid(params["decay"]), batch["x"].shape)

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    _, states = lax.associative_scan(combine, (decay, batch["x"]), axis=1)
    return squared(states[:, -1] @ params["w"], batch)


@case(lambda key: {"kernel": normal(key, 0, 6, 5), "w": normal(key, 1, 8, 4)}, sequences(6, 8, 4))
def fourier_cumsum_and_logsumexp(params, batch):
    spectrum = (
        jnp.fft.rfft(batch["x"], axis=1) * jnp.fft.rfft(params["kernel"][:, :1], axis=0)[None]
    )
    mixed = jnp.fft.irfft(spectrum, n=6, axis=1)
    summed = jnp.cumsum(jnp.tanh(mixed), axis=1)
    return squared(jax.nn.logsumexp(summed, axis=1) @ params["w"], batch)


@case(
    lambda key: {
        "first": normal(key, 0, 3, 3, 2, 6, scale=0.3),
        "depthwise": normal(key, 1, 3, 3, 1, 6, scale=0.3),
        "head": normal(key, 2, 6, 5),
    },
    images(6, 2, 5),
)
def convolutions_and_pooling(params, batch):
    def convolve(x, kernel, groups=1):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    x = jnp.tanh(convolve(batch["image"], params["first"]))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jnp.tanh(convolve(x, params["depthwise"], groups=6)).mean((1, 2))
    return cross_entropy(x @ params["head"], batch["label"])


@case(lambda key: {"a": normal(key, 0, 8, 6), "b": normal(key, 1, 6)}, vectors(8, 1))
def gradient_penalty_inside(params, batch):
    def energy(x):
        return jnp.vdot(params["b"], jnp.tanh(x @ params["a"]))

    slopes = jax.vmap(jax.grad(energy))(batch["x"])
    return squared(jax.vmap(energy)(batch["x"])[:, None], batch) + jnp.mean(slopes**2)


@case(lambda key: {"w": normal(key, 0, 8, 4)}, vectors(8, 4))
def inner_gradient_step(params, batch):
    def inner(w):
        return jnp.mean((batch["x"] @ w) ** 2, axis=0).sum() / 4 + 0.1 * jnp.sum(w**3)

    def task(x, y):
        grads = jax.grad(lambda w: jnp.sum((x @ w - y) ** 2))(params["w"])
        return jnp.sum((x @ (params["w"] - 0.05 * grads) - y) ** 2)

    return jnp.mean(jax.vmap(task)(batch["x"], batch["y"])) + inner(params["w"])


@case(lambda key: {"w": normal(key, 0, 6, 6), "v": normal(key, 1, 6)}, vectors(6, 6))
def tangents_and_hessians_inside(params, batch):
    def energy(v):
        return jnp.sum(jnp.sin(params["w"] @ v))

    value, tangent = jax.jvp(energy, (params["v"],), (jnp.ones_like(params["v"]),))
    curvature = jax.hessian(energy)(params["v"])
    return squared(batch["x"] @ (params["w"] + curvature), batch) + value * tangent


@case(lambda key: {"w": normal(key, 0, 6, 6), "v": normal(key, 1, 6)}, vectors(6, 6))
def implicit_linear_solve(params, batch):
    matrix = _positive(params["w"])

    def solve(multiply, right):
        del multiply
        return jnp.linalg.solve(lax.stop_gradient(matrix), right)

    solved = lax.custom_linear_solve(lambda x: matrix @ x, params["v"], solve, symmetric=True)
    return squared(batch["x"] + solved[None], batch)


@case(lambda key: {"w": normal(key, 0, 6, 6, scale=0.1), "v": normal(key, 1, 6)}, vectors(6, 6))
def implicit_fixed_point(params, batch):
    def residual(z):
        return z - jnp.tanh(params["w"] @ z + params["v"])

    def solve(f, start):
        step = lambda _, z: z - f(z)  # noqa: E731
        return lax.fori_loop(0, 60, step, start)

    def tangent_solve(g, y):
        return jnp.linalg.solve(jax.jacobian(g)(y), y)

    fixed = lax.custom_root(residual, jnp.zeros_like(params["v"]), solve, tangent_solve)
    return squared(batch["x"] * fixed[None], batch)


@case(lambda key: {"w": normal(key, 0, 8, 8), "b": normal(key, 1, 8)}, vectors(8, 8))
def random_numbers_from_a_key_made_inside(params, batch):
    noise = jax.random.normal(jax.random.key(3), (8, 8), params["w"].dtype)
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(4), 1), 0.5, (8,))
    w = params["w"] + 0.1 * noise
    return squared((batch["x"] @ w) * keep[None].astype(w.dtype) + params["b"][None], batch)


@case(lambda key: {"w": normal(key, 0, 8, 8)}, vectors(8, 8))
def prints_while_it_runs(params, batch):
    w = params["w"]
    jax.debug.callback(lambda x: None, w)

    def layer(x, _):
        jax.debug.callback(lambda x: None, x.sum())
        return jnp.tanh(x @ w), None

    x, _ = lax.scan(layer, batch["x"], length=2)
    jax.debug.print("{}", w.sum(), ordered=False)
    return squared(x, batch)


@case(lambda key: {"w": normal(key, 0, 8, 8), "v": normal(key, 1, 8)}, vectors(8, 8))
def chosen_by_platform(params, batch):
    def here(w, x):
        return jnp.tanh(x @ w)

    def elsewhere(w, x):
        return jnp.tanh(w.T @ x.T).T

    x = lax.platform_dependent(params["w"], batch["x"], cpu=here, default=elsewhere)
    with jax.named_scope("scaled"):
        return squared(x * params["v"][None], batch)
