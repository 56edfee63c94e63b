"""The structure that readers rely on: rooms, imports that go down only, short files.

A room is a folder with an `__init__.py`. Imports of every kind count, those for type checkers
included.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What a room imports lies on a lower floor: in an earlier line, or left of it in the same line.
FLOORS = [
    [
        "jaxzero._first_use",
        "jaxzero._warnings",
        "jaxzero._regular_file",
        "jaxzero._host_memory",
        "jaxzero._raw",
        "jaxzero._sums",
        "jaxzero._text",
        "jaxzero._xla_of_jax",
        "jaxzero._without_gc",
    ],
    ["jaxzero.pallas_kernels", "jaxzero._processes", "jaxzero._checked_json", "jaxzero._hlo"],
    ["jaxzero._codecs", "jaxzero._mesh", "jaxzero.launch"],
    ["jaxzero._attention", "jaxzero._cross_entropy", "jaxzero._sharding"],
    [
        "jaxzero._collectives",
        "jaxzero._program",
        "jaxzero._simigrad",
        "jaxzero.distributed",
        "jaxzero.models",
    ],
    ["jaxzero._activations"],
    ["jaxzero._plan", "jaxzero._stages", "jaxzero._windowed_update"],
    ["jaxzero._execute", "jaxzero._local_steps", "jaxzero._report"],
    ["jaxzero._verify"],
    ["jaxzero._zero"],
    [
        "jaxzero._checkpoint",
        "jaxzero._deepspeed",
        "jaxzero._planner",
        "jaxzero._reshard",
        "jaxzero.data",
    ],
    ["jaxzero.interop._tensors"],
    ["jaxzero.interop._rules", "jaxzero.interop._torch", "jaxzero.interop._safetensors"],
    ["jaxzero.interop._match", "jaxzero.interop._compare"],
    ["jaxzero.interop._load"],
    ["jaxzero.interop._huggingface"],
    ["jaxzero.interop"],
    ["jaxzero.jobs"],
    ["jaxzero.commands"],
    ["jaxzero.cli", "jaxzero.extend", "jaxzero"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# The seams to what JAX keeps to itself: jaxprs, and the client of its coordination service.
JAXPRS = {
    "jaxzero._hlo.host_memory",
    "jaxzero._mesh.emission",
    "jaxzero._mesh.loop_order",
    "jaxzero._mesh.per_device",
    "jaxzero._verify.roundings",
    *(f"jaxzero._program.{x}" for x in ("flops", "frozen_part", "ir", "layout_requests")),
    *(f"jaxzero._program.{x}" for x in ("multiplications", "same_operations", "trace")),
}
JAXPR_FIELDS = {"constvars", "eqns", "invars", "jaxpr", "outvars"}
COORDINATION = {f"jax._src.{name}" for name in ("clusters", "distributed", "xla_bridge")}


def _sources() -> dict[str, Path]:
    """Each module's name and file; links lead to `interop/` and `pallas_kernels/`."""
    found = {}
    folders = [ROOT / "jaxzero"]
    while folders:
        folder = folders.pop()
        for path in sorted(folder.iterdir()):
            if path.is_dir() and path.name != "__pycache__":
                folders.append(path)
            elif path.suffix == ".py":
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


SOURCES = _sources()
PACKAGES = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
EVERYTHING = [
    *SOURCES.values(),
    *(
        x
        for top in ("tests", "benchmarks", "examples", "docs")
        for x in sorted((ROOT / top).rglob("*.py"))
    ),
]


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


def _package(module: str) -> str:
    return module if module in PACKAGES else module.rpartition(".")[0]


@functools.cache
def _imports(module: str) -> frozenset[str]:
    """The absolute name of everything that a module imports, anywhere in it."""
    return frozenset(_imported_in(_tree(module), _package(module)))


def _imported_in(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _room(name: str) -> str | None:
    """The room that a module, or something in it, belongs to; None: it is not ours."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (room := ".".join(parts[:length])) in FLOOR:
            return room
    return None


def _module(name: str) -> str | None:
    """The module that `name` is, or is in. What a package exports is in the package."""
    package, _, last = name.rpartition(".")
    if package in PACKAGES and last in _exported(package):
        return package
    return name if name in SOURCES else (package if package in SOURCES else None)


def _file(name: str) -> str:
    """The module that `name` is, or is in, whatever a package exports."""
    return name if name in SOURCES else name.rpartition(".")[0]


@functools.cache
def _exported(package: str) -> frozenset[str]:
    """The names that a package's `__init__` imports."""
    nodes = (node for node in ast.walk(_tree(package)) if isinstance(node, ast.ImportFrom))
    return frozenset(alias.asname or alias.name for node in nodes for alias in node.names)


def test_imports_go_to_lower_floors():
    wrong = []
    for module in SOURCES:
        own = _room(module)
        if own is None or (own == "jaxzero" and module != "jaxzero"):
            wrong.append(f"{module} has no floor")
            continue
        for name in _imports(module):
            other = _room(name)
            if other not in (own, None) and FLOOR[other] >= FLOOR[own]:
                wrong.append(f"{module} (floor {FLOOR[own]}) imports {name} ({FLOOR[other]})")
    assert not wrong, f"Move it to a lower floor, or pass it in: {wrong}"


def test_the_architecture_page_has_every_room():
    page = (ROOT / "docs" / "how_it_works" / "architecture.md").read_text()
    named = {
        path.rpartition("/")[2] for path in re.findall(r"^\| `([\w/]+?)(?:/|\.py)` \|", page, re.M)
    }
    assert named >= {room.split(".")[1] for room in FLOOR if "." in room}


def test_other_rooms_are_imported_through_their_face():
    wrong = []
    for module in SOURCES:
        for name in _imports(module):
            found, other = _module(name), _room(name)
            if found is not None and other in PACKAGES and other != _room(module) != found:
                wrong += [f"{module} imports {name}"] * (found != other)
    assert not wrong, f"Export it from the room: {wrong}"


@pytest.mark.parametrize("room", sorted({_room(module) for module in SOURCES} & PACKAGES))
def test_no_import_cycles_in_a_room(room):
    inside = [x for x in SOURCES if _room(x) == room and x != room]
    graph = {x: set(map(_file, _imports(x))) & (set(inside) - {x}) for x in inside}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_a_room_says_what_comes_in_and_what_goes_out():
    for package in PACKAGES:
        docstring = ast.get_docstring(_tree(package))
        assert docstring, f"{package}: what is it for?"
        if package != "jaxzero":
            assert "\nIn: " in docstring and " Out: " in docstring.replace("\n", " "), package


def test_private_rooms_export_only_what_others_use():
    outside = [path for path in EVERYTHING if path.relative_to(ROOT).parts[0] != "jaxzero"]
    elsewhere = {
        x
        for path in outside
        for x in _imported_in(ast.parse(path.read_text()), "of.tests.or.benchmarks")
    }
    for package in filter(_is_private, PACKAGES):
        modules = (module for module in SOURCES if _room(module) != package)
        used = elsewhere.union(*map(_imports, modules))
        unused = sorted(name for name in _exported(package) if f"{package}.{name}" not in used)
        assert not unused, f"{package} exports what nobody imports: {unused}"


def _is_private(package: str) -> bool:
    return package.rpartition(".")[2].startswith("_")


def test_underscores_mark_what_is_private_once():
    for module in SOURCES.keys() - PACKAGES - {"jaxzero.cli", "jaxzero.extend"}:
        room, _, name = module.rpartition(".")
        assert name.startswith("_") != _is_private(room), module
        assert ast.get_docstring(_tree(module)), f"{module}: what problem does it solve?"


def test_only_the_seam_knows_jaxprs():
    for module in SOURCES.keys() - JAXPRS:
        names = {name for name in _imports(module) if _is_inside_jax(name)}
        for node in ast.walk(_tree(module)):
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                if node.attr in JAXPR_FIELDS or _is_inside_jax(name) or name == "jax.make_jaxpr":
                    names.add(f"{name} (line {node.lineno})")
        if module == "jaxzero._processes.coordination":
            names -= COORDINATION
        assert not names, f"{module}: this belongs in the seam ({sorted(JAXPRS)}): {names}"


def _is_inside_jax(name: str) -> bool:
    head, *rest = name.split(".")
    return head == "jax" and not {"_src", "core", "extend", "interpreters"}.isdisjoint(rest[:1])


def test_torch_is_imported_inside_functions_of_interop_only():
    for module in SOURCES:
        tree, package = _tree(module), _package(module)
        if module.startswith("jaxzero.interop"):
            tree = ast.Module([node for node in tree.body if not _is_function(node)], [])
        found = {name.partition(".")[0] for name in _imported_in(tree, package)}
        assert not found & {"torch", "transformers"}, module


def _is_function(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def test_files_are_short():
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in EVERYTHING}
    long = {path: num for path, num in lines.items() if num > 400}
    assert not long, f"These hold more than one idea: {long}"


def test_functions_are_short():
    for module in SOURCES:
        if module.startswith("jaxzero.pallas_kernels"):
            continue  # a kernel reads best in one piece
        for node in filter(_is_function, ast.walk(_tree(module))):
            assert _length(node) <= 60, f"{module}.{node.name} has {_length(node)} lines."


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code: a docstring is as long as what there is to say."""
    documented = ast.get_docstring(function) is not None
    statements = function.body[1:] if documented else function.body
    first, last = function.lineno, function.end_lineno or function.lineno
    if documented:
        docstring = function.body[0]
        last -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return last - first + 1 if statements else 1
