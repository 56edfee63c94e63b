"""Load the training job that a command line names: a Python function that returns its parts."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_job(name: str, said: str) -> tuple[Any, Callable[[], Any], Any, Any]:
    """Call the function `MODULE:NAME` of a user, which returns the parts of a training job.

    Args:
        name: the function, as `MODULE:NAME`.
        said: the words of the command line that name it, such as "`--function train:job`", for
            errors.

    Returns:
        `(loss_fn, init_fn, batch, tx)`; `tx` is None if the function returns no optimizer.

    Raises:
        ValueError: there is no such function, or its result is not such a tuple.
    """
    job = _function(name, said)()
    if not isinstance(job, tuple) or len(job) not in (3, 4):
        raise ValueError(
            f"{said} must return a tuple `(loss_fn, init_fn, batch)`; it returned "
            f"{type(job).__name__}{f' of {len(job)}' if isinstance(job, tuple) else ''}. A fourth "
            "entry may be an optax optimizer."
        )
    return job if len(job) == 4 else (*job, None)


def _function(name: str, said: str) -> Callable[[], Any]:
    """Import and return the function `MODULE:NAME`; the module may be in the working directory."""
    module, function = name.split(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        job = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"{said}: importing {module} failed: {error}.") from None
        raise ValueError(f"{said}: {error}. Name a module that Python finds.") from None
    if not callable(job):
        raise ValueError(
            f"{said}: the module {module} has no function {function}. It must return "
            "`(loss_fn, init_fn, batch)`."
        )
    return job
