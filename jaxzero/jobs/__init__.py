"""The job of `jaxzero train`: fine-tune a decoder on text, or a text encoder to find code.

The job and the packages of its extra `train` are imported on first use.

In: settings, made by the command line. Out: a run directory and an `Outcome`. `cli`, `commands`
and scripts use it.
"""

from typing import TYPE_CHECKING

from .._first_use import imported_on_first_use
from ._ends import Diverged as Diverged
from ._ends import Interrupted as Interrupted
from ._settings import Data as Data
from ._settings import Devices as Devices
from ._settings import Directory as Directory
from ._settings import Faults as Faults
from ._settings import LocalOptions as LocalOptions
from ._settings import Offloaded as Offloaded
from ._settings import Optimization as Optimization
from ._settings import Run as Run
from ._settings import Sharding as Sharding
from ._settings import Train as Train
from ._settings import Wire as Wire
from ._settings import check_positive as check_positive

if TYPE_CHECKING:
    from ._data import open_tokenizer as open_tokenizer
    from ._devices import choose_devices as choose_devices
    from ._printed import Outcome as Outcome
    from ._setup import describe_devices as describe_devices
    from ._setup import plan_step as plan_step
    from ._setup import set_up as set_up
    from ._train import train as train

__getattr__ = imported_on_first_use(
    __name__,
    {
        "open_tokenizer": ("_data", "train"),
        "choose_devices": ("_devices", None),
        "describe_devices": ("_setup", "train"),
        "plan_step": ("_setup", "train"),
        "set_up": ("_setup", "train"),
        "Outcome": ("_printed", "train"),
        "train": ("_train", "train"),
    },
)
