"""The notebooks in `docs/tutorials` were executed as they stand, and can be executed again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
NAMES = (
    "first_sharded_step",
    "finetune_hugging_face",
    "zeropp_on_a_slow_network",
    "long_rows",
    "simigrad_on_digits",
)
# One and three minutes: run by `make test-exhaustive`.
LONGEST = ("simigrad_on_digits", "zeropp_on_a_slow_network")
NEEDS = {
    "finetune_hugging_face": ("torch", "transformers", "flax"),
    "simigrad_on_digits": ("sklearn",),
}
# In a process of its own: a notebook's kernel does not inherit warnings that are errors. It does
# inherit the options with which tests compile in less time.
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=600).execute()
"""
# A home folder, a folder of this machine, or one of a virtual environment.
ABSOLUTE = re.compile(r"(?<![\w.:/~-])/(?:home|root|work|tmp|usr|opt|var|mnt|Users|data)/\w")


def _read(name: str) -> dict[str, Any]:
    return json.loads((TUTORIALS / f"{name}.ipynb").read_text("utf-8"))


def _texts(value: Any) -> list[str]:
    """Every string in a notebook, pictures aside."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [x for key, held in value.items() if key != "image/png" for x in _texts(held)]
    return [x for held in value for x in _texts(held)] if isinstance(value, list) else []


def test_every_notebook_is_tested():
    assert {path.stem for path in TUTORIALS.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_was_executed(name):
    notebook = _read(name)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(x["output_type"] in ("stream", "execute_result", "display_data") for x in outputs)
    assert not [x["text"] for x in outputs if x.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(len(x.get("data", {}).get("image/png", "")) <= 200_000 for x in outputs)
    found = [text for text in _texts(notebook) if ABSOLUTE.search(text)]
    assert not found, found
    assert (TUTORIALS / f"{name}.ipynb").stat().st_size <= 600_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in LONGEST else pytest.mark.ci)
        for name in NAMES
    ],
)
def test_it_runs(name, tmp_path):
    for package in ("nbclient", "nbformat", "ipykernel", "matplotlib", *NEEDS.get(name, ())):
        pytest.importorskip(package)
    environment = {key: x for key, x in os.environ.items() if key != "MPLBACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(TUTORIALS / f"{name}.ipynb")],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=tmp_path,
        env={**environment, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-5000:]
