"""What the site does besides Markdown: sources that pages link to, notebooks, inline pictures.

- A link from a page to a file of the repository outside `docs/` becomes a link to a page with
  that file, so that the same link works on the site and in a checkout. `path.py#name` leads to
  the line that defines `name`; a name that the file does not define is a warning, which a strict
  build makes an error. A linked picture is copied.
- `x.ipynb` becomes the page `x.md`, from the outputs that are stored in it. Nothing is executed.
- An SVG is put into the page itself, where its text takes the colour of the theme. A plot (PNG)
  is a link to itself, to be enlarged on a phone.
"""

from __future__ import annotations

import base64
import html
import json
import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_log = logging.getLogger("mkdocs.hooks.site")
_ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<=\])\((?P<target>[^()\s]+)\)")
_PICTURE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?P<src>[^":]+\.svg)"[^>]*>')
_CELL = re.compile(r'<td(?: style="[^"]*")?>(?P<text>.*?)</td>', re.DOTALL)
_PROSE = 40  # characters from which a cell is a sentence and no figure
_PLOT = re.compile(r'<img alt="[^"]*" src="(?P<src>[^":]+\.png)"[^>]*>')
_COPIED = {".png", ".svg"}
_LEXERS = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".jsonl": "json", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of every notebook, and of every source that a page links to."""
    for file in [x for x in files if x.src_uri.endswith(".ipynb")]:
        for made in _pages_of_notebook(file, config):
            files.append(made)
    sources: dict[str, Path] = {}
    for file in [x for x in files if x.is_documentation_page()]:
        for match in _LINK.finditer(file.content_string):
            if source := _source(match["target"], file.src_uri):
                path, _ = source
                if path.is_dir():
                    sources.update((_uri(x), x) for x in _members(path))
                sources[_uri(path)] = path
    for uri, path in sources.items():
        if path.suffix in _COPIED:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
        else:
            files.append(File.generated(config, uri, content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of `docs/` to the pages that `on_files` made."""
    here = posixpath.dirname(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        target = match["target"]
        source = _source(target, page.file.src_uri)
        if source is None:
            notebook, _, anchor = target.partition("#")
            if notebook.endswith(".ipynb") and ":" not in target and anchor != "file":
                return (
                    "(" + notebook.removesuffix(".ipynb") + ".md" + (anchor and "#" + anchor) + ")"
                )
            return match[0].replace("#file", "")
        path, name = source
        line = _line_of(path, name) if name else None
        if name and line is None:
            _log.warning(
                f"{page.file.src_uri} links to {name!r}, which {path.name} does not define"
            )
        uri = posixpath.relpath(_uri(path), here)
        return f"({uri}#__codelineno-0-{line})" if line else f"({uri})"

    return _outside_of_fences(markdown, lambda text: _LINK.sub(rewritten, text))


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put SVGs into the page, link plots, mark cells of prose; note the lines of a source."""
    if page.file.src_uri.startswith("source/") and page.present_anchor_ids is not None:
        page.present_anchor_ids.update(re.findall(r'id="(__codelineno-[0-9-]+)"', content))
    here = posixpath.dirname(page.file.dest_uri)
    by_destination = {x.dest_uri: x for x in files if x.src_uri.endswith(".svg")}

    def inlined(match: re.Match[str]) -> str:
        file = by_destination.get(posixpath.normpath(posixpath.join(here, match["src"])))
        if file is None:
            return match[0]
        picture = re.sub(r'<style class="alone">.*?</style>', "", file.content_string, flags=re.S)
        return f'<span class="picture" role="img" aria-label="{match["alt"]}">{picture}</span>'

    def marked(match: re.Match[str]) -> str:
        is_prose = len(re.sub("<.*?>", "", match["text"])) >= _PROSE
        return f'<td class="prose"{match[0][3:]}' if is_prose else match[0]

    content = _CELL.sub(marked, content)
    return _PLOT.sub(r'<a href="\g<src>">\g<0></a>', _PICTURE.sub(inlined, content))


# Sources.


def _source(target: str, src_uri: str) -> tuple[Path, str] | None:
    """The file outside `docs/` that a link leads to, and the name in it; None: it leads to none."""
    if ":" in target or target.startswith(("#", "/")):
        return None
    target, _, name = target.partition("#")
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(src_uri), target))
    if path.startswith(("docs/", "..")) or path == "docs":
        return None
    file = _ROOT / path
    return (file, name) if file.exists() else None


def _uri(path: Path) -> str:
    uri = "source/" + path.relative_to(_ROOT).as_posix()
    return uri if path.suffix in _COPIED else uri + ".md"


def _members(folder: Path) -> list[Path]:
    return sorted(x for x in folder.iterdir() if x.suffix in _LEXERS and not x.name.startswith("."))


def _source_page(path: Path) -> str:
    head = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\nhide: [toc, navigation]\n---\n\n"
    head += f"# `{path.relative_to(_ROOT).as_posix()}`\n\n"
    if path.is_dir():
        return head + "".join(f"- [{x.name}]({path.name}/{x.name}.md)\n" for x in _members(path))
    lexer = _LEXERS.get(path.suffix, "text")
    text = path.read_text()
    fence = "`" * (3 + max((len(x) for x in re.findall("`{3,}", text)), default=0))
    return f'{head}{fence} {{ .{lexer} linenums="1" }}\n{text}\n{fence}\n'


def _line_of(path: Path, name: str) -> int | None:
    """The line on which a file defines a function, a class, a method or a constant."""
    defines = re.compile(
        rf"\s*(?:(?:async )?def|class) {re.escape(name)}\b|{re.escape(name)}\b[^=]*="
    )
    note = f"[Note: {name.replace('-', ' ')}]"
    lines = path.read_text().splitlines()
    found = (i for i, line in enumerate(lines, 1) if defines.match(line) or line.startswith(note))
    return next(found, None)


def _outside_of_fences(markdown: str, change) -> str:
    parts = re.split(r"(^ *```.*?^ *```[^\n]*$)", markdown, flags=re.M | re.S)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


# Notebooks.


def _pages_of_notebook(file: File, config: MkDocsConfig) -> list[File]:
    """The page of a notebook, and the pictures in it."""
    notebook = json.loads(file.content_string)
    stem = file.src_uri.removesuffix(".ipynb")
    pictures: list[File] = []

    def add_picture(data: bytes, suffix: str) -> str:
        uri = f"{stem}_{len(pictures)}.{suffix}"
        pictures.append(File.generated(config, uri, content=data))
        return posixpath.basename(uri)

    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(f"````python\n{source}\n````")
            parts += [_output(x, add_picture) for x in cell["outputs"]]
    name = posixpath.basename(file.src_uri)
    parts.append(f"[This page as a notebook: `{name}`]({name}#file){{ .notebook }}")
    text = "\n\n".join(part for part in parts if part)
    return [File.generated(config, stem + ".md", content=text), *pictures]


def _output(output: dict, add_picture) -> str:
    """An output as Markdown."""
    if output["output_type"] == "stream":
        return _text("".join(output["text"]))
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return f"![]({add_picture(''.join(data['image/svg+xml']).encode(), 'svg')})"
    if "image/png" in data:
        return f"![]({add_picture(base64.b64decode(data['image/png']), 'png')})"
    if "text/plain" in data:
        return _text("".join(data["text/plain"]))
    return _text("\n".join(output.get("traceback", [])))


def _text(text: str) -> str:
    """Text that was printed; colours of a terminal are dropped."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()
    return f'<div class="output"><pre>{html.escape(text)}</pre></div>' if text else ""
