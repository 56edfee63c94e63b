"""After training: export a PyTorch checkpoint, and compare its embeddings in PyTorch."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..._processes import process_index
from ...interop import embed_with_transformers, export_encoder
from .._task import PairTokens, make_embed
from .setup import Setup

TOLERANCE = 1e-4  # largest difference of any component of two unit vectors
_NUM_COMPARED = 32  # pairs


def export_and_compare(
    setup: Setup, params: Any, tokens: PairTokens, directory: Path
) -> float | None:
    """Write a PyTorch checkpoint, load it with transformers, and compare embeddings.

    All processes must call it, since it gathers the parameters.

    Returns:
        The largest difference in any component, or None if torch or transformers is not installed,
        and on processes other than the first.

    Raises:
        RuntimeError: the embeddings differ by more than `TOLERANCE`; the export is not deleted.
    """
    full = jax.tree.map(np.asarray, setup.zero.unshard(params))
    export_encoder(full, directory, source=setup.checkpoint)
    if process_index() != 0 or not all(
        importlib.util.find_spec(name) for name in ("torch", "transformers")
    ):
        return None
    sample = tokens.rows(slice(_NUM_COMPARED))
    ours = np.asarray(jax.jit(make_embed(setup.graph))(full, sample))
    flat = (array.reshape(-1, array.shape[-1]) for array in sample)
    theirs = embed_with_transformers(directory, *flat).reshape(ours.shape)
    difference = float(np.abs(ours - theirs).max())
    if not difference <= TOLERANCE:  # also when it is NaN
        raise RuntimeError(
            f"The PyTorch checkpoint in {str(directory)!r} does not compute what was trained: "
            f"embeddings differ by {difference:.1e}, more than {TOLERANCE:.0e}. Do not use it; "
            "this is an error in jaxzero, please report it."
        )
    return difference
