"""Pipeline stages: the program of one micro-batch, cut at its layers, as the program of all ticks.

In: a function on flat lists that returns loss and gradients, and which arrays are stacks of layers.
Out: a function of this stage's layers that runs all micro-batches and sends activations to the next
stage and cotangents to the one before. To what plans gathers it is a program like any other.
"""

from .lists import LayerLists as LayerLists
from .messages import Encoding as Encoding
from .staged import Staged as Staged
