"""Run checkpoints in transformers on PyTorch, to compare models of `jaxzero.models` with them.

torch and transformers are optional (`pip install "jaxzero[torch]"`), and are imported only when a
function of this module is called.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxzero._first_use import extra_for
from jaxzero.interop._compare import Comparison, compare
from jaxzero.interop._rules import Rule
from jaxzero.models import DecoderConfig, ViTConfig, read_config

from .families import ENCODERS, decoder_family_of, encoder_family_of
from .load import LoadedDecoder, LoadedEncoder, load_decoder, load_encoder

# Modules of a ViT as transformers 5 calls them in memory; in files they keep these names.
_RENAMED = {
    "encoder.layer.": "layers.",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "}.output.dense": "}.mlp.fc2",
}
# Rows and tokens that are compared. With as many tokens as heads, shapes would not tell the layouts
# `[rows, heads, tokens, size]` and `[rows, tokens, heads, size]` apart.
_ROWS, _LENGTH = 3, 13


def embed_with_transformers(
    directory: Path | str, ids: np.ndarray, mask: np.ndarray, *, batch_size: int = 32
) -> np.ndarray:
    """Compute mean-pooled, normalized embeddings with `transformers.AutoModel`, float32 on the CPU.

    This shares no code with `jaxzero.models`, so it can verify an exported checkpoint.

    Args:
        directory: a Hugging Face directory of a text encoder, e.g. one that `export_encoder` wrote.
        ids: token ids, `[texts, tokens]`.
        mask: True for tokens, False for padding, same shape.
        batch_size: texts per forward pass.

    Returns:
        float32 array `[texts, hidden]` of unit rows.

    Raises:
        ImportError: torch or transformers is not installed.
    """
    torch, transformers = _imported()
    with _without_progress_bar(transformers):
        model = transformers.AutoModel.from_pretrained(
            directory, local_files_only=True, dtype=torch.float32
        ).eval()
    vectors = []
    with torch.inference_mode():
        for start in range(0, len(ids), batch_size):
            rows = slice(start, start + batch_size)
            batch_ids = torch.from_numpy(np.asarray(ids[rows], np.int64))
            batch_mask = torch.from_numpy(np.asarray(mask[rows], np.int64))
            hidden = model(input_ids=batch_ids, attention_mask=batch_mask).last_hidden_state
            weights = batch_mask[:, :, None].float()
            mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
            vectors.append(torch.nn.functional.normalize(mean, dim=-1).numpy())
    return np.concatenate(vectors)


def compare_with_transformers(directory: Path | str, *, submodules: bool = False) -> Comparison:
    """Compare the outputs of `jaxzero.models` for a checkpoint with those of transformers.

    Both read the weights into float32, whatever their dtype in the file, and compute on the CPU
    with random inputs: three rows of 13 tokens without padding, or three images. So the memory
    must hold the model twice.

    Args:
        directory: a Hugging Face directory that `load_decoder` or `load_encoder` reads.
        submodules: compare the outputs of the layers too.

    Raises:
        ImportError: torch or transformers is not installed.
        ValueError: the directory is no such checkpoint.
    """
    torch, transformers = _imported()
    loaded, rules = _load(directory)
    config = loaded.config
    # Layers are in a list, not scanned, so that the output of each can be recorded.
    model = nnx.merge(
        loaded.graph, jax.tree.map(lambda tensor: jnp.asarray(tensor.read()), loaded.params)
    )
    random, output = np.random.default_rng(0), "logits"
    if isinstance(config, ViTConfig):
        kind = "AutoModelForImageClassification" if config.num_labels else "AutoModel"
        output = "logits" if config.num_labels else "last_hidden_state"
        images = random.normal(size=(_ROWS, config.num_channels, *config.image_size))
        inputs, torch_inputs = (images,), {"pixel_values": images}
    else:
        length = min(_LENGTH, config.max_length)
        ids = random.integers(config.vocabulary_size, size=(_ROWS, length))
        # No padding tokens: RoBERTa gives them no position, whatever the mask says.
        padding = read_config(directory)[0].get("pad_token_id")
        ids = np.where(ids == padding, (ids + 1) % config.vocabulary_size, ids)
        mask = np.ones(ids.shape, bool)
        inputs, torch_inputs = (ids, mask), {"input_ids": ids, "attention_mask": mask}
        kind = "AutoModelForCausalLM"
        if not isinstance(config, DecoderConfig):
            kind, output = "AutoModel", "last_hidden_state"
    with _without_progress_bar(transformers):
        reference = getattr(transformers, kind).from_pretrained(
            directory, local_files_only=True, dtype=torch.float32
        )
    return compare(
        model,
        reference,
        inputs,
        torch_inputs=torch_inputs,
        output=output,
        submodules=rules if submodules else False,
    )


def _load(directory: Path | str) -> tuple[LoadedDecoder | LoadedEncoder, Any]:
    """Load a checkpoint in float32, with its layers in a list.

    Returns:
        The loaded model, and the rules between its parameters and transformers' names.
    """
    options: dict[str, Any] = {
        "dtype": "float32",
        "compute_dtype": "float32",
        "scan_layers": False,
        "remat": "none",
    }
    if read_config(directory)[0].get("model_type") in ENCODERS:
        loaded = load_encoder(directory, **options)
        rules = encoder_family_of(directory).rules(loaded.config)
        if isinstance(loaded.config, ViTConfig):
            rules += tuple(Rule(x.ours, tuple(map(_renamed, x.theirs)), *x.steps) for x in rules)
        return loaded, rules
    loaded = load_decoder(directory, **options)
    return loaded, decoder_family_of(directory).rules(loaded.config)


def _renamed(name: str) -> str:
    return functools.reduce(lambda name, old: name.replace(old, _RENAMED[old]), _RENAMED, name)


def _imported() -> tuple[Any, Any]:
    with extra_for("Comparing with PyTorch needs", "torch"):
        import torch
        import transformers
    return torch, transformers


@contextlib.contextmanager
def _without_progress_bar(transformers: Any) -> Iterator[None]:
    # The progress bar of transformers would overwrite that of the caller.
    was_on = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers.utils.logging.enable_progress_bar()
