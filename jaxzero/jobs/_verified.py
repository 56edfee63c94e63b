"""Verify the first step of a run, and print one line about it."""

from ._data import training_batches
from ._session import Session, State


def print_verified(session: Session, state: State) -> None:
    """Compare the first step, without codecs, with plain JAX on one device; print the verdict.

    Raises:
        ValueError: no device has the room, or the run takes local steps.
    """
    if session.rounds is not None:
        raise ValueError(
            "`verify` compares steps of all devices together, and `local_steps` are of one node. "
            "Leave one of them out."
        )
    zero, settings = session.setup.zero, session.settings
    batches = training_batches(session.examples.train, zero, settings.optimization)
    report = zero.verify(
        session.loss, state.params, next(batches), has_aux=True, codecs=False, variations=False
    )
    session.console.print(f"{report.line} {report.first}".strip(), highlight=False, soft_wrap=True)
