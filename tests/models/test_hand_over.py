"""A trained decoder in the hands of others: what transformers, vLLM and SGLang read of an export.

What vLLM and SGLang document of a local directory: `config.json` with `model_type`, `architectures`
and the dtype; weights in `model.safetensors`, or in files that `model.safetensors.index.json` maps
names to, named as transformers names them, with `format: pt` in the header; the tokenizer's files;
and `generation_config.json`, from which defaults of sampling and stop tokens are taken.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from jaxzero import interop, models

from . import tiny_models
from .tiny_models import read

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

CARRIED = {
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "added_tokens.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": [4, 9], "do_sample": false}',
}


def source_of(model, folder: Path) -> Path:
    tiny_models.save(model, folder)
    for name, text in CARRIED.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_transformers_writes_the_same_text_from_an_export(made, name: str, tmp_path: Path):
    """Of a model that has changed since it was loaded."""
    import transformers

    source = source_of(made(name).model, tmp_path / "source")
    loaded = interop.load_decoder(source)
    params = jax.tree.map(lambda x: x * (1 + 0.1 * jnp.cos(x)), read(loaded.params))
    export = interop.export_decoder(params, tmp_path / "export", source=source)
    ids = np.random.default_rng(0).integers(0, 37, (2, 6)).astype(np.int32)
    model = transformers.AutoModelForCausalLM.from_pretrained(export).eval()
    want = tiny_models.greedy(model, ids, np.ones_like(ids), 8)
    sampling = models.Sampling.from_json(export, pad_token=0)

    @jax.jit
    def run(params):
        decoder = nnx.merge(loaded.graph, params)
        cache = decoder.make_cache(2, 13)
        return models.generate(decoder.decode, cache, ids, max_new_tokens=8, sampling=sampling)

    got = run(params)
    np.testing.assert_array_equal(got.tokens[:, : want.shape[1]], want)
    before = tiny_models.greedy(made(name).model, ids, np.ones_like(ids), 8)
    assert want.shape != before.shape or (want != before).any(), "nothing has changed"


def test_an_export_is_laid_out_as_servers_document(made, tmp_path: Path):
    import torch

    narrow = tiny_models.make(*tiny_models.DECODERS["llama"]).to(torch.bfloat16)
    source = source_of(narrow, tmp_path / "source")
    loaded = interop.load_decoder(source, scan_layers=True)
    export = interop.export_decoder(read(loaded.params), tmp_path / "export", source=source)

    assert {path.name for path in export.iterdir()} == {
        "config.json",
        "model.safetensors",
        *CARRIED,
    }
    for name in CARRIED:
        assert (export / name).read_bytes() == (source / name).read_bytes(), name
    config = json.loads((export / "config.json").read_text())
    given = json.loads((source / "config.json").read_text())
    assert config == given
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    with safe_open(export / "model.safetensors", "np") as file:
        assert file.metadata()["format"] == "pt"
        assert set(file.keys()) == set(narrow.state_dict())
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
        for name, tensor in narrow.state_dict().items():
            assert tuple(file.get_slice(name).get_shape()) == tuple(tensor.shape), name


def test_an_export_in_several_files_has_the_index_of_transformers(made, tmp_path: Path):
    loaded = interop.open_checkpoint(made("llama").directory)
    export = interop.save_tensors(
        dict(loaded.items()), tmp_path / "export", max_shard_bytes=20_000, source=loaded.path
    )
    index = json.loads((export / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in export.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded.values())
    for name, file in index["weight_map"].items():
        with safe_open(export / file, "np") as held:
            assert name in held.keys()  # noqa: SIM118
    assert index["weight_map"].keys() == loaded.keys()
