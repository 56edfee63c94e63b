"""Directories of DeepSpeed that lack files, or hold files that do not belong together."""

from __future__ import annotations

import collections
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxzero import interop

from . import tiny_checkpoint
from .deepspeed_files import change_optimizer

DEEPSPEED = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"


def copied(tmp_path: Path, case: str) -> Path:
    shutil.copytree(DEEPSPEED / case, tmp_path / case)
    return tmp_path / case / "step3"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_a_rank_is_missing(tmp_path: Path, case: str, rank: int):
    shutil.copytree(DEEPSPEED / case, tmp_path / case)
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    (tmp_path / case / "step3" / name).unlink()
    message = "but none like .* of rank 0" if rank == 0 else "of 1 processes, but 2 wrote them"
    with pytest.raises(ValueError, match=message):
        interop.open_checkpoint(tmp_path / case)


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


def test_latest_is_too_long_for_a_name(tmp_path: Path):
    (tmp_path / "latest").write_text("9" * 4096)
    with pytest.raises(ValueError, match=r"latest' names '9.*, which is not a directory beside it"):
        interop.open_checkpoint(tmp_path)


def test_the_directory_of_a_run_without_latest(tmp_path: Path):
    copied(tmp_path, "zero1")
    (tmp_path / "zero1" / "latest").unlink()
    with pytest.raises(ValueError, match=r"one of the directories in it that are .*: 'step3'\."):
        interop.open_checkpoint(tmp_path / "zero1")


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_the_file_of_one_process(kind: str):
    file = DEEPSPEED / "zero3" / "step3" / f"zero_pp_rank_0_mp_rank_00_{kind}_states.pt"
    for key in (None, "module"):
        with pytest.raises(ValueError, match=r"is one file of a checkpoint of DeepSpeed.*Give the"):
            interop.open_checkpoint(file, key=key)
    whole = interop.open_checkpoint(DEEPSPEED / "zero1" / "step3" / "mp_rank_00_model_states.pt")
    assert whole["up.weight"].shape == (9, 6)


@pytest.mark.parametrize("case", ["zero1", "zero1_bf16", "zero1_elastic", "zero2", "zero3"])
def test_a_file_that_is_a_copy_of_another(tmp_path: Path, case: str):
    step = copied(tmp_path, case)
    first, second = (step / f"{prefix_of(step)}_{i}_mp_rank_00_optim_states.pt" for i in range(2))
    shutil.copyfile(first, second)
    with pytest.raises(ValueError, match=r"rank_1.* holds the same elements as \w*zero_pp_rank_0"):
        interop.open_checkpoint(step)


def set_steps(step: Path, **counts: int) -> None:
    """Change counts of steps in the model states of all processes."""
    torch = pytest.importorskip("torch", reason="needs torch: it writes the model states")
    for file in step.glob("*_model_states.pt"):
        torch.save({**torch.load(file, weights_only=False), **counts}, file)


@pytest.mark.parametrize("case", ["zero3", "universal_zero3"])
def test_model_states_of_two_steps(tmp_path: Path, case: str):
    step = copied(tmp_path, case)
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    kept = (step / name).read_bytes()
    set_steps(step, global_steps=5)
    (step / name).write_bytes(kept)
    with pytest.raises(ValueError, match=r"rank_1.* is of step 3, but zero_pp_rank_0\S* of step 5"):
        interop.open_checkpoint(step)


@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_model_states_of_a_step_before_the_optimizer(tmp_path: Path, case: str):
    step = copied(tmp_path, case)
    set_steps(step, global_steps=2)
    with pytest.raises(ValueError, match=r"an optimizer's step 3, but \S*model_states.* step 2\."):
        interop.open_checkpoint(step)


def test_model_states_of_a_step_after_the_optimizer(tmp_path: Path, recwarn):
    step = copied(tmp_path, "zero3")
    set_steps(step, global_steps=5)
    with pytest.warns(UserWarning, match=r"of step 5\. .* buffers and frozen parameters, which"):
        interop.open_checkpoint(step)
    set_steps(step, global_steps=5, skipped_steps=1)
    with pytest.warns(UserWarning, match=r"of step 5, of which 1 were skipped\."):
        interop.open_checkpoint(step)
    recwarn.clear()
    set_steps(step, global_steps=5, skipped_steps=2)
    interop.open_checkpoint(step)
    # Stages 1 and 2 compare the parameters themselves, so there is no warning.
    first_stage = copied(tmp_path, "zero1")
    set_steps(first_stage, global_steps=5)
    interop.open_checkpoint(first_stage)
    assert not [str(each.message) for each in recwarn if each.category is UserWarning]


@pytest.mark.parametrize("entry", ["mu_product", "max_exp_avg_sq", "worker_error"])
@pytest.mark.parametrize("case", ["zero1", "zero1_elastic", "zero3"])
def test_entries_that_adam_lacks_are_noticed(tmp_path: Path, case: str, entry: str):
    """Those of NAdam and others; the three entries that they share with Adam were read."""
    torch = pytest.importorskip("torch", reason="needs torch: it writes the optimizer states")
    step = copied(tmp_path, case)

    def add(state: dict) -> None:
        held = state["optimizer_state_dict"]
        base = held["optimizer_state_dict" if case == "zero3" else "base_optimizer_state"]
        (base if isinstance(base, list) else base["state"])[0][entry] = torch.tensor(0.9)

    for file in step.glob("*_optim_states.pt"):
        change_optimizer(file, add)
    checkpoint = interop.open_checkpoint(step)
    with pytest.raises(ValueError, match=rf"optim_states.pt' has '{entry}': .* no other optimizer"):
        checkpoint.adam()
    wanted = interop.open_checkpoint(DEEPSPEED / case)
    np.testing.assert_array_equal(checkpoint["up.weight"].read(), wanted["up.weight"].read())


def prefix_of(step: Path) -> str:
    """What names of optimizer states begin with, which differs for `BF16_Optimizer`."""
    return next(step.glob("*_optim_states.pt")).name.partition("_rank_")[0] + "_rank"


NUM_RANKS, PIECE = 8, 100


def in_one_parameter(step: Path, trained: Callable[[int], Any]) -> Path:
    """ZeRO-2 of one parameter, of which inner processes hold neither start, middle nor end.

    `trained` gives the elements of a process.
    """
    torch = pytest.importorskip("torch", reason="needs torch: it writes the checkpoint")
    step.mkdir()
    whole = torch.arange(NUM_RANKS * PIECE, dtype=torch.float32)
    shapes = [collections.OrderedDict(w=whole.shape)]
    model = {"module": {"w": whole}, "param_shapes": shapes, "buffer_names": []}
    torch.save(model, step / "mp_rank_00_model_states.pt")
    for rank in range(NUM_RANKS):
        part = torch.as_tensor(trained(rank), dtype=torch.float32)
        state = {
            "zero_stage": 2,
            "partition_count": NUM_RANKS,
            "single_partition_of_fp32_groups": [part],
            "base_optimizer_state": {
                "state": {0: {"step": 2.0, "exp_avg": part * 10, "exp_avg_sq": part * part}}
            },
            "group_paddings": [0],
        }
        file = step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, file)
    return step


def piece(rank: int) -> np.ndarray:
    return np.arange(rank * PIECE, (rank + 1) * PIECE)


def test_every_process_is_compared_with_the_model(tmp_path: Path):
    found = interop.open_checkpoint(in_one_parameter(tmp_path / "right", piece))
    np.testing.assert_array_equal(found["w"].read(), np.arange(NUM_RANKS * PIECE))
    swapped = in_one_parameter(
        tmp_path / "swapped", lambda rank: piece({1: 2, 2: 1}.get(rank, rank))
    )
    with pytest.raises(ValueError, match=r"'w' .* differs from the model .* from element 100 on"):
        interop.open_checkpoint(swapped)


def test_a_universal_checkpoint_of_stage_3_that_is_damaged(tmp_path: Path):
    step = copied(tmp_path, "universal_zero3")
    (step / "zero" / "optimizer_state.pt").unlink()
    with pytest.raises(ValueError, match=r"zero' lacks optimizer_state\.pt"):
        interop.open_checkpoint(step).adam()
    shutil.copyfile(
        step / "zero" / "norm.bias" / "fp32.pt", step / "zero" / "up.weight" / "fp32.pt"
    )
    with pytest.raises(ValueError, match=r"up\.weight/fp32\.pt' has shape \(6,\), but .*\(9, 6\)"):
        interop.open_checkpoint(step)


def test_a_universal_checkpoint_lacks_a_file(tmp_path: Path):
    step = copied(tmp_path, "universal")
    (step / "zero" / "up.weight" / "exp_avg_sq.pt").unlink()
    checkpoint = interop.open_checkpoint(step)
    with pytest.raises(ValueError, match=r"up\.weight' lacks exp_avg_sq\.pt"):
        checkpoint.adam()
    (step / "zero" / "up.weight" / "fp32.pt").unlink()
    with pytest.raises(ValueError, match=r"up\.weight' lacks fp32\.pt"):
        interop.open_checkpoint(step)


def test_an_export_takes_the_config_from_the_directory_of_the_run(tmp_path: Path):
    """`latest` names a directory below, which has no `config.json` of its own."""
    torch = pytest.importorskip("torch", reason="needs torch: it writes the checkpoint")
    run = tiny_checkpoint.write(tmp_path / "run")
    (run / "model.safetensors").unlink()
    step = run / "step1"
    for name, array in tiny_checkpoint.tensors().items():
        (step / "zero" / name).mkdir(parents=True)
        torch.save({"param": torch.tensor(array)}, step / "zero" / name / "fp32.pt")
    torch.save({"module": {}}, step / "mp_rank_00_model_states.pt")
    (run / "latest_universal").write_text("step1")
    loaded = interop.load_encoder(run)
    params = jax.tree.map(lambda tensor: tensor.read(), loaded.params)
    export = interop.export_encoder(params, tmp_path / "export", source=run)
    written = {path.relative_to(export).as_posix() for path in export.rglob("*") if path.is_file()}
    assert {"config.json", "tokenizer.json", "1_Pooling/config.json"} <= written
    assert interop.open_checkpoint(export).keys() == tiny_checkpoint.tensors().keys()
