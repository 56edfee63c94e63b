"""Checkpoints that are broken, or mean harm: errors name file and key, and nothing is run."""

from __future__ import annotations

import io
import json
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
from safetensors.numpy import save_file

from jaxzero import interop
from jaxzero.interop._torch.unpickle import unpickle

DEEPSPEED = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"


class RunsCode:
    """Makes a folder when it is unpickled as `pickle.load` would."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


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
    with pytest.raises(ValueError, match=r"old\.bin' is not a zip archive.*PyTorch 1\.6"):
        interop.open_checkpoint(tmp_path / "old.bin")
    with pytest.raises(ValueError, match="nowhere' is neither a file nor a directory"):
        interop.open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no checkpoint that is known"):
        interop.open_checkpoint(tmp_path)


def test_files_that_are_cut_short(tmp_path: Path):
    whole = (DEEPSPEED / "zero1" / "step3" / "mp_rank_00_model_states.pt").read_bytes()
    path = tmp_path / "m.pt"
    for size in [0, 3, 30, *range(100, len(whole), 487), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"m\.pt' is not (a whole file|a zip archive)"):
            interop.open_checkpoint(path)


class Fake:
    """In the place of tensors and storages."""


def read_fake(data: bytes):
    return unpickle(data, "fake", storage=lambda pid: Fake(), tensor=lambda *_: Fake())


def pickled(case: str) -> bytes:
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with zipfile.ZipFile(DEEPSPEED / case / "step3" / name) as archive:
        return archive.read(next(each for each in archive.namelist() if each.endswith("data.pkl")))


@hypothesis.given(data=st.data(), case=st.sampled_from(["zero1", "zero3"]))
def test_any_change_of_a_pickle_is_read_or_refused(data, case: str):
    content = bytearray(pickled(case))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_fake(bytes(content))
    except ValueError as error:
        assert "fake" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_a_rank_is_missing(tmp_path: Path, case: str, rank: int):
    shutil.copytree(DEEPSPEED / case, tmp_path / case)
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    (tmp_path / case / "step3" / name).unlink()
    message = "but none like .* of rank 0" if rank == 0 else "of 1 processes, but 2 wrote them"
    with pytest.raises(ValueError, match=message):
        interop.open_checkpoint(tmp_path / case)


def copied(tmp_path: Path, case: str) -> Path:
    shutil.copytree(DEEPSPEED / case, tmp_path / case)
    return tmp_path / case / "step3"


def test_files_of_two_checkpoints(tmp_path: Path):
    step = copied(tmp_path, "zero1")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copyfile(DEEPSPEED / "zero3" / "step3" / name, step / name)
    with pytest.raises(ValueError, match=r"holds states of ZeRO stages \['1', '3'\]"):
        interop.open_checkpoint(tmp_path / "zero1")
    first = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for each in (name, first):
        shutil.copyfile(DEEPSPEED / "zero3" / "step3" / each, step / each)
    for each in range(2):
        shutil.copyfile(
            step / "mp_rank_00_model_states.pt",
            step / f"zero_pp_rank_{each}_mp_rank_00_model_states.pt",
        )
    with pytest.raises(ValueError, match=r"are both of rank 0\. Files of two checkpoints"):
        interop.open_checkpoint(tmp_path / "zero1")


def test_what_deepspeed_cut_in_other_ways(tmp_path: Path):
    step = copied(tmp_path, "zero1")
    shutil.copyfile(step / "mp_rank_00_model_states.pt", step / "mp_rank_01_model_states.pt")
    with pytest.raises(NotImplementedError, match=r"mp_rank_01.*tensor parallelism.*ds_to_univ"):
        interop.open_checkpoint(tmp_path / "zero1")
    for name in ("layer_00-model_states.pt", "expert_0_mp_rank_00_model_states.pt"):
        (step / "mp_rank_01_model_states.pt").unlink(missing_ok=True)
        (step / name).write_bytes(b"")
        with pytest.raises(NotImplementedError, match=f"{name}.*pipeline or expert parallelism"):
            interop.open_checkpoint(step)
        (step / name).unlink()


def test_latest_names_no_directory(tmp_path: Path):
    for tag in ("step9", "../zero3", ""):
        (tmp_path / "latest").write_text(tag)
        with pytest.raises(ValueError, match=f"latest' names '{tag}', which is not a directory"):
            interop.open_checkpoint(tmp_path)


def test_a_universal_checkpoint_lacks_a_file(tmp_path: Path):
    step = copied(tmp_path, "universal")
    (step / "zero" / "up.weight" / "exp_avg_sq.pt").unlink()
    checkpoint = interop.open_checkpoint(step)
    with pytest.raises(ValueError, match=r"up\.weight' lacks exp_avg_sq\.pt"):
        checkpoint.adam()
    (step / "zero" / "up.weight" / "fp32.pt").unlink()
    with pytest.raises(ValueError, match=r"up\.weight' lacks fp32\.pt"):
        interop.open_checkpoint(step)


def test_state_dicts_that_are_unclear(tmp_path: Path):
    def nested(*keys: str) -> bytes:
        inner = tensor_pickle()[2:-1]
        items = b"".join(
            pickle.dumps(key, 2)[2:-1].replace(b"q\x00", b"") + inner + b"s" for key in keys
        )
        return b"\x80\x02}" + items + b"."

    storages = {"0": np.ones(4, np.float32).tobytes()}
    path = pack(tmp_path / "m.pt", nested("ema", "model"), storages)
    with pytest.raises(ValueError, match=r"several dicts of tensors: 'ema', 'model'.*`key=`"):
        interop.open_checkpoint(path)
    assert list(interop.open_checkpoint(path, key="ema")) == ["w"]
    with pytest.raises(ValueError, match=r"`key` must be one of 'ema', 'model'.*got 'x'"):
        interop.open_checkpoint(path, key="x")
    with pytest.raises(ValueError, match=r"m\.pt' \(torch\.save\) holds no optimizer state"):
        interop.open_checkpoint(path, key="ema").adam()


def test_an_index_that_lies(tmp_path: Path):
    index = tmp_path / "pytorch_model.bin.index.json"
    for content, message in [
        ('{"weight_map": {"w": "../m.bin"}}', "which is not a file beside it"),
        (
            '{"weight_map": {"w": "a.bin"}}',
            "lacks 'a.bin', which pytorch_model.bin.index.json names",
        ),
        ('{"weight_map": 3}', "is not an index"),
        ('{"weight_map": {}}', "has an empty `weight_map`"),
        ("{", "is not an index"),
    ]:
        index.write_text(content)
        with pytest.raises(ValueError, match=message):
            interop.open_checkpoint(tmp_path)
    pack(tmp_path / "a.bin", tensor_pickle(), {"0": bytes(16)})
    index.write_text(json.dumps({"weight_map": {"w": "a.bin"}}))
    assert list(interop.open_checkpoint(tmp_path)) == ["w"]
    index.write_text(json.dumps({"weight_map": {"w": "a.bin", "v": "a.bin"}}))
    with pytest.raises(ValueError, match="says that tensor 'v' is in a.bin, which does not hold"):
        interop.open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"v": "b.bin", "w": "a.bin"}}))
    pack(tmp_path / "b.bin", tensor_pickle().replace(b"w", b"v", 1), {"0": bytes(16)})
    assert sorted(interop.open_checkpoint(tmp_path)) == ["v", "w"]
    index.write_text(json.dumps({"weight_map": {"v": "b.bin"}}))
    pack(tmp_path / "b.bin", two_tensors(), {"0": bytes(16)})
    with pytest.raises(ValueError, match=r"b\.bin' holds tensor 'w', which pytorch_model"):
        interop.open_checkpoint(tmp_path)


def two_tensors() -> bytes:
    first, second = tensor_pickle()[2:-1], tensor_pickle().replace(b"w", b"v", 1)[3:-1]
    return b"\x80\x02" + first + second + b"."


def test_an_adapter_beside_the_model_is_not_the_model(tmp_path: Path):
    pack(tmp_path / "pytorch_model.bin", tensor_pickle(), {"0": bytes(16)})
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "adapter_model.safetensors")
    assert list(interop.open_checkpoint(tmp_path)) == ["w"]
    save_file({"b": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert list(interop.open_checkpoint(tmp_path)) == ["b"]


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_writing_without_torch_says_what_to_install(tmp_path: Path, form, monkeypatch):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "s.safetensors")
    tensors = interop.open_checkpoint(tmp_path / "s.safetensors")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"form='{form}' needs PyTorch.*pip install"):
        interop.write_checkpoint(tensors, tmp_path / "out", form=form)
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_paddings_that_are_not_one_for_each_parameter(tmp_path: Path, monkeypatch):
    from jaxzero.interop._torch import zero_partitions

    read = zero_partitions.read_ranks

    def with_another_padding(files, records):
        stage, ranks = read(files, records)
        return stage, [rank._replace(paddings=[[0]]) for rank in ranks]

    monkeypatch.setattr("jaxzero.interop._torch.deepspeed.read_ranks", with_another_padding)
    with pytest.raises(
        ValueError, match=r"optim_states\.pt' has 1 paddings for the \d+ parameters"
    ):
        list(interop.open_checkpoint(DEEPSPEED / "zero2").values())


def test_a_copy_that_differs_is_found(tmp_path: Path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float16)}
    source = tmp_path / "source.safetensors"
    save_file(arrays, source)
    tensors = interop.open_checkpoint(source)
    for changed, message in [
        (
            arrays | {"a": arrays["a"] + 1},
            "'a' in .* .*float32.* differs from the tensor that was written",
        ),
        (arrays | {"b": np.ones(2, np.float32)}, "'b' in .*float32"),
        (arrays | {"a": arrays["a"].T.copy()}, "'a' in "),
        ({"a": arrays["a"]}, "'b' was not written"),
        (arrays | {"c": arrays["b"]}, "'c' was not in the source"),
    ]:
        save_file(changed, tmp_path / "copy.safetensors")
        with pytest.raises(ValueError, match=message):
            interop.check_copy(tensors, tmp_path / "copy.safetensors")
    interop.check_copy(tensors, source)


def test_a_file_that_failed_leaves_nothing(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="needs torch: it writes")
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "s.safetensors")
    tensors = interop.open_checkpoint(tmp_path / "s.safetensors")
    (tmp_path / "o.bin").write_bytes(b"old")
    with pytest.MonkeyPatch.context() as patch:

        def full_disk(_, file):
            file.write(b"half")
            raise OSError("No space left on device")

        patch.setattr(torch, "save", full_disk)
        with pytest.raises(OSError, match="No space left"):
            interop.write_checkpoint(tensors, tmp_path / "o.bin", form="torch")
    assert (tmp_path / "o.bin").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.bin", "s.safetensors"]
    with pytest.raises(ValueError, match=r"`path` must be a directory with form='dcp'"):
        interop.write_checkpoint(tensors, tmp_path / "o.bin", form="dcp")


def test_metadata_of_something_else(tmp_path: Path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"\.metadata' does not describe a distributed check"):
        interop.open_checkpoint(tmp_path)
    (tmp_path / ".metadata").write_bytes(io.BytesIO(b"").read())
    with pytest.raises(ValueError, match=r"\.metadata' does not hold a whole pickle"):
        interop.open_checkpoint(tmp_path)
