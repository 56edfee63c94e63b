"""Remove from names the wrappers that PyTorch puts around modules.

`torch.compile`, FSDP and activation checkpointing wrap a module in another, which adds a component
to the names of its parameters: `layers.0._orig_mod.weight`. Some functions of PyTorch remove it and
others do not, so one checkpoint may hold both forms of a name. A leading `module.`, which
`DistributedDataParallel` adds, is kept: it may as well be a module of the model.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from jaxzero._text import shown

_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
Value = TypeVar("Value")


def plain_name(name: Any) -> Any:
    """Return a name without components that are wrappers; what is no text as it is."""
    if type(name) is not str:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS) or name


def by_plain_name(held: Mapping[Any, Value], where: str) -> dict[Any, Value]:
    """Return the items under their plain names, in order.

    Raises:
        ValueError: two have the same. `where` says where they are, for the message.
    """
    full: dict[Any, Any] = {}
    for name in held:
        other = full.setdefault(plain_name(name), name)
        if other is not name:
            raise ValueError(
                f"{where} holds both {shown(other)} and {shown(name)}, which are one name without "
                "the wrappers of PyTorch. Save one state dict only."
            )
    return {plain: held[name] for plain, name in full.items()}
