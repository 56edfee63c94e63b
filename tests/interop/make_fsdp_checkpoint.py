"""Train with FSDP2 on two CPU processes, save with `torch.distributed.checkpoint`, train on.

    python -m tests.interop.make_fsdp_checkpoint DIRECTORY RANK

is one of the processes. `DIRECTORY/dcp` is the checkpoint after 3 steps, and `expected.npz` has
what PyTorch says of its state then, and the batches, losses and parameters of 5 more steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from tests.models import torch_model
from tests.models.torch_model import BEFORE, RANKS


def train(rank: int, directory: str) -> None:
    """One process of the two."""
    torch.set_num_threads(1)
    meeting = f"file://{Path(directory, 'rendezvous').absolute()}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = torch_model.Model()
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(torch_model.groups(model), **torch_model.ADAMW)
    batches = torch_model.batches()

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch.chunk(RANKS)[rank])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), torch_model.CLIP)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / RANKS

    for batch in batches[:BEFORE]:
        step(batch)
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optim": state}, checkpoint_id=Path(directory) / "dcp")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    expected = _arrays("saved", weights, state)
    losses = [step(batch) for batch in batches[BEFORE:]]
    weights, state = get_state_dict(model, optimizer, options=options)
    expected |= _arrays("after", weights, state)
    if rank == 0:
        expected |= {"batches": batches[BEFORE:].numpy(), "losses": np.array(losses)}
        np.savez(Path(directory) / "expected.npz", **expected)
    dist.barrier()
    dist.destroy_process_group()


def _arrays(prefix: str, weights: dict, state: dict) -> dict[str, np.ndarray]:
    found = {f"{prefix}/fp32/{name}": value for name, value in weights.items()}
    for name, held in state.get("state", {}).items():  # whole on the first process, none elsewhere
        found |= {f"{prefix}/{key}/{name}": held[key] for key in ("exp_avg", "exp_avg_sq")}
    return {name: value.detach().numpy().copy() for name, value in found.items()}


if __name__ == "__main__":
    train(int(sys.argv[2]), sys.argv[1])
