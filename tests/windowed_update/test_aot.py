"""What updates by windows are compiled to for sixteen H200s, on a machine without one."""

import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxzero as jz
from benchmarks.compiled._h200 import h200_mesh
from benchmarks.compiled._host_copies import host_copies, host_to_host
from jaxzero._hlo import Rates, timeline
from jaxzero._hlo.host_memory import compile_with_host_memory, on_abstract_mesh
from jaxzero._windowed_update.update import WINDOW_BYTES

pytestmark = pytest.mark.standard_promotion

LAYERS, WIDTH, HIDDEN, DEVICES = 24, 4096, 11008, 16
LAYER = {
    **dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH)),
    **{"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)},
}
STACKED = {name: (LAYERS, *shape) for name, shape in LAYER.items()}
UNROLLED = {f"layer_{i}": LAYER for i in range(4)}
UNEVEN = {"table": (8009, DEVICES * WIDTH)}  # a prime number of rows: the last windows overlap
FEW = {"embedding": (32000, WIDTH)}  # two windows
ADAM = optax.adamw(1e-3)
EVERYTHING = dict(weights=True, optimizer=True, gradients=True)


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")
    return h200_mesh(2, DEVICES // 2)


def init(shapes):
    return jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))


def compiled_update(mesh, shapes, tx, **offload):
    """The compiled update, and the bytes of one device's shard of the parameters."""
    zero = jz.Zero(mesh, jz.ZeroConfig(offload=jz.Offload(**offload)))
    params = zero.abstract(functools.partial(init, shapes))
    state = zero.init_optimizer(tx, params)
    in_host = jz.Zero(mesh, jz.ZeroConfig(offload=jz.Offload(weights=True)))
    grads = (in_host if offload.get("gradients") else jz.Zero(mesh)).abstract(
        functools.partial(init, shapes)
    )

    def step(params, state, grads):
        return zero.apply_gradients(tx, grads, state, params)

    arguments = on_abstract_mesh((params, state, grads))
    options = jz.compiler_options("cuda", offload=True)
    step = jax.jit(step, donate_argnums=(0, 1))
    compiled = compile_with_host_memory(step, arguments, mesh, options=options)
    return compiled, sum(x.size for x in jax.tree.leaves(params)) * 4 // DEVICES


@pytest.mark.parametrize("shapes", [FEW, UNROLLED], ids=["few", "unrolled"])
def test_a_late_write_copies_nothing_within_host_memory(mesh, shapes):
    compiled, shard_bytes = compiled_update(mesh, shapes, ADAM, weights=True, optimizer=True)
    memory = compiled.memory_analysis()
    assert memory.host_alias_size_in_bytes == 3 * shard_bytes
    assert memory.host_temp_size_in_bytes == 0
    assert host_to_host(compiled.as_text()) == []


@pytest.mark.parametrize("shapes", [STACKED, UNROLLED], ids=["stacked", "unrolled"])
@pytest.mark.parametrize("clips", [False, True])
def test_two_windows_are_on_the_device(mesh, shapes, clips):
    tx = optax.chain(optax.clip_by_global_norm(1.0), ADAM) if clips else ADAM
    compiled, shard_bytes = compiled_update(mesh, shapes, tx, **EVERYTHING)
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes == 4 * shard_bytes
    assert memory.host_alias_size_in_bytes == 3 * shard_bytes  # updated in their place
    assert memory.host_temp_size_in_bytes == 0
    assert host_to_host(compiled.as_text()) == []
    # The current window, the next, and what is written of the current one.
    assert memory.temp_size_in_bytes < 3 * WINDOW_BYTES
    copies = host_copies(compiled.as_text())
    read, written = (
        sum(getattr(x, way) * x.trips for x in copies) for way in ("from_host", "to_host")
    )
    assert written == 3 * shard_bytes
    # The norm is a pass over the gradients. What it reads last may stay for the update.
    least = (5 * shard_bytes - WINDOW_BYTES) if clips else 4 * shard_bytes
    assert least <= read <= (5 if clips else 4) * shard_bytes


def test_parameters_in_device_memory_are_updated_in_their_place(mesh):
    compiled, shard_bytes = compiled_update(mesh, STACKED, ADAM, optimizer=True)
    memory = compiled.memory_analysis()
    assert memory.host_alias_size_in_bytes == 2 * shard_bytes
    assert memory.alias_size_in_bytes >= shard_bytes
    assert memory.host_temp_size_in_bytes == 0
    assert host_to_host(compiled.as_text()) == []
    assert memory.temp_size_in_bytes < 3 * WINDOW_BYTES


@pytest.mark.parametrize("in_host", [EVERYTHING, dict(weights=True, optimizer=True)], ids=len)
def test_copies_run_in_both_directions_at_all_times(mesh, in_host):
    """Predicted from the program: the time of the copies in the direction that has more of them.

    Each leaf's first read and last write have nothing beside them: two windows of some dozens.
    """
    compiled, shard_bytes = compiled_update(mesh, STACKED, ADAM, **in_host)
    line = timeline(compiled.as_text(), rates := Rates(num_local=8))
    assert line.host_bytes_in == (3 + ("gradients" in in_host)) * shard_bytes
    assert line.host_bytes_out == 3 * shard_bytes
    assert line.seconds <= 1.1 * line.host_bytes_in / rates.host, line


@pytest.mark.parametrize("shapes", [{"gate": STACKED["gate"]}, UNEVEN], ids=["even", "uneven"])
def test_the_addresses_of_windows_are_right(mesh, shapes):
    """In a loop they are annotated by the compiler, or else computed at run time."""
    text = compiled_update(mesh, shapes, ADAM, **EVERYTHING)[0].as_text()
    in_loops = [x for x in host_copies(text) if x.in_loop]
    assert len(in_loops) == 4 + 3
    for copy in in_loops:
        size = copy.from_host + copy.to_host
        # The window after the current one is read, and the current one is written. The last of
        # uneven windows, which is read in a loop but not written there, begins earlier.
        first = size if copy.from_host else 0
        for address in map(json.loads, copy.addresses):
            assert jax.__version_info__ >= (0, 12)  # that of JAX 0.10.2 gets them wrong
            linear = address["linear"]
            assert (int(linear["byte_offset"]), int(linear["byte_stride"])) == (first, size)
            assert copy.to_host or shapes is not UNEVEN
    if jax.__version_info__ >= (0, 12) and shapes is not UNEVEN:
        assert all(x.addresses for x in in_loops)  # so the copy engines do them
