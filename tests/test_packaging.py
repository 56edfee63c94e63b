"""What users rely on: a small public face, light imports, and that all of it is installed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import jaxzero

from . import typed_program

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ["interop", "pallas_kernels"]  # beside `jaxzero/`, installed inside it through links
in_a_checkout = pytest.mark.skipif(
    not (ROOT / OUTSIDE[0]).exists(), reason="the sdist has these folders where the links are"
)


def _packages() -> dict[str, Path]:
    """Each package's name and folder."""
    found, folders = {}, [("jaxzero", ROOT / "jaxzero")]
    while folders:
        name, folder = folders.pop()
        found[name] = folder
        inside = (x for x in folder.iterdir() if x.is_dir() and any(x.glob("*.py")))
        folders += [(f"{name}.{path.name}", path) for path in inside]
    return found


PACKAGES = _packages()


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import jaxzero", "jax optax orbax tensorstore tyro rich flax torch"),
        (
            "import jaxzero; jaxzero.Zero, jaxzero.zeropp, jaxzero.make_mesh",
            "orbax tensorstore flax tyro jaxzero._planner jaxzero._reshard jaxzero._deepspeed",
        ),
        ("import jaxzero.interop, jaxzero.models, jaxzero.cli", "torch transformers wandb"),
        (
            "import jaxzero.cli",
            "flax grain safetensors tokenizers matplotlib tensorboardX orbax tensorstore "
            "jaxzero._zero jaxzero._execute jaxzero._planner",
        ),
    ],
)
def test_importing_loads_no_slow_or_optional_package(statement, unwanted, tmp_path):
    code = f"{statement}, sys" if ";" not in statement else f"{statement}; import sys"
    code += f"; print(*sorted(sys.modules.keys() & set({unwanted.split()})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def _public_names() -> dict[str, str]:
    """The public names of `jaxzero`, and the module of each."""
    names = {}
    for node in ast.walk(ast.parse((ROOT / "jaxzero" / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level and node.module != "_first_use":
            for alias in node.names:
                assert alias.asname == alias.name, f"Write `{alias.name} as {alias.name}`."
                names[alias.name] = node.module
    return names


def test_the_public_face_is_small_and_explicit():
    names = _public_names()
    # 8 codecs and what places them, 6 presets and their parts, `Zero`, SimiGrad's 4, the 4 of
    # local steps, the 3 of the planner and `compile_for`, the schedule of freezing, `reshard` with
    # its report, which is to be read before anything is sent, a warning to be filtered by name, and
    # what models need that no framework has: a loss without the logits of all tokens, attention and
    # a constraint for split tokens, leaves that stay split and the exchange of tokens with them.
    assert len(names) <= 49, f"{len(names)} public names: the API is too big."
    # What type checkers and the documentation read is what is imported on first use.
    for name, module in names.items():
        home = importlib.import_module(f"jaxzero.{module}")
        assert getattr(jaxzero, name) is getattr(home, name)
    assert names.keys() <= set(dir(jaxzero))
    with pytest.raises(AttributeError, match="'jaxzero' has no attribute 'Zer'") as refused:
        _ = jaxzero.Zer  # pyright: ignore[reportAttributeAccessIssue]
    # With these Python asks "Did you mean: 'Zero'?".
    assert (refused.value.name, refused.value.obj) == ("Zer", jaxzero)


@pytest.mark.slow
@pytest.mark.standard_promotion  # optax computes `decay**count` from two types
def test_a_typed_program_runs_and_has_every_public_name(tmp_path):
    text = (ROOT / "tests" / "typed_program.py").read_text()
    assert sorted(name for name in _public_names() if f"jz.{name}" not in text) == []
    assert len({str(config) for config in typed_program.configs()}) == len(typed_program.configs())
    *losses, restored = typed_program.train(tmp_path)
    assert losses[1] < losses[0] and restored < losses[0]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_what_is_installed_is_what_is_here(package):
    """In a checkout it is the same files; for a wheel it finds a module that was left out."""
    assert (PACKAGES[package] / "__init__.py").exists(), f"{package} is no package."
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed."
    (installed,) = map(Path, list(spec.submodule_search_locations)[:1])
    for pattern in ("*.py", "py.typed"):
        here = sorted(path.name for path in PACKAGES[package].glob(pattern))
        assert sorted(path.name for path in installed.glob(pattern)) == here
    if package == "jaxzero":
        assert (installed / "py.typed").exists()


@in_a_checkout
@pytest.mark.parametrize("name", OUTSIDE)
def test_links_resolve(name):
    link = ROOT / "jaxzero" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name), "The link must be relative, to survive a move."
    assert link.resolve() == ROOT / name


@in_a_checkout
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_package_imported_by_its_folder_name_is_refused(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=f"part of jaxzero.*'{name}'.*from jaxzero import {name}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
