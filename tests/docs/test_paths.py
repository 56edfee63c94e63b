"""Every path of the repository that README and the pages name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FOLDERS = "jaxzero|interop|pallas_kernels|tests|benchmarks|examples|docs|\\.ci"
_FILES = "py|md|jsonl|png|svg|ipynb|sh|yaml|txtpb|txt"
_PATH = re.compile(rf"(?<![\w/.-])((?:{_FOLDERS})/[\w./-]*\.(?:{_FILES}))\b")
_FOLDER = re.compile(rf"`((?:{_FOLDERS})/[\w./-]*/)`")
_LINK = re.compile(r"(?<=\])\(([^()\s]+)\)")
_TEST = re.compile(r"`((?:[\w/]+/)?test_\w+\.py)?(?:::(\w+))?`")


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_the_paths_that_a_page_names_exist(page):
    text = page.read_text()
    named = {match[1] for match in [*_PATH.finditer(text), *_FOLDER.finditer(text)]}
    assert sorted(path for path in named if not _exists(ROOT / path)) == []


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_the_files_that_a_page_links_to_exist(page):
    targets = {match[1].split("#")[0] for match in _LINK.finditer(_prose(page))}
    local = {x for x in targets if x and ":" not in x and x != "..."}
    assert sorted(x for x in local if not _exists(page.parent / x)) == []


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_the_tests_that_a_page_names_exist(page):
    """`test_x.py::test_y`, and `::test_z` of the file named before it."""
    file, missing = None, []
    for match in _TEST.finditer(page.read_text()):
        name, function = match[1], match[2]
        if name:
            found = [x for x in (ROOT / "tests").rglob(Path(name).name) if x.match(name)]
            file = found[0] if found else None
            missing += [] if found else [name]
        if function and file and f"def {function}(" not in file.read_text():
            missing.append(f"{file.name}::{function}")
    assert missing == []


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def _prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```[^\n]*$", "", page.read_text(), flags=re.M | re.S)


def _exists(path: Path) -> bool:
    """Whether a file, or the notebook of a page, is there.

    The sdist has `interop/` and `pallas_kernels/` inside `jaxzero/` only.
    """
    inside = ROOT / "jaxzero" / path.resolve().relative_to(ROOT)
    notebook = path.with_suffix(".ipynb")
    return path.exists() or inside.exists() or (path.suffix == ".md" and notebook.exists())
