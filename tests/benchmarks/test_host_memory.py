"""Host memory in programs that are compiled for sixteen H200s, on a machine without one."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compiled._h200 import h200_mesh
from benchmarks.compiled._host_copies import host_copies, host_to_host, slice_strides
from jaxzero._hlo.host_memory import HOST, compile_with_host_memory, host_bytes, on_abstract_mesh

Space = jax.memory.Space
LAYERS, WIDTH, DEVICES = 6, 256, 16
_STACK = LAYERS * WIDTH * WIDTH * 4  # bytes of all layers
_SPLIT, _ROWS = P(None, ("node", "local")), P(("node", "local"))


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")
    return h200_mesh(2, DEVICES // 2)


def _struct(mesh, shape, spec=_SPLIT, kind=HOST):
    sharding = NamedSharding(mesh, spec)
    return on_abstract_mesh(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding), kind)


def _stack(mesh, spec=_SPLIT, kind=HOST):
    return _struct(mesh, (LAYERS, WIDTH, WIDTH), spec, kind)


def _jit(function, mesh, in_specs, out_specs, **options):
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(mapped, **options)


def _forward(mesh, layer_of):
    """A scan over layers in host memory, of which turn `i` reads `layer_of(stack, i)`."""

    def local(stack, x):
        def turn(x, i):
            return jnp.tanh(x @ jax.device_put(layer_of(stack, i), Space.Device)), None

        return lax.scan(turn, x, jnp.arange(LAYERS))[0]

    return _jit(local, mesh, (P(), _ROWS), _ROWS)


def _chosen(stack, i):
    return lax.dynamic_index_in_dim(stack, i, 0, keepdims=False)


def test_layers_are_read_from_host_memory(mesh):
    arguments = (_stack(mesh, P()), _struct(mesh, (512, WIDTH), _ROWS, None))
    assert host_bytes(arguments) == _STACK
    compiled = compile_with_host_memory(_forward(mesh, _chosen), arguments, mesh)
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes == _STACK
    assert memory.argument_size_in_bytes == 512 // DEVICES * WIDTH * 4
    (copy,) = host_copies(compiled.as_text())
    assert (copy.from_host, copy.to_host, copy.trips) == (_STACK // LAYERS, 0, LAYERS)


def test_the_stride_of_a_scan_in_reverse_is_annotated(mesh):
    """Wrongly on JAX 0.10.2, where a program must take its index from an array instead."""

    def scanned(stack, x):
        def turn(x, layer):
            return jnp.tanh(x @ jax.device_put(layer, Space.Device)), None

        return lax.scan(turn, x, stack, reverse=True)[0]

    def in_reverse(stack, i):
        return _chosen(stack, LAYERS - 1 - i)

    arguments = (_stack(mesh, P()), _struct(mesh, (512, WIDTH), _ROWS, None))
    functions = (_jit(scanned, mesh, (P(), _ROWS), _ROWS), _forward(mesh, in_reverse))
    texts = [compile_with_host_memory(x, arguments, mesh).as_text() for x in functions]
    (annotated,), (computed,) = (slice_strides(text).values() for text in texts)
    sign = 1 if jax.__version_info__ < (0, 11) else -1
    assert annotated == sign * _STACK // LAYERS
    assert computed is None


def _update(grads, state):
    """Adds a layer's gradients to its state in host memory, layer by layer."""

    def turn(i, state):
        old = jax.device_put(_chosen(state, i), Space.Device)
        new = jax.device_put(old + _chosen(grads, i), Space.Host)
        return lax.dynamic_update_index_in_dim(state, new, i, 0)

    return lax.fori_loop(0, LAYERS, turn, state)


def test_donated_state_is_updated_where_it_is(mesh):
    """And not in the place of the gradients, which have its shape but are in device memory."""
    update = _jit(_update, mesh, (_SPLIT, _SPLIT), _SPLIT, donate_argnums=(0, 1))
    arguments = (_stack(mesh, kind="device"), _stack(mesh))
    compiled = compile_with_host_memory(update, arguments, mesh)
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes == _STACK // DEVICES
    assert memory.host_output_size_in_bytes == _STACK // DEVICES
    assert memory.host_alias_size_in_bytes == _STACK // DEVICES
    assert memory.alias_size_in_bytes == 0
    assert host_to_host(compiled.as_text()) == []


def test_state_that_is_not_donated_is_copied_within_host_memory(mesh):
    update = _jit(_update, mesh, (_SPLIT, _SPLIT), _SPLIT)
    arguments = (_stack(mesh, kind="device"), _stack(mesh))
    text = compile_with_host_memory(update, arguments, mesh).as_text()
    assert [x.from_host for x in host_to_host(text)] == [_STACK // DEVICES]


def test_what_is_not_in_host_memory_in_the_end_is_refused(mesh):
    arguments = (_stack(mesh), _stack(mesh, kind=None))
    unused = _jit(lambda stack, x: x, mesh, (_SPLIT, _SPLIT), _SPLIT)
    shard = _STACK // DEVICES
    with pytest.raises(ValueError, match=f"the arguments have {shard} bytes .* program has 0"):
        compile_with_host_memory(unused, arguments, mesh)
    sliced = _jit(lambda stack: stack[:1], mesh, (_SPLIT,), _SPLIT)
    layer = shard // LAYERS
    with pytest.raises(ValueError, match=f"the results have {layer} bytes .* program has 0"):
        compile_with_host_memory(sliced, arguments[:1], mesh)


def test_a_sharding_on_devices_drops_host_memory(mesh):
    """Which is why there is `on_abstract_mesh`; where it no longer does, that can go."""
    assert NamedSharding(mesh, _SPLIT, memory_kind=HOST).memory_kind is None


def test_structs_are_moved_to_the_abstract_mesh():
    mesh = jax.make_mesh((8,), ("all",))
    host = NamedSharding(mesh, P("all"), memory_kind=HOST)
    one = jax.ShapeDtypeStruct((16, 3), jnp.bfloat16, sharding=host)
    two = one.update(sharding=NamedSharding(mesh, P("all")))
    tree = on_abstract_mesh({"a": one, "b": [two, two]}, {"a": None, "b": [None, HOST]})
    structs = jax.tree.leaves(tree)
    assert [x.sharding.memory_kind for x in structs] == [HOST, two.sharding.memory_kind, HOST]
    assert all(x.sharding.mesh == mesh.abstract_mesh for x in structs)
    assert all(
        (x.shape, x.dtype, x.sharding.spec) == ((16, 3), jnp.bfloat16, P("all")) for x in structs
    )
    assert host_bytes(tree) == 2 * (16 // 8) * 3 * 2
    with pytest.raises(
        ValueError, match=r"`tree\['a'\]` in host memory must be on an abstract mesh"
    ):
        host_bytes({"a": one})
    with pytest.raises(ValueError, match=r"`tree\['a'\]` must have a `NamedSharding`; got None"):
        on_abstract_mesh({"a": jax.ShapeDtypeStruct((2,), jnp.float32)})
