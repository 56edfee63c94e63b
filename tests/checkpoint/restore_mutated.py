"""A process that changes copies of a checkpoint, one file each, and restores them.

    python restore_mutated.py SOURCE DIRECTORY MODE

It reads the number of a change per line, and prints what happened as a line of JSON. `MODE` says
what becomes of the digests: "kept", or "signed" again after the change.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
_SPARSE_BYTES = 2**40


def main(source: Path, directory: Path, mode: str) -> None:
    import jaxzero as jz

    from .saved import make_state

    warnings.simplefilter("ignore")
    zero = jz.Zero(jz.make_mesh(1))
    like = make_state(zero, 0)
    wanted = jax.tree.leaves(zero.unshard(make_state(zero, 20)["params"]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        target = directory / line.strip()
        folder = shutil.copytree(source, target) / "20"
        what = change(folder, random.Random(int(line)))
        _sign(folder, mode)
        before = _peak()
        try:
            with jz.Checkpoints(target, zero) as checkpoints:
                state = checkpoints.restore(like)
            got = jax.tree.leaves(zero.unshard(state.state["params"]))
            same = all((a == b).all() for a, b in zip(got, wanted, strict=True))
            same = same and state.extra == {"step": 20}
            said = ["restored", "exactly" if same else "changed"]
        except Exception as error:
            said = [type(error).__name__, str(error)]
        print(json.dumps([what, *said, _peak() - before]), flush=True)
        shutil.rmtree(target, ignore_errors=True)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def change(folder: Path, rng: random.Random) -> str:
    """Change one file, and return what was done."""
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    kind = rng.choice(sorted(_CHANGES))
    _CHANGES[kind](path, rng)
    return f"{kind} {path.relative_to(folder)}"


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 4])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _number(path: Path, rng: random.Random) -> None:
    """Change a number in a text; where there is none, put one before it."""
    content = path.read_bytes()
    found = list(re.finditer(rb"\d+", content)) or list(re.finditer(b"^", content))
    place = rng.choice(found)
    other = rng.choice([b"0", b"-1", b"1000000000000", b"99999999999999999999", b"1e400", b"[1]"])
    path.write_bytes(content[: place.start()] + other + content[place.end() :])


def _swap(path: Path, rng: random.Random) -> None:
    other = rng.choice(sorted(other for other in path.parent.iterdir() if other.is_file()))
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)


def _replace(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    def change(path: Path, rng: random.Random) -> None:
        path.unlink()
        make(path)

    return change


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


_CHANGES = {
    "flip": _flip,
    "number": _number,
    "swap": _swap,
    "cut": _cut,
    "append": lambda path, rng: path.write_bytes(path.read_bytes() + rng.randbytes(9)),
    "garbage": lambda path, rng: path.write_bytes(rng.randbytes(300)),
    "sparse": lambda path, rng: os.truncate(path, _SPARSE_BYTES),
    "remove": lambda path, rng: path.unlink(),
    "pipe": _replace(os.mkfifo),
    "folder": _replace(Path.mkdir),
    "zeros": _replace(lambda path: path.symlink_to("/dev/zero")),
    "loop": _replace(lambda path: path.symlink_to(path.name)),
}


def _sign(folder: Path, mode: str) -> None:
    """Write sizes and digests of the files as they are now, as a checkpoint has them."""
    sums, description = folder / "SHA256SUMS", folder / "jaxzero.json"
    if mode == "signed" and _is_small(sums) and _is_small(description):
        try:
            said = dict(json.loads(description.read_bytes()))
        except (ValueError, TypeError):
            return
        paths = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path not in (sums, description)
        }
        said["files"] = {name: path.stat().st_size for name, path in paths.items()}
        description.write_text(json.dumps(said))
        paths[description.name] = description
        lines = [f"{_digest(path)}  {name}\n" for name, path in paths.items()]
        sums.write_text("".join(lines))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if _is_small(path) else "0" * 64


def _is_small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size < 2**20


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
