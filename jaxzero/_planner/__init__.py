"""Choose how to train a model on a cluster: enumerate, bound, compile for absent devices, rank.

In: a loss, shapes, and a `Cluster`. Out: `Plans`. Nothing is run.
"""

from .cluster import Cluster as Cluster
from .cluster import Device as Device
from .target import absent_mesh as absent_mesh
from .tune import tune as tune
