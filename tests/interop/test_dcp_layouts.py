"""Dicts that people save with `torch.distributed.checkpoint`: names of model and moments agree."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxzero import interop

torch = pytest.importorskip("torch", reason="needs torch: it writes the checkpoints")

NAMES = ("state.weight", "cell.state.weight", "up.weight")


def save(content: dict, directory: Path, **options: Any) -> Path:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(content, storage_writer=FileSystemWriter(directory), no_dist=True, **options)
    return directory


def weights(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 3, generator=generator) for name in NAMES}


def state_of(model: dict, *, step: float = 2.0, scale: float = 1.0) -> dict:
    """As `get_optimizer_state_dict` gives it: by name, with groups."""
    state = {
        name: {
            "exp_avg": scale * 10 * value,
            "exp_avg_sq": scale * value**2,
            "step": torch.tensor(step),
        }
        for name, value in model.items()
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(model)}]}


def flat(state: dict) -> dict:
    """As with `flatten_optimizer_state_dict`."""
    return {
        f"state.{name}.{key}": value
        for name, held in state["state"].items()
        for key, value in held.items()
    } | {f"param_groups.{name}.lr": 0.1 for name in state["state"]}


def layouts(model: dict) -> dict[str, dict]:
    optimizer = state_of(model)
    return {
        "plain": {"model": model, "optim": optimizer},
        "application": {"app": {"model": model, "optim": optimizer}},
        "with tensors beside it": {"model": model, "optim": optimizer, "rng": torch.arange(5)},
        "flat": {"model": model, "optim": flat(optimizer)},
        "torchtitan": {**model, "optimizer": flat(optimizer), "lr_scheduler": {"last_epoch": 3}},
    }


def check(checkpoint: interop.Checkpoint, model: dict, **options: float) -> None:
    expected, moments = state_of(model, **options), checkpoint.adam()
    assert moments.step == 2 and moments.exp_avg.keys() == model.keys()
    for name, value in model.items():
        np.testing.assert_array_equal(checkpoint[name].read(), value.numpy(), err_msg=name)
        for kind in ("exp_avg", "exp_avg_sq"):
            held, wanted = getattr(moments, kind)[name], expected["state"][name][kind]
            np.testing.assert_array_equal(held.read(), wanted.numpy(), err_msg=f"{kind} {name}")


@pytest.mark.parametrize("layout", layouts(weights()))
def test_names_of_model_and_moments(layout: str, tmp_path: Path):
    checkpoint = interop.open_checkpoint(save(layouts(weights())[layout], tmp_path / "dcp"))
    assert set(checkpoint) - {"rng"} == set(NAMES)
    check(checkpoint, weights())


def test_what_was_not_flattened(tmp_path: Path):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    model = weights()
    content = {f"model.{name}": value for name, value in model.items()}
    content |= {f"optim.{name}": value for name, value in flat(state_of(model)).items()}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    checkpoint = interop.open_checkpoint(save(content, tmp_path / "dcp", planner=planner))
    assert checkpoint.keys() == {f"model.{name}" for name in NAMES}


def test_two_models_are_told_apart_by_key(tmp_path: Path):
    content = {"model": weights(), "ema": weights(1), "optim": state_of(weights())}
    path = save(content, tmp_path / "dcp")
    both = interop.open_checkpoint(path)
    assert len(both) == 6
    with pytest.raises(ValueError, match=r"has a state for 'state\.weight', but no .* `key=`"):
        both.adam()
    check(interop.open_checkpoint(path, key="model"), weights())
    averaged = interop.open_checkpoint(path, key="ema")
    np.testing.assert_array_equal(averaged["up.weight"].read(), weights(1)["up.weight"].numpy())
    with pytest.raises(ValueError, match=r"must be one of 'ema', 'model', .*; got 'mdel'"):
        interop.open_checkpoint(path, key="mdel")


def test_two_optimizers(tmp_path: Path):
    """Those of two models have states under the same names; those of one model share it."""
    model = weights()
    content = {"gen": model, "disc": weights(1), "optim_g": state_of(model)}
    content["optim_d"] = state_of(weights(1), step=9.0)
    for key in (None, "gen"):
        checkpoint = interop.open_checkpoint(save(content, tmp_path / "gan"), key=key)
        with pytest.raises(ValueError, match=r"two optimizers, 'optim_g' and 'optim_d', with a st"):
            checkpoint.adam()
    first = {"state.weight": model["state.weight"]}
    rest = {name: model[name] for name in NAMES[1:]}
    content = {"model": model, "optims": [state_of(first), state_of(rest)]}
    check(interop.open_checkpoint(save(content, tmp_path / "shared")), model)


def numbered(order: tuple[str, ...], sizes: tuple[int, ...], **options: Any) -> dict:
    """`optimizer.state_dict()`: the parameters have numbers, in groups of the given sizes."""
    model = weights()
    state = [state_of(model)["state"][name] for name in order]
    groups, begin = [], 0
    for size in sizes:
        of_group = {key: names[begin : begin + size] for key, names in options.items()}
        groups.append({"lr": 0.1, "params": list(range(begin, begin + size)), **of_group})
        begin += size
    return {"model": model, "optim": {"state": dict(enumerate(state)), "param_groups": groups}}


def test_numbers_in_groups_are_not_guessed(tmp_path: Path):
    """All shapes are equal, so that nothing else shows the order of the groups."""
    order = (NAMES[1], NAMES[0], NAMES[2])
    checkpoint = interop.open_checkpoint(save(numbered(order, (1, 2)), tmp_path / "a"))
    with pytest.raises(ValueError, match=r"identifies its 3 parameters by number.*`names=`"):
        checkpoint.adam()
    moments = checkpoint.adam(order)
    for name, value in weights().items():
        np.testing.assert_array_equal(moments.exp_avg[name].read(), (10 * value).numpy())
    named = numbered(order, (1, 2), param_names=list(order))
    check(interop.open_checkpoint(save(named, tmp_path / "b")), weights())
    check(interop.open_checkpoint(save(numbered(NAMES, (3,)), tmp_path / "c")), weights())


@pytest.mark.parametrize("key", ["momentum_buffer", "square_avg", "sum"])
def test_states_of_other_optimizers_are_no_weights(key: str, tmp_path: Path):
    model = weights()
    state = {name: {key: value} for name, value in model.items()}
    content = {"model": model, "optim": {"state": state, "param_groups": [{"lr": 0.1}]}}
    checkpoint = interop.open_checkpoint(save(content, tmp_path / "dcp"))
    assert checkpoint.keys() == set(NAMES)
    with pytest.raises(ValueError, match="holds no optimizer state of Adam"):
        checkpoint.adam()
