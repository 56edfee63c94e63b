"""Define the exceptions that end a run before its last step; all processes raise them."""

from ..distributed import AgreedEnd


class Interrupted(AgreedEnd):
    """Raised when a run was asked to stop and has saved its state after `step` steps.

    The run can be resumed by its `name`.
    """

    def __init__(self, name: str | None, step: int, *, by_ctrl_c: bool):
        super().__init__(f"Run {name!r} was interrupted after step {step} and saved.")
        self.name = name
        self.step = step
        self.by_ctrl_c = by_ctrl_c  # otherwise by SIGTERM


class Diverged(AgreedEnd, RuntimeError):
    """Raised on all processes after too many steps in a row with non-finite loss or gradients."""
