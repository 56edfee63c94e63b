"""The model that checkpoints of PyTorch, FSDP2 and DeepSpeed in the tests are of."""

from __future__ import annotations

import torch

VOCABULARY, WIDTH, HIDDEN = 11, 6, 9  # odd sizes, so that partitions are padded
BEFORE, AFTER, ROWS, LENGTH = 3, 5, 8, 4  # steps before the checkpoint and after it, and a batch
RANKS = 2
ADAMW = {"lr": 0.02, "betas": [0.9, 0.98], "eps": 1e-7}
CLIP = 0.5


class Model(torch.nn.Module):
    """A language model with tied embeddings, a frozen layer and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad = False
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.frozen(x)
        x = self.norm(x + self.down(torch.tanh(self.up(x))) * self.scale)
        logits = self.head(x)[:, :-1].float()
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1)
        )


def groups(model: Model) -> list[dict]:
    """Two groups, as is usual: matrices decay, vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def batches() -> torch.Tensor:
    """Tokens of all steps, `[steps, rows, length]`."""
    shape = (BEFORE + AFTER, ROWS, LENGTH)
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
