"""Translate a DeepSpeed configuration to a `ZeroConfig`, an optimizer and a loss scale.

In: `ds_config.json`. Out: a `DeepSpeedRun`. Unsupported keys raise an error or are listed in a
warning.
"""

from .loss_scale import DynamicScale as DynamicScale
from .loss_scale import loss_scale_of as loss_scale_of
from .loss_scale import scale_loss as scale_loss
from .run import DeepSpeedRun as DeepSpeedRun
from .run import from_deepspeed as from_deepspeed
