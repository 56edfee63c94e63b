"""One rank of a PyTorch peer in the race over a slow network (`race.py`).

    python -m benchmarks.network._torch RUN.json HOST DEVICE

A rank is a process with one device. The model is that of `_peers.py`, layer for layer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ._hosts import INTERFACE, sent_bytes
from ._link import LinkUse

# What DeepSpeed is asked for, beyond ZeRO-3 with its defaults.
_DEEPSPEED = {
    "deepspeed zero3": {},
    "deepspeed hpz": {"zero_hpz_partition_size": 2},
    "deepspeed qwz": {"zero_quantized_weights": True},
    "deepspeed qgz": {"zero_quantized_gradients": True},
}


class Block(nn.Module):
    """A pre-norm layer: causal attention, then a perceptron four times as wide."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            project(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Decoder(nn.Module):
    """Tokens in, mean cross-entropy of the next ones out; embeddings are tied."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, **_: Any):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocabulary, width))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, tokens):
        x = F.embedding(tokens[:, :-1], self.embedding)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x @ self.embedding.T).flatten(0, 1), tokens[:, 1:].flatten())


def main(run: dict[str, Any], host: int, device: int) -> None:
    rank = host * run["devices_per_host"] + device
    world = run["hosts"] * run["devices_per_host"]
    torch.set_num_threads(1)
    address, port = run["address"].split(":")
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": INTERFACE}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(device)}
    timeout = timedelta(seconds=run["timeout_seconds"])
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timeout)
    tokens = torch.from_numpy(np.load(run["tokens"])).long()
    # Steps, micro-batches, rows: each rank takes its share of the rows.
    batches = tokens.unflatten(2, (world, -1))[:, :, rank]
    model = Decoder(**run["size"])
    model.load_state_dict(_state(np.load(run["weights"])))
    step = (_fsdp2 if run["peer"] == "fsdp2" else _deepspeed)(run, model)

    seconds, losses = [], []

    def take(batch):
        start = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - start)

    for batch in batches[: run["warmup"]]:
        take(batch)
    dist.barrier()
    sent, busy = sent_bytes(), time.process_time()
    with LinkUse(run["bytes_per_second"]) as link:
        for batch in batches[run["warmup"] :]:
            take(batch)
    busy = time.process_time() - busy
    dist.barrier()
    sent = sent_bytes() - sent
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    measured = {
        "seconds": seconds[run["warmup"] :],
        "busy_seconds": busy,
        "sent_bytes": sent,
        "link": link.shares(),
        "losses": (mean / world).tolist(),
    }
    if device == 0:
        Path(run["results"], f"{host}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def _state(leaves: Any) -> dict[str, torch.Tensor]:
    """Named as in the model; `nn.Linear` holds a matrix the other way round."""
    state = {}
    for name in leaves.files:
        leaf = torch.from_numpy(leaves[name])
        linear = leaf.ndim == 2 and name != "embedding"
        state[f"{name}.weight" if name != "embedding" else name] = leaf.T if linear else leaf
    return state


def _fsdp2(run: dict[str, Any], model: Decoder) -> Callable[[torch.Tensor], float]:
    """`fully_shard` of every layer and of the whole, as it comes.

    With several micro-batches gradients are reduced after each one, which is the default:
    `set_requires_gradient_sync(False)` would keep whole gradients on every device.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=run["learning_rate"])

    def step(batch):
        total = 0.0
        for tokens in batch:
            loss = model(tokens) / len(batch)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _deepspeed(run: dict[str, Any], model: Decoder) -> Callable[[torch.Tensor], float]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": run["size"]["rows"] // dist.get_world_size(),
        "gradient_accumulation_steps": run["microbatches"],
        "gradient_clipping": 0.0,  # without the key it clips to 1.0, which no other peer does
        "zero_optimization": {"stage": 3, **_DEEPSPEED[run["peer"]]},
        "optimizer": {
            "type": "Adam",
            "params": {"lr": run["learning_rate"], "weight_decay": 0.0, "torch_adam": True},
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )

    def step(batch):
        total = 0.0
        for tokens in batch:
            loss = engine(tokens)
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()
            total += loss.item() / len(batch)
        return total

    return step


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), *map(int, sys.argv[2:]))
    # All is measured and written. At an ordinary exit a thread of PyTorch's at times aborts the
    # process ("terminate called without an active exception"), and the run would count as failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
