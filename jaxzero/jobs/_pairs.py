"""Real training pairs from any tree of Python files: (docstring, function body).

Every documented function is a free example of "find the code that does this": its docstring is the
description, its body without the docstring is the code. The name and the signature are left out,
for they would give the answer away. The default tree is the standard library of the Python that
runs the job, so no data has to be downloaded.

The order of the pairs and the split into training and held-out depend on the files alone: files are
visited in sorted order, and a *module* (all functions of one file) is held out as a whole by a
hash of its path. Functions of one file resemble each other, so a split by function would
leak.
"""

import ast
import dataclasses
import os
import sysconfig
import textwrap
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path

_SKIPPED_DIRECTORIES = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "testing", "tests"}
)
_MIN_DESCRIPTION_WORDS = 3
_MIN_CODE_CHARACTERS = 40  # leaves out `pass`, `...`, `return self._name`
_HELD_OUT_SHARE = 8  # one module in so many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A function: its docstring (description) and its body (code)."""

    description: str
    code: str
    module: str  # path relative to the tree, with forward slashes
    line: int  # of the `def`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Training pairs and the pairs of modules that training never sees."""

    train: tuple[Pair, ...]
    held_out: tuple[Pair, ...]


def standard_library() -> Path:
    """The folder of the standard library of the Python that is running."""
    return Path(sysconfig.get_paths()["stdlib"])


def collect_pairs(directory: Path) -> Pairs:
    """Read every Python file under `directory` and split its documented functions by module.

    A description or a body that occurs twice is kept once: a copy among the in-batch negatives
    would be punished as wrong although it is right, and a copy across the split would leak.

    Raises:
        ValueError: `directory` is not a directory, or holds too few documented functions to split.
    """
    if not directory.is_dir():
        raise ValueError(
            f"`data` must be a directory of Python files; {str(directory)!r} is not a directory. "
            "Leave it out to use the standard library."
        )
    train, held_out = [], []
    seen = set()
    for path in _python_files(directory):
        module = path.relative_to(directory).as_posix()
        side = held_out if is_held_out(module) else train
        for pair in pairs_in(_read(path), module):
            keys = {("description", pair.description.lower()), ("code", pair.code)}
            if seen.isdisjoint(keys):
                side.append(pair)
            seen |= keys
    if not train or not held_out:
        raise ValueError(
            f"{str(directory)!r} gives {len(train)} training and {len(held_out)} held-out pairs; "
            "both must be positive. Point `data` to a tree with more modules whose functions have "
            "docstrings."
        )
    return Pairs(train=tuple(train), held_out=tuple(held_out))


def is_held_out(module: str) -> bool:
    """Return True if `module` is held out from training, by a hash of its path."""
    return zlib.crc32(module.encode()) % _HELD_OUT_SHARE == 0  # unlike `hash`, the same every time


def pairs_in(source: str, module: str) -> Iterator[Pair]:
    """Yield a pair for each function of `source` with a docstring and a body worth finding.

    Source that is not valid Python for this interpreter yields nothing: trees of Python files
    contain templates and files for other versions.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    functions = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    for function in sorted(functions, key=lambda node: (node.lineno, node.col_offset)):
        description = " ".join((ast.get_docstring(function) or "").split())
        code = _body_without_docstring(function, lines)
        if len(description.split()) < _MIN_DESCRIPTION_WORDS or len(code) < _MIN_CODE_CHARACTERS:
            continue
        yield Pair(description=description, code=code, module=module, line=function.lineno)


def _body_without_docstring(
    function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> str:
    docstring, *statements = function.body
    if not statements:
        return ""
    first = statements[0]
    # A decorated inner function starts at its first decorator.
    start = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
    if start <= (docstring.end_lineno or start):  # one line holds both: the text would leak
        return ""
    return textwrap.dedent("\n".join(lines[start - 1 : statements[-1].end_lineno])).strip()


def _python_files(directory: Path) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_DIRECTORIES]  # prune
        found += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("test_")
        ]
    return sorted(found, key=lambda path: path.relative_to(directory).as_posix())


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # honours the coding line, as Python itself does
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""
