"""Read pickles that PyTorch wrote, without executing code from them.

A pickle is a program that may call any function it names. Here names are looked up in a table and
never imported: tensors, dtypes and plain containers have an entry; classes that describe a run
(those of DeepSpeed, the metadata of distributed checkpoints, numpy's random states) become
`Record`s, which only store their arguments; any other name is an error before anything is called.
The standard library calls this "restricting globals": https://docs.python.org/3/library/pickle.html
"""

import collections
import io
import pickle
import pickletools
from collections.abc import Callable, Collection
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "complex64": np.dtype(np.complex64),
    "complex128": np.dtype(np.complex128),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
DTYPES |= {"half": DTYPES["float16"], "float": DTYPES["float32"], "double": DTYPES["float64"]}
DTYPES |= {"short": DTYPES["int16"], "int": DTYPES["int32"], "long": DTYPES["int64"]}

# Values are names rather than dtypes: a pickle may set the state of an object that it names, and
# numpy's dtypes are shared by the whole process.
_STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}

# Any class or function whose full name begins with one of these becomes a `Record`.
_DESCRIPTIONS = ("deepspeed.", "numpy.", "torch.distributed.", "pathlib.")
_DESCRIBING = {
    "argparse.Namespace",
    "collections.deque",
    "collections.defaultdict",
    "datetime.datetime",
    "datetime.timedelta",
    "torch.device",
    "torch.serialization._get_layout",
}

MakeTensor = Callable[[Any, np.dtype | None, int, tuple[int, ...], tuple[int, ...]], Any]


class Record:
    """Description of a pickled object whose class was not imported."""

    name = ""  # full name of the class, with its module
    arguments: tuple[Any, ...]  # positional arguments of the constructor
    state: Any  # state that the pickle set afterwards; see `field`

    def __new__(cls, *arguments: Any, **_: Any) -> "Record":
        """Store the positional arguments."""
        self = super().__new__(cls)
        self.__dict__["arguments"] = arguments
        return self

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Ignore items: pickles of `collections.deque` append them."""

    def extend(self, values: Any) -> None:
        """Ignore items, like `append`."""

    def field(self, name: str, default: Any = None) -> Any:
        """Return a field of the object, or `default` if its state has no such field."""
        state = self.__dict__.get("state")
        return state.get(name, default) if isinstance(state, dict) else default


def unpickle(
    data: bytes,
    where: str,
    *,
    storage: Callable[[tuple], Any] | None = None,
    tensor: MakeTensor | None = None,
    records: Collection[str] = (),
) -> Any:
    """Read a pickle that holds tensors, containers, numbers, strings and descriptions of a run.

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
    try:
        _check_memo(data)
        return _Unpickler(data, where, storage, tensor, frozenset(records)).load()
    except _Refused as error:
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
            f"{where} does not hold a whole pickle ({type(error).__name__}: {error}). Copy or "
            "download the checkpoint again."
        ) from error


class _Refused(Exception):
    pass


def _check_memo(data: bytes) -> None:
    # The unpickler allocates a memo as long as its largest index: one opcode could take 64 GiB.
    for _, argument, _ in (each for each in pickletools.genops(data) if "PUT" in each[0].name):
        if argument is not None and int(argument) > len(data):
            raise pickle.UnpicklingError(f"a memo index of {argument}")


class _Unpickler(pickle.Unpickler):
    """A `pickle.Unpickler` that resolves names in its own table only.

    Functions of the table are created anew for each pickle (bound methods and closures), so that a
    pickle that sets attributes on them cannot affect anything else.
    """

    def __init__(
        self,
        data: bytes,
        where: str,
        storage: Callable[[tuple], Any] | None,
        tensor: MakeTensor | None,
        records: frozenset[str],
    ):
        super().__init__(io.BytesIO(data))
        self._where = where
        self._storage = storage
        self._tensor = tensor
        self._records = records

    def persistent_load(self, pid: Any) -> Any:
        """Resolve a reference to a storage outside the pickle."""
        if self._storage is None or not isinstance(pid, tuple):
            raise pickle.UnpicklingError(f"unexpected persistent id {pid!r}")
        return self._storage(pid)

    def find_class(self, module: str, name: str) -> Any:
        """Return the table's substitute for a name; never import it."""
        full = f"{module}.{name}"
        if module == "torch" and name in DTYPES:
            return name
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if full in _PLAIN:
            return _PLAIN[full]
        makers = self._makers()
        if full in makers:
            return makers[full]
        if full in _DESCRIBING or full in self._records or full.startswith(_DESCRIPTIONS):
            return type("Record", (Record,), {"name": full})
        raise _Refused(
            f"{self._where} names `{full}`, which is neither a tensor nor a description of a run, "
            "and could be code. Nothing was run. If you trust its author, load it with PyTorch "
            "and save only its tensors: `torch.save(model.state_dict(), path)`."
        )

    def _makers(self) -> dict[str, Callable]:
        def rebuild(storage, offset, shape, strides, *_):
            return self._made(storage, None, offset, shape, strides)

        def rebuild_typed(storage, offset, shape, strides, requires_grad, hooks, dtype, *_):
            return self._made(storage, dtype, offset, shape, strides)

        def parameter(data, *_):
            return data

        def encoded(text, encoding):
            return text.encode({"latin1": "latin1"}[encoding])

        return {
            "torch._utils._rebuild_tensor": rebuild,
            "torch._utils._rebuild_tensor_v2": rebuild,
            "torch._utils._rebuild_tensor_v3": rebuild_typed,
            "torch._utils._rebuild_parameter": parameter,
            "torch._utils._rebuild_parameter_with_state": parameter,
            "torch._tensor._rebuild_from_type_v2": lambda function, kind, made, *_: function(*made),
            "torch.Tensor": parameter,
            "torch.nn.parameter.Parameter": parameter,
            "_codecs.encode": encoded,
        }

    def _made(self, storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> Any:
        if self._tensor is None:
            raise pickle.UnpicklingError("unexpected tensor")
        numbers = (offset, *shape, *strides)
        if len(shape) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
            raise pickle.UnpicklingError(
                f"a tensor of offset {offset}, shape {shape} and strides {strides}"
            )
        dtype = None if dtype is None else DTYPES[dtype]
        return self._tensor(storage, dtype, offset, tuple(shape), tuple(strides))


_PLAIN: dict[str, Any] = {
    "collections.OrderedDict": collections.OrderedDict,
    "torch.Size": tuple,
    "__builtin__.set": set,
    "builtins.set": set,
    "__builtin__.frozenset": frozenset,
    "builtins.frozenset": frozenset,
    "__builtin__.complex": complex,
    "builtins.complex": complex,
}
