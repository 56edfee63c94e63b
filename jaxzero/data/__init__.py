"""Global batches for several hosts, each of which reads its own rows. Needs `pip install grain`.

In: a Grain dataset and a `Zero`. Out: sharded global batches, and a position to resume from
(`Batches`). `PackedRows` is a source for Grain that packs documents of different lengths into rows
of one length. Jobs and scripts use it.

    import grain
    from jaxzero.data import Batches

    examples = grain.MapDataset.source(records).shuffle(seed=0).repeat()
    batches = Batches(examples, zero, batch_size=256)
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
        checkpoints.save(number, state, extra={"data": batches.get_state()})
"""

from ._batches import Batches as Batches
from ._packing import PackedRows as PackedRows
