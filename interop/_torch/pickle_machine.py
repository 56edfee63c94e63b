"""Execute the opcodes of a pickle on plain containers, in bounded time and memory.

`pickle.Unpickler` is not used: in a kilobyte, each of 100 nested tuples can hold the one before it
twice, which is a tree of 2^100 nodes. Hashing it as a key takes forever, inside a C function, where
Ctrl-C has no effect. Here every opcode is a step of Python code, and

- a tuple, written out without sharing, may not be much larger than the pickle,
- hashing and copying may together take a fixed multiple of the length of the pickle,
- an opcode that PyTorch does not write, such as one that calls `setattr`, is refused.

https://github.com/python/cpython/blob/main/Lib/pickletools.py describes the opcodes.
"""

import collections
import pickle
import pickletools
from collections.abc import Callable, Iterable
from typing import Any

from jaxzero._text import shown

_MAX_DEPTH = 100  # of nested tuples
_MAX_COMPOUND_KEYS = 10_000  # tuples and frozensets; their hashes can be made to collide
_BINARY = 2  # first protocol that is announced by its opcode, and uses no opcodes of text


class Record:
    """An object that a pickle describes, whose class is not imported; it compares by identity."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]):
        self.name = name  # full name of the class, with its module
        self.arguments = arguments  # positional arguments of the constructor
        self.state: Any = None  # state that the pickle set afterwards; see `field`

    def field(self, name: str, default: Any = None) -> Any:
        """Return a field of the object, or `default` if its state has no such field."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class RecordKind:
    """Stands for a class that is not imported; calling it makes a `Record`."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *arguments: Any) -> Record:
        """Return a `Record` of this class with the positional arguments."""
        return Record(self.name, arguments)


class Maker:
    """A function that a pickle may call, with the `PickleMachine` and the pickle's arguments."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]):
        self.make = make


class PickleMachine:
    """Executes one pickle, with a stack and a memo of its own.

    Args:
        data: the pickle.
        find: converts the full name of a class or function to a `Maker`, a `RecordKind`, or a value
            that cannot be called.
        persistent: resolves a reference to an object outside the pickle.
    """

    def __init__(
        self, data: bytes, find: Callable[[str], Any], persistent: Callable[[Any], Any]
    ) -> None:
        self._data = data
        self.find, self.persistent = find, persistent
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []  # stacks below each mark
        self.memo: dict[int, Any] = {}
        # The constants are for small pickles, which may nest and share more than their length.
        self._max_size = 10_000 + len(data)
        self._work = 100_000 + 10 * len(data)
        self._compound_keys = 0
        # (size, depth) of tuples that contain tuples, by id; `_kept` keeps the ids valid.
        self._nested: dict[int, tuple[int, int]] = {}
        self._kept: list[Any] = []

    def run(self) -> Any:
        """Execute the pickle and return the object that it describes.

        Raises:
            pickle.UnpicklingError: the pickle is broken, or asks for more work than its length
                justifies. Other exceptions of broken pickles: `IndexError`, `LookupError`,
                `TypeError`, `ValueError`.
        """
        protocol: int = 1
        for opcode, argument, position in pickletools.genops(self._data):
            name = opcode.name
            if name == "PROTO" and position == 0:
                protocol = int(argument or 0)
            elif opcode.proto > max(protocol, 1) or (protocol >= _BINARY and name in _TEXT):
                raise pickle.UnpicklingError(f"opcode {name} in a pickle of protocol {protocol}")
            elif name == "FRAME" and int(argument or 0) > len(self._data) - (position or 0):
                raise pickle.UnpicklingError("a frame that extends beyond its end")
            elif name in _VALUES:
                self.push(argument)
            elif name in _OPERATIONS:
                _OPERATIONS[name](self, argument)
            elif name != "STOP":
                raise pickle.UnpicklingError(f"opcode {name}, which PyTorch does not write")
        if len(self.stack) != 1 or self.marked:
            raise pickle.UnpicklingError(f"{len(self.stack)} objects at its end in place of one")
        return self.stack.pop()

    def push(self, value: Any) -> None:
        """Push a value on the current stack: the values since the last mark."""
        self.stack.append(value)

    def spend(self, work: int) -> None:
        """Charge `work` to the budget of the pickle; raise `UnpicklingError` when it is spent.

        One unit of work is one item that an operation hashes or copies.
        """
        self._work -= work
        if self._work < 0:
            raise pickle.UnpicklingError(
                f"more work than {len(self._data)} bytes describe: nested tuples, or one object "
                "that is copied again and again"
            )

    def tuple_of(self, items: Iterable[Any]) -> tuple[Any, ...]:
        """Make a tuple; raise if it is too large when written out with shared values repeated."""
        made = tuple(items)
        self._measure(made)
        return made

    def frozenset_of(self, items: Iterable[Any]) -> frozenset[Any]:
        """Make a frozenset of keys; raise if it is too large when written out, as in `tuple_of`."""
        made = frozenset(self.key(item) for item in items)
        self._measure(made)
        return made

    def key(self, value: Any) -> Any:
        """Return a value to be used as a key, after checking that hashing it takes bounded time."""
        kind = type(value)
        if kind in (str, bytes, bool, float, type(None), Record):
            return value
        if kind is int and -(2**63) <= value < 2**64:
            return value
        if kind not in (tuple, frozenset):
            raise pickle.UnpicklingError(f"the key {shown(value)}")
        self._compound_keys += 1
        if self._compound_keys > _MAX_COMPOUND_KEYS:
            raise pickle.UnpicklingError(f"more than {_MAX_COMPOUND_KEYS} keys that are tuples")
        self._check_elements(value)
        return value

    def set_items(self, target: Any, items: list[Any]) -> None:
        """Set items of `target` from alternating keys and values; leave a `Record` unchanged."""
        if len(items) % 2:
            raise pickle.UnpicklingError("a key without a value")
        if type(target) is Record:
            return
        if type(target) not in (dict, collections.OrderedDict):
            raise pickle.UnpicklingError(f"items of {shown(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self.key(key)] = value

    def since_mark(self) -> list[Any]:
        """Pop the items above the last mark of the stack, and remove the mark."""
        items, self.stack = self.stack, self.marked.pop()
        return items

    def _check_elements(self, value: Any) -> None:
        self.spend(self._size_of(value)[0])
        for element in value:
            if type(element) in (tuple, frozenset):
                self._check_elements(element)
            else:
                self.key(element)

    def _size_of(self, value: Any) -> tuple[int, int]:
        """Return (number of nodes, depth) of a value, a tree of nested tuples and frozensets.

        Any other value is a leaf.
        """
        if type(value) not in (tuple, frozenset):
            return 1, 0
        return self._nested.get(id(value)) or (1 + len(value), 1)

    def _measure(self, value: Any) -> None:
        sizes = [self._size_of(item) for item in value]
        size, depth = 1 + sum(size for size, _ in sizes), 1 + max((d for _, d in sizes), default=0)
        if size > self._max_size or depth > _MAX_DEPTH:
            raise pickle.UnpicklingError(
                f"nested tuples of {size} items, {depth} deep, in {len(self._data)} bytes"
            )
        if depth > 1:
            self._nested[id(value)] = size, depth
            self._kept.append(value)


def _mark(machine: PickleMachine, _: Any) -> None:
    machine.marked.append(machine.stack)
    machine.stack = []


def _tuple_of_last(count: int) -> Callable[[PickleMachine, Any], None]:
    def make(machine: PickleMachine, _: Any) -> None:
        if len(machine.stack) < count:
            raise pickle.UnpicklingError("a tuple of more items than there are")
        machine.stack[-count:] = [machine.tuple_of(machine.stack[-count:])]

    return make


def _dict(machine: PickleMachine, _: Any) -> None:
    made: dict[Any, Any] = {}
    machine.set_items(made, machine.since_mark())
    machine.push(made)


def _append(machine: PickleMachine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is list:
        target.extend(items)
    elif type(target) is not Record:  # those of a record, such as a deque, are not used
        raise pickle.UnpicklingError(f"items of {shown(target)}")


def _add(machine: PickleMachine, _: Any) -> None:
    items, target = machine.since_mark(), machine.stack[-1]
    if type(target) is not set:
        raise pickle.UnpicklingError(f"elements of {shown(target)}")
    target.update(machine.key(item) for item in items)


def _set_item(machine: PickleMachine, _: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items(machine.stack[-1], [key, value])


def _set_items(machine: PickleMachine, _: Any) -> None:
    items = machine.since_mark()
    machine.set_items(machine.stack[-1], items)


def _stack_global(machine: PickleMachine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise pickle.UnpicklingError("the name of a class that is not text")
    machine.push(machine.find(f"{module}.{name}"))


def _reduce(machine: PickleMachine, _: Any) -> None:
    arguments, function = machine.stack.pop(), machine.stack.pop()
    if type(arguments) is not tuple or type(function) not in (Maker, RecordKind):
        raise pickle.UnpicklingError(f"a call of {shown(function)} with {shown(arguments)}")
    made = function.make(machine, *arguments) if type(function) is Maker else function(*arguments)
    machine.push(made)


def _new_object(machine: PickleMachine, _: Any) -> None:
    arguments, kind = machine.stack.pop(), machine.stack.pop()
    if type(arguments) is not tuple or type(kind) is not RecordKind:
        raise pickle.UnpicklingError(f"a new {shown(kind)} of {shown(arguments)}")
    machine.push(kind(*arguments))


def _new_object_with_keywords(machine: PickleMachine, _: Any) -> None:
    machine.stack.pop()  # keyword arguments of a class that is not imported
    _new_object(machine, None)


def _build(machine: PickleMachine, _: Any) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if type(target) is Record:
        target.state = state
    elif type(target) is not collections.OrderedDict or type(state) is not dict:
        raise pickle.UnpicklingError(f"a state of {shown(target)}")
    # Attributes of an OrderedDict, such as `_metadata` of a state dict, are not used.


def _memoize(machine: PickleMachine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


def _text_of_python_2(machine: PickleMachine, text: str) -> None:
    if not text.isascii():
        raise pickle.UnpicklingError(f"text of Python 2 in an unknown encoding, {shown(text)}")
    machine.push(text)


_Operation = Callable[[PickleMachine, Any], Any]
# Opcodes that push their argument.
_VALUES = {"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
_VALUES |= {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_VALUES |= {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_TEXT = {"INT", "LONG", "FLOAT", "UNICODE", "PUT", "GET", "DICT", "LIST"}
_OPERATIONS: dict[str, _Operation] = {
    "FRAME": lambda machine, _: None,  # where the stream may be cut; we have all of it
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "BINSTRING": _text_of_python_2,
    "SHORT_BINSTRING": _text_of_python_2,
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_SET": lambda machine, _: machine.push(set()),
    "MARK": _mark,
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": lambda machine, _: machine.since_mark(),
    "TUPLE": lambda machine, _: machine.push(machine.tuple_of(machine.since_mark())),
    "TUPLE1": _tuple_of_last(1),
    "TUPLE2": _tuple_of_last(2),
    "TUPLE3": _tuple_of_last(3),
    "LIST": lambda machine, _: machine.push(machine.since_mark()),
    "DICT": _dict,
    "FROZENSET": lambda machine, _: machine.push(machine.frozenset_of(machine.since_mark())),
    "APPEND": lambda machine, _: _append(machine, [machine.stack.pop()]),
    "APPENDS": lambda machine, _: _append(machine, machine.since_mark()),
    "ADDITEMS": _add,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "PUT": _memoize,
    "BINPUT": _memoize,
    "LONG_BINPUT": _memoize,
    "MEMOIZE": lambda machine, _: _memoize(machine, len(machine.memo)),
    "GET": lambda machine, index: machine.push(machine.memo[index]),
    "BINGET": lambda machine, index: machine.push(machine.memo[index]),
    "LONG_BINGET": lambda machine, index: machine.push(machine.memo[index]),
    "GLOBAL": lambda machine, names: machine.push(machine.find(names.replace(" ", ".", 1))),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "NEWOBJ": _new_object,
    "NEWOBJ_EX": _new_object_with_keywords,
    "BUILD": _build,
    "BINPERSID": lambda machine, _: machine.push(machine.persistent(machine.stack.pop())),
}
