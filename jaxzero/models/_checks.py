"""What the frozen dataclasses of this package check by their annotations."""

import dataclasses
import typing
from typing import Any


def check_positive(config: Any) -> None:
    """Refuse a field annotated `int`, or `int | None` with a number, that is not positive."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_count = field.type is int or (field.type == (int | None) and value is not None)
        if is_count and not (isinstance(value, int) and value > 0):
            raise ValueError(f"`{field.name}` must be a positive integer; got {value!r}.")


def check_choices(config: Any) -> None:
    """Refuse a field annotated `Literal[...]` that is none of those."""
    for field in dataclasses.fields(config):
        if typing.get_origin(field.type) is not typing.Literal:
            continue
        value, choices = getattr(config, field.name), typing.get_args(field.type)
        if value not in choices:
            raise ValueError(
                f"`{field.name}` must be one of {', '.join(map(repr, choices))}; got {value!r}."
            )
