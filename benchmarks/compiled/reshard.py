"""What `jz.reshard` sends and holds for a 7B model on 2 x 8 H200s: the compiled programs are read.

    python -m benchmarks.compiled.reshard

Nothing runs. Bytes are those of the collectives in the compiled programs; the lower bound counts
the bytes that devices need and do not have, in the type that is sent. The peak is the memory of the
source, of the result, and the most that any one program has beside its arguments and results.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._llama import LlamaSize
from benchmarks.shared._rows import append_row
from jaxzero._hlo.collectives import Collective, collectives
from jaxzero._reshard import lowered, planned

from ._h200 import h200_mesh

# Columns and rows of the stacked kernels `[layers, in, out]`.
_COLUMNS, _ROWS = P(None, None, "local"), P(None, "local")
TENSOR_PARALLEL = {
    "embedding": P("local"),
    "layers": {
        **dict.fromkeys(("query", "key", "value", "gate", "up"), _COLUMNS),
        **dict.fromkeys(("out", "down"), _ROWS),
        **dict.fromkeys(("norm1", "norm2"), P()),
    },
    "norm": P(),
    "head": P(None, "local"),
}


def main(
    size: LlamaSize = LlamaSize(),  # noqa: B008
    nodes: int = 2,
    local: int = 8,
    target: Literal["cpu", "h200"] = "h200",
) -> None:
    """Compile, count, and append a row for each way of sending.

    Args:
        size: of the model, held in bfloat16.
        nodes: of the mesh.
        local: devices of a node.
        target: what to compile for.
    """
    if target == "h200":
        mesh = h200_mesh(nodes, local)
    else:
        mesh = jz.make_mesh(nodes, devices=jax.devices()[: nodes * local])
    zero = jz.Zero(mesh)

    def init(key: jax.Array) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), _llama.init(size, key))

    params = zero.abstract(functools.partial(init), jax.random.key(0))
    for name, codec in {"none": None, "int8": jz.Int8()}.items():
        report = jz.reshard_report(params, zero, specs=TENSOR_PARALLEL, codec=codec)
        began = time.perf_counter()
        sent, temporary = _compiled(zero, params, codec)
        append_row(
            "reshard",
            {
                "target": target,
                "nodes": nodes,
                "local": local,
                "codec": name,
                "parameters": _llama.num_parameters(size),
                **sent,
                "least_node_bytes": report.least_into_node,
                "least_device_bytes": report.least_into_device,
                "node_bytes_planned": report.into_node,
                "device_bytes_planned": report.into_device,
                "source_bytes": report.source_bytes,
                "result_bytes": report.result_bytes,
                "largest_leaf_bytes": report.largest_leaf_bytes,
                "program_bytes": temporary,
                "program_bytes_planned": report.program_bytes,
                "peak_bytes": report.source_bytes + report.result_bytes + temporary,
                "programs": report.windows,
                "compile_s": round(time.perf_counter() - began, 1),
                **dataclasses.asdict(size),
            },
        )


def _compiled(zero: jz.Zero, params: Any, codec: Any) -> tuple[dict[str, int], int]:
    """Bytes into the device and the node that get most, and the largest temporary memory."""
    _, plan, _ = planned(params, zero, TENSOR_PARALLEL, codec=codec)
    local = zero.mesh.shape["local"]
    entering, outside, temporary = np.zeros(zero.mesh.size), np.zeros(zero.mesh.size), 0
    for program in lowered(plan):
        done = program.compile()
        memory = done.memory_analysis()
        assert memory is not None
        temporary = max(temporary, memory.temp_size_in_bytes)
        for each in collectives(done.as_text() or ""):
            _add(each, local, entering, outside)
    sent = {
        "node_bytes": int(outside.reshape(-1, local).sum(axis=1).max()),
        "device_bytes": int(entering.max()),
    }
    return sent, temporary


def _add(each: Collective, local: int, entering: np.ndarray, outside: np.ndarray) -> None:
    """Add the bytes of one collective to those of each device."""
    held = sum(shape.num_bytes for shape in each.results) * each.trips
    if each.op == "collective-permute":
        for source, to in each.groups:
            entering[to] += held * (source != to)
            outside[to] += held * (source // local != to // local)
        return
    for group in map(np.array, each.groups):
        part = held // len(group)
        entering[group] += part * (len(group) - 1)
        outside[group] += part * (group[:, None] // local != group[None] // local).sum(axis=1)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 32)
    tyro.cli(main)
