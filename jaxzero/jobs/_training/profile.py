"""A trace of some steps, by JAX's profiler; every step is marked in it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax


class StepProfiler:
    """Traces the requested steps. A context manager."""

    def __init__(self, steps: range, directory: Path):
        """Prepare to trace `steps` (numbers of optimizer steps); the traces go to `directory`."""
        self._steps = steps
        self._directory = directory
        self._is_tracing = False

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Mark what is done inside as a step, and trace it if that was asked for."""
        if number in self._steps and not self._is_tracing:
            jax.profiler.start_trace(self._directory)
            self._is_tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if number + 1 not in self._steps:
            self._stop()

    def _stop(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
