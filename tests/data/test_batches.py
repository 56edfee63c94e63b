"""Batches of a Grain dataset: their order, their layout, who reads what, and going on elsewhere."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

import jaxzero as jz
from jaxzero.data import Batches
from tests.processes import ended, started

from .read_by_processes import EPOCH, EPOCHS, ROWS, Source, dataset

IN_MEMORY = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
MESHES = {
    "auto": lambda: jz.make_mesh(nodes=2),
    "explicit": lambda: jz.make_mesh(nodes=2, axis_type=AxisType.Explicit),
    "simulated": lambda: jz.make_mesh(nodes=2, simulate=8),
    "third axis": lambda: Mesh(
        np.array(jax.devices()).reshape(2, 2, 2), ("node", "model", "local")
    ),
}


def in_order() -> list[int]:
    """The examples of both epochs, one by one."""
    return [element["number"] for element in dataset(Source())]


def numbers(batches: Batches, num: int) -> list[int]:
    return [i for _ in range(num) for i in np.asarray(next(batches)["number"]).tolist()]


@pytest.mark.parametrize("mesh", MESHES)
def test_batches_are_the_dataset_in_order(mesh: str):
    zero = jz.Zero(MESHES[mesh]())
    batches = list(Batches(dataset(Source()), zero, batch_size=ROWS))
    assert len(batches) == EPOCH * EPOCHS // ROWS
    found = np.concatenate([batch["number"] for batch in batches]).tolist()
    assert found == in_order()
    for epoch in range(EPOCHS):
        assert sorted(found[epoch * EPOCH :][:EPOCH]) == list(range(EPOCH))
    assert found[:EPOCH] != found[EPOCH:], "each epoch has an order of its own"
    sharding = NamedSharding(zero.mesh, zero.batch_spec)
    for x in jax.tree.leaves(batches):
        assert x.sharding == sharding and x.shape == (ROWS,) and x.dtype == jnp.int32


def test_batches_go_into_a_step():
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = zero.shard({"scale": np.ones(8, np.float32)})

    def loss(params, batch):
        return jnp.mean(params["scale"]) * jnp.mean(batch["powers"][1].astype(jnp.float32))

    step = jax.jit(zero.value_and_grad(loss))
    with Batches(dataset(Source()), zero, batch_size=ROWS, read_options=IN_MEMORY) as batches:
        first = next(batches)
    squares = [i**2 for i in in_order()[:ROWS]]
    np.testing.assert_allclose(step(params, first)[0], np.mean(squares), rtol=1e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_rounds_are_batches_stacked(mesh: str):
    zero = jz.Zero(MESHES[mesh]())
    make = functools.partial(Batches, dataset(Source()), zero, batch_size=ROWS)
    single = list(make())
    batches = make()
    first = next(batches)
    rounds = list(batches.rounds(2))
    assert batches.get_state()["batches"] == 1 + 2 * len(rounds)
    assert len(rounds) == (len(single) - 1) // 2, "an incomplete round is not read"
    spec = jax.sharding.PartitionSpec(None, *zero.batch_spec)
    for found, pair in zip(rounds, zip(single[1::2], single[2::2], strict=False), strict=True):
        stacked = jax.tree.map(lambda *x: np.stack(x), *pair)
        jax.tree.map(np.testing.assert_array_equal, found, stacked)
        for x in jax.tree.leaves(found):
            assert x.sharding == NamedSharding(zero.mesh, spec)
    jax.tree.map(np.testing.assert_array_equal, first, single[0])
    with pytest.raises(ValueError, match="`steps` must be at least 1; got 0"):
        next(batches.rounds(0))


@pytest.mark.parametrize("options", [None, IN_MEMORY])
def test_a_state_goes_on_with_the_next_batch(options: grain.ReadOptions | None):
    zero = jz.Zero(jz.make_mesh(nodes=2))
    make = functools.partial(Batches, batch_size=ROWS, read_options=options)
    with make(dataset(Source()), zero) as batches:
        start = numbers(batches, 2)
        state = json.loads(json.dumps(batches.get_state()))
        rest = numbers(batches, 3)
        assert next(batches, None) is None
        batches.set_state(state)
        assert numbers(batches, 3) == rest
    fewer = jz.Zero(jz.make_mesh(devices=jax.devices()[:2]))
    with make(dataset(Source()), fewer) as batches:
        batches.set_state(state)
        assert numbers(batches, 3) == rest
        assert batches.get_state() == {**state, "batches": 5}
    assert start + rest == in_order()


def test_closing_loses_no_place():
    with Batches(dataset(Source()), jz.Zero(jz.make_mesh()), batch_size=ROWS) as batches:
        start = numbers(batches, 1)
        batches.close()
        assert start + numbers(batches, 1) == in_order()[: 2 * ROWS]


def test_a_batch_that_failed_is_read_again():
    failures, bad = iter(["once"]), in_order()[ROWS + 3]

    def read(element: dict[str, Any]) -> dict[str, Any]:
        if element["number"] == bad and next(failures, None):
            raise OSError("The disk is away.")
        return element

    batches = Batches(dataset(Source()).map(read), jz.Zero(jz.make_mesh()), batch_size=ROWS)
    start = numbers(batches, 1)
    with pytest.raises(OSError, match="The disk is away"):
        next(batches)
    assert start + numbers(batches, 4) == in_order()


def test_more_epochs_may_follow():
    """The state of a run of two epochs serves for a longer one."""
    zero = jz.Zero(jz.make_mesh())
    epoch = grain.MapDataset.range(12).shuffle(seed=1)
    short = Batches(epoch.repeat(2), zero, batch_size=8)
    assert len(list(short)) == 3
    forever = Batches(epoch.repeat(), zero, batch_size=8)
    forever.set_state(short.get_state())
    assert np.asarray(next(forever)).tolist() == [epoch[i] for i in range(24, 32)]
    with pytest.raises(ValueError, match="that after 3 batches; the dataset has 1. Repeat it"):
        Batches(epoch, zero, batch_size=8).set_state(short.get_state())


@pytest.mark.parametrize(
    ("made", "batch_size", "error", "message"),
    [
        ([1, 2], 8, TypeError, "`dataset` must be a `grain.MapDataset`.*; got list. Make one"),
        (grain.MapDataset.range(9).to_iter_dataset(), 8, TypeError, "got PrefetchIterDataset"),
        (
            grain.MapDataset.range(9),
            12,
            ValueError,
            "a multiple of the number of devices, 8; got 12",
        ),
        (grain.MapDataset.range(9), 0, ValueError, "`batch_size` must be .* got 0"),
        (grain.MapDataset.range(9), 16, ValueError, "has 9 elements, fewer than one batch of 16"),
    ],
)
def test_refused(made: Any, batch_size: int, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        Batches(made, jz.Zero(jz.make_mesh(nodes=2)), batch_size=batch_size)


def test_a_process_without_devices_is_refused(monkeypatch: pytest.MonkeyPatch):
    zero = jz.Zero(jz.make_mesh())
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="Process 1 has none of the devices of the mesh"):
        Batches(grain.MapDataset.range(9), zero, batch_size=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ds: ds.map(lambda i: np.zeros(i)), r"shape of leaf `\.`: .* Pad or cut them"),
        (lambda ds: ds.map(lambda i: {"a": "text"}), "Leaf `a` of an element has dtype <U4"),
        (lambda ds: ds.map(lambda i: {f"{i}": 1}), "Elements differ: one is a tree"),
        (lambda ds: ds.filter(lambda i: i != 3), "has no element 3: a filter removed it"),
    ],
)
def test_elements_that_make_no_batch(change: Any, message: str):
    zero = jz.Zero(jz.make_mesh())
    with pytest.raises(ValueError, match=message):
        next(Batches(change(grain.MapDataset.range(8)), zero, batch_size=8))


@pytest.mark.parametrize(
    ("other", "batch_size", "message"),
    [
        (dataset(range(EPOCH)), 16, "batch_size = 8, and these batches have 16. Give"),
        (dataset(range(21)), 8, "epoch_length = 20, and these batches have 21"),
        (
            grain.MapDataset.range(EPOCH).seed(6).shuffle().repeat(2),
            8,
            "seeds = .* Give the dataset",
        ),
    ],
)
def test_a_state_of_something_else(other: grain.MapDataset, batch_size: int, message: str):
    zero = jz.Zero(jz.make_mesh())
    state = Batches(dataset(Source()), zero, batch_size=ROWS).get_state()
    batches = Batches(other, zero, batch_size=batch_size)
    with pytest.raises(ValueError, match=message):
        batches.set_state(state)
    with pytest.raises(ValueError, match="must be from `Batches.get_state`; got {'step': 3}"):
        batches.set_state({"step": 3})


@contextlib.contextmanager
def two_processes(num_devices: int) -> Iterator[list[subprocess.Popen[str]]]:
    with started("tests.data.read_by_processes", 2, num_devices, stdin=subprocess.PIPE) as running:
        yield running
        for process in running:  # they wait for each other before they end
            process.stdin.close()
            process.stdin = None
        assert [end.status for end in ended(running, seconds=60.0)] == [0, 0]


def read_together(
    processes: list[subprocess.Popen[str]], state: dict[str, Any] | None, num: int
) -> tuple[list[int], dict[str, Any]]:
    """The examples of some batches in order, and the state after them."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(json.dumps([state, num]) + "\n")
        process.stdin.flush()
    said = []
    for process in processes:
        assert process.stdout is not None  # to which others (Gloo) write lines of their own
        said.append(json.loads(next(line for line in process.stdout if line.startswith("{"))))
    found = []
    for batch in range(num):
        held = [each["rows"][batch] for each in said]
        assert [len(rows) for rows in held] == [ROWS // 2] * 2
        rows = {int(row): i for each in held for row, i in each.items()}
        found += [rows[row] for row in range(ROWS)]
        assert [each["sums"][batch] for each in said] == [sum(i**2 for i in found[-ROWS:])] * 2
    assert said[0]["state"] == said[1]["state"], "it is the same on every process"
    first = 0 if state is None else state["batches"]
    halves = [in_order()[start:][: ROWS // 2] for start in range(0, EPOCHS * EPOCH, ROWS // 2)]
    for number, each in enumerate(said):
        mine, asked = halves[number::2][first:], collections.Counter(each["asked"])
        assert not asked - collections.Counter(itertools.chain(*mine)), "read for the other"
        assert not collections.Counter(itertools.chain(*mine[:num])) - asked
    return found, said[0]["state"]


def test_two_hosts_then_one_then_two():
    with two_processes(num_devices=2) as processes:
        first, state = read_together(processes, None, 2)
        with Batches(dataset(Source()), jz.Zero(jz.make_mesh(nodes=2)), batch_size=ROWS) as alone:
            alone.set_state(state)
            second = numbers(alone, 1)
            state = alone.get_state()
        third, state = read_together(processes, state, 2)
    assert state["batches"] == 5
    assert first + second + third == in_order()
