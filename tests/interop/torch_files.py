"""Files as `torch.save` lays them out, written without torch, so that they can say anything."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path


def pack(path: Path, data: bytes, storages: dict[str, bytes] | None = None, **options) -> Path:
    """A file as `torch.save` lays it out, around any pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)
    return path


def pack_legacy(
    path: Path,
    data: bytes,
    storages: dict[str, tuple[int, bytes]],
    *,
    keys: list | None = None,
    machine: object = None,
    version: int = 1001,
    end: bytes = b"",
) -> Path:
    """A file as `torch.save` wrote it before 1.6, around any pickle.

    `storages` maps each key to its number of elements and its bytes.
    """
    machine = {"protocol_version": 1001, "little_endian": True} if machine is None else machine
    head = [pickle.dumps(each, 2) for each in (0x1950A86A20F9469CFC6C, version, machine)]
    tail = [struct.pack("<q", count) + content for count, content in storages.values()]
    keys = [*storages] if keys is None else keys
    path.write_bytes(b"".join([*head, data, pickle.dumps(keys, 2), *tail, end]))
    return path


def tensor_pickle(
    *,
    storage: str = "FloatStorage",
    count=4,
    offset=0,
    shape=(2, 2),
    strides=(2, 1),
    key="0",
    view: tuple = (),
) -> bytes:
    """The pickle of `{"w": tensor}`, written out, so that it can say anything.

    `view` is what a legacy file says of a storage besides: (None,), or what it is a view of.
    """

    def argument(value) -> bytes:
        return pickle.dumps(value, 2)[2:-1].replace(b"q\x00", b"").replace(b"q\x01", b"")

    pid = (
        b"(" + argument("storage") + f"ctorch\n{storage}\n".encode() + argument(key)
        + argument("cpu") + argument(count) + b"".join(map(argument, view)) + b"tQ"
    )  # fmt: skip
    arguments = b"(" + pid + argument(offset) + argument(shape) + argument(strides) + b"\x89Nt"
    made = b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"
    return b"\x80\x02}" + argument("w") + made + b"s."
