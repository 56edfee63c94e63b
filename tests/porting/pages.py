"""What the tests of `examples/porting/` and its pages share."""

from __future__ import annotations

import difflib
import re
from pathlib import Path


def assert_page_shows_diff(page: Path, before: Path, after: Path) -> None:
    """The page's first `diff` block is the unified diff of the two scripts."""
    lines = difflib.unified_diff(
        before.read_text().splitlines(), after.read_text().splitlines(), before.name, after.name
    )
    want = "\n".join(line.rstrip() for line in lines)
    found = re.findall(r"```diff\n(.*?)\n```", page.read_text(), re.DOTALL)
    assert found and found[0] == want, f"{page} should show:\n```diff\n{want}\n```"
