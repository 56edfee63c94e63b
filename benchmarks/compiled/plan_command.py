"""Time `jaxzero plan` as a user runs it: a new process, and no compiled program in its cache.

    python -m benchmarks.compiled.plan_command --model 1b
    python -m benchmarks.compiled.plan_command --model 405b --nodes 64 --rows 1 --tokens 4096

Needs jaxzero[aot,train]. The command starts, reads the `config.json` of a decoder, compares budgets
of activations too, and prints a table. CPU seconds, those of child processes
included, change less than wall time with other load.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import tyro

from benchmarks.shared._models import SIZES
from benchmarks.shared._rows import append_row

from .plans import cpu_seconds

PlannedModel = Literal["1b", "7b", "405b", "1t"]
_BEST = re.compile(r"^The best: (?!.*tokens a second)(.+)$", re.MULTILINE)


def main(
    model: PlannedModel = "7b",
    nodes: int = 2,
    local: int = 8,
    device: str = "h200",
    link: float = 50.0,
    rows: float = 2.0,
    tokens: int = 2048,
    budget: float = 180.0,
) -> None:
    """Run the command, and append a row.

    Args:
        model: TinyLlama (1.1B), Llama-7B, Llama-405B, or a mixture of 1T parameters.
        nodes: of the cluster.
        local: devices of a node.
        device: their kind.
        link: GB a second that enter a node.
        rows: of a step, for each device.
        tokens: of a row.
        budget: seconds after which no further program is compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_config(model)))
        command = ["plan", "--model", folder, "--nodes", str(nodes), "--local", str(local)]
        command += ["--device", device, "--link", str(link)]
        command += ["--rows", str(rows), "--tokens", str(tokens), "--budget", str(budget)]
        jaxzero = str(Path(sys.executable).parent / "jaxzero")
        start, cpu = time.perf_counter(), cpu_seconds()
        run = subprocess.run(
            [sys.executable, jaxzero, *command],
            env={**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    print(run.stdout)
    found = _BEST.search(run.stdout)
    assert found is not None, run.stdout
    append_row(
        "plan_command",
        {
            "model": model,
            "cluster": f"{nodes} x {local} {device}",
            "link_gb_per_second": link,
            "rows_per_device": rows,
            "tokens": tokens,
            "budget_seconds": budget,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),
            "best": found[1],
            "printed": run.stdout,
        },
    )


def _config(model: PlannedModel) -> dict[str, object]:
    size = SIZES[model]
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": size.width // size.heads,
        "moe_intermediate_size": size.hidden,
        "num_experts": size.experts,
        "num_experts_per_tok": size.choices,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": size.width,
        "intermediate_size": size.hidden,
        "max_position_embeddings": 4096,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads or size.heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": size.vocabulary,
        **(mixture if size.experts else {}),
    }


if __name__ == "__main__":
    tyro.cli(main)
