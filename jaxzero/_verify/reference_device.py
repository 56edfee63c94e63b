"""The device on which plain JAX runs with all rows: one that has the room, or the host's CPU."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .._collectives import readable_bytes
from .._mesh import AnyMesh, physical
from .problem import Problem


def choose_device(problem: Problem, mesh: AnyMesh, reference: Any) -> tuple[Any, str]:
    """The device, and a sentence about what it must hold at least.

    Args:
        problem: the call.
        mesh: the mesh of the step.
        reference: a device, the name of a platform such as "cpu", or None: a device of the mesh if
            it has the room, otherwise the host's CPU.

    Raises:
        ValueError: `reference` is no device of this process, or has not the room.
    """
    least = least_bytes(problem)
    said = (
        f"Plain JAX on one device holds at least {readable_bytes(least)} of parameters, gradients "
        "and rows"
    )
    if reference is None:
        own = next(x for x in physical(mesh).devices.flat if x.process_index == jax.process_index())
        device = own if least <= free_bytes(own) else named_device("cpu")
    else:
        device = named_device(reference) if isinstance(reference, str) else reference
        if not isinstance(device, jax.Device) or device.process_index != jax.process_index():
            raise ValueError(
                "`reference` must be a device of this process (`jax.local_devices()`) or the name "
                f"of a platform, such as 'cpu'; got {reference!r}."
            )
    free = free_bytes(device)
    if least > free:
        raise ValueError(
            f"{said}, and {device} has {readable_bytes(int(free))} left. Verify a smaller model of "
            "the same layers, or give another `reference`."
        )
    return device, f"{said}, on {device}."


def free_bytes(device: Any) -> float | int:
    """Bytes that a device has left; infinite where that is not known."""
    if device.platform == "cpu":
        return _free_host_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return float("inf")
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _free_host_bytes() -> float | int:
    try:
        with open("/proc/meminfo") as file:
            sizes = dict(line.split(":") for line in file)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return float("inf")


def named_device(platform: str) -> Any:
    """The first device of a platform.

    Raises:
        ValueError: JAX has not started that platform.
    """
    try:
        return jax.local_devices(backend=platform)[0]
    except RuntimeError as error:
        raise ValueError(
            f"`reference`: JAX has no platform {platform!r} here ({error}). Start it with "
            "both, as by `JAX_PLATFORMS=cuda,cpu`."
        ) from error


def least_bytes(problem: Problem) -> int:
    """Bytes of all arguments and gradients."""
    sizes = [np.size(x) * getattr(x.dtype, "itemsize", 8) for x in problem.arrays]
    return sum(sizes) + sum(sizes[i] for i in problem.differentiated)
