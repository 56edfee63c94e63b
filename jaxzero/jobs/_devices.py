"""Choose the devices that a command runs on."""

import contextlib
from typing import Any

import jax

from .._processes import process_count

_FAKE_DEVICES = 8


def choose_devices(num_devices: int | None) -> list[Any]:
    """Return `num_devices` devices (`jax.Device`) of the default backend; None: all.

    JAX is configured to show the CPU as several devices, which matters only on a machine without
    accelerators. This must be done before JAX starts a backend, so it is done on every machine.

    Raises:
        ValueError: there are fewer devices than requested.
    """
    if jax.config.values["jax_num_cpu_devices"] < 0:  # not set by the user
        with contextlib.suppress(RuntimeError):  # a backend runs already: take its devices
            jax.config.update("jax_num_cpu_devices", _fake_devices(num_devices))
    devices = jax.devices()
    if num_devices is not None and num_devices > len(devices):
        raise ValueError(
            f"`devices` asks for {num_devices}, JAX sees {len(devices)} ({devices[0].platform}). "
            "Ask for at most that many, or run on fake ones with JAX_PLATFORMS=cpu."
        )
    return devices[:num_devices]


def _fake_devices(num_devices: int | None) -> int:
    """Return the number of fake devices of this process; 1 if several processes simulate hosts."""
    return 1 if process_count() > 1 else num_devices or _FAKE_DEVICES
