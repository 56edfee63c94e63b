"""Time per token of greedy decoding on the CPU, against transformers' `generate` with its cache.

    python -m benchmarks.measured.decoding --cores 1

Needs torch and transformers. Both have the same random Llama in float32, the same prompts and the
same cores, and take turns in one process, so that what else runs on the machine slows down both. A
time is that of a whole call, the prompt included, over the number of new tokens; compiling is not
in it. The texts are compared. Ratios are those of neighbouring calls. CPU time is that of all
threads; on one core, where no thread waits for another, it leaves out what other programs take.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from benchmarks.shared._rows import append_row
from jaxzero import interop, models


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A Llama, and what it writes."""

    hidden: int = 512
    layers: int = 8
    vocabulary: int = 8192
    batches: tuple[int, ...] = (1, 8)
    prompt: int = 16  # tokens
    new_tokens: int = 64
    rounds: int = 7
    cores: int | None = None  # that both may use; None: all of the process

    def config(self) -> dict[str, Any]:
        """For `transformers.LlamaConfig`."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 11 * self.hidden // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64,
            "num_key_value_heads": self.hidden // 128,
            "eos_token_id": None,
            "pad_token_id": 0,
        }


def _theirs(model: Any, new_tokens: int) -> Callable[[np.ndarray], np.ndarray]:
    import torch

    def run(ids: np.ndarray) -> np.ndarray:
        given = torch.from_numpy(ids.astype(np.int64))
        mask = torch.ones_like(given)
        text = model.generate(
            given, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False
        )
        return text[:, ids.shape[1] :].numpy()

    return run


def _ours(directory: Path, new_tokens: int) -> Callable[[np.ndarray], np.ndarray]:
    loaded = interop.load_decoder(directory)
    params = jax.tree.map(lambda tensor: jnp.asarray(tensor.read()), loaded.params)

    @jax.jit
    def run(params, cache, ids):
        decode = nnx.merge(loaded.graph, params).decode
        return models.generate(decode, cache, ids, max_new_tokens=new_tokens).tokens

    def decode(ids: np.ndarray) -> np.ndarray:
        cache = models.make_cache(loaded.config, len(ids), ids.shape[1] + new_tokens - 1)
        return np.asarray(run(params, cache, jnp.asarray(ids)))

    return decode


def _milliseconds(run: Callable[[np.ndarray], np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Per new token: of the clock, and of the CPU."""
    start = time.perf_counter(), time.process_time()
    tokens = run(ids)
    end = time.perf_counter(), time.process_time()
    return np.subtract(end, start) * 1e3 / tokens.shape[1]


def _summary(rounds: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Medians and ranges of the peers, and of the ratio within each round."""
    found: dict[str, Any] = {}
    for i, clock in enumerate(("", "cpu_")):
        for peer in rounds[0]:
            times = [float(each[peer][i]) for each in rounds]
            found[f"{peer}_{clock}ms_per_token_median"] = round(statistics.median(times), 3)
            found[f"{peer}_{clock}ms_per_token_range"] = [
                round(bound, 3) for bound in (min(times), max(times))
            ]
        ratios = [float(each["jaxzero"][i] / each["transformers"][i]) for each in rounds]
        found[f"{clock}time_over_transformers_median"] = round(statistics.median(ratios), 3)
    return found


def measure(settings: Settings) -> None:
    """Measure every batch size, and append a row for each."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings.config())).eval()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        ours = _ours(Path(directory), settings.new_tokens)
    theirs = _theirs(model, settings.new_tokens)
    peers = {"jaxzero": ours, "transformers": theirs}
    for batch in settings.batches:
        random = np.random.default_rng(batch)
        ids = random.integers(1, settings.vocabulary, (batch, settings.prompt)).astype(np.int32)
        same = float(np.mean(ours(ids) == theirs(ids)))  # and both are warm
        rounds = []
        for i in range(settings.rounds):
            order = list(peers.items())[:: 1 if i % 2 else -1]
            rounds.append({name: _milliseconds(run, ids) for name, run in order})
        append_row(
            "decoding",
            {
                "settings": dataclasses.asdict(settings),
                "batch": batch,
                "parameters": sum(x.numel() for x in model.parameters()),
                "threads": torch.get_num_threads(),
                "load_average": os.getloadavg()[0],
                "transformers": transformers.__version__,
                **_summary(rounds),
                "equal_tokens": same,
            },
        )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    given = tyro.cli(Settings)
    if given.cores is not None:  # before either library makes its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    measure(given)
