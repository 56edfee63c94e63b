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

README = Path(__file__).parents[2] / "README.md"
DOCS = README.parent / "docs"
PAGES = (
    "start/first_step.md",
    "howto/does_not_fit.md",
    "howto/experts.md",
    "howto/fp8.md",
    "howto/freezing.md",
    "howto/from_deepspeed.md",
    "howto/from_fsdp2.md",
    "howto/from_gspmd.md",
    "howto/is_my_run_right.md",
    "howto/local_steps.md",
    "howto/long_rows.md",
    "howto/lora.md",
    "howto/muon.md",
    "howto/offload.md",
    "howto/planning.md",
    "howto/recommenders.md",
    "howto/resharding.md",
    "howto/verify.md",
    "how_it_works/one_weight.md",
)
SOON = ("start/first_step.md",)  # the others run in CI
NOT_PROGRAMS = ("start/faq.md",)  # every block is an excerpt
BLOCK = re.compile(r"(?:<!-- (?P<comment>.*?) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
ALONE = "run as a process of its own"


def _blocks(page: str) -> list[tuple[str, str]]:
    """Comment and code of each block of Python."""
    found = BLOCK.finditer((DOCS / page).read_text())
    return [(match["comment"] or "", match["code"]) for match in found]


def _run(program: str, folder: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8", **environment},
        cwd=folder,
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
def test_the_page_runs(page, tmp_path):
    program = "\n".join(code for comment, code in _blocks(page) if not comment)
    printed = _run(program, tmp_path)
    shown = re.findall(r"```text\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert not shown or _words("".join(shown)) == _words(printed)


def _scripts(page: str) -> list[str]:
    return [code for comment, code in _blocks(page) if comment == ALONE]


@pytest.mark.ci
@pytest.mark.slow
def test_the_script_of_fsdp2_runs():
    """In one process, as `torchrun` would start it."""
    pytest.importorskip("torch")
    (script,) = _scripts("howto/from_fsdp2.md")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
    _check_learns(_run(script, **group))


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(("number", "needs"), [(0, ("flax",)), (1, ("flax", "transformers"))])
def test_the_first_scripts_run(number, needs, tmp_path):
    for package in needs:
        pytest.importorskip(package)
    _check_learns(_run(_scripts("start/first_step.md")[number], tmp_path))


def test_the_first_scripts_are_short_and_the_readme_has_the_same():
    """A newcomer reads at most 15 lines below the imports, and a line where a stand-in is made."""
    page = _blocks("start/first_step.md")
    scripts = [code for _, code in page if code.startswith("import jax, optax")]
    assert len(scripts) == 3
    assert scripts == re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for script in scripts:
        lines = [line for line in script.splitlines() if line.strip()]
        assert len([x for x in lines if not x.startswith(("import ", "from "))]) <= 16


def _check_learns(printed: str) -> None:
    losses = re.findall(r"loss ([\d.]+)", printed)
    assert float(losses[-1]) < float(losses[0])


def _words(text: str) -> list[str]:
    """Without the widths of columns, and numbers in three digits, to compare what was printed."""
    return [f"{float(x):.3g}" if re.fullmatch(r"\d+\.\d+", x) else x for x in text.split()]
