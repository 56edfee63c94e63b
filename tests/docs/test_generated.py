"""What scripts write into the documentation is what they would write today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["docs/_hooks/cli.py", "docs/_pictures/draw.py"])
def test_is_up_to_date(script):
    command = [sys.executable, str(ROOT / script), "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
