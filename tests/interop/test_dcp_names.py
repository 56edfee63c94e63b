"""Which tensors of a distributed checkpoint are the model's, where names do not say it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxzero import interop

torch = pytest.importorskip("torch", reason="needs torch: it writes the checkpoints")

from .test_dcp_layouts import flat, save, state_of  # noqa: E402  # it is skipped without torch


def filled(*names: str, begin: int = 0) -> dict[str, Any]:
    return {name: torch.full((2, 2), float(begin + number)) for number, name in enumerate(names, 1)}


def firsts(tensors: Any) -> dict[str, float]:
    return {name: float(tensors[name].read().flat[0]) for name in tensors}


def save_copies(content: dict, directory: Path, **options: Any) -> Path:
    """Save as two processes do that hold copies of all tensors: each writes one half."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    planners = [DefaultSavePlanner(**options) for _ in range(2)]
    writers = [FileSystemWriter(directory) for _ in range(2)]
    plans = []
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        planner.set_up_planner(content, None, rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    results = []
    for planner, writer, plan in zip(
        planners, writers, writers[0].prepare_global_plan(plans), strict=True
    ):
        written = writer.write_data(planner.finish_plan(plan), planner)
        written.wait()
        results.append(written.value())
    writers[0].finish(metadata, results)
    weights = [name for name in metadata.state_dict_metadata if name[-1] in "abcd"]
    assert weights != sorted(weights), "this order would show nothing"
    return directory


def test_copies_of_two_processes_are_matched_in_the_order_of_the_model(tmp_path: Path):
    model = filled("a", "b", "c", "d")
    state = dict(enumerate(state_of(model)["state"].values()))
    groups = [{"lr": 0.1, "params": [0, 1, 2, 3]}]
    content = {"model": model, "optim": {"state": state, "param_groups": groups}}
    checkpoint = interop.open_checkpoint(save_copies(content, tmp_path / "dcp"))
    assert list(checkpoint) == list(model)
    expected = {name: 10 * value for name, value in firsts(checkpoint).items()}
    assert firsts(checkpoint.adam().exp_avg) == expected


@pytest.mark.parametrize("kept", [None, "param_groups", "param_names"])
def test_numbers_need_names_if_the_order_was_not_saved(kept: str | None, tmp_path: Path):
    model = filled("a", "b", "c", "d")
    content = {f"model.{name}": value for name, value in model.items()}
    for number, held in enumerate(state_of(model)["state"].values()):
        content |= {f"optim.state.{number}.{key}": value for key, value in held.items()}
    group = {"lr": 0.1, "params": [0, 1, 2, 3]}
    if kept == "param_names":
        group["param_names"] = list(model)
    if kept is not None:
        content["optim.param_groups"] = [group]
    path = save_copies(content, tmp_path / "dcp", flatten_state_dict=False)
    checkpoint = interop.open_checkpoint(path, key="model")
    lost = "the order of the model's" if kept else "its groups"
    if kept != "param_names":
        with pytest.raises(ValueError, match=rf"4 .* by number, and {lost} .* Pass `names=`"):
            checkpoint.adam()
    expected = {name: 10 * value for name, value in firsts(checkpoint).items()}
    names = None if kept == "param_names" else list(model)
    assert firsts(checkpoint.adam(names).exp_avg) == expected


@pytest.mark.parametrize("kind", ["exp_avg", "momentum_buffer", "square_avg", "sum"])
@pytest.mark.parametrize("flatten", [True, False])
def test_modules_called_state_are_the_model_s(kind: str, flatten: bool, tmp_path: Path):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    model = filled(f"state.cell.{kind}", "state.cell.weight", "up.weight")
    content: dict[str, Any] = {"model": model, "step": torch.tensor(1)}
    if not flatten:
        content = {f"model.{name}": value for name, value in model.items()}
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    path = save(content, tmp_path / "dcp", planner=planner)
    checkpoint = interop.open_checkpoint(path, key="model")
    assert firsts(checkpoint) == {name: float(value[0, 0]) for name, value in model.items()}
    assert len(interop.open_checkpoint(path)) == len(model) + flatten


@pytest.mark.parametrize("layout", ["nested", "flat", "flat beside the model", "flat, no groups"])
def test_modules_called_state_beside_an_optimizer(layout: str, tmp_path: Path):
    model = filled("state.cell.sum", "up.weight")
    trained = {"up.weight": model["up.weight"]}
    flattened = flat(state_of(trained))
    ungrouped = {name: value for name, value in flattened.items() if name.startswith("state.")}
    content = {
        "nested": {"model": model, "optim": state_of(trained)},
        "flat": {"model": model, "optim": flattened},
        "flat beside the model": model | flattened,
        "flat, no groups": {"model": model, "optim": ungrouped},
    }[layout]
    checkpoint = interop.open_checkpoint(save(content, tmp_path / "dcp"))
    assert firsts(checkpoint) == {"state.cell.sum": 1, "up.weight": 2}
    assert firsts(checkpoint.adam().exp_avg) == {"up.weight": 20}


def test_state_beside_a_model_under_one_key(tmp_path: Path):
    model = filled("a", "b")
    content = {"train": {"model": model, "state": state_of(model)["state"]}}
    checkpoint = interop.open_checkpoint(save(content, tmp_path / "dcp"))
    assert firsts(checkpoint) == {"a": 1, "b": 2}
    assert firsts(checkpoint.adam().exp_avg) == {"a": 10, "b": 20}


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_wrapped_model_beside_another(prefix: str, tmp_path: Path):
    model = filled("w", "v")
    wrapped = {f"{prefix}{name}": value for name, value in model.items()}
    content = {"model": wrapped, "ema": filled("w", "v", begin=8), "optim": state_of(model)}
    path = save(content, tmp_path / "dcp")
    inside = prefix if prefix == "module." else ""
    names = {f"model.{inside}w": 1, f"model.{inside}v": 2, "ema.w": 9, "ema.v": 10}
    both = interop.open_checkpoint(path)
    assert firsts(both) == names
    with pytest.raises(ValueError, match=r"has a state for 'w', but no .* `key=`"):
        both.adam()
    assert firsts(interop.open_checkpoint(path, key="ema")) == {"w": 9, "v": 10}
    chosen = interop.open_checkpoint(path, key="model")
    assert firsts(chosen) == {f"{inside}w": 1, f"{inside}v": 2}
    if inside:
        with pytest.raises(
            ValueError, match=r"there are 'module\.w'.* save both with `get_state_di"
        ):
            chosen.adam()
    else:
        assert firsts(chosen.adam().exp_avg) == {"w": 10, "v": 20}
    content = {"app": content}
    nested = interop.open_checkpoint(save(content, tmp_path / "app"))
    assert firsts(nested) == {f"app.{name}": value for name, value in names.items()}


@pytest.mark.parametrize("wrapper", ["_orig_mod.", ""])
def test_wrapped_model_beside_a_tensor(wrapper: str, tmp_path: Path):
    model = filled("w", "v")
    content = {
        "model": {f"{wrapper}{name}": value for name, value in model.items()},
        "rng": torch.arange(3),
        "optim": state_of(model),
    }
    checkpoint = interop.open_checkpoint(save(content, tmp_path / "dcp"))
    assert checkpoint.keys() == {"w", "v", "rng"}
    assert firsts(checkpoint.adam().exp_avg) == {"w": 10, "v": 20}


def test_a_model_under_the_key_module(tmp_path: Path):
    model = filled("w", "v")
    content = {"module": model, "rng": torch.arange(3), "optim": state_of(model)}
    checkpoint = interop.open_checkpoint(save(content, tmp_path / "dcp"))
    assert checkpoint.keys() == {"w", "v", "rng"}


def test_a_name_without_wrappers_that_is_another_tensor_s(tmp_path: Path):
    content = {"model": filled("_orig_mod.w"), "w": torch.arange(2), "optim": state_of(filled("w"))}
    checkpoint = interop.open_checkpoint(save(content, tmp_path / "dcp"), key="model")
    assert firsts(checkpoint) == {"w": 1}
    whole = interop.open_checkpoint(tmp_path / "dcp")
    assert whole.keys() == {"model.w", "w"}


@pytest.mark.parametrize("key", [None, "gen"])
def test_two_optimizers_whose_names_differ_by_a_wrapper(key: str | None, tmp_path: Path):
    content = {"gen": filled("w"), "disc": filled("_orig_mod.w", begin=2)}
    content |= {"og": state_of(content["gen"]), "od": state_of(content["disc"])}
    checkpoint = interop.open_checkpoint(save(content, tmp_path / "dcp"), key=key)
    with pytest.raises(
        ValueError, match=r"two optimizers, 'og' and 'od', .* 'w' and '_orig_mod\.w"
    ):
        checkpoint.adam()


def test_two_states_for_one_parameter(tmp_path: Path):
    content = {"model": filled("w"), "optim": state_of(filled("w", "_orig_mod.w"))}
    checkpoint = interop.open_checkpoint(save(content, tmp_path / "dcp"))
    with pytest.raises(ValueError, match=r"'optim' .* 'w' and one for '_orig_mod\.w', .* one name"):
        checkpoint.adam()


def test_key_for_names_that_were_not_flattened(tmp_path: Path):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    model = filled("cell.state.weight", "up.weight")
    content = {f"app.model.{name}": value for name, value in model.items()}
    content |= {f"app.optim.{name}": value for name, value in flat(state_of(model)).items()}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    path = save(content, tmp_path / "dcp", planner=planner)
    with pytest.raises(ValueError, match=r"no tensor .* `key=`"):
        interop.open_checkpoint(path).adam()
    checkpoint = interop.open_checkpoint(path, key="app.model")
    assert firsts(checkpoint) == {"cell.state.weight": 1, "up.weight": 2}
    moments = checkpoint.adam()
    assert firsts(moments.exp_avg) == {"cell.state.weight": 10, "up.weight": 20}
    np.testing.assert_array_equal(moments.exp_avg_sq["up.weight"].read(), np.full((2, 2), 4))
    with pytest.raises(ValueError, match=r"`key` must be one of 'app', .*'app\.model'.* got 'mod'"):
        interop.open_checkpoint(path, key="mod")
