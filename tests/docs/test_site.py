"""The built site: every page in the navigation, and nothing fetched from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_SOURCES = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_NOT_FETCHED = {"canonical", "next", "prev"}  # of links in the head


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_every_page_is_in_the_navigation():
    listed = list(_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    files = [x.relative_to(DOCS) for kind in ("md", "ipynb") for x in DOCS.rglob(f"*.{kind}")]
    pages = [x.with_suffix(".md").as_posix() for x in files if not x.parts[0].startswith("_")]
    assert sorted(listed) == sorted(pages)


@pytest.mark.ci
def test_reading_asks_nothing_of_other_hosts(site):
    found = []
    for page in site.rglob("*.html"):
        parser = _Fetches()
        parser.feed(page.read_text())
        found += [(page.relative_to(site).as_posix(), url) for url in parser.urls]
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        urls = [
            *re.findall(r"url\(\s*[\"']?([^\"')]+)", text),
            *re.findall(r"@import\s+(\S+)", text),
        ]
        found += [(sheet.relative_to(site).as_posix(), url) for url in urls]
    assert [(page, url) for page, url in found if re.match(r"[\"']?(https?:)?//", url)] == []


@pytest.mark.ci
def test_a_reader_can_search_for_a_public_name(site):
    index = (site / "search" / "search_index.json").read_text()
    assert "CommSchedule" in index and "value_and_grad" in index
    assert '"location":"source/' not in index  # sources would drown the pages


class _Fetches(HTMLParser):
    """What a browser fetches when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and _NOT_FETCHED & set((values.get("rel") or "").split()):
            return
        if url := values.get(_SOURCES.get(tag, "")):
            self.urls.append(url)
        if tag == "pre" and "mermaid" in (values.get("class") or ""):
            self.urls.append("//unpkg.com/mermaid")  # which the theme would fetch


def _pages(nav: Any):
    """The files in a navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(entry)
