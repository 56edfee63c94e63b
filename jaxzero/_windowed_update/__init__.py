"""Run an optax optimizer on leaves in host memory, one window of a leaf on the device at a time.

In: an optimizer, and gradients, optimizer state and parameters, some of whose leaves lie in host
memory. Out: the new parameters and state, each array in the memory of the array that it replaces.
For leaves in host memory, an optimizer that needs a whole leaf at once (Muon, Shampoo) is refused.
`_zero` is the only user.
"""

from .program import UpdateLayouts as UpdateLayouts
from .update import LayerUpdate as LayerUpdate
from .update import TracedUpdate as TracedUpdate
from .update import layer_updates as layer_updates
from .update import windowed_update as windowed_update
