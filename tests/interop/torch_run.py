"""The JAX twin of `torch_model`, and what it takes to go on with a run of PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import ShapeDtypeStruct

import jaxzero as jz
from jaxzero import interop
from jaxzero.interop import Rule, Transpose

RULES = (
    Rule("embed", "embed.weight"),
    Rule("up.kernel", "up.weight", Transpose()),
    Rule("up.bias", "up.bias"),
    Rule("down.kernel", "down.weight", Transpose()),
    Rule("down.bias", "down.bias"),
    Rule("norm.scale", "norm.weight"),
    Rule("norm.bias", "norm.bias"),
)
FROZEN = (Rule("kernel", "frozen.weight", Transpose()), Rule("scale", "scale"))
TIED = "head.weight"

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.02, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.1},
    },
}


def _shape(*shape: int) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, jnp.float32)


def shapes() -> dict[str, Any]:
    """The parameters that are trained."""
    return {
        "embed": _shape(11, 6),
        "up": {"kernel": _shape(6, 9), "bias": _shape(9)},
        "down": {"kernel": _shape(9, 6), "bias": _shape(6)},
        "norm": {"scale": _shape(6), "bias": _shape(6)},
    }


def loss_fn(params, tokens, frozen):
    """As `torch_model.Model.forward`."""
    x = params["embed"][tokens]
    x = x + x @ frozen["kernel"]
    hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"][None, None])
    down = hidden @ params["down"]["kernel"] + params["down"]["bias"][None, None]
    x = x + down * frozen["scale"]
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    x = (x - mean) / jnp.sqrt(var + 1e-5) * params["norm"]["scale"][None, None]
    x = x + params["norm"]["bias"][None, None]
    logits = (x @ params["embed"].T)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def matrices(params: Any) -> Any:
    """What decays."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


class Run:
    """A run of PyTorch, gone on with on 8 devices. Compiled once, for any number of checkpoints."""

    def __init__(self):
        mesh = jz.make_mesh(nodes=2)
        self.run = jz.from_deepspeed(CONFIG, mesh, weight_decay_mask=matrices)
        differentiate = self.run.value_and_grad(loss_fn)

        def step(params, opt_state, tokens, frozen):
            loss, grads = differentiate(params, opt_state, tokens, frozen)
            updates, opt_state = self.run.optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        self._step = jax.jit(step)

    def load(self, checkpoint: interop.Checkpoint) -> tuple[Any, Any, Any]:
        """Parameters, optimizer state, and what is not trained."""
        zero = self.run.zero
        loaded = interop.load_into(
            shapes(), checkpoint, rules=RULES, ignore=["frozen.weight", "scale", TIED]
        )
        frozen = interop.load_into(
            {"kernel": _shape(6, 6), "scale": _shape()},
            {name: checkpoint[name] for name in ("frozen.weight", "scale")},
            rules=FROZEN,
        )
        params = zero.shard(loaded)
        opt_state = zero.init_optimizer(self.run.optimizer, params)
        opt_state = interop.load_adam(opt_state, loaded, checkpoint, rules=RULES)
        return params, opt_state, zero.shard(frozen)

    def follow(self, checkpoint: interop.Checkpoint, expected: Any) -> tuple[list[float], Any]:
        """Train on the batches in `expected`: losses, and parameters by the checkpoint's names."""
        params, opt_state, frozen = self.load(checkpoint)
        losses = []
        for tokens in expected["batches"]:
            tokens = jnp.asarray(tokens, jnp.int32)
            params, opt_state, loss = self._step(params, opt_state, tokens, frozen)
            losses.append(float(loss))
        after = interop.tensors_from(params, RULES, like=shapes())
        return losses, {name: tensor.read() for name, tensor in after.items()}


def expected_of(directory: Path) -> dict[str, np.ndarray]:
    """What the trainer itself said, which the script that ran it has written down."""
    with np.load(directory / "expected.npz") as file:
        return dict(file)
