"""Broken and malicious pickles and archives: errors name the file, and no code in it runs."""

from __future__ import annotations

import functools
import io
import os
import pickle
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxzero import interop

from .torch_files import pack, tensor_pickle

DEEPSPEED = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"


class RunsCode:
    """Makes a folder when it is unpickled as `pickle.load` would."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_the_form_of_these_files_is_read(tmp_path: Path):
    values = np.arange(4, dtype=np.float32)
    path = pack(tmp_path / "m.bin", tensor_pickle(), {"0": values.tobytes()})
    np.testing.assert_array_equal(interop.open_checkpoint(path)["w"].read(), values.reshape(2, 2))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_code_is_run(tmp_path: Path, protocol: int):
    marker = tmp_path / "marker"
    data = pickle.dumps({"w": RunsCode(marker)}, protocol)
    files = [
        pack(tmp_path / "m.bin", data),
        pack(tmp_path / "parts" / "pytorch_model.bin", data).parent,
        pack(tmp_path / "zero" / "mp_rank_00_model_states.pt", data).parent,
    ]
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(data)
    for path in [*files, tmp_path / "dcp"]:
        with pytest.raises(ValueError, match=r"names `(posix|os|nt)\.mkdir`, .*Nothing was run"):
            interop.open_checkpoint(path)
    assert not marker.exists()
    with pytest.raises(ValueError, match=f"{str(tmp_path / 'dcp')}/.metadata' names"):
        interop.open_checkpoint(tmp_path / "dcp")
    pickle.loads(data)  # the file does mean harm
    assert marker.exists()


def test_classes_can_be_passed_over(tmp_path: Path):
    class_by_name = b"\x80\x02}X\x01\x00\x00\x00acmine\nConfig\n)\x81}X\x01\x00\x00\x00bK\x01sbs."
    path = pack(tmp_path / "m.bin", class_by_name)
    with pytest.raises(ValueError, match=r"names `mine\.Config`"):
        interop.open_checkpoint(path)
    parts = pack(tmp_path / "parts" / "pytorch_model.bin", class_by_name).parent
    for each in (path, parts):
        with pytest.raises(ValueError, match=r"\.bin' holds no dict of tensors"):
            interop.open_checkpoint(each, records=["mine.Config"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 5}, "storage '0' of 5 x float32, which has 16 bytes"),
        ({"count": -1}, "a storage described as"),
        ({"offset": 1}, "offset 1 in a storage of 16 bytes"),
        ({"offset": -1}, "a tensor of offset -1"),
        ({"shape": (2, 3)}, "a tensor of shape \\(2, 3\\)"),
        ({"shape": (10**15,), "strides": (0,)}, "a tensor of shape \\(1000000000000000,\\)"),
        ({"strides": (2, -1)}, "strides \\(2, -1\\)"),
        ({"strides": (2,)}, "strides \\(2,\\)"),
        ({"storage": "QInt8Storage"}, "names `torch.QInt8Storage`"),
        ({"key": "1"}, "lacks `data/1`, which its `data.pkl` refers to"),
        ({"key": "../0"}, "lacks `data/../0`"),
    ],
)
def test_tensors_that_lie(tmp_path: Path, change: dict, message: str):
    path = pack(tmp_path / "m.bin", tensor_pickle(**change), {"0": bytes(16)})
    with pytest.raises(ValueError, match=f"{path.name}' .*{message}"):
        interop.open_checkpoint(path)


def test_a_memo_index_takes_no_memory(tmp_path: Path):
    bomb = b"\x80\x02}r\xff\xff\xff\x7f."  # `pickle` would make room for 2^31 entries
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"m\.bin' holds no dict of tensors"):
        interop.open_checkpoint(pack(tmp_path / "m.bin", bomb))
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_other_archives(tmp_path: Path):
    compressed = pack(
        tmp_path / "z.bin", tensor_pickle(), {"0": bytes(16)}, compression=zipfile.ZIP_DEFLATED
    )
    with pytest.raises(ValueError, match=r"z\.bin' is a compressed archive"):
        interop.open_checkpoint(compressed)
    with zipfile.ZipFile(tmp_path / "o.bin", "w") as archive:
        archive.writestr("word/document.xml", "")
    with pytest.raises(ValueError, match=r"o\.bin' is a zip archive without a `data\.pkl`"):
        interop.open_checkpoint(tmp_path / "o.bin")
    (tmp_path / "old.bin").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(ValueError, match=r"old\.bin' is not a whole file of `torch\.save` .pickle"):
        interop.open_checkpoint(tmp_path / "old.bin")
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / "dcp").mkdir(exist_ok=True)
        (tmp_path / "dcp" / name).write_bytes(b"")
        with pytest.raises(
            ValueError, match=rf"{name}' is one file .* Give the directory, .*/dcp'"
        ):
            interop.open_checkpoint(tmp_path / "dcp" / name)
    with pytest.raises(ValueError, match="nowhere' is neither a file nor a directory"):
        interop.open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no checkpoint that is known"):
        interop.open_checkpoint(tmp_path)


def test_files_that_are_cut_short(tmp_path: Path):
    whole = (DEEPSPEED / "zero1" / "step3" / "mp_rank_00_model_states.pt").read_bytes()
    path = tmp_path / "m.pt"
    for size in [0, 3, 30, *range(100, len(whole), 487), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"m\.pt' is (not (a whole file|a zip archive)|empty)"):
            interop.open_checkpoint(path)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    for case in ("zero1", "zero3"):
        shutil.copytree(DEEPSPEED / case, folder / case)
    return folder


FILE = Path("step3", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


@functools.cache
def entries(case: str) -> dict[str, bytes]:
    """Contents of the archive of an optimizer state, by name."""
    with zipfile.ZipFile(DEEPSPEED / case / FILE) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


@hypothesis.given(data=st.data(), case=st.sampled_from(["zero1", "zero3"]))
def test_any_change_of_a_pickle_is_read_or_refused(copies: Path, data, case: str):
    content = bytearray(entries(case)["data.pkl"])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    storages = {
        name.removeprefix("data/"): held
        for name, held in entries(case).items()
        if name.startswith("data/")
    }
    pack(copies / case / FILE, bytes(content), storages)
    try:
        interop.open_checkpoint(copies / case)
    except ValueError as error:
        assert str(copies / case) in str(error)


def test_metadata_of_something_else(tmp_path: Path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"\.metadata' does not describe a distributed check"):
        interop.open_checkpoint(tmp_path)
    (tmp_path / ".metadata").write_bytes(io.BytesIO(b"").read())
    with pytest.raises(ValueError, match=r"\.metadata' does not hold a whole pickle"):
        interop.open_checkpoint(tmp_path)
