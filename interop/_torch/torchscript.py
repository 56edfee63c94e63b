"""Read the state dict of a program that `torch.jit.save` wrote.

Its archive has the form of `torch.save`'s: `data.pkl` holds the module, an object whose attributes
are tensors, other modules and values of Python. The source of its class in `code/` has a line that
lists its parameters and one that lists its buffers; only these two lines are read, and nothing is
run. Other
tensors, such as those of `constants.pkl`, are no part of a state dict.
"""

import dataclasses
import re
from typing import Any

from jaxzero._text import shown
from jaxzero.interop._tensors import LazyTensor

from .archive import Archive
from .pickle_machine import Record

_DECLARED = re.compile(r"^class (\w+)(.*):$|^  __(parameters|buffers)__ = \[(.*)\]$", re.MULTILINE)
_NAMES = re.compile(r'("[^"\\]*", )*')
_SAVE = "Load it with `torch.jit.load`, and save its `state_dict()`."
_MAX_CODE_BYTES = 2**26  # of all classes, unpacked
_MAX_DEPTH, _MAX_MODULES = 100, 100_000  # a module that is at two places counts twice


_OTHERS = ("", "(Enum)", "(Interface)", "(NamedTuple)")  # classes that are not of modules
_OPAQUE = "__torch__.torch.classes."  # written in C++; they have no text


@dataclasses.dataclass
class _Class:
    is_module: bool
    parameters: list[str] | None = None  # None: not declared
    buffers: list[str] | None = None


class _Classes:
    """The classes that an archive declares in `code/`; an entry is read when it is needed."""

    def __init__(self, archive: Archive):
        self._archive = archive
        self._known: dict[str, dict[str, _Class]] = {}  # by the entry that declares them
        self._code_bytes = 0

    def of(self, value: Any) -> _Class | None:
        """Return the declaration of a module's class; None if `value` is no module."""
        if not isinstance(value, Record) or not value.name.startswith("__torch__."):
            return None
        if value.name.startswith(_OPAQUE):
            return None
        module, _, name = value.name.rpartition(".")
        entry = f"code/{module.replace('.', '/')}.py"
        if entry not in self._known:
            self._known[entry] = self._read(entry) if entry in self._archive else {}
        kind = self._known[entry].get(name)
        if kind is None:
            raise ValueError(
                f"{self._archive.where} does not declare the class {shown(value.name)} of an "
                f"object in it. {_SAVE}"
            )
        return kind if kind.is_module else None

    def _read(self, entry: str) -> dict[str, _Class]:
        self._code_bytes += self._archive.place(entry)[1]
        if self._code_bytes > _MAX_CODE_BYTES:
            raise ValueError(
                f"{self._archive.where} declares its classes in more than {_MAX_CODE_BYTES} bytes. "
                f"{_SAVE}"
            )
        classes: dict[str, _Class] = {}
        current = _Class(False)
        for name, base, kind, listed in _DECLARED.findall(self._archive.read(entry).decode()):
            if name and base in ("(Module)", *_OTHERS):
                current = classes[name] = _Class(base == "(Module)")
            elif kind and _NAMES.fullmatch(listed):
                setattr(current, kind, re.findall(r'"([^"]*)"', listed))
            else:
                raise ValueError(
                    f"{self._archive.where} declares {shown(name + base or listed)} in a form that "
                    f"is not known. {_SAVE}"
                )
        return classes


def script_state_dict(program: Any, archive: Archive) -> dict[str, LazyTensor]:
    """Return the parameters and buffers of a program by name, as `torch.jit.load` names them."""
    classes, tensors = _Classes(archive), {}
    if classes.of(program) is None:
        raise ValueError(
            f"{archive.where} is a program of TorchScript without a module. Give a file that holds "
            "a state dict."
        )
    left, visited = [("", program, 0)], 0
    while left:
        prefix, module, depth = left.pop()
        visited += 1
        if depth > _MAX_DEPTH or visited > _MAX_MODULES:
            raise ValueError(
                f"{archive.where} holds more than {_MAX_MODULES} modules, or modules nested deeper "
                f"than {_MAX_DEPTH}, at {shown(prefix)}. {_SAVE}"
            )
        kind, state = classes.of(module), module.state
        if kind is None or kind.parameters is None or not isinstance(state, dict):
            raise ValueError(
                f"{archive.where} does not declare the parameters of {shown(prefix)}. {_SAVE}"
            )
        # Programs of old versions declare no buffers: there every other tensor is one.
        others = [name for name, value in state.items() if isinstance(value, LazyTensor)]
        buffers = kind.buffers if kind.buffers is not None else others
        for name in dict.fromkeys((*kind.parameters, *buffers)):
            if not isinstance(state.get(name, ...), LazyTensor | None):
                raise ValueError(
                    f"{archive.where} declares {shown(prefix + name)} as a tensor, and holds none. "
                    f"{_SAVE}"
                )
            if state[name] is not None:
                tensors[prefix + name] = state[name]
        inner = [(key, value) for key, value in state.items() if classes.of(value) is not None]
        if any(type(key) is not str for key, _ in inner):
            raise ValueError(f"{archive.where} has a module of the name {shown(inner[0][0])}.")
        # Reversed: the last is taken first, and tensors keep the order of the program.
        left += [(f"{prefix}{key}.", value, depth + 1) for key, value in inner][::-1]
    if not tensors:
        raise ValueError(
            f"{archive.where} is a program of TorchScript without parameters and buffers. Where "
            "`torch.jit.freeze` made constants of them, they have no names: give the program that "
            "was frozen, or its state dict."
        )
    return tensors
