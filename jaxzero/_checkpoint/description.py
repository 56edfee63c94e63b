"""Describe a checkpoint in `jaxzero.json`, for users and for `jaxzero inspect`."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax

from .._zero import Zero
from .stored_leaves import Named

_PACKAGES = ("jaxzero", "jax", "orbax-checkpoint")


def describe(step: int, named: Mapping[str, Named], zero: Zero) -> dict[str, Any]:
    """Return versions, mesh, configuration and leaves of a checkpoint, as JSON values."""
    return {
        "step": step,
        "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in _PACKAGES},
        "processes": jax.process_count(),
        "mesh": dict(zero.mesh.shape),
        "stage": zero.config.stage,
        "config": str(zero.config),
        "leaves": {
            name: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            for name, (leaf, _) in named.items()
        },
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a source folder, not installed
        return None
