"""Names of a package whose module is imported on first use, since it needs an extra."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def imported_on_first_use(
    package: str, names: Mapping[str, tuple[str, str]]
) -> Callable[[str], Any]:
    """A `__getattr__` for a package.

    Args:
        package: its `__name__`.
        names: for each name its module in the package, and the extra of pyproject.toml that the
            module needs, which is named if it is not installed.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, extra = names[name]
        try:
            return getattr(importlib.import_module(f".{module}", package), name)
        except ImportError as error:
            missing = error.__cause__ or error  # of a name that this one imports on first use
            if not isinstance(missing, ModuleNotFoundError):
                raise
            raise ImportError(
                f"`{name}` needs the package {missing.name!r}, which is not installed. Install it "
                f'with `pip install -e ".[{extra}]"` in a checkout of jaxzero.'
            ) from missing

    return find
