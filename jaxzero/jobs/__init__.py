"""Jobs that `jaxzero` runs from the command line; each is a function of one frozen dataclass.

A job and the packages of its extra are imported on first use: `jaxzero launch` needs none of them.

In: settings, made by the command line. Out: run directories, tables and files. Only `cli` and
scripts use it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._ends import Diverged as Diverged
from ._ends import Interrupted as Interrupted
from ._local_settings import Local as Local
from ._plan_settings import Plan as Plan
from ._plan_settings import Verify as Verify
from ._sample_settings import Sample as Sample
from ._settings import Convert as Convert
from ._settings import Data as Data
from ._settings import Devices as Devices
from ._settings import Faults as Faults
from ._settings import Inspect as Inspect
from ._settings import Offloaded as Offloaded
from ._settings import Optimization as Optimization
from ._settings import Report as Report
from ._settings import Run as Run
from ._settings import Sharding as Sharding
from ._settings import Train as Train
from ._settings import Wire as Wire

if TYPE_CHECKING:
    from ._files import convert as convert
    from ._files import inspect as inspect
    from ._plans import plan as plan
    from ._plans import report as report
    from ._plans import verify as verify
    from ._sampling import sample as sample
    from ._training import Outcome as Outcome
    from ._training import train as train

_LATER = {  # name: package, and the extra of pyproject.toml that it needs
    "convert": ("_files", "torch"),
    "inspect": ("_files", "torch"),
    "plan": ("_plans", "train"),
    "report": ("_plans", "train"),
    "verify": ("_plans", "train"),
    "sample": ("_sampling", "torch"),
    "Outcome": ("_training", "train"),
    "train": ("_training", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room, extra = _LATER[name]
    try:
        return getattr(importlib.import_module(f".{room}", __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"`{name}` needs the package {error.name!r}, which is not installed. Install it "
            f'with `pip install -e ".[{extra}]"` in a checkout of jaxzero.'
        ) from error
