"""Change files of DeepSpeed with torch, without DeepSpeed: what it describes a run with is lost."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


class _Lost:
    """An object of a class of DeepSpeed."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "ZeroStageEnum":
            return int
        return _Lost if module.startswith("deepspeed") else super().find_class(module, name)


def change_optimizer(file: Path, change: Callable[[dict], None]) -> None:
    """Apply `change` to the content of an optimizer state, or of one that was made universal."""
    import torch

    module = types.SimpleNamespace(**vars(pickle) | {"Unpickler": _Unpickler})
    state = torch.load(file, pickle_module=module, weights_only=False)
    held = state.get("optimizer_state_dict", state)
    for each in (state, held):
        each.pop("loss_scaler", None)
        each.pop("param_slice_mappings", None)
    change(state)
    torch.save(state, file)
