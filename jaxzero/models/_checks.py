"""Validate config dataclasses by the names and annotations of their fields."""

import dataclasses
import typing
from typing import Any


def check_positive(config: Any, *, or_zero: tuple[str, ...] = ()) -> None:
    """Raise if a field annotated `int` or `int | None` holds a number that is not positive."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_count = field.type is int or (field.type == (int | None) and value is not None)
        least = 0 if field.name in or_zero else 1
        if is_count and not (isinstance(value, int) and value >= least):
            kind = "an integer of at least 0" if least == 0 else "a positive integer"
            raise ValueError(f"`{field.name}` must be {kind}; got {value!r}.")


def check_choices(config: Any) -> None:
    """Raise if a field annotated `Literal[...]` has another value."""
    for field in dataclasses.fields(config):
        if typing.get_origin(field.type) is not typing.Literal:
            continue
        value, choices = getattr(config, field.name), typing.get_args(field.type)
        if value not in choices:
            raise ValueError(
                f"`{field.name}` must be one of {', '.join(map(repr, choices))}; got {value!r}."
            )


def check_dropout(config: Any) -> None:
    """Raise if a field named `..._dropout` is not in [0, 1)."""
    for field in dataclasses.fields(config):
        if field.name.endswith("_dropout") and not 0 <= getattr(config, field.name) < 1:
            raise ValueError(
                f"`{field.name}` must be in [0, 1); got {getattr(config, field.name)!r}."
            )
