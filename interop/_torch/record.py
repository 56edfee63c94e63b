"""What a pickle says of an object whose class is not imported."""

from typing import Any


class Record:
    """Description of a pickled object; it runs nothing and compares by identity."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]):
        self.name = name  # full name of the class, with its module
        self.arguments = arguments  # positional arguments of the constructor
        self.state: Any = None  # state that the pickle set afterwards; see `field`

    def field(self, name: str, default: Any = None) -> Any:
        """Return a field of the object, or `default` if its state has no such field."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class RecordKind:
    """A class that is not imported; calling it makes a `Record`."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *arguments: Any) -> Record:
        """Keep the positional arguments."""
        return Record(self.name, arguments)
