"""`reshard` against numpy's slices of the full arrays, to the bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from tests.processes import run

RANDOM = np.random.default_rng(0)
TREE = {
    "matrix": RANDOM.normal(size=(16, 24)).astype(np.float32),
    "narrow": jnp.asarray(RANDOM.normal(size=(3, 8, 40)), jnp.bfloat16),
    "padded": RANDOM.normal(size=(10, 6)).astype(np.float32),
    "vector": np.arange(7, dtype=np.int32),
    "number": np.float32(3),
}
WHOLE = {name: P() for name in TREE}


def check(made: Any, mesh: Mesh, specs: dict[str, P], tree: Any = TREE) -> None:
    """Every shard of every array is the slice that its sharding says, bit for bit."""
    for name, full in tree.items():
        wanted = NamedSharding(mesh, specs[name])
        assert made[name].sharding.is_equivalent_to(wanted, np.ndim(full)), name
        assert made[name].shape == np.shape(full) and made[name].dtype == full.dtype
        for shard in made[name].addressable_shards:
            mine = np.asarray(full)[wanted.devices_indices_map(np.shape(full))[shard.device]]
            assert np.asarray(shard.data).tobytes() == mine.tobytes(), name


def moved(zero: jz.Zero, mesh: Mesh | None = None, **specs: P) -> dict[str, str]:
    """Move the tree, check it, and say how each array went."""
    params = zero.shard(TREE)
    asked = {"specs": WHOLE | specs, "mesh": mesh}
    check(jz.reshard(params, zero, **asked), mesh or zero.mesh, asked["specs"])
    return {leaf.path: leaf.how for leaf in jz.reshard_report(params, zero, **asked).leaves}


def other_mesh(shape: tuple[int, ...], names: tuple[str, ...], order: Any = slice(None)) -> Mesh:
    return Mesh(np.array(jax.devices())[order].reshape(shape), names)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_tensor_parallel_inside_a_node(axis_type):
    zero = jz.Zero(jz.make_mesh(2, axis_type=axis_type))
    with jax.set_mesh(zero.mesh):
        ways = moved(zero, matrix=P("local"), narrow=P(None, "local"))
    assert ways == {
        "matrix": "all-to-all over local, all-gather over node",
        "narrow": "all-to-all over local, all-gather over node",
        "padded": "all-gather over node, all-gather over local",
        "vector": "all-gather over node, all-gather over local",
        "number": "copy",
    }


@pytest.mark.parametrize(
    ("specs", "way"),
    [
        ({"matrix": P(None, "local")}, "all-gather over node"),
        ({"matrix": P("node")}, "all-to-all over node, all-gather over local"),
        ({"matrix": P(None, "node")}, "permute over node+local, all-gather over local"),
        ({"matrix": P("local", "node")}, "all-to-all over local, all-to-all over node"),
        ({"matrix": P(("node", "local"))}, "all-to-all over node+local"),
        ({"matrix": P(None, ("local", "node"))}, "copy"),
        ({"padded": P("node")}, "all-gather of all rows, in 1 windows"),
    ],
)
def test_other_specs_over_the_same_mesh(specs, way):
    (name,) = specs
    assert moved(jz.Zero(jz.make_mesh(2)), **specs)[name] == way


@pytest.mark.parametrize(
    ("mesh", "axis", "ways"),
    [
        (
            lambda: other_mesh((8,), ("model",)),
            "model",
            ("all-to-all over node+local", "permute over node+local"),
        ),
        (
            lambda: other_mesh((4, 2), ("data", "model")),
            ("model", "data"),
            ("all-to-all over node+local", "permute over node+local"),
        ),
        (
            lambda: other_mesh((2, 4), ("x", "y"), [0, 4, 1, 5, 2, 6, 3, 7]),
            ("y", "x"),
            ("all-to-all over node+local", "permute over node+local"),
        ),
        (
            lambda: other_mesh((8,), ("model",), slice(None, None, -1)),
            "model",
            ("all-gather of all rows, in 1 windows",) * 2,
        ),
        (lambda: other_mesh((4,), ("model",), slice(4)), "model", ("jax.device_put",) * 2),
    ],
    ids=["line", "other nodes", "transposed", "reversed", "fewer devices"],
)
def test_other_meshes(mesh, axis, ways):
    found = moved(jz.Zero(jz.make_mesh(2)), mesh(), matrix=P(axis), narrow=P(None, None, axis))
    assert (found["matrix"], found["narrow"]) == ways
    # What is whole on each device is gathered, in whatever order the devices are.
    whole = "all-gather over node, all-gather over local"
    assert found["vector"] == ("jax.device_put" if mesh().size < 8 else whole)


@pytest.mark.parametrize(
    ("config", "nodes", "devices"),
    [
        (jz.hsdp(), 2, 8),  # nodes have the same
        (jz.ddp(), 2, 8),  # all devices have the same
        (jz.zero3(), 3, 6),  # all is padded
        (jz.zero3(), 1, 1),
    ],
)
def test_other_layouts_of_the_source(config, nodes, devices):
    zero = jz.Zero(jz.make_mesh(nodes, devices=jax.devices()[:devices]), config)
    moved(zero, matrix=P(None, "local"), narrow=P(None, None, "local"))
    moved(zero, matrix=P("local"))


def test_simulated_devices_hold_all_on_one():
    zero = jz.Zero(jz.make_mesh(2, simulate=8))
    assert set(moved(zero, matrix=P("local")).values()) == {"copy"}


def test_windows_of_rows_overlap_and_leave_no_gap():
    zero = jz.Zero(jz.make_mesh(2))
    tree = {"x": RANDOM.normal(size=(44, 6)).astype(np.float32)}  # 8 shards of 6 rows, padded
    params, specs = zero.shard(tree), {"x": P("local")}
    options = {"specs": specs, "window_bytes": 8 * 4 * 6 * 4}  # 4 of the 6 rows
    (leaf,) = jz.reshard_report(params, zero, **options).leaves
    assert leaf.how == "all-gather of all rows, in 2 windows"
    check(jz.reshard(params, zero, **options), zero.mesh, specs, tree)


def test_small_windows_give_the_same():
    zero = jz.Zero(jz.make_mesh(2))
    specs = WHOLE | {"matrix": P("local")}
    params = zero.shard(TREE)
    assert jz.reshard_report(params, zero, specs=specs, window_bytes=1).windows == len(TREE)
    check(jz.reshard(params, zero, specs=specs, window_bytes=1), zero.mesh, specs)


def test_floats_are_cast_and_the_source_stays():
    zero = jz.Zero(jz.make_mesh(2))
    params = zero.shard(TREE)
    made = jz.reshard(params, zero, specs=P(), dtype=jnp.bfloat16)
    cast = {
        name: x if x.dtype == np.int32 else np.asarray(x).astype(jnp.bfloat16)
        for name, x in TREE.items()
    }
    check(made, zero.mesh, WHOLE, cast)
    jax.tree.map(lambda x: x.delete(), made)  # copies, also of what was there already
    jax.tree.map(np.testing.assert_array_equal, zero.unshard(params), TREE)


@pytest.mark.parametrize("codec", [jz.Int8(block=32), jz.Int4(block=32)])
def test_a_codec_keeps_its_bound(codec):
    zero = jz.Zero(jz.make_mesh(2), jz.ZeroConfig(min_quantized_size=64))
    full = {"x": TREE["matrix"], "y": TREE["padded"]}
    specs = {"x": P(None, "local"), "y": P()}
    made = jz.reshard(zero.shard(full), zero, specs=specs, codec=codec)
    # 8 shards of 3 columns are rows of 48 numbers each, which are encoded as one message.
    x = np.asarray(full["x"]).reshape(16, 8, 3).transpose(1, 0, 2).reshape(8, 48)
    got = np.asarray(made["x"]).reshape(16, 8, 3).transpose(1, 0, 2).reshape(8, 48)
    assert (np.abs(got - x) <= codec.error_bound(x)).all() and (got != x).any()
    np.testing.assert_array_equal(made["y"], full["y"])  # too small


def test_encoded_and_offloaded_leaves():
    zero = jz.Zero(jz.make_mesh(2), jz.ZeroConfig(min_quantized_size=64))
    frozen = zero.shard({"x": TREE["matrix"]}, codec=jz.Int8(block=32))
    made = jz.reshard(frozen, zero, specs=P("local"))
    np.testing.assert_array_equal(made["x"], zero.unshard(frozen)["x"])
    host = jz.Zero(jz.make_mesh(2), jz.ZeroConfig(offload=jz.Offload(weights=True, min_size=0)))
    params = host.shard({"x": TREE["matrix"]})
    assert params["x"].sharding.memory_kind == "pinned_host"
    made = jz.reshard(params, host, specs=P("local"))
    check(made, host.mesh, {"x": P("local")}, {"x": TREE["matrix"]})
    assert made["x"].sharding.memory_kind != "pinned_host"


def test_parts_of_trees_and_optimizer_state():
    zero = jz.Zero(jz.make_mesh(2))
    params = zero.shard({"a": TREE, "b": None, "key": jax.random.key(0)})
    made = jz.reshard({"only": params["a"]["padded"]}, zero, specs=P())
    np.testing.assert_array_equal(made["only"], TREE["padded"])
    made = jz.reshard(params, zero, specs={"a": P(), "b": None, "key": P()})
    assert made["b"] is None and made["key"].dtype == jax.random.key(0).dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"specs": {"matrix": P()}}, "`specs` must be a tree prefix of `params`"),
        ({"specs": P("model")}, "has no axis 'model', only .'node', 'local'."),
        ({"specs": P("local", "local")}, "names an axis twice"),
        ({"specs": WHOLE | {"vector": P("local")}}, "dim 0 of size 7 does not divide into 4 equal"),
        ({"specs": WHOLE | {"number": P("local")}}, "1 entries for 0 dims"),
        ({"specs": P(), "dtype": jnp.int8}, "`dtype` must be a float type"),
        ({"specs": P(), "window_bytes": 0}, "`window_bytes` must be a positive integer"),
        ({"specs": jax.tree.map(lambda _: None, TREE)}, "tree prefix|`PartitionSpec`s only"),
    ],
)
def test_mistakes_are_named_before_anything_runs(options, message):
    zero = jz.Zero(jz.make_mesh(2))
    with pytest.raises(ValueError, match=message):
        jz.reshard(zero.shard(TREE), zero, **options)


class Unhashable(jz.Int8):
    __hash__ = None  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"zero": "zero"}, "`zero` must be the `jz.Zero` that made `params`; got 'zero'"),
        ({"mesh": 8}, "`mesh` must be a `jax.sharding.Mesh` or None; got 8"),
        ({"codec": "int8"}, "`codec` of `reshard` must be a codec such as `jz.Int8..`.*got 'int8'"),
        ({"codec": Unhashable()}, "Make the class a frozen dataclass with hashable fields"),
    ],
)
def test_arguments_of_another_type_are_named(changed, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    zero = jz.Zero(jz.make_mesh(2))
    given = {"zero": zero, "specs": P()} | changed
    with pytest.raises(ValueError, match=message):
        jz.reshard(zero.shard({"x": np.ones(8, np.float32)}), **given)


def test_what_is_not_of_this_zero_is_refused():
    zero = jz.Zero(jz.make_mesh(2))
    with pytest.raises(ValueError, match="is on 1 device, and must be split over the 8"):
        jz.reshard({"x": jax.device_put(jnp.ones((8, 8)), jax.devices()[0])}, zero, specs=P())
    params = zero.shard(TREE)
    with pytest.raises(ValueError, match="`params` must hold an array"):
        jz.reshard({"x": None}, zero, specs=P())
    with pytest.raises(ValueError, match="Call `reshard` outside of `jax.jit`"):
        jax.jit(lambda x: jz.reshard(x, zero, specs=P()))(params)


@pytest.mark.parametrize("spec", [P(), P("node"), P(None, "tensor")])
@pytest.mark.parametrize("window_bytes", [1, 2**20])
def test_further_axes_whose_cuts_do_not_fit(spec, window_bytes):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("node", "local", "tensor"))
    zero = jz.Zero(mesh)
    tree = {"x": TREE["padded"]}
    params = zero.shard(tree, specs={"x": P(None, "tensor")})
    made = jz.reshard(params, zero, specs=spec, window_bytes=window_bytes)
    check(made, mesh, {"x": spec}, tree)


def test_stacks_that_stages_pad():
    """Dim 0 of 4 layers on 3 stages, and for `padded` the dim of ZeRO: to specs that split both."""
    devices = jax.devices()[:6]
    zero = jz.Zero(jz.make_mesh(3, devices=devices), jz.pipeline(1))
    draw = RANDOM.normal(size=(4, 5, 6)).astype(np.float32)
    tree = {"layers": {"even": draw, "padded": draw[..., :3], "scale": draw[:, 0, 0]}}
    flat = tree["layers"]
    params = zero.shard(tree)
    mesh = Mesh(np.array(devices[:6]).reshape(2, 3), ("x", "y"))
    for spec in (P(), P("x")):
        made = jz.reshard(params, zero, specs=spec, mesh=mesh)["layers"]
        check(made, mesh, dict.fromkeys(flat, spec), flat)
    made = jz.reshard(params, zero, specs=P(), mesh=other_mesh((4,), ("x",), slice(4)))["layers"]
    for name, x in flat.items():
        np.testing.assert_array_equal(made[name], x)
    report = jz.reshard_report(params, zero, specs=P("x"), mesh=mesh)
    assert report.into_node >= report.least_into_node > 0


@pytest.mark.ci
def test_two_processes():
    for ended in run("tests.reshard.two_processes", 2):
        assert ended.said() == {"same": True}
