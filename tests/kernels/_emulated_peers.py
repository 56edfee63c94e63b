"""The one-kernel collectives on a CPU, with `all_to_all` in place of stores to peers.

Interpret mode has no semaphores and no memory of other devices. What it can run is the rest of
the kernels: all of their arithmetic and indexing. So each is run twice: once to send, with the
inbox of each peer kept as an outbox here; then outboxes are exchanged; and once to receive.
A single device sends to itself, in one run.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxzero.pallas_kernels import _all_gather, _memory, _reduce_scatter
from jaxzero.pallas_kernels._protocol import exchange
from jaxzero.pallas_kernels._remote import store_tile


def replace_stores(monkeypatch):
    for module in (_all_gather, _reduce_scatter):
        monkeypatch.setattr(module, "run", run)


def run(block, source, seed, result, axis, tiling):
    """As `_remote.run`. Of several devices, places must not be used twice."""
    devices = lax.axis_size(axis)
    assert devices == 1 or tiling.slots == tiling.most_tiles
    seeds = [seed.reshape(1)] if tiling.format.rounding == "stochastic" else []
    inbox = tiling.inbox(devices)

    class Silent(block):
        def signal(self, semaphore, peer):
            pass

        def wait(self, semaphore, count, peer=0):
            pass

    class Alone(Silent):
        def put(self, peer, slot, codes_b, scale_r):
            place = (peer, self.block, slot)
            store_tile(self.codes.at[place], codes_b)
            store_tile(self.scales.at[place], scale_r)

    class Sender(Alone):
        def read(self, peer, tile, slot, so_far):
            pass

        def store(self, tile, total):
            pass

    class Receiver(Silent):
        def write(self, tile, slot):
            pass

    def call(kind, out, order, *inputs):
        def kernel(*refs):
            party = kind(axis, tiling, order(refs), (None, None, None))
            exchange(
                party, num_tiles=party.num_tiles, most_tiles=tiling.most_tiles, slots=tiling.slots
            )

        options = _memory.interpret_options()
        assert "interpret" in options
        grid = {"grid": (tiling.blocks,), "grid_names": ("block",)}
        return plgpu.kernel(kernel, out_type=out, **grid, **options)(*inputs)

    if devices == 1:
        return call(Alone, (result, *inbox), lambda refs: refs, source, *seeds)[0]
    sent = call(Sender, (result, *inbox), lambda refs: refs, source, *seeds)[1:]
    arrived = [_swapped(x, axis) for x in sent]
    # A kernel's last reference is its result.
    return call(
        Receiver,
        result,
        lambda refs: (*refs[:-3], refs[-1], *refs[-3:-1]),
        source,
        *seeds,
        *arrived,
    )


def _swapped(x, axis):
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    sent = lax.bitcast_convert_type(x, bits)
    return lax.bitcast_convert_type(lax.all_to_all(sent, axis, 0, 0, tiled=True), x.dtype)
