"""Change one operator or number at a time, and list the changes that no test notices.

    python -m tests.mutants jaxzero/_reshard tests/reshard --num 20

Works on a copy of the sources. Each mutant runs the given tests until one fails. Some survivors
compute the same, or differ only in cost; for any other a test is missing.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
_COMPARISONS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot}
_COMPARISONS = {**_COMPARISONS, **{b: a for a, b in _COMPARISONS.items()}, ast.In: ast.NotIn}
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}


def mutated(node: ast.AST) -> str | None:
    """The text of a node with another meaning; None: there is no rule for it."""
    node = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=[operator, *_]) if type(operator) in _COMPARISONS:
            node.ops[0] = _COMPARISONS[type(operator)]()
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            node.op = _OPERATORS[type(operator)]()
        case ast.BoolOp(op=operator):
            node.op = ast.And() if isinstance(operator, ast.Or) else ast.Or()
        case ast.UnaryOp(op=ast.Not()):
            node = node.operand
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int(number)):
            return str(number + 1)
        case ast.IfExp():
            node.body, node.orelse = node.orelse, node.body
        case _:
            return None
    return f"({ast.unparse(node)})"


def mutants(text: str) -> Iterator[tuple[int, str, str]]:
    """The line, what is changed, and the new text of each mutant; messages are left alone."""
    tree = ast.parse(text)
    messages = (x for x in ast.walk(tree) if isinstance(x, ast.Raise | ast.JoinedStr))
    left_alone = {id(x) for message in messages for x in ast.walk(message)}
    lines = text.encode().splitlines(keepends=True)
    for node in ast.walk(tree):
        if id(node) in left_alone or (new := mutated(node)) is None:
            continue
        assert isinstance(node, ast.expr) and node.end_col_offset is not None
        if node.lineno == node.end_lineno:
            i, start, end = node.lineno - 1, node.col_offset, node.end_col_offset
            line = lines[i][:start] + new.encode() + lines[i][end:]
            change = f"{lines[i][start:end].decode()} -> {new}"
            yield node.lineno, change, b"".join([*lines[:i], line, *lines[i + 1 :]]).decode()


def main(
    package: tyro.conf.Positional[str],
    tests: tyro.conf.Positional[tuple[str, ...]],
    num: int = 20,
    seed: int = 0,
    every: int = 1,
) -> None:
    """Run tests on mutants of a package, and print each survivor and their number.

    Args:
        package: folder or file of the code to change, from the root.
        tests: files and folders of tests, quick ones first.
        num: number of mutants, drawn at random.
        seed: of the draw.
        every: run the first case of each file of tests, and every nth after it.
    """
    folder = ROOT / package
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    candidates = [(file, *mutant) for file in files for mutant in mutants(file.read_text())]
    drawn = random.Random(seed).sample(candidates, min(num, len(candidates)))
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "site", "*.egg-info")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-xq", f"--every={every}", *tests]
        run = functools.partial(subprocess.run, command, cwd=tree, env=environment)
        began = time.monotonic()
        run(check=True)  # without a change, they pass
        seconds = 60 + 5 * (time.monotonic() - began)  # a mutant may loop forever
        survivors = 0
        for file, line, change, text in drawn:
            path = tree / file.relative_to(ROOT)
            path.write_text(text)
            with contextlib.suppress(subprocess.TimeoutExpired):
                if run(capture_output=True, timeout=seconds).returncode == 0:
                    survivors += 1
                    print(f"{file.relative_to(ROOT)}:{line}  {change}", flush=True)
            path.write_text(file.read_text())
    print(f"{survivors} of {len(drawn)} mutants survived")


if __name__ == "__main__":
    tyro.cli(main)
