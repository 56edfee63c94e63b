"""SimiGrad: the batch size follows the similarity of gradients.

In: gradients of micro-batches, or inner products of two half-batches. Out: an optax transformation,
its state and statistics. Needs nothing of the sharding rooms.
"""

from .batch_rules import Jump as Jump
from .batch_rules import Walk as Walk
from .similarity import CodecNoise as CodecNoise
from .similarity import GradientHalves as GradientHalves
from .similarity import dot as dot
from .state import SimigradState as SimigradState
from .state import simigrad_stats as simigrad_stats
from .transform import simigrad as simigrad
