"""Read pickles that PyTorch wrote, without executing code from them.

A pickle is a program that may call any function it names. Here a machine of our own executes it
(`pickle_machine`), and looks names up in a table (`names`). The standard library calls this
"restricting globals": https://docs.python.org/3/library/pickle.html
"""

import pickle
from collections.abc import Callable, Collection
from typing import Any

from jaxzero._text import escaped, shown

from .names import MakeTensor, Names, Refused
from .pickle_machine import PickleMachine


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
