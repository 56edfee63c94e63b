"""Run a module of PyTorch, and record the outputs of its submodules."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxzero.interop._tensors import plain_name

from .trees import as_numpy, call, first_array, map_arrays, torch_tensor


@dataclasses.dataclass(frozen=True)
class TorchCall:
    """One call of a submodule.

    Attributes:
        name: of the submodule.
        array: the first array of its output; None if it has none, or is not recorded.
        num_roundings: parameters that were used up to its end, and calls without parameters.
        longest_sum: the most elements that one of these parameters sums over.
    """

    name: str
    array: np.ndarray | None
    num_roundings: int
    longest_sum: int


def run_torch(module: Any, inputs: Any, *, record: bool) -> tuple[Any, list[TorchCall]]:
    """Run a module in evaluation mode, without gradients.

    Returns:
        Its outputs, and the calls of its submodules in the order in which they ended. The last one
        is that of `module`, with the name "".
    """
    import torch

    parameter = next(module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    inputs = map_arrays(lambda each: torch_tensor(each, device), inputs)
    calls: list[TorchCall] = []

    def add(name: str, each: Any, _: Any, output: Any) -> None:
        own = len(list(each.parameters(recurse=False)))
        is_leaf = next(each.children(), None) is None
        held = list(each.parameters())  # also of children that are used without a call
        last = calls[-1] if calls else TorchCall("", None, 0, 1)
        calls.append(
            TorchCall(
                name,
                as_numpy(first_array(output)) if record and name else None,
                max(last.num_roundings + max(own, int(is_leaf)), len(held)),
                max([last.longest_sum, *map(_summed, held)]),
            )
        )

    with _evaluation(module), contextlib.ExitStack() as stack, torch.no_grad():
        for name, each in module.named_modules():
            hook = functools.partial(add, plain_name(name))
            stack.callback(each.register_forward_hook(hook).remove)
        outputs = call(module, inputs)
    return outputs, calls


def _summed(parameter: Any) -> int:
    """Elements that are summed for one of the output: inputs of a linear layer, or a norm's."""
    return math.prod(parameter.shape[1:]) if parameter.ndim > 1 else parameter.numel()


@contextlib.contextmanager
def _evaluation(module: Any) -> Iterator[None]:
    training = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, was in training.items():
            each.training = was
