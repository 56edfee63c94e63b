"""Import the modules of a package when a name that they define is first used.

This serves modules that are slow to import, and modules that need packages which only an extra of
pyproject.toml installs.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def imported_on_first_use(
    package: str, names: Mapping[str, tuple[str, str | None]]
) -> Callable[[str], Any]:
    """Make a `__getattr__` for a package that imports a name's module when the name is first read.

    Args:
        package: the `__name__` of the package.
        names: for each name, the module in the package that defines it, and the extra of
            pyproject.toml that the module needs, or None. Where packages of the extra are not
            installed, reading the name raises an `ImportError` that names the extra.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise _no_attribute(package, name)
        module, extra = names[name]
        with contextlib.nullcontext() if extra is None else extra_for(f"`{name}` needs", extra):
            return getattr(importlib.import_module(f".{module}", package), name)

    return find


@contextlib.contextmanager
def extra_for(what: str, extra: str) -> Iterator[None]:
    """Raise an `ImportError` that names an extra if the `with` block imports a missing package.

    Args:
        what: the beginning of the message, such as "`name` needs".
        extra: the name of the extra in pyproject.toml.
    """
    try:
        yield
    except ImportError as error:
        missing = error.__cause__ or error  # the cause, if a name was imported on first use
        if not isinstance(missing, ModuleNotFoundError):
            raise
        raise ImportError(
            f"{what} the package {missing.name!r}, which is not installed. Install it with "
            f'`pip install "jaxzero[{extra}]"`.'
        ) from missing


def exported_on_first_use(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a `__getattr__` and a `__dir__` for a package whose modules are slow to import.

    `__getattr__` imports the module of a name when the name is first read. `__dir__` lists all
    names, also those of modules that are not imported yet.

    Args:
        package: the `__name__` of the package.
        modules: for each module in the package, the names that it exports, separated by spaces.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise _no_attribute(package, name)
        value = getattr(importlib.import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, value)  # Python calls `find` for absent names only
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names


def _no_attribute(package: str, name: str) -> AttributeError:
    # With `name` and `obj` Python suggests the nearest name of `dir(obj)`.
    message = f"module {package!r} has no attribute {name!r}"
    return AttributeError(message, name=name, obj=sys.modules[package])
