"""SimiGrad: adapt the batch size to the similarity of the gradients of two half-batches.

In: gradients of micro-batches, or inner products of two half-batches. Out: an optax transformation,
its state and statistics. It also works without `jz.Zero`.
"""

from .batch_rules import BatchRule as BatchRule
from .batch_rules import JumpRule as JumpRule
from .batch_rules import WalkRule as WalkRule
from .similarity import CodecNoise as CodecNoise
from .similarity import GradientHalves as GradientHalves
from .similarity import dot as dot
from .state import SimigradState as SimigradState
from .state import simigrad_stats as simigrad_stats
from .transform import simigrad as simigrad
