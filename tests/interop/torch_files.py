"""Files as `torch.save` lays them out, written without torch, so that they can say anything."""

from __future__ import annotations

import pickle
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


def tensor_pickle(
    *, storage: str = "FloatStorage", count=4, offset=0, shape=(2, 2), strides=(2, 1), key="0"
) -> bytes:
    """The pickle of `{"w": tensor}`, written out, so that it can say anything."""

    def argument(value) -> bytes:
        return pickle.dumps(value, 2)[2:-1].replace(b"q\x00", b"").replace(b"q\x01", b"")

    pid = (
        b"(" + argument("storage") + f"ctorch\n{storage}\n".encode() + argument(key)
        + argument("cpu") + argument(count) + b"tQ"
    )  # fmt: skip
    arguments = b"(" + pid + argument(offset) + argument(shape) + argument(strides) + b"\x89Nt"
    made = b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"
    return b"\x80\x02}" + argument("w") + made + b"s."
