"""Move trees from the shards of `Zero` to any other sharding, and count the bytes beforehand.

In: a tree that a `Zero` laid out, a mesh and `PartitionSpec`s. Out: ordinary arrays, or a report.
`jaxzero` exports `reshard` and `reshard_report`. Benchmarks compile the results of `planned` and
`lowered`. No other package of the library imports this one.
"""

from .reshard import lowered as lowered
from .reshard import planned as planned
from .reshard import reshard as reshard
from .reshard import reshard_report as reshard_report
