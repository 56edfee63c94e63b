"""Trace some steps with JAX's profiler, and mark each step in the trace."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax


class StepProfiler:
    """Context manager that traces the requested steps."""

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
    def step(self, number: int, num_steps: int = 1) -> Iterator[None]:
        """Context manager that marks its block as step `number`, and traces it if requested.

        Args:
            number: the number of the step that the block runs.
            num_steps: how many it runs, of which `number` is the first.
        """
        following = number + num_steps
        if self._has_any(number, following) and not self._is_tracing:
            jax.profiler.start_trace(self._directory)
            self._is_tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if not self._has_any(following, following + num_steps):
            self._stop()

    def _has_any(self, first: int, following: int) -> bool:
        """Whether steps from `first` to before `following` are to be traced."""
        return first < self._steps.stop and self._steps.start < following

    def _stop(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
