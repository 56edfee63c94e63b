"""Base classes and registries for your own codecs, hops, batch rules and platforms.

    class MyCodec(extend.BlockCodec): ...                        # jz.PerAxis(node=MyCodec())
    class MyRule(extend.BatchRule): ...                          # jz.simigrad(tx, rule=MyRule())
    class MyHop(extend.GradientHop): ...                         # jz.PerAxis(node=MyHop())
    extend.register_compiler_options("cuda", {...})              # jz.compiler_options("cuda")

Pass an instance of your subclass where the library takes an instance of one of its own subclasses.
The base classes of decoder families and of forms of checkpoints are in `jaxzero.interop`:
`DecoderFamily` and `CheckpointForm`. `docs/howto/extending.md` and
`docs/howto/extending_checkpoints.md` show one of each.
"""

from ._codecs import BlockCodec as BlockCodec
from ._codecs import Codec as Codec
from ._sharding import GradientHop as GradientHop
from ._sharding import WeightHop as WeightHop
from ._sharding import register_compiler_options as register_compiler_options
from ._simigrad import BatchRule as BatchRule
