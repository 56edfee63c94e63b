"""Adam's moments by the names of parameters, from an optimizer's state dict."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxzero.interop._tensors import (
    AdamMoments,
    LazyTensor,
    by_plain_name,
    check_is_adam,
    gather_moments,
    plain_name,
    read_step,
)

from .numbered import ModelOrder, names_of_numbers, parameters_in
from .torch_file import TorchTensor

Order = Callable[[], ModelOrder]


def moments_of(
    optimizer: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    where: str,
    names: Sequence[str] | None = None,
    *,
    order: Order | None = None,
    of_trainer: bool = False,
) -> AdamMoments:
    """Extract Adam's moments from an optimizer's state dict.

    Args:
        optimizer: result of `optimizer.state_dict()`, with `state` and `param_groups`. It
            identifies parameters by number, or by name if FSDP wrote it.
        tensors: tensors of the model by name.
        where: file name, for messages.
        names: names of the parameters in the optimizer's order. If None, the names that the
            optimizer recorded; or those that `names_of_numbers` finds.
        order: returns the order of the model's parameters, or raises a `ValueError` with the
            reason why it is not known. If None, `tensors` are in the order of the model's state
            dict.
        of_trainer: whether the Trainer of transformers made the optimizer's groups.
    """
    state = dict(optimizer["state"])
    if not state:
        raise ValueError(
            f"The optimizer in {where} has no state of any parameter: it took no step, or is not "
            "Adam or AdamW, and no other optimizer is read. Start with a new optimizer state; "
            "weights can be loaded without it."
        )
    groups = optimizer["param_groups"]
    if not all(isinstance(each, str) for each in state):
        order = order or (lambda: ModelOrder(parameters_in(tensors)))
        state = _by_name(state, groups, tensors, where, names, order, of_trainer)
    state = by_plain_name(state, where)
    state = {name: _with_name(name, held) for name, held in state.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    betas = groups[0].get("betas") if groups else None
    return gather_moments(state, shapes, where, read_step, betas)


def _by_name(
    state: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, LazyTensor],
    where: str,
    names: Sequence[str] | None,
    order: Order,
    of_trainer: bool,
) -> dict[str, Any]:
    numbers = [number for group in groups for number in group["params"]]
    kept = [name for group in groups for name in group.get("param_names", ())]
    if names is None and len(kept) == len(numbers):
        names = [plain_name(name) for name in kept]
    if names is None:
        return _matched(state, groups, tensors, where, order, of_trainer)
    if len(names) != len(numbers):
        raise ValueError(
            f"`names` must name the {len(numbers)} parameters of the optimizer in {where}; got "
            f"{len(names)}. Leave out buffers, frozen parameters, and the second name of tied ones."
        )
    pairs = zip(names, numbers, strict=True)
    return {name: state[number] for name, number in pairs if number in state}


def _matched(
    state: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, LazyTensor],
    where: str,
    order: Order,
    of_trainer: bool,
) -> dict[str, Any]:
    def ordered() -> ModelOrder:
        # The Trainer's first group decays.
        known = of_trainer and len(groups) == 2 and groups[1].get("weight_decay") == 0
        if len(groups) != 1 and not known:
            raise ValueError(f"nothing says how they were divided into {len(groups)} groups")
        return order()

    for held in state.values():
        if "exp_avg" not in held:
            check_is_adam(held, f"The optimizer in {where}, whose parameters are numbers,")
    names = parameters_in(tensors)
    try:
        found = names_of_numbers(
            [group["params"] for group in groups],
            {number: tuple(held["exp_avg"].shape) for number, held in state.items()},
            {name: tensors[name].shape for name in names},
            ordered,
            of_trainer=of_trainer,
        )
    except ValueError as error:
        count = sum(len(group["params"]) for group in groups)
        raise ValueError(
            f"The optimizer in {where} identifies its {count} parameters by number, and they "
            f"cannot be matched to the {len(tensors)} tensors of the model: {error}. Pass "
            "`names=`, the names in the order of the optimizer, which its program gives: "
            "`[n for g in optimizer.param_groups for p in g['params'] for n, each in "
            "model.named_parameters() if each is p]`."
        ) from error
    return {name: state[number] for number, name in found.items()}


def _with_name(name: str, held: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: dataclasses.replace(value, name=f"{name}.{key}")
        if isinstance(value, TorchTensor)
        else value
        for key, value in held.items()
    }
