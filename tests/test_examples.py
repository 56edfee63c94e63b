"""The examples and the README's first program run as they stand, and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _run(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", _run(str(path)))]
    assert losses[-1] < 0.1 * losses[0]


def test_there_are_three():
    assert [path.stem for path in EXAMPLES] == ["equinox_mlp", "flax_linen", "flax_nnx"]


@pytest.mark.slow
def test_readme():
    program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert float(_run("-c", program)) < 0.5
