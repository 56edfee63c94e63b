"""Checkpoints of DeepSpeed whose sizes or shapes are wrong: refused by name, nothing is shifted."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxzero import interop
from jaxzero.interop._torch import model_state, zero_partitions

DEEPSPEED = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"
STAGES_1_2 = ["zero1", "zero1_bf16", "zero1_elastic", "zero2", "zero2_round_robin"]
Change = Callable[[Any], Any]


def opened(monkeypatch, case: str, *, model: Change | None = None, optimizer: Change | None = None):
    """Open a checkpoint after its pickled states were changed."""
    for module, change in ((model_state, model), (zero_partitions, optimizer)):
        if change is None:
            continue
        read = module.read_torch_file

        def changed(file, *, records=(), change=change, read=read):
            state = read(file, records=records)
            change(state)
            return state

        monkeypatch.setattr(module, "read_torch_file", changed)
    return interop.open_checkpoint(DEEPSPEED / case)


def shapes_changed(change: Callable[[dict], dict]) -> Change:
    """Replace the shapes of the first group."""

    def changed(state: Any) -> None:
        state["param_shapes"][0] = change(state["param_shapes"][0])

    return changed


def reverse(group: dict) -> dict:
    return collections.OrderedDict(reversed(group.items()))


def with_first(group: dict, shape: tuple) -> dict:
    first, *rest = group
    return {first: shape, **{name: group[name] for name in rest}}


@pytest.mark.parametrize("case", [*STAGES_1_2, "zero3"])
@pytest.mark.parametrize(
    "change",
    [
        reverse,
        lambda group: with_first(group, (10, 6)),
        lambda group: with_first(group, (12, 6)),
        lambda group: with_first(group, (11, True)),
        lambda group: with_first(group, (11, -6)),
        lambda group: with_first(group, (11, 6.0)),
        lambda group: with_first(group, (6, 11)),
        lambda group: dict(list(group.items())[1:]),
        lambda group: {**group, "more": (2,)},
        lambda group: {**group, "down.bias": (6,)},
        lambda group: {5: (11, 6), **dict(list(group.items())[1:])},
    ],
)
def test_shapes(monkeypatch, case: str, change):
    if case == "zero3" and change(dict(a=(11, 6), b=(1,))) == dict(a=(6, 11), b=(1,)):
        pytest.skip("stage 3 stores a parameter's shape in one place only")
    with pytest.raises(ValueError, match=f"{DEEPSPEED / case}") as caught:
        opened(monkeypatch, case, model=shapes_changed(change))
    assert "Copy" in str(caught.value) or "different checkpoints" in str(caught.value)


@pytest.mark.parametrize("case", [*STAGES_1_2, "zero3"])
def test_a_model_that_lacks_what_was_trained(monkeypatch, case: str):
    """Without the model, nothing would show that the shapes are in another order."""

    def emptied(state):
        state["module"] = {}
        shapes_changed(reverse)(state)

    def without_one(state):
        del state["module"]["norm.bias"]

    def no_tensor(state):
        state["module"]["norm.bias"] = None

    for change in (emptied, without_one, *([no_tensor] if case != "zero3" else [])):
        with (
            monkeypatch.context() as patch,
            pytest.raises(ValueError, match=r"model_states\.pt' gives '\S+' a shape, but the "),
        ):
            opened(patch, case, model=change)


def test_a_model_that_lacks_what_was_frozen(monkeypatch):
    def change(state):
        del state["module"]["frozen.weight"]

    with pytest.raises(ValueError, match=r"gives 'frozen\.weight' a shape, but the model there"):
        opened(monkeypatch, "zero2", model=change)


@pytest.mark.parametrize("case", ["zero1", "zero2"])
@pytest.mark.parametrize(
    "paddings",
    [
        [[0, 0, 0], [0, 0, 0, 1]],
        [[-2, 2, 0], [3, 2, 2, 0]],
        [[2, 2, 0], [3, 2, 2, 2]],
        [[2, 2, 0], [3, 2, 2]],
        [[2, 2, 0]],
        [[True, 0, 0], [0, 0, 0, 0]],
        [[2, 4, 0], [3, 2, 2, 0]],
        [[6, 10, 0], [7, 10, 10, 0]],
        3,
    ],
)
def test_alignment_paddings(monkeypatch, case: str, paddings):
    def change(state):
        state["optimizer_state_dict"]["param_alignment_paddings"] = paddings

    with pytest.raises(ValueError, match=r"optim_states\.pt' (has|gives)"):
        opened(monkeypatch, case, optimizer=change)


def test_paddings_that_are_not_one_for_each_parameter(monkeypatch):
    def change(state):
        state["optimizer_state_dict"]["param_alignment_paddings"] = [[0]]

    message = r"optim_states\.pt' has 1 paddings for the 3 parameters of group 0"
    with pytest.raises(ValueError, match=message):
        opened(monkeypatch, "zero2", optimizer=change)


def test_alignment_paddings_of_the_right_sum(monkeypatch):
    """In other places they would shift parameters, and no size would show it."""

    def change(state):
        assert state["optimizer_state_dict"]["param_alignment_paddings"] == [
            [2, 2, 0],
            [3, 2, 2, 0],
        ]
        state["optimizer_state_dict"]["param_alignment_paddings"] = [[4, 0, 0], [3, 2, 2, 0]]

    with pytest.raises(ValueError, match=r"paddings \[4, 0, 0\] .*which no alignment"):
        opened(monkeypatch, "zero1", optimizer=change)


def test_paddings_that_were_zeroed_or_added(monkeypatch):
    def zeroed(state):
        state["optimizer_state_dict"]["param_alignment_paddings"] = [[0] * 3, [0] * 4]

    def added(state):
        state["optimizer_state_dict"]["param_alignment_paddings"] = [[2, 2, 0], [3, 2, 2, 0]]

    for case, change in (("zero1", zeroed), ("zero2", added)):
        with (
            monkeypatch.context() as patch,
            pytest.raises(ValueError, match="of group 0|group 0 a"),
        ):
            opened(patch, case, optimizer=change)


@pytest.mark.parametrize("case", STAGES_1_2)
def test_group_paddings(monkeypatch, case: str):
    def change(state):
        state["optimizer_state_dict"]["group_paddings"] = [0, 1]

    with pytest.raises(ValueError, match=r"gives group \d a padding of \d \(`group_paddings`\)"):
        opened(monkeypatch, case, optimizer=change)


@pytest.mark.parametrize("case", [*STAGES_1_2, "zero3"])
@pytest.mark.parametrize("key", ["fp32", "exp_avg"])
def test_flat_tensors_that_are_cut_short(monkeypatch, case: str, key: str):
    def change(state):
        state = state["optimizer_state_dict"]
        if key == "fp32":
            flat = state.get("fp32_flat_groups") or state["single_partition_of_fp32_groups"]
            flat[1] = flat[1].narrow(0, 0, flat[1].size - 1)
            return
        base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
        held = base["state"][1] if isinstance(base, dict) else base[1]
        held[key] = held[key].narrow(0, 0, held[key].size - 1)

    with pytest.raises(ValueError, match=rf"`{key}` of group 1 in .*optim_states\.pt' has \d+ ele"):
        opened(monkeypatch, case, optimizer=change)


def test_processes_that_describe_other_shapes(monkeypatch):
    def change(state, seen=[]):  # noqa: B006 (counts the calls)
        seen.append(state)
        if len(seen) == 2:
            state["param_shapes"][2] = reverse(state["param_shapes"][2])

    with pytest.raises(ValueError, match=r"`param_shapes` of .*rank_1.* differs from that of"):
        opened(monkeypatch, "zero3", model=change)


@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_processes_at_other_steps(monkeypatch, case: str):
    def change(state, seen=[]):  # noqa: B006 (counts the calls)
        seen.append(state)
        if len(seen) == 2:
            held = state["optimizer_state_dict"]
            base = held.get("base_optimizer_state", held.get("optimizer_state_dict"))
            for each in base["state"].values():
                each["step"] = 8

    with pytest.raises(ValueError, match=r"rank_1.* is of step \[8\], but zero_pp_rank_0.* \[3\]"):
        opened(monkeypatch, case, optimizer=change)


def test_a_tied_weight_that_is_another_parameter(monkeypatch):
    def change(state):
        state["shared_params"] = {"norm.weight": "norm.bias"}

    for case in ("zero2", "zero3"):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="`shared_params` in"):
            opened(patch, case, model=change)


def test_a_tied_weight_of_another_shape(monkeypatch):
    """Frozen, so that it has no optimizer state that would show it to be a parameter."""

    def change(state):
        state["shared_params"] = {"frozen.weight": "norm.weight"}

    with pytest.raises(ValueError, match="'frozen.weight' is 'norm.weight', but it has a shape"):
        opened(monkeypatch, "zero2", model=change)


def test_frozen_fragments_that_are_too_long(monkeypatch):
    def change(state):
        state["frozen_param_shapes"] = {"frozen.weight": (5, 6)}

    with pytest.raises(ValueError, match=r"do not hold 15 elements each of 'frozen\.weight'"):
        opened(monkeypatch, "zero3", model=change)
