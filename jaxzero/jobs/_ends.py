"""How a run ends before its last step, on all processes alike."""

from ..distributed import AgreedEnd


class Interrupted(AgreedEnd):
    """The run was asked to stop and saved after `step` steps; `name` can be resumed."""

    def __init__(self, name: str | None, step: int, *, by_ctrl_c: bool):
        super().__init__(f"Run {name!r} was interrupted after step {step} and saved.")
        self.name = name
        self.step = step
        self.by_ctrl_c = by_ctrl_c  # else by SIGTERM


class Diverged(AgreedEnd, RuntimeError):
    """Losses or gradients stay non-finite, on all processes alike."""
