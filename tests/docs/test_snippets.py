"""The Python in the pages of `docs/start` and `docs/howto` runs as it stands.

The blocks of a page are one program, executed in order in a process of its own. A comment before a
block changes that: `<!-- not run: why -->` (it is only parsed), or
`<!-- run as a process of its own -->` (a script of another library, which is run alone).
"""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "start/first_step.md",
    "howto/fp8.md",
    "howto/freezing.md",
    "howto/from_deepspeed.md",
    "howto/from_fsdp2.md",
    "howto/from_gspmd.md",
    "howto/is_my_run_right.md",
    "howto/local_steps.md",
    "howto/lora.md",
    "howto/offload.md",
    "howto/planning.md",
    "howto/recommenders.md",
    "howto/resharding.md",
    "howto/verify.md",
    "how_it_works/one_weight.md",
)
SOON = ("start/first_step.md", "howto/from_gspmd.md")  # the others run in CI
NOT_PROGRAMS = ("start/faq.md",)  # every block is an excerpt
BLOCK = re.compile(r"(?:<!-- (?P<comment>.*?) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
ALONE = "run as a process of its own"


def _blocks(page: str) -> list[tuple[str, str]]:
    """Comment and code of each block of Python."""
    found = BLOCK.finditer((DOCS / page).read_text())
    return [(match["comment"] or "", match["code"]) for match in found]


def _run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", (*PAGES, *NOT_PROGRAMS))
def test_every_block_parses(page):
    blocks = _blocks(page)
    assert blocks, f"{page} has no Python"
    for comment, code in blocks:
        ast.parse(code)
        assert comment == ALONE or re.fullmatch("(not run: .+)?", comment), comment


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [x if x in SOON else pytest.param(x, marks=pytest.mark.ci) for x in PAGES],
)
def test_the_page_runs(page):
    program = "\n".join(code for comment, code in _blocks(page) if not comment)
    printed = _run(program)
    shown = re.findall(r"```text\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert not shown or _words("".join(shown)) == _words(printed)


@pytest.mark.ci
@pytest.mark.slow
def test_the_script_of_fsdp2_runs():
    """In one process, as `torchrun` would start it."""
    pytest.importorskip("torch")
    (script,) = (code for comment, code in _blocks("howto/from_fsdp2.md") if comment == ALONE)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
    losses = re.findall(r"loss ([\d.]+)", _run(script, **group))
    assert float(losses[-1]) < float(losses[0])


def _words(text: str) -> list[str]:
    """Without the widths of columns, and numbers in three digits, to compare what was printed."""
    return [f"{float(x):.3g}" if re.fullmatch(r"\d+\.\d+", x) else x for x in text.split()]
