"""Exceptions that end a run before its last step, raised on all processes."""

from ..distributed import AgreedEnd


class Interrupted(AgreedEnd):
    """The run was asked to stop and saved its state after `step` steps; resume it by `name`."""

    def __init__(self, name: str | None, step: int, *, by_ctrl_c: bool):
        super().__init__(f"Run {name!r} was interrupted after step {step} and saved.")
        self.name = name
        self.step = step
        self.by_ctrl_c = by_ctrl_c  # otherwise by SIGTERM


class Diverged(AgreedEnd, RuntimeError):
    """Too many steps in a row had non-finite losses or gradients. Raised on all processes."""
