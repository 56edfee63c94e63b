"""A BERT checkpoint small enough for tests, written without torch and without `jaxzero.interop`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

LAYERS, HIDDEN, INTERMEDIATE, HEADS, LENGTH, VOCABULARY = 2, 16, 40, 4, 24, 60

CONFIG = {
    "architectures": ["BertModel"],
    "hidden_act": "gelu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": LENGTH,
    "model_type": "bert",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "vocab_size": VOCABULARY,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the file, by the names and in the orientation of PyTorch."""
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, HIDDEN),
        "embeddings.position_embeddings.weight": (LENGTH, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm.weight": (HIDDEN,),
        "embeddings.LayerNorm.bias": (HIDDEN,),
        "pooler.dense.weight": (HIDDEN, HIDDEN),
        "pooler.dense.bias": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}."
        linear = {
            "attention.self.query": (HIDDEN, HIDDEN),
            "attention.self.key": (HIDDEN, HIDDEN),
            "attention.self.value": (HIDDEN, HIDDEN),
            "attention.output.dense": (HIDDEN, HIDDEN),
            "intermediate.dense": (INTERMEDIATE, HIDDEN),
            "output.dense": (HIDDEN, INTERMEDIATE),
        }
        for name, shape in linear.items():
            found[f"{prefix}{name}.weight"] = shape
            found[f"{prefix}{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            found[f"{prefix}{name}.weight"] = found[f"{prefix}{name}.bias"] = (HIDDEN,)
    return found


def tensors(dtype: np.typing.DTypeLike = np.float32) -> dict[str, np.ndarray]:
    """Random tensors, large enough for every part of the model to matter."""
    rng = np.random.default_rng(0)
    made = {name: (0.3 * rng.normal(size=shape)).astype(dtype) for name, shape in shapes().items()}
    for name in made:
        if name.endswith("LayerNorm.weight"):
            made[name] = made[name] + np.ones((), dtype)
    return made | {"embeddings.position_ids": np.arange(LENGTH, dtype=np.int64)[None]}


def write(directory: Path, held: dict[str, np.ndarray] | None = None, **config: object) -> Path:
    """Write a checkpoint with a tokenizer; `config` changes entries of its `config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors() if held is None else held, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    pooling = directory / "1_Pooling"
    pooling.mkdir(exist_ok=True)
    (pooling / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    _tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def _tokenizer() -> Tokenizer:
    """Letters, and pairs of a few: any text has tokens, and few of them are unknown."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = special + letters + [f"##{letter}" for letter in letters] + ["return", "=", "(", ")"]
    assert len(words) <= VOCABULARY
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    # As in published checkpoints, the file asks for a length that the job must override.
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding(length=128)
    return tokenizer
