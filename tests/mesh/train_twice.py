"""Train a small decoder twice on 8 fake devices: the same bits at every step, and no abort.

The jitted step calls `zero` twice. `NPROC` in the environment is the number of XLA's threads.
XLA:CPU runs only programs of some size in parallel, so the model cannot be much smaller.

Run: `python -m tests.mesh.train_twice PRESET STEPS [donate]`.
"""

import functools
import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxzero as jz

WIDTH, LENGTH, VOCABULARY, LAYERS, HEADS = 128, 128, 2048, 4, 4


def init(key):
    def draw(number, *shape):
        return jax.random.normal(jax.random.fold_in(key, number), shape) * 0.02

    def norm(*lead):
        return {"scale": jnp.ones((*lead, WIDTH)), "bias": jnp.zeros((*lead, WIDTH))}

    def linear(number, num_in, num_out):
        bias = jnp.zeros((LAYERS, num_out))
        return {"kernel": draw(number, LAYERS, num_in, num_out), "bias": bias}

    return {
        "embedding": draw(0, VOCABULARY, WIDTH),
        "positions": draw(1, LENGTH, WIDTH),
        "norm": norm(),
        "layers": {
            "norms": [norm(LAYERS), norm(LAYERS)],
            "qkv": linear(2, WIDTH, 3 * WIDTH),
            "out": linear(3, WIDTH, WIDTH),
            "up": linear(4, WIDTH, 4 * WIDTH),
            "down": linear(5, 4 * WIDTH, WIDTH),
        },
    }


def normalized(x, norm):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * norm["scale"] + norm["bias"]


def applied(linear, x):
    return x @ linear["kernel"] + linear["bias"]


@functools.partial(jax.checkpoint, prevent_cse=False)
def layer(x, weights):
    before, between = weights["norms"]
    heads = (*x.shape[:2], HEADS, -1)
    qkv = applied(weights["qkv"], normalized(x, before))
    q, k, v = (y.reshape(heads) for y in jnp.split(qkv, 3, -1))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + applied(weights["out"], y.reshape(x.shape))
    y = jax.nn.gelu(applied(weights["up"], normalized(x, between)))
    return x + applied(weights["down"], y), None


def loss_fn(params, ids):
    x = params["embedding"][ids[:, :-1]] + params["positions"]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = normalized(x, params["norm"]) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def assert_equal_gradients(zero: jz.Zero, steps: int) -> None:
    """The same step on the same arguments gives the same bits."""
    params, state = zero.init(init, jax.random.key(0)), {}
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (16, LENGTH + 1)).astype(np.int32)
    if zero.config.needs_wire_state:
        state["wire_state"] = zero.init_wire_state(params)
    run = jax.jit(zero.value_and_grad(loss_fn))
    found = [
        [np.asarray(x) for x in jax.tree.leaves(run(params, ids, **state)[:2])]
        for _ in range(steps)
    ]
    assert all(np.isfinite(x).all() for x in found[0])
    for again in found[1:]:
        for x, y in zip(found[0], again, strict=True):
            np.testing.assert_array_equal(x, y)


def main(preset: str, steps: int, donate: bool) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    zero = jz.Zero(jz.make_mesh(nodes=2), getattr(jz, preset)())
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    gradients, keeps_state = zero.value_and_grad(loss_fn), zero.config.needs_wire_state

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2) if donate else ())
    def step(params, opt_state, wire_state, ids):
        given = {"wire_state": wire_state} if keeps_state else {}
        loss, grads, *kept = gradients(params, ids, **given)
        other, more, *kept = gradients(params, -ids % VOCABULARY, **given)
        grads = jax.tree.map(jnp.add, grads, more)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, kept[0] if kept else None, (loss, other)

    assert_equal_gradients(zero, steps)
    runs = []
    for _ in range(2):
        params = zero.init(init, jax.random.key(0))
        state = params, zero.init_optimizer(tx, params)
        state = *state, zero.init_wire_state(params) if keeps_state else None
        del params
        draw, digests = np.random.default_rng(0), []
        for _ in range(steps):
            ids = draw.integers(0, VOCABULARY, (16, LENGTH + 1)).astype(np.int32)
            *state, losses = step(*state, ids)
            values = [np.asarray(x) for x in jax.tree.leaves((losses, state[0]))]
            assert all(np.isfinite(x).all() for x in values)
            digests.append(hashlib.sha256(b"".join(x.tobytes() for x in values)).hexdigest())
        runs.append(digests)
    assert runs[0] == runs[1], [a == b for a, b in zip(*runs, strict=True)]
    print(jax.__version__, preset, steps, [float(x) for x in losses])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "donate" in sys.argv)
