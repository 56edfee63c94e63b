"""What readers and users rely on: layers, short files, a small public face, what is installed."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {  # what is imported: where it lies
    "jaxzero": ROOT / "jaxzero",
    "jaxzero.data": ROOT / "jaxzero" / "data",
    "jaxzero.distributed": ROOT / "jaxzero" / "distributed",
    "jaxzero.interop": ROOT / "interop",
    "jaxzero.jobs": ROOT / "jaxzero" / "jobs",
    "jaxzero.launch": ROOT / "jaxzero" / "launch",
    "jaxzero.models": ROOT / "jaxzero" / "models",
    "jaxzero.pallas_kernels": ROOT / "pallas_kernels",
}
OUTSIDE = ["interop", "pallas_kernels"]  # beside `jaxzero/`, installed inside it

# A module imports from its own layer and from those above it in this list, never from one below.
LAYERS = [
    {"_blocks", "_context", "_coordination", "_flush", "_similarity", "_warnings"},
    {"pallas_kernels"},
    {
        "_block_codecs",
        "_codecs",
        "_compiler",
        "_config",
        "_exit_codes",
        "_mesh",
        "_paths",
        "_reduce_scatter",
        "_simulate",
    },
    {"_partition", "_traffic"},
    {"_stored_array"},
    {"_modules"},
    {"_tree_plan"},
    {"_pieces"},
    {"_messages", "_sums"},
    {"_collectives"},
    {"_halves", "_hops"},
    {"_reductions"},
    {"_layout_requests", "_views", "_program", "_tracing", "_uses", "_gradients"},
    {"_units", "_regions"},
    {"_schedule", "_slices", "_plan"},
    {"_arrivals"},
    {"_emit", "_emit_loop"},
    {
        "_accumulate",
        "_arguments",
        "_batch_choice",
        "_compiled",
        "_initialize",
        "_placement",
        "_registry",
        "_report",
        "_timeline",
        "_wire_report",
    },
    {"_codec_noise", "_held", "_means", "_wire_state"},
    {"_local", "_optimizer", "_transform", "_calls"},
    {"_padding_check"},
    {"_trees"},
    {"_zero", "_pad_batch"},
    {"_batch_rules"},
    {"_simigrad_arguments"},
    {"_simigrad_state"},
    {"distributed"},
    {"_checkpoint_agreement", "_checkpoint_files", "_checkpoint_integrity", "_checkpoint_layout"},
    {"_checkpoint_choice", "_checkpoint_description", "_checkpoint_save"},
    {"_checkpoint", "_simigrad", "_deepspeed_keys", "_loss_scale", "data", "models"},
    {"_deepspeed_optimizer"},
    {"_deepspeed_config", "interop"},
    {"jobs", "launch"},
    {"cli"},
]
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}

# The one other seam: JAX's coordination service has no public client.
COORDINATION = {f"jax._src.{name}" for name in ("clusters", "distributed", "xla_bridge")}
# The seam: what jaxprs look like inside is known to these alone.
SEAM = {f"jaxzero.{name}" for name in ("_context", "_layout_requests", "_program", "_tracing")}
JAXPR_FIELDS = {"constvars", "eqns", "invars", "jaxpr", "outvars"}

SOURCES = {
    f"{package}.{path.stem}": path
    for package, folder in FOLDERS.items()
    for path in sorted(folder.glob("*.py"))
}
each_source = pytest.mark.parametrize("module", SOURCES)


def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _imports(node: ast.AST, package: str) -> Iterator[str]:
    """The absolute name of everything imported under `node`, but for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = importlib.util.resolve_name("." * child.level + (child.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in child.names)
        elif not _is_type_checking(child):
            yield from _imports(child, package)


def _package(module: str) -> str:
    return module.rpartition(".")[0]


def _unit(name: str) -> str | None:
    """The part of jaxzero that `name` is in: a module, or a package with all it holds."""
    head, _, rest = name.partition(".")
    unit = rest.partition(".")[0]
    return unit if head == "jaxzero" and unit != "__init__" else None


@each_source
def test_imports_point_to_layers_above(module):
    unit = _unit(module)
    if unit is None:
        return  # the public face may import anything
    assert unit in RANK, f"{unit} has no place in LAYERS: which layer is it in?"
    for name in _imports(_tree(module), _package(module)):
        assert name != "jaxzero", f"{module} imports the public face: name the module it needs."
        other = _unit(name)
        if other is not None:
            assert other in RANK, f"{module} imports {name}, which has no place in LAYERS."
            assert RANK[other] <= RANK[unit], f"{module} imports {name}, from a layer below."


def test_no_import_cycles():
    graph = {
        module: {
            found
            for name in _imports(_tree(module), _package(module))
            for found in (name, _package(name))  # `from ._x import y` names y, or a module
            if found in SOURCES and found != module
        }
        for module in SOURCES
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@each_source
def test_only_the_seam_knows_jaxprs(module):
    if module in {"jaxzero._processes.coordination", *SEAM}:
        return
    tree = _tree(module)
    names = {name for name in _imports(tree, _package(module)) if _is_inside_jax(name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if node.attr in JAXPR_FIELDS or _is_inside_jax(name) or name == "jax.make_jaxpr":
                names.add(f"{name} (line {node.lineno})")
    if module == "jaxzero._processes.coordination":
        names -= COORDINATION
    assert not names, f"{module}: this belongs in the seam ({sorted(SEAM)}): {sorted(names)}"


def _is_inside_jax(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "jax" and not {"_src", "core", "extend", "interpreters"}.isdisjoint(
        parts[1:2]
    )


@each_source
def test_torch_is_imported_inside_functions_of_interop_only(module):
    tree = _tree(module)
    everywhere = {name.partition(".")[0] for name in _imports(tree, _package(module))}
    if _unit(module) != "interop":
        assert not everywhere & {"torch", "transformers"}
    top = ast.Module([node for node in tree.body if not _is_function(node)], [])
    assert not {name.partition(".")[0] for name in _imports(top, _package(module))} & {
        "torch",
        "transformers",
    }


def _is_function(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        (
            "import jaxzero",
            "torch transformers flax safetensors tokenizers tyro matplotlib grain tensorboardX",
        ),
        ("import jaxzero.interop, jaxzero.models, jaxzero.cli", "torch transformers wandb"),
        ("import jaxzero.cli", "flax grain safetensors tokenizers matplotlib tensorboardX"),
    ],
)
def test_importing_loads_no_optional_package(statement, unwanted, tmp_path):
    code = f"{statement}, sys; print(*sorted(sys.modules.keys() & set({unwanted.split()})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@each_source
def test_files_and_functions_are_short(module):
    lines = len(SOURCES[module].read_text().splitlines())
    assert lines <= 400, f"{SOURCES[module]} has {lines} lines: it holds more than one idea."
    if _unit(module) == "pallas_kernels":
        return  # a kernel reads best in one piece
    for node in ast.walk(_tree(module)):
        if _is_function(node):
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


@each_source
def test_modules_are_private_and_documented(module):
    name = module.rpartition(".")[2]
    assert name.startswith("_") or module == "jaxzero.cli", "Only packages are public."
    assert ast.get_docstring(_tree(module)), "What problem does it solve?"


def test_the_public_face_is_small_and_explicit():
    names = []
    for node in _tree("jaxzero.__init__").body[1:]:
        assert isinstance(node, ast.ImportFrom), f"`{ast.unparse(node)}`: only re-exports here."
        for alias in node.names:
            assert alias.asname == alias.name, f"Write `{alias.name} as {alias.name}`."
            names.append(alias.name)
    # 21 for ZeRO and 4 for SimiGrad, which needs none of the others.
    assert len(names) <= 26, f"{len(names)} public names: the API is too big."


def test_every_folder_is_packaged():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    places = {name: ROOT / folder for name, folder in settings["package-dir"].items()}
    assert settings["packages"] == sorted(FOLDERS)
    assert places == FOLDERS
    tops = [ROOT / "jaxzero", *(ROOT / name for name in OUTSIDE)]  # links are not walked into
    found = {init.parent for top in tops for init in top.rglob("__init__.py")}
    assert {path for path in found if not path.is_symlink()} >= set(FOLDERS.values())
    assert {path.resolve() for path in found} == set(FOLDERS.values())


@pytest.mark.parametrize("package", FOLDERS)
def test_what_is_installed_is_what_is_here(package):
    """In a checkout it is the same files; for a wheel it finds a module that was left out."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed."
    (installed,) = map(Path, list(spec.submodule_search_locations)[:1])
    for pattern in ("*.py", "py.typed"):
        here = sorted(path.name for path in FOLDERS[package].glob(pattern))
        assert sorted(path.name for path in installed.glob(pattern)) == here
    if package == "jaxzero":
        assert (installed / "py.typed").exists()


@pytest.mark.parametrize("name", OUTSIDE)
def test_links_resolve(name):
    link = ROOT / "jaxzero" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name), "The link must be relative, to survive a move."
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_package_imported_by_its_folder_name_is_refused(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=f"part of jaxzero.*'{name}'.*from jaxzero import {name}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
