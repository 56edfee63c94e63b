"""One of several processes that train together, until something happens to one of them.

    python distributed_run.py ADDRESS NUMBER COUNT WHAT

WHAT: "agree" compares settings and replicas and ends; "train" makes steps for ever and says so;
"raise" and "hang" are what process 1 does after its third step; "alone" has process 1 miss a
barrier; "wait" is one process that waits, first with leave and then without, and "wait long"
one that takes more than its leave; "limit" is one that takes too long where no watchdog runs;
"resume" begins to train at step 41, after a while; "quit" has process 1 end by `SystemExit(3)`;
"early" has it fail before training, where JAX waits 10 s at the end in place of 300.
"""

from __future__ import annotations

import json
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxzero as jz
from jaxzero import distributed
from jaxzero._processes.coordination import barrier
from jaxzero.distributed import _initialize

HEARTBEAT_SECONDS = 3.0


def main(address: str, number: int, count: int, what: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    if count > 1 or what == "resume":
        if what == "early":
            _initialize._SHUTDOWN_SECONDS = 10
        distributed.initialize(
            coordinator_address=address,
            num_processes=count,
            process_id=number,
            start_seconds=60,
            heartbeat_seconds=10 if what == "early" else 100,
        )
    if what == "agree":
        print(json.dumps(_agree(number)))
    elif what == "wait":
        with distributed.Watchdog(step_seconds=1.0) as dog:
            with dog.waiting(10.0):
                time.sleep(3)
            print("waited", flush=True)
            time.sleep(30)
    elif what == "wait long":
        with distributed.Watchdog() as dog, dog.waiting(1.0):
            time.sleep(30)
    elif what == "limit":
        with distributed.time_limit("restoring", 10.0):
            time.sleep(1)
        with distributed.time_limit("the export", 1.0):
            time.sleep(30)
    elif what == "resume":
        print("restoring", flush=True)
        time.sleep(4)  # JAX looks for the signal once in a second
        _train(number, what, first=41)
    elif what == "alone":
        if number == 0:
            barrier("a place of its own", 2.0)
        time.sleep(5)
    elif what == "early":
        if number == 1:
            raise ValueError("a mistake before training")
        barrier("training", 1000.0)
    else:
        _train(number, what)


def _agree(number: int) -> dict[str, object]:
    mesh = jz.make_mesh()
    said: dict[str, object] = {"mesh": dict(mesh.shape)}
    distributed.check_same(settings={"rate": 0.1, "steps": 3}, seed=0)
    for name, values in {
        "settings": {"settings": {"rate": 0.1 + number, "steps": 3}},
        "missing": {"settings": {"rate": 0.1, **({"more": 1} if number else {})}},
    }.items():
        said[name] = _error(distributed.check_same, **values)

    def laid_out(spec: PartitionSpec, change: float = 0.0) -> jax.Array:
        """0, 1, 2, 3 on every device that has them, but for a change on the last."""
        pieces = []
        sharding = NamedSharding(mesh, spec)
        for device, index in sharding.addressable_devices_indices_map((4,)).items():
            piece = np.arange(4, dtype=np.float32)[index]
            is_last = device is jax.local_devices()[-1] and number == 1
            pieces.append(jax.device_put(piece + np.float32(change) * is_last, device))
        return jax.make_array_from_single_device_arrays((4,), sharding, pieces)

    everywhere, split = PartitionSpec(), PartitionSpec("local")
    good = {
        "split": laid_out(split),
        "whole": laid_out(everywhere),
        "key": jax.random.key(0),
        "n": 1,
    }
    distributed.check_replicas(good, step=7)
    for name, tree, step in (
        ("whole", {**good, "whole": laid_out(everywhere, 1e-6)}, 7),
        ("split", {**good, "split": laid_out(split, 1e-6)}, 7),
        ("number", {**good, "n": number}, 7),
        ("step", {"n": 1} if number else good, 7 + number),  # which only a first word tells
    ):
        said[f"replicas {name}"] = _error(distributed.check_replicas, tree, step=step)
    return said


def _error(function, *arguments, **options) -> str | None:
    try:
        function(*arguments, **options)
    except (ValueError, distributed.ReplicasDiffer) as error:
        return str(error)
    return None


def _train(number: int, what: str, first: int = 0) -> None:
    mesh = jz.make_mesh()
    sharding = NamedSharding(mesh, PartitionSpec(("node", "local")))
    x = jax.make_array_from_callback((4,), sharding, lambda index: np.ones(4)[index])
    add = jax.jit(lambda x: x.sum())
    step_seconds = 6 if what == "hang" else 60
    dog = distributed.Watchdog(step_seconds=step_seconds, heartbeat_seconds=HEARTBEAT_SECONDS)
    with dog, distributed.StopRequest() as stop:
        for step in range(first, first + 100_000):
            add(x).block_until_ready()
            dog.beat(step)
            if stop.reached():
                print("stopped after", step, flush=True)
                raise SystemExit(distributed.STOPPED)
            if number == 1 and step == 3 and what == "raise":
                raise ValueError("a mistake of one process")
            if number == 1 and step == 3 and what == "quit":
                raise SystemExit(3)
            if number == 1 and step == 3 and what == "hang":
                time.sleep(1000)
            if step == 3:
                print("training", flush=True)
            time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
