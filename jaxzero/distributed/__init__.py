"""Run JAX in several processes: start, compare settings, stop together, detect lost processes.

In: addresses, settings and arrays. Out: agreement of all processes, or an error that names the
process that differs. Jobs and scripts use it.

import jaxzero as jz
from jaxzero import distributed

distributed.initialize()  # does nothing if there is only one process
distributed.check_same(settings=settings)
with distributed.StopRequest() as stop, jz.Checkpoints(directory, zero) as checkpoints:
    with distributed.Watchdog() as watchdog:
        for step in range(first, last):
            ...
            watchdog.beat(step)
            if stop.reached():
                checkpoints.save(step, state)
                raise SystemExit(distributed.STOPPED)  # once the checkpoint is written
"""

from .._processes import DIVERGED as DIVERGED
from .._processes import PEER_LOST as PEER_LOST
from .._processes import STOPPED as STOPPED
from ._agreement import ReplicasDiffer as ReplicasDiffer
from ._agreement import check_replicas as check_replicas
from ._agreement import check_same as check_same
from ._initialize import initialize as initialize
from ._stop import StopRequest as StopRequest
from ._watchdog import AgreedEnd as AgreedEnd
from ._watchdog import Watchdog as Watchdog
from ._watchdog import causes as causes
from ._watchdog import leave as leave
from ._watchdog import time_limit as time_limit
