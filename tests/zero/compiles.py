"""A list of what XLA has compiled since this module was imported."""

import jax

COMPILES: list[str] = []


def _note_compile(event: str, duration: float, **_):
    if "backend_compile" in event:
        COMPILES.append(event)


jax.monitoring.register_event_duration_secs_listener(_note_compile)
