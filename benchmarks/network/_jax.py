"""One host of a JAX peer in the race over a slow network (`race.py`).

    python -m benchmarks.network._jax RUN.json HOST

A host is a process with two devices. Peer "single" is one device in one process: the curve of
losses that all others are compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jaxzero as jz
from benchmarks.shared import _gspmd, _peers

from ._hosts import sent_bytes
from ._link import LinkUse

_CONFIGS = {
    "jaxzero zero3": jz.zero3(),
    "jaxzero pipeline": jz.pipeline(microbatches=4),  # times those of the run; one row each
    "jaxzero zeropp": jz.zeropp(),
    "jaxzero zeropp4": jz.zeropp4(),
}


def main(run: dict[str, Any], host: int) -> None:
    single = run["peer"] == "single"
    connect(run, host)
    zero = jz.Zero(jz.make_mesh(), _CONFIGS.get(run["peer"]))
    state, step = _trainer(run, zero)
    batches = _batches(run, zero)
    compiled = step.lower(*state, batches[0]).compile()

    seconds, losses = [], []

    def take(batch):
        nonlocal state
        start = time.perf_counter()
        state, loss = compiled(*state, batch)
        jax.block_until_ready((state, loss))
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))

    for batch in batches[: run["warmup"]]:
        take(batch)
    multihost_utils.sync_global_devices("timed steps")
    sent, busy = 0 if single else sent_bytes(), time.process_time()
    with contextlib.nullcontext() if single else LinkUse(run["bytes_per_second"]) as link:
        for batch in batches[run["warmup"] :]:
            take(batch)
    busy = time.process_time() - busy
    multihost_utils.sync_global_devices("end")
    measured = {
        "seconds": seconds[run["warmup"] :],
        "busy_seconds": busy,
        "sent_bytes": 0 if single else sent_bytes() - sent,
        "link": link and link.shares(),
        "losses": losses,
    }
    Path(run["results"], f"{host}.json").write_text(json.dumps(measured))


def connect(run: dict[str, Any], host: int) -> None:
    """Make this process one of the run's, on the devices of its host."""
    single = run["peer"] == "single"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1 if single else run["devices_per_host"])
    if not single:
        jax.distributed.initialize(
            run["address"], run["hosts"], host, initialization_timeout=run["timeout_seconds"]
        )


def _trainer(run: dict[str, Any], zero: jz.Zero) -> tuple[tuple, Callable]:
    """Parameters, optimizer state and wire state, and the jitted step that they go through."""
    size, count = _peers.Size(**run["size"]), run["microbatches"]
    if zero.config.stages is not None:
        size = dataclasses.replace(size, layers_in="scan")
        count *= zero.config.stages.microbatches
    tx = optax.adam(run["learning_rate"])
    ours = run["peer"].startswith("jaxzero")
    params, opt_state = initial_state(run, zero, tx)
    split = jax.tree.map(lambda x: x.sharding, (params, opt_state))
    wire_state = zero.init_wire_state(params) if ours and zero.config.needs_wire_state else None

    def loss_fn(params, tokens):
        return _peers.loss(size, params, tokens)

    def of_jaxzero(params, wire_state, tokens):
        call = zero.value_and_grad(loss_fn, microbatches=count)
        if wire_state is None:
            return (*call(params, tokens), None)
        return call(params, tokens, wire_state=wire_state)

    def of_compiler(params, wire_state, tokens):
        value_and_grad = jax.value_and_grad(loss_fn)
        if count == 1:
            return (*value_and_grad(params, tokens[0]), wire_state)

        def add(sums, tokens):
            sums = jax.tree.map(jnp.add, sums, value_and_grad(params, tokens))
            return (sums[0], jax.lax.with_sharding_constraint(sums[1], split[0])), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        sums, _ = jax.lax.scan(add, zeros, tokens)
        return (*jax.tree.map(lambda x: x / count, sums), wire_state)

    value_and_grad = of_jaxzero if ours else of_compiler

    def step(params, opt_state, wire_state, tokens):
        loss, grads, wire_state = value_and_grad(params, wire_state, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, wire_state), loss

    out = ((*split, None), None)
    options = jz.compiler_options("cpu") if ours else None
    jitted = jax.jit(step, out_shardings=out, donate_argnums=(0, 1), compiler_options=options)
    return (params, opt_state, wire_state), jitted


def initial_state(run: dict[str, Any], zero: jz.Zero, tx: optax.GradientTransformation) -> Any:
    """Parameters and optimizer state, split as the peer's users would."""
    whole = _tree(np.load(run["weights"]))
    if zero.config.stages is not None:
        whole["layers"] = jax.tree.map(lambda *x: np.stack(x), *whole["layers"])
    if run["peer"].startswith("jaxzero"):
        params = zero.shard(whole)
        return params, zero.init_optimizer(tx, params)
    split = _gspmd.shardings(whole, zero.mesh)
    params = jax.tree.map(
        lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, x.__getitem__),
        whole,
        split,
    )
    return params, _gspmd.init(tx.init, params, mesh=zero.mesh)


def _batches(run: dict[str, Any], zero: jz.Zero) -> list[jax.Array]:
    """The tokens of each step, on the devices; for the compiler micro-batches come first."""
    tokens = np.load(run["tokens"])
    spec = PartitionSpec(None, *zero.batch_spec)
    if run["peer"].startswith("jaxzero"):
        # A device takes its micro-batches from neighbouring rows.
        tokens = tokens.reshape(len(tokens), -1, tokens.shape[-1])
        spec = zero.batch_spec
    sharding = NamedSharding(zero.mesh, spec)
    return [jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in tokens]


def _tree(leaves: Any) -> dict[str, Any]:
    """Parameters as `_peers` has them, from arrays named "embedding", "layers.0.q", ..."""
    layers: list[dict[str, Any]] = []
    for name in leaves.files:
        _, _, rest = name.partition("layers.")
        if rest:
            number, leaf = rest.split(".")
            layers.extend({} for _ in range(int(number) + 1 - len(layers)))
            layers[int(number)][leaf] = leaves[name]
    return {"embedding": leaves["embedding"], "layers": layers}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
