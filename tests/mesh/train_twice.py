"""Train a small decoder twice on 8 fake devices: the same bits at every step, and no abort.

The jitted step, whose arguments are donated, calls `zero` twice, and its loss has collectives of
its own. `NPROC` in the environment is the number of XLA's threads.

Run: `python -m tests.mesh.train_twice PRESET STEPS`.
"""

import functools
import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxzero as jz
from jaxzero import models

WIDTH, LENGTH, VOCABULARY = 128, 128, 2048


def main(preset: str, steps: int) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    config = models.DecoderConfig(
        vocabulary_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_layers=4,
        num_heads=4,
        num_key_value_heads=4,
        head_size=WIDTH // 4,
        rope=models.Rope(rotary_size=WIDTH // 4),
        scan_layers=True,
    )
    graph, full = nnx.split(models.Decoder(config, rngs=nnx.Rngs(0)))
    full = jax.device_get(full)
    zero = jz.Zero(jz.make_mesh(nodes=2), getattr(jz, preset)())
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    keeps_state = zero.config.needs_wire_state

    def loss_fn(params, ids):
        logits = nnx.merge(graph, params)(ids[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
        entropy = optax.softmax_cross_entropy(logits, jax.nn.softmax(logits))
        return losses.mean() + 1e-3 * jax.lax.pmean(entropy.mean(), ("node", "local")) ** 2

    gradients = zero.value_and_grad(loss_fn)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, opt_state, wire_state, ids):
        given = {"wire_state": wire_state} if keeps_state else {}
        loss, grads, *kept = gradients(params, ids, **given)
        other = zero.apply(loss_fn)(params, ids[::-1])
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, kept[0] if kept else None, (loss, other)

    runs = []
    for _ in range(2):
        params = zero.shard(full)
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
    print(jax.__version__, preset, steps, [float(x) for x in jnp.stack(losses)])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
