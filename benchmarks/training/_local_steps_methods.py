"""The methods of the study of local steps, by name.

A name has up to three parts, such as `diloco10 sgd(0.7, momentum=0.6, nesterov=True) rate 1.4`: a
key of `_SETTINGS`; an outer optimizer in place of the one there; and the learning rate of the nodes
over that of synchronous training, if it is not 1.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import optax

import jaxzero as jz

from ._local_steps_summary import BASELINE

_PRESET = "sgd(0.7, momentum=0.9, nesterov=True)"
_AVERAGE = "sgd(1.0)"  # the outer parameters are the mean of the nodes'
_NUMBER = r"\d+(?:\.\d+)?"
_OUTER = re.compile(
    rf"sgd\((?P<rate>{_NUMBER})(?:, momentum=(?P<momentum>{_NUMBER}), nesterov=True)?\)"
)
_NAME = re.compile(rf"(?P<settings>\w+)(?: (?P<outer>sgd\([^)]*\)))?(?: rate (?P<rate>{_NUMBER}))?")


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to take local steps.

    Attributes:
        local: the local steps.
        outer: the outer optimizer of `local`, as it is written.
        rate: how many times the learning rate of synchronous training nodes take.
    """

    local: jz.LocalSteps
    outer: str
    rate: float = 1.0


def _streaming(every: int, fragments: int = 3, **changes: Any) -> jz.LocalSteps:
    preset = jz.streaming_diloco(every=every, fragments=fragments)
    return dataclasses.replace(preset, **changes)


# The local steps, and the outer optimizer that they have unless the name says another.
_SETTINGS: dict[str, tuple[jz.LocalSteps, str]] = {
    "diloco30": (jz.diloco(every=30), _PRESET),
    "streaming30": (_streaming(30), _PRESET),
    "diloco1": (jz.diloco(every=1), _PRESET),
    "diloco5": (jz.diloco(every=5), _PRESET),
    "diloco10": (jz.diloco(every=10), _PRESET),
    "diloco100": (jz.diloco(every=100), _PRESET),
    "streaming30_delay0": (_streaming(30, delay=0), _PRESET),
    "streaming30_delay1": (_streaming(30, delay=1), _PRESET),
    "streaming30_delay10": (_streaming(30, delay=10), _PRESET),
    "streaming10": (_streaming(10, fragments=2), _PRESET),
    "streaming100": (_streaming(100, fragments=4), _PRESET),
    "dasgd30": (jz.dasgd(every=30, delay=5), _AVERAGE),
    # Why a method is worse: one thing is changed.
    "average1": (jz.LocalSteps(every=1), _AVERAGE),
    "average5": (jz.LocalSteps(every=5), _AVERAGE),
    "average10": (jz.LocalSteps(every=10), _AVERAGE),
    "average30": (jz.LocalSteps(every=30), _AVERAGE),
    "average100": (jz.LocalSteps(every=100), _AVERAGE),
    "streaming30_average": (_streaming(30), _AVERAGE),
    "streaming30_kept": (_streaming(30, mixing=None), _PRESET),
    "streaming30_kept_average": (_streaming(30, mixing=None), _AVERAGE),
    "streaming30_float32": (_streaming(30, codec=None), _PRESET),
}


def method(name: str) -> Method | None:
    """The method of this name; None is synchronous training.

    Raises:
        ValueError: there is none.
    """
    if name == BASELINE:
        return None
    found = _NAME.fullmatch(name)
    if found is None or found["settings"] not in _SETTINGS:
        raise ValueError(
            f"`methods` must be {BASELINE} or among {', '.join(_SETTINGS)}, each with an outer "
            f"optimizer ({_PRESET}) and a rate (rate 1.4) after it, if any; got {name!r}."
        )
    local, outer = _SETTINGS[found["settings"]]
    outer = found["outer"] or outer
    local = dataclasses.replace(local, outer=_outer(outer))
    return Method(local, outer, float(found["rate"] or 1))


def _outer(text: str) -> optax.GradientTransformation:
    found = _OUTER.fullmatch(text)
    if found is None:
        raise ValueError(f"`methods` must name outer optimizers as in {_PRESET}; got {text!r}.")
    momentum = found["momentum"]
    if momentum is None:
        return optax.sgd(float(found["rate"]))
    return optax.sgd(float(found["rate"]), float(momentum), nesterov=True)


_RATES = (0.25, 0.5, 0.7, 1.4, 2.0, 2.8)
_TUNED = ("diloco30", "streaming30", "average10", "average30", "streaming30_average", "average100")
_OTHER_OUTER = (
    "sgd(0.7, momentum=0.6, nesterov=True)",
    "sgd(0.7, momentum=0.5, nesterov=True)",
    "sgd(0.7, momentum=0.7, nesterov=True)",
    "sgd(0.3, momentum=0.9, nesterov=True)",
)
_WITH_OTHER_OUTER = ("diloco10", "diloco30", "streaming10", "streaming30")

# The methods that run unless others are named.
DEFAULT = (
    BASELINE,
    *_SETTINGS,
    *(f"{name} {outer}" for outer in _OTHER_OUTER for name in _WITH_OTHER_OUTER),
    *(f"{name} rate {rate}" for name in _TUNED for rate in _RATES),
)

# The figure: for each panel, what each curve has at which place.
OVER_EVERY = {
    "DiLoCo": {1.0: "diloco1", 10.0: "diloco10", 30.0: "diloco30", 100.0: "diloco100"},
    "streaming": {10.0: "streaming10", 30.0: "streaming30", 100.0: "streaming100"},
    "average": {1.0: "average1", 10.0: "average10", 30.0: "average30", 100.0: "average100"},
}
OVER_DELAY = {
    "streaming, H = 30": {
        0.0: "streaming30_delay0",
        1.0: "streaming30_delay1",
        5.0: "streaming30",
        10.0: "streaming30_delay10",
    },
    "DaSGD, H = 30": {0.0: "average30", 5.0: "dasgd30"},
}
