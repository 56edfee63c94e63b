"""Train with a DeepSpeed configuration, continuing from a DeepSpeed checkpoint.

    python examples/from_deepspeed.py [CHECKPOINT]

The model is that of the checkpoints in `tests/fixtures/deepspeed`: small, with a frozen layer, and
a head that is tied to the embeddings. Without a checkpoint it starts from random weights. Pretends
that this machine has 8 devices.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxzero as jz
from jaxzero import interop
from jaxzero.interop import Rule, Transpose

CONFIG = Path(__file__).with_name("ds_config.json")
VOCABULARY, WIDTH, HIDDEN, LENGTH = 11, 6, 9, 4
# Our parameters, and what the checkpoint calls them.
RULES = (
    Rule("embed", "embed.weight"),
    Rule("up.kernel", "up.weight", Transpose()),
    Rule("up.bias", "up.bias"),
    Rule("down.kernel", "down.weight", Transpose()),
    Rule("down.bias", "down.bias"),
    Rule("norm.scale", "norm.weight"),
    Rule("norm.bias", "norm.bias"),
)
FROZEN_RULES = (Rule("kernel", "frozen.weight", Transpose()), Rule("scale", "scale"))
FROZEN, TIED = ("frozen.weight", "scale"), ("head.weight",)


def init(key: jax.Array) -> dict[str, Any]:
    """The parameters that are trained."""
    keys = jax.random.split(key, 3)
    normal = jax.random.normal
    return {
        "embed": normal(keys[0], (VOCABULARY, WIDTH)),
        "up": {"kernel": normal(keys[1], (WIDTH, HIDDEN)) / 2, "bias": jnp.zeros(HIDDEN)},
        "down": {"kernel": normal(keys[2], (HIDDEN, WIDTH)) / 3, "bias": jnp.zeros(WIDTH)},
        "norm": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
    }


def init_frozen() -> dict[str, Any]:
    return {"kernel": jnp.zeros((WIDTH, WIDTH)), "scale": jnp.ones(())}


def loss_fn(params, tokens, frozen):
    """Mean loss of the next token; `tokens` are `[rows, LENGTH]`."""
    x = params["embed"][tokens]
    x = x + x @ frozen["kernel"]
    hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    x = x + (hidden @ params["down"]["kernel"] + params["down"]["bias"]) * frozen["scale"]
    x = jax.nn.standardize(x, epsilon=1e-5) * params["norm"]["scale"] + params["norm"]["bias"]
    logits = (x @ params["embed"].T)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def set_up() -> interop.DeepSpeedRun:
    """What the configuration asks for. A warning names the keys that have no effect here."""
    run = jz.from_deepspeed(
        CONFIG,
        jz.make_mesh(nodes=2),
        values={"optimizer.params.lr": 0.02},  # the file leaves it "auto"
        weight_decay_mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    print(f"ZeRO-{run.zero.config.stage}, {run.batch_size} rows a step; in vain: {run.unhonoured}")
    return run


def start(run: interop.DeepSpeedRun) -> tuple[Any, Any, Any]:
    """Random parameters, new optimizer state, and what is not trained."""
    params = run.zero.init(init, jax.random.key(0))
    opt_state = run.zero.init_optimizer(run.optimizer, params)
    return params, opt_state, run.zero.init(init_frozen)


def resume(run: interop.DeepSpeedRun, directory: Path | str) -> tuple[Any, Any, Any]:
    """The same from a checkpoint: each device reads its slices, of Adam's moments too."""
    checkpoint = interop.open_checkpoint(directory)
    shapes, frozen_shapes = jax.eval_shape(init, jax.random.key(0)), jax.eval_shape(init_frozen)
    loaded = interop.load_into(shapes, checkpoint, rules=RULES, ignore=(*FROZEN, *TIED))
    others = {name: checkpoint[name] for name in FROZEN}
    frozen = interop.load_into(frozen_shapes, others, rules=FROZEN_RULES)
    params = run.zero.shard(loaded)
    opt_state = run.zero.init_optimizer(run.optimizer, params)
    opt_state = interop.load_adam(opt_state, loaded, checkpoint, rules=RULES)
    print(f"{checkpoint.form}, after step {checkpoint.adam().step}")
    return params, opt_state, run.zero.shard(frozen)


def make_step(run: interop.DeepSpeedRun) -> Callable:
    differentiate = run.value_and_grad(loss_fn)

    @jax.jit
    def step(params, opt_state, frozen, tokens):
        loss, grads = differentiate(params, opt_state, tokens, frozen)
        updates, opt_state = run.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def batches(num_steps: int, num_rows: int) -> Iterator[np.ndarray]:
    """Rows in which a token says which one is next: int32 `[num_rows, LENGTH]`."""
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        first = random.integers(VOCABULARY, size=(num_rows, 1))
        yield ((first + 3 * np.arange(LENGTH)) % VOCABULARY).astype(np.int32)


def train(step: Callable, state: tuple[Any, Any, Any], data: Iterable[np.ndarray]) -> list[float]:
    params, opt_state, frozen = state
    losses = []
    for i, tokens in enumerate(data):
        params, opt_state, loss = step(params, opt_state, frozen, tokens)
        losses.append(float(loss))
        if i % 20 == 0:
            print(f"step {i}: loss {loss:.5f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    run = set_up()
    state = resume(run, sys.argv[1]) if sys.argv[1:] else start(run)
    train(make_step(run), state, batches(101, run.batch_size))
