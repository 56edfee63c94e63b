"""One of several processes that load a checkpoint, save it, and fail to save it.

    python save_by_processes.py ADDRESS NUMBER COUNT SOURCE DIRECTORY

It prints, as JSON, what happened to a save that process 1 cannot write all of, and to one of which
the file system does not keep what process 1 writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
from jax.sharding import AxisType

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)


def main(address: str, number: int, count: int, source: Path, directory: Path) -> None:
    jax.distributed.initialize(address, num_processes=count, process_id=number)
    import jaxzero as jz
    from jaxzero import interop
    from jaxzero.interop import Merge, Rule, Transpose

    rules = [
        Rule("stack", "layers.{i}.weight", Transpose()),
        Rule("fused", ("first", "second"), Merge(0, (5, 12))),
        Rule("scale", "scale"),
    ]
    shapes = {"stack": (3, 6, 17), "fused": (17, 4), "scale": (1,)}
    tree = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
    loaded = interop.load_into(tree, source, rules=rules)
    # A node for each process; two; and one over all, of whose axes none is a process's own.
    for nodes, name in ((2 * count, "more"), (1, "one"), (count, "saved")):
        kind = AxisType.Auto if nodes == count else AxisType.Explicit
        zero = jz.Zero(jz.make_mesh(nodes=nodes, axis_type=kind))
        tensors = interop.tensors_from(zero.shard(loaded), rules, like=loaded)
        interop.save_tensors(tensors, directory / name, max_shard_bytes=500, source=source)

    said = {}
    for name, fault in (("full", _full_disk()), ("lost", _lost_writes())):
        with fault if number == 1 else contextlib.nullcontext():
            try:
                interop.save_tensors(tensors, directory / name, max_shard_bytes=500)
            except Exception as error:
                said[name] = [type(error).__name__, str(error)]
    print(json.dumps(said))


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    """Room for the probe of a file system, and for no tensor."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _lost_writes() -> contextlib.AbstractContextManager:
    return mock.patch.object(os, "pwrite", lambda descriptor, data, offset: len(data))


if __name__ == "__main__":
    address, number, count, source, directory = sys.argv[1:]
    main(address, int(number), int(count), Path(source), Path(directory))
