"""Models of transformers that several modules of tests compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from . import tiny_models


class Made(NamedTuple):
    model: Any  # of transformers
    directory: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory):
    """Models of transformers and the directories they were saved in, by name, each made once."""
    found: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in found:
            model = tiny_models.make(*(tiny_models.DECODERS | tiny_models.MORE_DECODERS)[name])
            found[name] = Made(model, tiny_models.save(model, tmp_path_factory.mktemp("made")))
        return found[name]

    return get
