"""Checkpoints: true shapes on disk, any mesh takes them up, mistakes are named."""

import re
import shutil
import threading

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxzero as jz
from jaxzero import cli

pytestmark = pytest.mark.standard_promotion  # optax


def _init():
    key = jax.random.key(0)
    return {
        "odd": jax.random.normal(key, (7, 5)),
        "even": jax.random.normal(key, (16, 8), jnp.bfloat16),
        "scalar": jnp.float32(3),
        "empty": jnp.zeros((0, 3)),
        "none": None,
    }


def _zero(nodes, devices):
    return jz.Zero(jz.make_mesh(nodes, devices=jax.devices()[:devices]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    zero, directory = _zero(2, 6), tmp_path_factory.mktemp("saved")
    params = zero.init(_init)
    tx = zero.optimizer(optax.adafactor(1e-2, min_dim_size_to_factor=4))
    state = {"params": params, "opt_state": zero.init_optimizer(tx, params), "step": jnp.int32(3)}
    with jz.Checkpoints(directory, zero) as checkpoints:
        assert checkpoints.latest_step() is None
        checkpoints.save(3, state, extra={"examples": 96})
        checkpoints.save(3, state)  # a step that is there stays as it is
    return directory, zero, state


@pytest.mark.parametrize(("nodes", "devices"), [(2, 6), (2, 8), (1, 1)])
def test_restore_on_any_mesh(saved, nodes, devices):
    directory, old, state = saved
    zero = _zero(nodes, devices)
    params = zero.abstract(_init)
    tx = zero.optimizer(optax.adafactor(1e-2, min_dim_size_to_factor=4))
    like = {"params": params, "opt_state": zero.init_optimizer(tx, params), "step": jnp.int32(0)}
    with jz.Checkpoints(directory, zero) as checkpoints:
        _, restored, extra = checkpoints.restore(like)
    assert extra == {"examples": 96}
    assert int(restored["step"]) == 3
    for name in ("params", "opt_state"):
        jax.tree.map(
            np.testing.assert_array_equal,
            zero.unshard(restored[name]),
            old.unshard(state[name]),
        )
    shardings = jax.tree.map(lambda x: x.sharding, restored["params"])
    assert shardings == jax.tree.map(lambda x: x.sharding, params)


def test_what_is_read_may_depend_on_what_was_saved_beside_it(tmp_path):
    zero = _zero(2, 8)

    def like(extra):
        if extra["rows"] != 3:
            raise ValueError("no such rows")
        return {"x": jax.ShapeDtypeStruct((extra["rows"], 2), jnp.float32)}

    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, {"x": jnp.asarray(x)}, extra={"rows": 3})
        step, state, extra = checkpoints.restore(like)
        assert (step, extra) == (1, {"rows": 3})
        np.testing.assert_array_equal(state["x"], x)
        checkpoints.save(2, {"x": jnp.asarray(x)}, extra={"rows": 4})
        with pytest.raises(ValueError, match="no such rows"):
            checkpoints.restore(like)


def test_random_keys_and_a_restore_right_after_a_save(tmp_path):
    zero = _zero(2, 8)
    state = {"params": zero.init(_init), "random": {"key": jax.random.key(7)}}
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(state).state
    np.testing.assert_array_equal(
        jax.random.bits(restored["random"]["key"]), jax.random.bits(state["random"]["key"])
    )


def test_only_the_newest_are_kept(tmp_path):
    zero = _zero(2, 8)
    params = zero.init(_init)
    with jz.Checkpoints(tmp_path, zero, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"params": params})
        checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_what_was_just_saved_is_kept(tmp_path):
    """Even where there are newer ones, of a run that was taken up at an earlier step."""
    zero = _zero(1, 1)
    with jz.Checkpoints(tmp_path, zero, keep=2) as checkpoints:
        for step in (20, 40, 30):
            checkpoints.save(step, {"params": zero.init(_init)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["30", "40"]


def test_save_returns_before_the_write_has_ended(tmp_path, monkeypatch):
    """The step that comes next takes the memory of the arrays meanwhile."""

    class Slow:
        def result(self, timeout):
            assert released.wait(timeout)

    async def async_save(*args, **kwargs):
        return [Slow(), *(await begin(*args, **kwargs) or [])]

    begin = ocp.StandardCheckpointHandler.async_save
    monkeypatch.setattr(ocp.StandardCheckpointHandler, "async_save", async_save)
    zero, released = _zero(2, 8), threading.Event()
    state = {"params": zero.init(_init)}
    want = zero.unshard(state["params"])
    late = threading.Timer(30, released.set)  # for a `save` that waits, which then fails here
    late.start()
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, state)
        assert not released.is_set(), "`save` waited for the write"
        assert checkpoints.latest_step() is None
        jax.tree.map(lambda x: x.delete(), state)
        released.set()
        late.cancel()
        checkpoints.close()
        assert checkpoints.latest_step() == 1
        restored = checkpoints.restore({"params": zero.abstract(_init)}).state
    jax.tree.map(np.testing.assert_array_equal, zero.unshard(restored["params"]), want)


def test_inspect_shows_what_a_checkpoint_says_of_itself(saved, tmp_path, capsys, monkeypatch):
    directory, _, _ = saved
    monkeypatch.setenv("COLUMNS", "300")
    for path in (directory, directory / "3"):
        assert cli.main(["inspect", str(path)]) == 0
        said = capsys.readouterr().out
        assert f"step 3, in {directory / '3'}" in said
        assert "processes: 1, mesh: node=2, local=3;" in said and "stage=3" in said
        assert re.search(r"params\.odd +float32\[7,5\]", said)
        assert re.search(r"params\.even +bfloat16\[16,8\]", said)
    shutil.copytree(directory / "3", tmp_path / "3")
    (tmp_path / "3" / "jaxzero.json").write_text("{")
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "jaxzero.json' is damaged" in capsys.readouterr().err


def test_mistakes_are_named(saved, tmp_path):
    directory, zero, state = saved
    with jz.Checkpoints(tmp_path, zero) as empty, pytest.raises(FileNotFoundError, match="none"):
        empty.restore({"params": state["params"]})
    with jz.Checkpoints(directory, zero) as checkpoints:
        with pytest.raises(ValueError, match=r"no leaf `model\.even`. Its first is `opt_state\."):
            checkpoints.restore({"model": state["params"]})
        with pytest.raises(ValueError, match="`opt_state"):
            checkpoints.restore({"params": state["params"], "step": state["step"]})
        more = zero.shard({**{k: np.ones((2, 2), np.float32) for k in ("odd", "even", "new")}})
        with pytest.raises(ValueError, match=r"`params.even` has shape \(16, 8\)|no leaf"):
            checkpoints.restore({**state, "params": more})
        with pytest.raises(FileNotFoundError, match="step 9"):
            checkpoints.restore(state, step=9)
    with pytest.raises(ValueError, match="`keep`"):
        jz.Checkpoints(tmp_path, zero, keep=0)


def test_trees_without_names_are_refused(saved, monkeypatch):
    directory, zero, state = saved
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    with jz.Checkpoints(directory, zero) as checkpoints:
        with pytest.raises(TypeError, match="`step` must be an integer; got dict"):
            checkpoints.save(state, 4)
        for unnamed in (tuple(state.values()), {0: state["params"]}):
            with pytest.raises(TypeError, match="trees by name.*Give each tree a name"):
                checkpoints.save(4, unnamed)
            with pytest.raises(TypeError, match="trees by name.*Give each tree a name"):
                checkpoints.restore(unnamed)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"x.y": np.zeros(3, np.float32), "x": {"y": np.ones(3, np.float32)}}},
        {"a.x": np.zeros(3, np.float32), "a": {"x": np.ones(3, np.float32)}},
    ],
    ids=["in one tree", "in two trees"],
)
def test_two_leaves_of_one_name_are_refused(tmp_path, state):
    """One would take the place of the other on disk."""
    with (
        jz.Checkpoints(tmp_path, _zero(1, 1)) as checkpoints,
        pytest.raises(
            ValueError, match=r"Two leaves of the state are named `a\.x.*Rename that key"
        ),
    ):
        checkpoints.save(1, state)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.int64(12_000_000_000), "`tokens` is int64 and holds 12000000000.*int32.*`extra`"),
        (np.array([1.0, 1e300]), r"`tokens` is float64 and holds 1e\+300.*float32"),
    ],
    ids=["integer", "float"],
)
def test_numbers_that_jax_would_change_are_refused(tmp_path, value, message):
    with jz.Checkpoints(tmp_path, _zero(1, 1)) as checkpoints:
        with pytest.raises(ValueError, match=message):
            checkpoints.save(1, {"tokens": value})
        state = {"tokens": np.int64(12), "loss": np.float64(0.1), "worst": np.array([np.inf])}
        checkpoints.save(2, state)
        restored = checkpoints.restore(state).state
    assert (int(restored["tokens"]), float(restored["worst"][0])) == (12, np.inf)
    assert restored["loss"] == np.float32(0.1)


@pytest.mark.parametrize(("first", "then"), [(True, True), (True, False), (False, True)], ids=str)
def test_arrays_are_restored_into_the_memory_of_like(tmp_path, first, then):
    """A restored leaf has the memory kind of `like`, whether it is padded or not."""

    def zero_of(is_offloaded):
        offload = jz.Offload(weights=True, min_size=4) if is_offloaded else None
        mesh = jz.make_mesh(2, devices=jax.devices()[:4])
        return jz.Zero(mesh, jz.ZeroConfig(offload=offload))

    random = np.random.default_rng(0)
    shapes = {"even": (8, 4), "odd": (3, 5)}
    whole = {name: random.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    with jz.Checkpoints(tmp_path, zero_of(first)) as checkpoints:
        checkpoints.save(1, {"params": zero_of(first).shard(whole)})
    zero = zero_of(then)
    like = {"params": zero.abstract(lambda: jax.tree.map(jnp.asarray, whole))}
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        restored = checkpoints.restore(like).state["params"]
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(restored)}
    assert (kinds == {"pinned_host"}) == then and ("pinned_host" in kinds) == then
    jax.tree.map(np.testing.assert_array_equal, zero.unshard(restored), whole)
