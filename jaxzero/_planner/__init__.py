"""Choose how to train a model on a cluster, without the cluster.

In: a loss, shapes, and a `Cluster`. Out: `Plans`. Candidate plans are enumerated, and bounds of
their memory and time are computed. Some are compiled for the absent devices, and all are ranked.
Nothing is run.
"""

from .bounder import Bounder as Bounder
from .bounds import Bounds as Bounds
from .bounds import Work as Work
from .candidates import Candidate as Candidate
from .candidates import enumerate_candidates as enumerate_candidates
from .cluster import Cluster as Cluster
from .cluster import Device as Device
from .compile_for import compile_for as compile_for
from .compiles import Compiled as Compiled
from .compiles import Compiler as Compiler
from .job import Job as Job
from .ranking import ranked as ranked
from .search import Search as Search
from .target import absent_mesh as absent_mesh
from .tune import tune as tune
