"""Read the state of an optimizer from a file of its own, beside the model's checkpoint.

The Trainer of transformers writes `optimizer.pt` into `checkpoint-N`, and Accelerate's `save_state`
writes `optimizer.bin`. Both hold `optimizer.state_dict()`, which identifies parameters by number.
The numbers follow the order of the model's parameters. A safetensors file does not show this order,
since it sorts its tensors by name. So, if `config.json` names a model class of transformers, that
model is built without data, and its parameters are listed.
"""

import dataclasses
import functools
import importlib.util
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jaxzero._text import escaped, shown
from jaxzero.interop._tensors import AdamMoments, Checkpoint
from jaxzero.interop._torch import ModelOrder, Origin, parameters_in, read_optimizer

# Accelerate writes several optimizers as `optimizer.bin`, `optimizer_1.bin`, ...
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_1.bin")
_OF_TRAINER = "trainer_state.json"


def with_optimizer(
    checkpoint: Checkpoint, path: Path, given: Path | str | None, records: Collection[str]
) -> Checkpoint:
    """Add the moments of an optimizer's file to a checkpoint; return it unchanged if there is none.

    Args:
        checkpoint: the opened checkpoint.
        path: the checkpoint's file or directory; a directory may hold the optimizer's file.
        given: the optimizer's file; None to look for one in the directory.
        records: full names of classes that a pickle may name; they are not imported.

    Raises:
        ValueError: `given` is not a file, or the checkpoint has the state of an optimizer itself.
    """
    directory = path if path.is_dir() else path.parent
    if given is None:
        files = [path / name for name in _OPTIMIZERS if (path / name).is_file()]
        if checkpoint.moments is not None or not files:
            return checkpoint
    else:
        files = [Path(given)]
        if checkpoint.moments is not None or not files[0].is_file():
            why = "is not a file" if checkpoint.moments is None else "is given, and it has one"
            raise ValueError(
                f"`optimizer` must be a file of `torch.save`, for a checkpoint without the state "
                f"of an optimizer, such as {str(path)!r}; {str(given)!r} {why}."
            )

    def moments(names: Sequence[str] | None = None) -> AdamMoments:
        if len(files) > 1:
            raise ValueError(
                f"{str(path)!r} holds the optimizers {', '.join(file.name for file in files)}, and "
                "nothing says which trained the model. Name one: `open_checkpoint(path, "
                "optimizer=file)`."
            )
        of_trainer = (files[0].parent / _OF_TRAINER).is_file()
        origin = Origin(functools.partial(_order, checkpoint, directory), of_trainer)
        return read_optimizer(files[0], checkpoint, names, origin, records)

    return dataclasses.replace(checkpoint, moments=moments)


def _order(checkpoint: Checkpoint, directory: Path) -> ModelOrder:
    """Return the order of the model's parameters.

    It comes from the checkpoint, or else from a model that transformers builds from `config.json`.

    Raises:
        ValueError: the order cannot be found out; the message is the reason.
    """
    if checkpoint.in_order:
        return ModelOrder(parameters_in(checkpoint.tensors))
    unknown = f"the order of the model is not in {checkpoint.form}, and "
    try:
        config = json.loads((directory / "config.json").read_bytes())
        (kind,), version = map(str, config["architectures"]), str(config["transformers_version"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"{unknown}no config.json names its class") from None
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{unknown}{' and '.join(missing)} is not installed to tell it")
    import transformers

    here = transformers.__version__
    if version.split(".")[:2] != here.split(".")[:2]:  # a class may have changed its order
        raise ValueError(
            f"{unknown}it was saved with transformers {escaped(version)}, where {here} is installed"
        )
    try:
        model = _model_of_transformers(directory, kind, len(checkpoint))
        trainer: Any = transformers.Trainer
        decayed = trainer.get_decay_parameter_names(None, model)  # it does not use `self`
    except Exception as error:  # the constructor of any class of transformers may raise anything
        raise ValueError(
            f"{unknown}transformers makes no {shown(kind)} of config.json ({escaped(error)})"
        ) from error
    names = [name for name, _ in model.named_parameters()]
    held = {name: tensor.shape for name, tensor in checkpoint.items()}
    for name, parameter in model.named_parameters():
        if held.get(name) != tuple(parameter.shape):
            raise ValueError(
                f"{unknown}{shown(name)} of {shown(kind)} has another name or shape in the files"
            )
    return ModelOrder(names, decayed)


def _model_of_transformers(directory: Path, kind: str, num_tensors: int) -> Any:
    """Build the model that `config.json` describes on PyTorch's meta device, without data.

    Args:
        directory: the folder with `config.json`.
        kind: name of the model's class in transformers.
        num_tensors: tensors in the checkpoint; a config with more layers than this is refused.

    Raises:
        ValueError: transformers has no such class, or the config has too many layers.
    """
    import torch
    import transformers

    model_class: Any = getattr(transformers, kind, None)
    if not isinstance(model_class, type) or not issubclass(
        model_class, transformers.PreTrainedModel
    ):
        raise ValueError("there is no such model")
    config_class: Any = model_class.config_class
    settings = config_class.from_pretrained(directory, local_files_only=True)
    if getattr(settings, "num_hidden_layers", 0) > num_tensors:
        raise ValueError("more layers than tensors")
    with torch.device("meta"):
        return model_class(settings)
