"""Counts of layers and experts that the files do not have are refused before a model is built."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxzero import interop

from . import tiny_checkpoint

_MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
}


def _refused(load: Any, directory: Path, message: str) -> None:
    started = time.perf_counter()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            load(directory)
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize("count", [2, 9_999, 10**7, 10**12])
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts"])
def test_a_decoder_has_no_more_than_its_tensors(tmp_path: Path, key: str, count: int):
    count += key == "num_local_experts"
    names = [f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight" for e in range(2)]
    save_file(
        {name: np.zeros((8, 8), np.float32) for name in names}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(_MIXTRAL | {key: count}))
    _refused(interop.load_decoder, tmp_path, rf"`{key}` in .*config\.json' .*{count}")


def test_names_that_no_rule_knows_bound_the_layers_too(tmp_path: Path):
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(_MIXTRAL | {"num_hidden_layers": 5_000}))
    _refused(interop.load_decoder, tmp_path, "is 5000, but .* holds 1 tensors")


def test_an_encoder_has_no_more_than_its_tensors(tmp_path: Path):
    content = tiny_checkpoint.CONFIG | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(content))
    held = {name: np.zeros(shape, np.float32) for name, shape in tiny_checkpoint.shapes().items()}
    save_file(held, tmp_path / "model.safetensors")
    message = r"`num_hidden_layers` in .* is 3, but .* holds tensors of 2 layers"
    _refused(interop.load_encoder, tmp_path, message)
    with pytest.raises(ValueError, match=message):
        interop.export_encoder({}, tmp_path / "export", source=tmp_path)
