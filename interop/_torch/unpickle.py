"""Read pickles that PyTorch wrote, without executing code from them.

A pickle is a program that may call any function it names. Here a machine of our own executes it
(`pickle_machine`), and names are looked up in tables and never imported: tensors, dtypes and plain
containers have an entry; classes that describe a run (those of DeepSpeed, the metadata of
distributed checkpoints, numpy's random states) become `Record`s, which only store their arguments;
any other name is an error before anything is called. The standard library calls this "restricting
globals": https://docs.python.org/3/library/pickle.html
"""

import collections
import functools
import pickle
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxzero._text import escaped, matches, shown
from jaxzero.interop._tensors import MAX_DIMS

from .pickle_machine import Maker, PickleMachine, RecordKind

DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
}
_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in (
        *(("Bool", "bool"), ("Byte", "uint8"), ("Char", "int8"), ("Untyped", "uint8")),
        *(("Short", "int16"), ("Int", "int32"), ("Long", "int64")),
        *(("Half", "float16"), ("BFloat16", "bfloat16"), ("Float", "float32")),
        *(("Double", "float64"), ("ComplexFloat", "complex64"), ("ComplexDouble", "complex128")),
    )
}
# Any class or function whose full name begins with one of these becomes a `Record`.
_DESCRIPTIONS = (
    "__torch__.",  # a class of TorchScript
    "deepspeed.",
    "numpy.",
    "torch.distributed._shard.",
    "torch.distributed._tensor.",
    "torch.distributed.device_mesh.",
    "torch.distributed.fsdp.",
    "torch.distributed.tensor.",
)
_OTHER_DTYPE = re.compile(r"(float|bfloat|complex|bits|q?u?int)\d+\w*")
_SUBCLASS = "torch._utils._rebuild_wrapper_subclass"
# Constructors of tensors that are not read: the kind of tensor, and what to save instead.
_OTHER_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": ("sparse", "`tensor.to_dense()`"),
    "torch._utils._rebuild_nested_tensor": ("nested", "`tensor.to_padded_tensor(0.0)`"),
    "torch._utils._rebuild_qtensor": ("quantized", "`tensor.dequantize()`"),
    "torch._utils._rebuild_meta_tensor_no_storage": ("meta", "a tensor that has data"),
}
# Default factories of `collections.defaultdict`; `long` and `unicode` are from Python 2.
_FACTORIES = ("dict", "float", "int", "list", "long", "str", "tuple", "unicode")
_TYPED_LISTS = ("bool", "double", "int", "tensor")  # with a function of TorchScript each
_DCP = ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")
_DCP += ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
_DESCRIBING = {
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in _DCP),
    *("pathlib.Path", "pathlib.PosixPath", "pathlib.WindowsPath"),
    *("pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
    *(f"{module}.{name}" for module in ("__builtin__", "builtins") for name in _FACTORIES),
    *("argparse.Namespace", "collections.deque", "collections.defaultdict", "torch.device"),
    *("datetime.datetime", "datetime.timedelta"),
    "_io.BytesIO",  # the `_extra_state` of Transformer Engine
}
# Constructors of tensors, and their arguments; the last may be left out.
_VIEW, _PLAIN = ("storage", "offset", "shape", "strides"), ("requires_grad", "hooks")
_REBUILD = {
    "torch._utils._rebuild_tensor": _VIEW,
    "torch._utils._rebuild_tensor_v2": (*_VIEW, *_PLAIN, "metadata"),
    "torch._utils._rebuild_tensor_v3": (*_VIEW, *_PLAIN, "dtype", "metadata"),
}


class TorchDtype(NamedTuple):
    """Stands for a dtype of PyTorch that a pickle names, such as `torch.float32`."""

    dtype: np.dtype


class TorchStorage(NamedTuple):
    """Stands for a class of storages that a pickle names, such as `torch.FloatStorage`."""

    dtype: np.dtype


class _Marker(NamedTuple):
    """Stands for a class that a pickle may pass as an argument but not call."""

    name: str


class Refused(Exception):
    """Raised for a name in a pickle that could be code."""


# (storage, dtype or None for the storage's, offset, shape, strides), in elements -> tensor.
MakeTensor = Callable[[Any, np.dtype | None, int, tuple[int, ...], tuple[int, ...]], Any]


class Names:
    """Looks up names for one pickle; the arguments are those of `unpickle`."""

    def __init__(self, where: str, tensor: MakeTensor | None, records: Collection[str]):
        self._where, self._tensor, self._records = where, tensor, tuple(records)
        self._tensors = {
            name: Maker(functools.partial(self._rebuilt, names)) for name, names in _REBUILD.items()
        } | {
            "torch._utils._rebuild_parameter": Maker(self._parameter),
            "torch._utils._rebuild_parameter_with_state": Maker(self._parameter),
            "torch._tensor._rebuild_from_type_v2": Maker(self._of_type),
        }

    def find(self, full: str) -> Any:
        """Return what stands in for a class or function; never import it.

        Raises:
            Refused: the name is not known.
        """
        module, _, name = full.rpartition(".")
        if module == "torch" and name in DTYPES:
            return TorchDtype(DTYPES[name])
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return TorchStorage(DTYPES[_STORAGES[name]])
        if full in _CONTAINERS:
            return _CONTAINERS[full]
        if full in self._tensors:
            return self._tensors[full]
        if full in ("torch.Tensor", "torch.nn.parameter.Parameter"):
            return _Marker(full)
        known = full in _DESCRIBING or full.startswith(_DESCRIPTIONS)
        if known or matches(full, self._records):
            return RecordKind(full)
        if full == _SUBCLASS:
            raise Refused(
                f"{self._where} holds a tensor of a class of its own, such as a DTensor, of which "
                "each process saves only its shard. Save with `torch.distributed.checkpoint`, or "
                "save `tensor.full_tensor()` of each."
            )
        if full.startswith("torch.nn.modules."):
            raise Refused(
                f"{self._where} holds a whole module (`{escaped(full)}`), whose class is code. "
                "Nothing was run. If you trust its author, load it with `torch.load(path, "
                "map_location='cpu', weights_only=False)`, and save only its tensors: "
                "`torch.save(model.state_dict(), path)`."
            )
        if full in _OTHER_TENSORS:
            kind, instead = _OTHER_TENSORS[full]
            raise Refused(
                f"{self._where} holds a {kind} tensor, which is not read. Save {instead} instead."
            )
        if module == "torch" and _OTHER_DTYPE.fullmatch(name):
            raise Refused(
                f"{self._where} holds a tensor of the dtype {escaped(full)}, which is not read. "
                f"Known are {', '.join(DTYPES)}: cast it to one of them, or save its bytes with "
                "`tensor.view(torch.uint8)`."
            )
        raise Refused(
            f"{self._where} names `{escaped(full)}`, which is neither a tensor nor a description "
            "of a run, and could be code. Nothing was run. If it is a class of which no object is "
            f"needed, `interop.open_checkpoint(path, records=[{escaped(full)!r}])` passes over "
            "them (`--records` of `jaxzero inspect` and `convert`; `*` matches any text), and does "
            "not import it. If you trust the author of the file, you can also load it with "
            "`torch.load(path, map_location='cpu', weights_only=False)`, and save only its "
            "tensors: `torch.save(model.state_dict(), path)`."
        )

    def _rebuilt(self, names: tuple[str, ...], machine: PickleMachine, *values: Any) -> Any:
        given = dict(zip(names, values, strict=False))
        if len(values) not in (len(names), len(names) - ("metadata" in names)):
            raise pickle.UnpicklingError(f"a tensor made of {len(values)} values")
        dtype = given.get("dtype")
        if type(dtype) is not TorchDtype and "dtype" in given:
            raise pickle.UnpicklingError(f"a tensor of dtype {shown(dtype)}")
        if self._tensor is None:
            raise pickle.UnpicklingError("unexpected tensor")
        offset, shape, strides = (given[name] for name in ("offset", "shape", "strides"))
        sizes = type(shape) is tuple and type(strides) is tuple and len(shape) <= MAX_DIMS
        if (
            not sizes
            or len(shape) != len(strides)
            or not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides))
        ):
            raise pickle.UnpicklingError(
                f"a tensor of offset {shown(offset)}, shape {shown(shape)} and strides "
                f"{shown(strides)}"
            )
        if given.get("metadata"):
            raise pickle.UnpicklingError(
                f"a tensor with {shown(given['metadata'])}, whose values are computed when it is "
                "read; save `tensor.resolve_conj().resolve_neg()`"
            )
        dtype = None if dtype is None else dtype.dtype
        made = self._tensor(given["storage"], dtype, offset, shape, strides)
        _check_gradient(given.get("requires_grad", False), getattr(made, "dtype", None))
        return made

    def _parameter(
        self, machine: PickleMachine, data: Any, requires_grad: Any, hooks: Any, state: Any = None
    ) -> Any:
        _check_gradient(requires_grad, getattr(data, "dtype", None))
        return data

    def _of_type(
        self, machine: PickleMachine, function: Any, kind: Any, arguments: Any, state: Any
    ) -> Any:
        of_tensor = isinstance(kind, _Marker | RecordKind)  # the latter: a class of the user
        if function not in self._tensors.values() or not of_tensor or type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"a tensor made by {shown(function)} as {shown(kind)}")
        return function.make(machine, *arguments)


def _check_gradient(requires_grad: Any, dtype: Any) -> None:
    """Raise if `requires_grad` is no bool, or if it is True for a tensor of integers."""
    real = not isinstance(dtype, np.dtype) or dtype.kind in "fcV"  # V: bfloat16, float8
    if type(requires_grad) is not bool or (requires_grad and not real):
        raise pickle.UnpicklingError(f"requires_grad={shown(requires_grad)} of {shown(dtype)}")


def _ordered_dict(machine: PickleMachine, pairs: Any = ()) -> collections.OrderedDict:
    ordered: collections.OrderedDict = collections.OrderedDict()
    for pair in _listed(machine, pairs):
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise pickle.UnpicklingError(f"the item {shown(pair)} of an OrderedDict")
        ordered[machine.key(pair[0])] = pair[1]
    return ordered


def _listed(machine: PickleMachine, items: Any) -> Any:
    if type(items) not in (list, tuple, set):
        raise pickle.UnpicklingError(f"a container made of {shown(items)}")
    machine.spend(len(items))
    return items


def _set(machine: PickleMachine, items: Any = ()) -> set:
    return {machine.key(item) for item in _listed(machine, items)}


def _frozenset(machine: PickleMachine, items: Any = ()) -> frozenset:
    return machine.frozenset_of(_listed(machine, items))


def _size(machine: PickleMachine, sizes: Any = ()) -> tuple:
    if not all(type(size) is int for size in _listed(machine, sizes)):
        raise pickle.UnpicklingError(f"the shape {shown(sizes)}")
    return machine.tuple_of(sizes)


def _complex(machine: PickleMachine, real: Any, imaginary: Any) -> complex:
    return complex(real, imaginary)


def _encoded(machine: PickleMachine, text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text in the encoding {shown(encoding)}")
    machine.spend(len(text))
    return text.encode("latin1")


def _unchanged(machine: PickleMachine, value: Any, *_: Any) -> Any:
    return value


def _layout(machine: PickleMachine, name: Any) -> _Marker:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"the layout {shown(name)}")
    return _Marker(name)


_CONTAINERS: dict[str, Maker] = {
    "collections.OrderedDict": Maker(_ordered_dict),
    "torch.Size": Maker(_size),
    "__builtin__.set": Maker(_set),
    "builtins.set": Maker(_set),
    "__builtin__.frozenset": Maker(_frozenset),
    "builtins.frozenset": Maker(_frozenset),
    "__builtin__.complex": Maker(_complex),
    "builtins.complex": Maker(_complex),
    "_codecs.encode": Maker(_encoded),
    "torch.serialization._get_layout": Maker(_layout),
    # Lists and dicts of TorchScript with their types.
    "torch.jit._pickle.restore_type_tag": Maker(_unchanged),
    **{f"torch.jit._pickle.build_{kind}list": Maker(_unchanged) for kind in _TYPED_LISTS},
}


def unpickle(
    data: bytes,
    where: str,
    *,
    storage: Callable[[tuple], Any] | None = None,
    tensor: MakeTensor | None = None,
    records: Collection[str] = (),
) -> Any:
    """Read a pickle that holds tensors, containers, numbers, strings and descriptions of a run.

    Time and memory are bounded by the length of the pickle, and Ctrl-C interrupts.

    Args:
        data: the pickle.
        where: file name, for messages.
        storage: converts a persistent id to a storage, the first argument of `tensor`.
        tensor: makes a tensor from a storage, a dtype (None for the storage's), an offset, a shape
            and strides, all in elements.
        records: full names of further classes to be read as `Record`s.

    Raises:
        ValueError: the pickle names any other class or function, or is broken.
    """

    def persistent(pid: Any) -> Any:
        if storage is None or type(pid) is not tuple:
            raise pickle.UnpicklingError(f"unexpected persistent id {shown(pid)}")
        return storage(pid)

    try:
        return PickleMachine(data, Names(where, tensor, records).find, persistent).run()
    except Refused as error:
        raise ValueError(str(error)) from None
    # Opcodes of a broken pickle, applied to objects of the wrong type, may raise any of these.
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(
            f"{where} does not hold a whole pickle ({type(error).__name__}: {escaped(error)}). "
            "Copy or download the checkpoint again."
        ) from error
