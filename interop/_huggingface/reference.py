"""Compute reference embeddings with Hugging Face transformers on PyTorch.

Both are optional (`pip install -e ".[torch]"` in a checkout) and are imported only when called.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def embed_with_transformers(
    directory: Path | str, ids: np.ndarray, mask: np.ndarray, *, batch_size: int = 32
) -> np.ndarray:
    """Compute mean-pooled, normalized embeddings with `transformers.AutoModel`, float32 on the CPU.

    It shares no code with `jaxzero.models`, so it can verify an exported checkpoint.

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
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ImportError(
            "Comparing with PyTorch needs torch and transformers, which are optional. Install them "
            'with `pip install -e ".[torch]"` in a checkout of jaxzero.'
        ) from error

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
