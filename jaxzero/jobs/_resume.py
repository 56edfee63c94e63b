"""Where a run starts: at step 0, or at its last checkpoint if that is of the same run."""

import dataclasses
from typing import Any

from ._session import Session, State


def begin(session: Session) -> State:
    """The state before the first step.

    Raises:
        ValueError: there is a run of this name already.
    """
    step = session.checkpoints.latest_step()
    if step is not None:
        raise ValueError(
            f"{str(session.settings.run.directory)!r} already holds a run, at step {step}. Go on "
            "with it by `resume`, choose another `name`, or delete the folder."
        )
    session.journal.clear()  # of a run that ended before its first checkpoint
    return _initial(session)


def save(session: Session, state: State) -> None:
    """Save a state, with what `restore` will compare."""
    tree = {"params": state.params, "opt_state": state.opt_state}
    session.checkpoints.save(state.step, tree, extra=_identity(session))


def restore(session: Session) -> State:
    """The state of the last checkpoint. It may come from a run on other devices.

    Raises:
        ValueError: there is no checkpoint, or a setting that decides the course of training differs
            from the run that saved it.
    """
    step = session.checkpoints.latest_step()
    if step is None:
        raise ValueError(
            f"There is nothing to resume in {str(session.settings.run.directory)!r}: it holds no "
            "checkpoint. Leave out `resume`, or give the `name` of another run."
        )
    like = _initial(session)
    tree, saved = session.checkpoints.restore(
        like={"params": like.params, "opt_state": like.opt_state}
    )
    _check_same(_identity(session), saved)
    session.journal.drop_after(step)
    return State(step=step, params=tree["params"], opt_state=tree["opt_state"])


def _initial(session: Session) -> State:
    return State(step=0, params=session.setup.params, opt_state=session.setup.opt_state)


def _identity(session: Session) -> dict[str, Any]:
    """The settings that a resumed run must share, as JSON.

    Devices and sharding may differ: they do not change what is learned, beyond rounding.
    """
    return {
        **dataclasses.asdict(session.settings.optimization),
        "max_tokens": session.settings.data.max_tokens,
        "data": session.examples.digest,
    }


def _check_same(given: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, value in given.items():
        if saved.get(name) != value:
            remedy = (
                "Use the Python and the `data` of the first run"
                if name == "data"
                else "Pass the value of the first run"
            )
            raise ValueError(
                f"Cannot resume with another `{name}`: the run was started with "
                f"{saved.get(name)!r}, got {value!r}. {remedy}, or start a new run under another "
                "`name`."
            )
