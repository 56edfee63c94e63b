"""`jaxzero report`: what would be split how, and what each device would hold. Trains nothing."""

from rich.console import Console

from ._settings import Optimization, Report
from ._setup import describe_devices, set_up


def report(settings: Report, console: Console) -> None:
    """Print the table.

    Raises:
        ValueError: the settings do not fit the machine, or the checkpoint cannot be loaded.
    """
    setup = set_up(settings.checkpoint, settings.devices, settings.sharding, Optimization())
    console.print(
        f"{setup.checkpoint}\non {describe_devices(setup)}", highlight=False, soft_wrap=True
    )
    setup.zero.report(setup.params, setup.opt_state).print(console)
