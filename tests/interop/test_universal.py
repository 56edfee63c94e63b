"""Universal checkpoints that `ds_to_universal.py` makes of tensor and pipeline parallelism.

They are made here from checkpoints without these, as DeepSpeed 0.19.8 would write them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxzero import interop

from .deepspeed_files import change_optimizer

torch = pytest.importorskip("torch", reason="needs torch: it writes the checkpoints")

DEEPSPEED = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"
MOMENTS = ("exp_avg", "exp_avg_sq")
MATRICES = ("embed.weight", "up.weight", "down.weight")


def copied(tmp_path: Path, case: str) -> Path:
    return Path(shutil.copytree(DEEPSPEED / case / "step3", tmp_path / "step3"))


def load(file: Path) -> Any:
    return torch.load(file, weights_only=False)


def change_model(file: Path, change: Callable[[dict], None], to: Path | None = None) -> None:
    state = load(file)
    change(state)
    torch.save(state, to or file)


def without_frozen(state: dict) -> None:
    del state["module"]["frozen.weight"]
    state["frozen_param_shapes"] = {}


def part(tensor, rank: int):
    """Of two parts, rows of the first are more where they cannot be halved."""
    return tensor.chunk(2)[rank].clone()


def two_parts(step: Path, *names: str, change: Callable[[dict], None] | None = None) -> None:
    """Cut parameters of the model of stage 1 or 2 in two: files of two processes."""
    file = step / "mp_rank_00_model_states.pt"
    whole = load(file)
    for rank in range(2):
        state = {**whole, "module": dict(whole["module"])}
        if change is not None:
            change(state)
        for name in names:
            state["module"][name] = part(whole["module"][name], rank)
        torch.save(state, step / f"mp_rank_0{rank}_model_states.pt")


def check_same(step: Path, case: str, *, without: tuple[str, ...] = ()) -> None:
    """Compare parameters and moments with those of the checkpoint that was changed."""
    found, wanted = (interop.open_checkpoint(path) for path in (step, DEEPSPEED / case))
    assert found.keys() == wanted.keys() - set(without)
    moments = [(getattr(x.adam(), kind) for kind in MOMENTS) for x in (found, wanted)]
    for ours, theirs in ((found, wanted), *zip(*moments, strict=True)):
        for name in ours:
            np.testing.assert_array_equal(ours[name].read(), theirs[name].read(), err_msg=name)
    assert found.adam().step == wanted.adam().step == 3


def test_a_frozen_parameter_that_was_cut(tmp_path: Path):
    """The converter writes the part of the first process to `zero`."""
    step = copied(tmp_path, "universal")
    file = step / "zero" / "frozen.weight" / "fp32.pt"
    torch.save({"param": part(load(file)["param"], 0)}, file)
    two_parts(step, "frozen.weight")
    with pytest.raises(NotImplementedError, match=r"'frozen\.weight' \(1 such .*mp_rank_01_model"):
        interop.open_checkpoint(step)
    shutil.rmtree(file.parent)
    with pytest.raises(NotImplementedError, match=r"'frozen\.weight' \(1 such .*mp_rank_01_model"):
        interop.open_checkpoint(step)


def test_frozen_fragments_of_one_part(tmp_path: Path):
    step = copied(tmp_path, "universal_zero3")
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_0{{}}_model_states.pt"
        shutil.copyfile(step / name.format(0), step / name.format(1))
    with pytest.raises(NotImplementedError, match=r"'frozen\.weight' \(1 such .*_mp_rank_01_model"):
        interop.open_checkpoint(step)


def test_what_has_no_optimizer_state_keeps_its_dtype(tmp_path: Path):
    """The converter writes buffers as float32, which cannot represent 2**24 + 1."""
    step = copied(tmp_path, "universal")
    number = torch.tensor([2**24 + 1])
    half = torch.tensor([[0.1, -3.0]], dtype=torch.bfloat16)

    def change(state):
        state["module"] |= {"numbers": number, "half.weight": half}
        state["buffer_names"].append("numbers")

    change_model(step / "mp_rank_00_model_states.pt", change)
    for name, tensor in {"numbers": number, "half.weight": half}.items():
        (step / "zero" / name).mkdir()
        torch.save({"param": tensor.float()}, step / "zero" / name / "fp32.pt")
    found = interop.open_checkpoint(step)
    assert found["numbers"].dtype == np.int64 and found["numbers"].read() == [2**24 + 1]
    assert found["half.weight"].dtype.name == "bfloat16"
    np.testing.assert_array_equal(found["half.weight"].read().astype(float), half.double().numpy())


def test_a_copy_of_another_shape(tmp_path: Path):
    step = copied(tmp_path, "universal")
    torch.save({"param": torch.zeros(3, 6)}, step / "zero" / "frozen.weight" / "fp32.pt")
    with pytest.raises(
        ValueError, match=r"frozen\.weight/fp32\.pt' has shape \(3, 6\), .*\(6, 6\)"
    ):
        interop.open_checkpoint(step)


def test_tensor_parallelism(tmp_path: Path):
    """Trained parameters were merged; `head.weight` is a second name, of which parts are left."""
    step = copied(tmp_path, "universal")
    shutil.rmtree(step / "zero" / "frozen.weight")
    file = step / "zero" / "head.weight" / "fp32.pt"
    torch.save({"param": part(load(file)["param"], 0)}, file)
    two_parts(step, *MATRICES, "head.weight", change=without_frozen)
    check_same(step, "universal", without=("frozen.weight",))
    assert interop.open_checkpoint(step).aliases == {"head.weight": "embed.weight"}


def merged_stage_3(step: Path) -> None:
    """As of two processes of tensor parallelism: shapes of parts, and tensors in their own."""
    shapes = {}
    for rank in range(2):
        file = step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        whole = load(file)
        for piece in range(2):
            state = {**whole, "module": dict(whole["module"])}
            without_frozen(state)
            shapes = {name: s for group in whole["param_shapes"] for name, s in group.items()}
            state["param_shapes"] = [
                {
                    name: part(torch.empty(shape), piece).shape if name in MATRICES else shape
                    for name, shape in group.items()
                }
                for group in whole["param_shapes"]
            ]
            name = file.name.replace("_mp_rank_00", f"_mp_rank_0{piece}")
            torch.save(state, step / name)
    for name, shape in shapes.items():
        for kind in ("fp32", *MOMENTS):
            file = step / "zero" / name / f"{kind}.pt"
            torch.save({"cat_dim": 0, "param": load(file).reshape(shape)}, file)


def test_tensor_parallelism_of_stage_3(tmp_path: Path):
    step = copied(tmp_path, "universal_zero3")
    merged_stage_3(step)
    check_same(step, "universal_zero3", without=("frozen.weight",))


@pytest.mark.parametrize("shape", [(54,), (6, 9), (54, 1), (3, 3, 6)])
def test_a_merged_tensor_of_another_shape(tmp_path: Path, shape: tuple[int, ...]):
    step = copied(tmp_path, "universal_zero3")
    merged_stage_3(step)
    file = step / "zero" / "up.weight" / "fp32.pt"
    torch.save({"cat_dim": 0, "param": load(file)["param"].reshape(shape)}, file)
    with pytest.raises(ValueError, match=r"up\.weight/fp32\.pt' has shape .*gives \(5, 6\)"):
        interop.open_checkpoint(step)


def test_a_pipeline(tmp_path: Path):
    """Its model states hold no model; what was not trained is in files that are not converted."""
    step = copied(tmp_path, "universal")
    for name in ("frozen.weight", "head.weight", "scale"):
        shutil.rmtree(step / "zero" / name)
    file = step / "mp_rank_00_model_states.pt"
    for rank in (1, 0):
        to = step / f"mp_rank_0{rank}_model_states.pt"
        change_model(file, lambda state: state.update(module=None, shared_params={}), to)
    check_same(step, "universal", without=("frozen.weight", "head.weight", "scale"))


def test_a_pipeline_that_was_not_converted(tmp_path: Path):
    step = Path(shutil.copytree(DEEPSPEED / "zero1" / "step3", tmp_path / "step3"))
    change_model(step / "mp_rank_00_model_states.pt", lambda state: state.update(module=None))
    with pytest.raises(ValueError, match="has no `module`"):
        interop.open_checkpoint(step)


def test_a_folder_of_no_parameter(tmp_path: Path):
    step = copied(tmp_path, "universal_zero3")
    shutil.copytree(step / "zero" / "up.weight", step / "zero" / "other.weight")
    with pytest.raises(ValueError, match=r"other\.weight' is of no parameter that `param_shapes`"):
        interop.open_checkpoint(step)


@pytest.mark.parametrize("case", ["universal", "universal_zero3"])
def test_other_optimizers_are_noticed(tmp_path: Path, case: str):
    step = copied(tmp_path, case)
    torch.save(torch.zeros(54), step / "zero" / "up.weight" / "max_exp_avg_sq.pt")
    with pytest.raises(ValueError, match=r"'up\.weight' has 'max_exp_avg_sq': .* no other opt"):
        interop.open_checkpoint(step).adam()
    (step / "zero" / "up.weight" / "max_exp_avg_sq.pt").unlink()
    file = step / "zero" / "optimizer_state.pt"  # all that converters before Muon kept of it
    kept = file.read_bytes()

    def set_option(option: str, value: object) -> None:
        change_optimizer(file, lambda state: state["param_groups"][0].update({option: value}))

    for option, value in (("momentum_decay", 0.004), ("amsgrad", True)):
        set_option(option, value)
        with pytest.raises(ValueError, match=rf"optimizer_state\.pt' has the option `{option}`, "):
            interop.open_checkpoint(step).adam()
        file.write_bytes(kept)
    set_option("amsgrad", False)
    assert interop.open_checkpoint(step).adam().step == 3
    if case == "universal_zero3":
        change_optimizer(
            file,
            lambda state: state["optimizer_state_dict"]["state"][0].update(mu_product=0.9),
        )
        with pytest.raises(ValueError, match=r"optimizer_state\.pt' has 'mu_product'"):
            interop.open_checkpoint(step).adam()
    wanted = interop.open_checkpoint(DEEPSPEED / case)["up.weight"].read()
    np.testing.assert_array_equal(interop.open_checkpoint(step)["up.weight"].read(), wanted)


def test_what_another_optimizer_trained_is_read_in_float32(tmp_path: Path):
    """Of Muon there are no means: its parameters were taken for frozen, and read as computed with.

    `ds_to_universal.py` of DeepSpeed after 0.19.8 writes what each optimizer keeps.
    """
    step = copied(tmp_path, "universal")
    change_model(
        step / "mp_rank_00_model_states.pt",
        lambda state: state["module"].update({n: state["module"][n].bfloat16() for n in MATRICES}),
    )
    for name in MATRICES:
        for kind in (*MOMENTS, "step"):
            (step / "zero" / name / f"{kind}.pt").unlink()
        torch.save({"param": torch.zeros(1)}, step / "zero" / name / "momentum_buffer.pt")
    found, wanted = (interop.open_checkpoint(x) for x in (step, DEEPSPEED / "universal"))
    for name in wanted:
        np.testing.assert_array_equal(found[name].read(), wanted[name].read(), strict=True)
    with pytest.raises(ValueError, match=r"has 'momentum_buffer': .* no other optimizer is read"):
        found.adam()
