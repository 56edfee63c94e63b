"""The training job: set up, step, log, save, resume and export.

In: the `Train` settings. Out: a run directory and an `Outcome`. Needs the extra `train`.
"""

from .loss import make_loss as make_loss
from .node_bytes import plan_step as plan_step
from .setup import describe_devices as describe_devices
from .setup import set_up as set_up
from .train import Outcome as Outcome
from .train import train as train
