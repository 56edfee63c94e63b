"""Pipeline stages: turn a function of one micro-batch into a pipeline of all micro-batches.

In: a function on flat lists of arrays that returns loss and gradients of one micro-batch, and which
of its arrays are stacks of layers. Its program is cut at the layers. Out: a function of one stage's
layers that runs all micro-batches, sends activations to the next stage, and sends cotangents to the
stage before. Gathers are planned for this function as for any other.
"""

from .lists import LayerLists as LayerLists
from .messages import Encoding as Encoding
from .staged import Staged as Staged
