"""Jobs that `jaxzero` runs from the command line; each is a function of one frozen dataclass."""

from ._convert import convert as convert
from ._inspect import inspect as inspect
from ._loop import Diverged as Diverged
from ._loop import Interrupted as Interrupted
from ._report import report as report
from ._settings import Convert as Convert
from ._settings import Data as Data
from ._settings import Devices as Devices
from ._settings import Faults as Faults
from ._settings import Inspect as Inspect
from ._settings import Optimization as Optimization
from ._settings import Report as Report
from ._settings import Run as Run
from ._settings import Sharding as Sharding
from ._settings import Train as Train
from ._settings import Wire as Wire
from ._train import Outcome as Outcome
from ._train import train as train
