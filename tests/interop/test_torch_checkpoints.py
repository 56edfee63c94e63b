"""Checkpoints of DeepSpeed, FSDP2 and torch.save: what they say, and training that goes on."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxzero import interop

from . import torch_run

HERE = Path(__file__).resolve().parent
DEEPSPEED = HERE.parent / "fixtures" / "deepspeed"
# Case -> form, and the run that it was saved by.
CASES = {
    "zero1": ("DeepSpeed ZeRO-1", "zero1"),
    "zero1_bf16": ("DeepSpeed ZeRO-1", "zero1_bf16"),
    "zero1_elastic": ("DeepSpeed ZeRO-1", "zero1_elastic"),
    "zero2": ("DeepSpeed ZeRO-2", "zero2"),
    "zero2_round_robin": ("DeepSpeed ZeRO-2", "zero2_round_robin"),
    "zero3": ("DeepSpeed ZeRO-3", "zero3"),
    "universal": ("DeepSpeed universal", "zero2"),
    "universal_zero3": ("DeepSpeed universal", "zero3"),
}
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch: FSDP2 is run"
)


@pytest.fixture(scope="session")
def run() -> torch_run.Run:
    return torch_run.Run()


@pytest.fixture(scope="session")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of FSDP2 by two processes, and `expected.npz`."""
    folder = tmp_path_factory.mktemp("fsdp")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.interop.make_fsdp_checkpoint", folder, str(rank)],
            cwd=HERE.parents[1],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=240)
        assert rank.returncode == 0, errors
    return folder


def check_state(checkpoint: interop.Checkpoint, expected: dict[str, np.ndarray]) -> None:
    """Parameters and moments are, to the bit, those that the trainer says it saved."""
    moments = checkpoint.adam()
    assert moments.step == 3
    sources = {"fp32": checkpoint, "exp_avg": moments.exp_avg, "exp_avg_sq": moments.exp_avg_sq}
    compared = 0
    for key, array in expected.items():
        moment, _, rest = key.partition("/")
        if moment != "saved":
            continue
        kind, _, name = rest.partition("/")
        tensor = sources[kind][name]
        assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype), key
        np.testing.assert_array_equal(tensor.read(), array, err_msg=key)
        inner = tuple(slice(size // 3, size) for size in array.shape)
        np.testing.assert_array_equal(tensor[inner], array[inner], err_msg=key)
        compared += 1
    assert compared >= 7


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_state(case: str):
    form, saved_by = CASES[case]
    checkpoint = interop.open_checkpoint(DEEPSPEED / case)
    assert checkpoint.form == form
    expected = torch_run.expected_of(DEEPSPEED / saved_by)
    check_state(checkpoint, expected)
    frozen = checkpoint["frozen.weight"]
    assert frozen.dtype.name == ("bfloat16" if case == "zero1_bf16" else "float32")
    np.testing.assert_array_equal(frozen.read(), expected["frozen"].astype(frozen.dtype))
    assert checkpoint["scale"].read() == 1.5
    np.testing.assert_array_equal(
        checkpoint["head.weight"].read(), checkpoint["embed.weight"].read()
    )
    if "zero3" not in case:  # stage 3 does not say which parameters are one
        assert checkpoint.aliases == {"head.weight": "embed.weight"}


@needs_torch
def test_fsdp_state(fsdp: Path):
    checkpoint = interop.open_checkpoint(fsdp / "dcp")
    assert checkpoint.form == "torch DCP"
    check_state(checkpoint, torch_run.expected_of(fsdp))


# float32, five steps: losses of about 4 and parameters of about 1, whose rounding grows by Adam's
# division by small moments.
TOLERANCE = 1e-5


def check_followed(run: torch_run.Run, path: Path, expected: dict[str, np.ndarray]) -> None:
    losses, after = run.follow(interop.open_checkpoint(path), expected)
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=TOLERANCE)
    for name, array in after.items():
        np.testing.assert_allclose(
            array, expected[f"after/fp32/{name}"], rtol=0, atol=TOLERANCE, err_msg=name
        )


@pytest.mark.standard_promotion  # optax
@pytest.mark.parametrize("case", [case for case in CASES if case != "zero1_bf16"])
@pytest.mark.one_in(2)
def test_training_goes_on_as_in_deepspeed(case: str, run: torch_run.Run):
    check_followed(run, DEEPSPEED / case, torch_run.expected_of(DEEPSPEED / CASES[case][1]))


@needs_torch
@pytest.mark.standard_promotion
def test_training_goes_on_as_in_fsdp(fsdp: Path, run: torch_run.Run):
    check_followed(run, fsdp / "dcp", torch_run.expected_of(fsdp))


@pytest.mark.standard_promotion
def test_without_moments_training_goes_elsewhere(run: torch_run.Run):
    """The tests above would fail if moments, or the step, were left out."""
    expected = torch_run.expected_of(DEEPSPEED / "zero3")
    checkpoint = interop.open_checkpoint(DEEPSPEED / "zero3")
    params, opt_state, frozen = run.load(checkpoint)
    fresh = run.run.zero.init_optimizer(run.run.optimizer, params)
    tokens = jax.numpy.asarray(expected["batches"][0], jax.numpy.int32)
    kept, _, _ = run._step(params, opt_state, tokens, frozen)
    lost, _, _ = run._step(params, fresh, tokens, frozen)
    kept, lost = (run.run.zero.unshard(params)["embed"] for params in (kept, lost))
    assert np.abs(kept - lost).max() > 100 * TOLERANCE


@pytest.fixture
def broken(fsdp: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint of FSDP2, to be broken."""
    return Path(shutil.copytree(fsdp / "dcp", tmp_path / "dcp"))


@needs_torch
def test_files_of_fsdp_that_are_missing_or_cut_short(broken: Path):
    part = broken / "__1_0.distcp"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"__1_0\.distcp' is truncated: '.*' should end at byte"):
        interop.open_checkpoint(broken)
    part.unlink()
    with pytest.raises(ValueError, match=r"lacks __1_0\.distcp, in which '.*' lies"):
        interop.open_checkpoint(broken)
    part.write_bytes(bytes(len(whole)))
    with pytest.raises(ValueError, match=r"__1_0\.distcp' \('model\..*'\) holds nothing but zeros"):
        interop.open_checkpoint(broken)["up.weight"].read()
    (broken / ".metadata").write_bytes((broken / ".metadata").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"\.metadata' does not hold a whole pickle"):
        interop.open_checkpoint(broken)


def change_chunk(metadata, **fields):
    chunk = metadata.state_dict_metadata["model.up.weight"].chunks[0]
    for name, value in fields.items():
        setattr(chunk, name, torch_size(value))


def torch_size(values):
    import torch

    return torch.Size(values)


def change_place(metadata, **fields):
    for index, place in metadata.storage_data.items():
        if index.fqn == "model.up.weight":
            for name, value in fields.items():
                setattr(place, name, value)


@needs_torch
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: change_chunk(m, sizes=(4, 6)),
            "do not cover its shape .* without gap or overlap",
        ),
        (
            lambda m: change_chunk(m, sizes=(6, 6)),
            "do not cover its shape .* without gap or overlap",
        ),
        (lambda m: change_chunk(m, sizes=(10, 6)), r"which is not inside its shape \(9, 6\)"),
        (lambda m: change_chunk(m, offsets=(1, 0)), r"at \(1, 0\), which no file holds"),
        (lambda m: change_place(m, relative_path="../x"), r"in '\.\./x', which is not a place"),
        (lambda m: change_place(m, offset=-1), "is truncated"),
        (lambda m: change_place(m, length=10**12), "is truncated"),
        (lambda m: m.state_dict_metadata["model.up.weight"].chunks.pop(), "without gap or overlap"),
        (lambda m: m.storage_data.clear(), "which no file holds"),
        (lambda m: setattr(m, "storage_data", None), "it has no `storage_data`"),
    ],
)
def test_metadata_of_fsdp_that_lies(broken: Path, change, message: str):
    path = broken / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # our own
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=f"{broken}.*{message}"):
        interop.open_checkpoint(broken)


@needs_torch
def test_a_chunk_of_another_shape_or_dtype(broken: Path):
    path = broken / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    properties = metadata.state_dict_metadata["model.up.weight"].properties
    import torch

    properties.dtype = torch.float16
    path.write_bytes(pickle.dumps(metadata))
    checkpoint = interop.open_checkpoint(broken)
    with pytest.raises(ValueError, match=r"chunk of 'model\.up\.weight' .*float32.* says float16"):
        checkpoint["up.weight"].read()


def test_they_print_themselves_in_a_line():
    checkpoint = interop.open_checkpoint(DEEPSPEED / "zero3")
    path = repr(str(DEEPSPEED / "zero3" / "step3"))
    assert repr(checkpoint) == (
        f"<Checkpoint {path} (DeepSpeed ZeRO-3): 9 tensors of 952 B, float32 (9), 1 more names of "
        "them, optimizer state>"
    )
    assert repr(checkpoint.adam()) == (
        "<AdamMoments after 3 steps: 14 tensors of 1.57 KiB, float32 (14)>"
    )
    text = repr(checkpoint["up.weight"])  # of two files
    assert text.startswith("<LazyTensor float32[9, 6] of 'up.weight' in '") and len(text) < 300
