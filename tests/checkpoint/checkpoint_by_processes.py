"""One of several processes that take up a checkpoint of one process, and save their own.

    python checkpoint_by_processes.py ADDRESS NUMBER COUNT DIRECTORY

`DIRECTORY/one` holds the checkpoint, `DIRECTORY/want.npz` what is in it. The checkpoints of the
processes come to `DIRECTORY/many`, and what is in the last to `DIRECTORY/many.npz`. Printed, as
JSON, is what went wrong where it should.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)


def main(address: str, number: int, count: int, directory: Path) -> None:
    jax.distributed.initialize(address, num_processes=count, process_id=number)
    import jax.numpy as jnp
    import numpy as np

    import jaxzero as jz
    from jaxzero._checkpoint import checkpoints as _checkpoint
    from jaxzero._checkpoint import digests
    from jaxzero._checkpoint import directory as _directory
    from tests.jobs.tiny_run import assert_same_bits, make_run, whole

    run, said = make_run(nodes=count, devices=2 * count), {}
    double = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)
    with jz.Checkpoints(directory / "one", run.zero) as checkpoints:
        restored = checkpoints.restore(run.first)
    assert_same_bits(whole(run, restored.state), dict(np.load(directory / "want.npz")))

    with jz.Checkpoints(directory / "many", run.zero) as checkpoints:
        first = run.first | {"empty": jnp.zeros((0, 3))}  # as its key and step, of each process
        checkpoints.save(1, first)
        assert checkpoints.restore(first).state["empty"].shape == (0, 3)
        state = restored.state | {"params": double(restored.state["params"])}
        want = whole(run, state)
        checkpoints.save(2, state, extra={"position": 48})
        # It takes the memory of the arrays that are being saved.
        state["params"] = double(state["params"])
        again = checkpoints.restore(run.first)
        assert (again.step, again.extra) == (2, {"position": 48})
        assert_same_bits(whole(run, again.state), want)
        if number == 0:
            np.savez(directory / "many.npz", **want)

        gone = FileNotFoundError("a file is gone") if number == 1 else None
        read = _checkpoint.read_arrays
        with mock.patch.object(_checkpoint, "read_arrays", wraps=read, side_effect=gone):
            said["unread"] = _message(lambda: checkpoints.restore_or_none(run.first))
        bad = OSError(errno.EIO, os.strerror(errno.EIO)) if number == 1 else None
        digest = digests.digest
        with mock.patch.object(digests, "digest", wraps=digest, side_effect=bad):
            said["unverified"] = _message(lambda: checkpoints.restore_or_none(run.first))

        checkpoints.save(3, state)
        checkpoints.close()
        seen = []

        def deleted_meanwhile(folder: Path) -> bool:
            """Process 0 has just seen it, process 1 comes too late."""
            if folder.name != "3":
                return is_folder(folder)
            seen.append(folder)
            return number == 0 and len(seen) == 1

        is_folder = _directory.is_folder
        with mock.patch.object(_directory, "is_folder", deleted_meanwhile):
            assert checkpoints.restore(run.first).step == 2

        _damage(directory / "many" / "3", number)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", jz.Checkpoints.Damaged)
            assert checkpoints.restore(run.first).step == 2
        said["damaged"] = [str(warning.message) for warning in caught]

        full = OSError("this disk is full") if number == 1 else None
        write = checkpoints._saver._write
        with mock.patch.object(checkpoints._saver, "_write", wraps=write, side_effect=full):
            checkpoints.save(4, state)
            said["failed"] = _message(checkpoints.close)
        said["steps"] = _message(lambda: checkpoints.save(4 + number, state))
        said["different"] = _message(lambda: checkpoints.save(4, {"own": jnp.int32(number)}))

    with jz.Checkpoints(directory / "many", run.zero, timeout=2) as checkpoints:
        if number == 0:  # the others do not come
            began = time.monotonic()
            said["lost"] = _message(lambda: checkpoints.save(5, state))
            said["waited"] = time.monotonic() - began
    print(json.dumps(said), flush=True)


def _damage(folder: Path, number: int) -> None:
    """Flip a bit in the second largest file: the first that the second process verifies."""
    if number == 0:
        sizes = json.loads((folder / "jaxzero.json").read_text())["files"]
        file = folder / sorted(sizes, key=lambda name: (-sizes[name], name))[1]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    from jaxzero._processes.coordination import barrier

    barrier("damaged", 300)


def _message(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    address, number, count, directory = sys.argv[1:]
    main(address, int(number), int(count), Path(directory))
