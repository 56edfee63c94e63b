"""`jaxzero report`: how arrays would be split, and what a step would send, without training."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from .._settings import Data, Optimization, Report
from .._task import abstract_tokens
from .._training import describe_devices, make_loss, plan_step, set_up
from .plan_plot import SUFFIXES, plot_plan


def report(settings: Report, console: Console) -> None:
    """Print the report of a step on the batch that `jaxzero train` takes by default.

    Raises:
        ValueError: the settings do not fit the machine, the checkpoint cannot be loaded, or
            the picture is no file of a known format in a folder that exists.
        OSError: the picture cannot be written. This is found before the work.
    """
    if settings.plot is not None:
        _check_plot(settings.plot)
    optimization = Optimization()
    setup = set_up(
        settings.checkpoint,
        settings.devices,
        settings.sharding,
        optimization,
        max_tokens=None,
        console=console,
    )
    console.print(
        escape(f"{setup.checkpoint}\non {describe_devices(setup)}"), highlight=False, soft_wrap=True
    )
    pairs_per_device = -(-optimization.pairs // setup.num_devices)
    tokens = abstract_tokens(
        pairs_per_device * setup.num_devices, min(Data().max_tokens, setup.config.max_length)
    )
    loss = make_loss(setup.graph, temperature=optimization.temperature)
    plan = plan_step(setup.zero, setup.params, loss, tokens)
    setup.zero.report(setup.params, setup.opt_state, plan=plan).print(settings.detail, console)
    if settings.plot is not None:
        plot_plan(plan, settings.plot, title=f"one step on {describe_devices(setup)}")
        console.print(escape(f"Timeline drawn to {settings.plot}"), highlight=False, soft_wrap=True)


def _check_plot(path: Path) -> None:
    flag = f"`--plot {path}`"
    if not path.parent.is_dir():
        raise ValueError(
            f"{flag}: the folder {path.parent} does not exist. Make it, or name another place."
        )
    if path.is_dir():
        raise ValueError(f"{flag} is a folder. Name a file in it, such as {path / 'plan.png'}.")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{flag} must end in {', '.join(SUFFIXES)}, which selects the format.")
    exists = path.exists()
    path.open("ab").close()  # raises the `OSError` that writing the plot would
    if not exists:
        path.unlink()
