"""Tensors in files of `torch.save`, of every dtype and kind: read bit for bit, or refused."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxzero import interop

torch = pytest.importorskip("torch", reason="needs torch: it writes the files")

DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2"),
]


def saved(path: Path, **content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_through_every_form(dtype: str, tmp_path: Path):
    """Also strided, by slices, and what is written: float8_e5m2 failed in numpy."""
    bits = torch.arange(3 * 8 * 16, dtype=torch.uint8) % 2  # valid for booleans too
    whole = bits.view(getattr(torch, dtype)).reshape(3, -1)
    held = {"whole": whole, "strided": whole.t()[1::3], "scalar": whole[0, 0]}
    checkpoint = interop.open_checkpoint(saved(tmp_path / "run.pt", **held))

    def check(found: Any) -> None:
        for name, tensor in held.items():
            array = found[name].read()
            assert (array.dtype.name, array.shape) == (dtype, tuple(tensor.shape))
            wanted = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            assert array.tobytes() == wanted.tobytes()
            if tensor.ndim:
                part = found[name][(slice(1, 3), slice(0, 2))]
                assert part.tobytes() == np.ascontiguousarray(array[1:3, :2]).tobytes()

    check(checkpoint)
    forms = ("torch", "dcp") if "complex" in dtype else ("torch", "dcp", "safetensors")
    for form in forms:
        interop.write_checkpoint(checkpoint, tmp_path / f"as_{form}", form=form)
        check(interop.open_checkpoint(tmp_path / f"as_{form}"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.zeros(2, 2).to(torch.float8_e4m3fnuz),
            r"a tensor of the dtype torch\.float8_e4m3fnuz, which is not read\. Known are bool, ",
        ),
        (lambda: torch.eye(3).to_sparse(), r"a sparse tensor, .* Save `tensor\.to_dense\(\)`"),
        (lambda: torch.empty(3, device="meta"), "a meta tensor, .* Save a tensor that has data"),
    ],
)
def test_tensors_that_are_not_read_are_told_from_code(make, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f"holds {message}") as raised:
        interop.open_checkpoint(saved(tmp_path / "run.pt", w=make()))
    assert "code" not in str(raised.value)


class Config:
    """Of the user."""


def test_objects_of_classes_that_are_not_known(tmp_path: Path):
    path = saved(tmp_path / "run.pt", model={"w": torch.ones(2)}, config=Config())
    name = f"{Config.__module__}.Config"
    with pytest.raises(ValueError, match=rf"and could be code.*records=\['{name}'\]\)` passes"):
        interop.open_checkpoint(path)
    assert interop.open_checkpoint(path, records=[name])["w"].shape == (2,)


@pytest.mark.parametrize("factory", [list, dict, int, float, str, tuple, None])
def test_dicts_with_a_factory_are_passed_over(factory, tmp_path: Path):
    log = collections.defaultdict(factory)
    log["loss"] = [1.0]
    path = saved(tmp_path / "run.pt", model={"w": torch.ones(2)}, log=log)
    assert list(interop.open_checkpoint(path)) == ["w"]


def test_an_optimizer_without_a_model(tmp_path: Path):
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(
        ValueError, match="the state of an optimizer, and no model. Open the model with"
    ):
        interop.open_checkpoint(tmp_path / "optimizer.pt")


def test_a_whole_module_is_told_from_an_object_of_the_user(tmp_path: Path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    message = (
        r"holds a whole module \(`torch\.nn\.modules\.linear\.Linear`\).*model\.state_dict\(\)"
    )
    with pytest.raises(ValueError, match=message):
        interop.open_checkpoint(tmp_path / "model.pt")


def test_files_with_the_suffix_of_another_form(tmp_path: Path):
    save_file({"w": np.ones(2)}, tmp_path / "a.bin")
    with pytest.raises(
        ValueError, match=r"a\.bin' looks like a safetensors file\. .* \.safetensors"
    ):
        interop.open_checkpoint(tmp_path / "a.bin")
    torch.save({"w": torch.ones(2)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"writes it, .* rename it so that it ends in \.pt; then"):
        interop.open_checkpoint(tmp_path / "b.safetensors")
    (tmp_path / "a.bin").rename(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").rename(tmp_path / "b.pt")
    for name in ("a.safetensors", "b.pt"):
        assert interop.open_checkpoint(tmp_path / name)["w"].shape == (2,)


def test_a_tensor_beside_the_model(tmp_path: Path):
    """Such as the best score so far: then the dict of the model was not found, even by its key."""
    model = torch.nn.Linear(2, 3).state_dict()
    path = saved(tmp_path / "run.pt", net=model, best=torch.tensor(0.5), settings={"lr": 0.1})
    with pytest.raises(ValueError, match=r"several dicts of tensors: '', 'net'.*'' is the dict of"):
        interop.open_checkpoint(path)
    found = interop.open_checkpoint(path, key="net")
    assert {name: found[name].read().tolist() for name in found} == {
        name: tensor.tolist() for name, tensor in model.items()
    }
    with pytest.raises(ValueError, match=r"'net' in .* is not a tensor but a OrderedDict"):
        interop.open_checkpoint(path, key="")
