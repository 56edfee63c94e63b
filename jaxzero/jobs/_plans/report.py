"""`jaxzero report`: how arrays would be split, and what a step would send, without training."""

from rich.console import Console

from .._settings import Data, Optimization, Report
from .._training import abstract_tokens, describe_devices, make_loss, plan_step, set_up
from .plan_plot import plot_plan


def report(settings: Report, console: Console) -> None:
    """Print the report of a step on the batch that `jaxzero train` takes by default.

    Raises:
        ValueError: the settings do not fit the machine, the checkpoint cannot be loaded, or
            there is no folder for the picture.
    """
    if settings.plot is not None and not settings.plot.parent.is_dir():
        raise ValueError(
            f"`--plot {settings.plot}`: the folder {settings.plot.parent} does not exist. Make it, "
            "or name another place."
        )
    optimization = Optimization()
    setup = set_up(settings.checkpoint, settings.devices, settings.sharding, optimization)
    console.print(
        f"{setup.checkpoint}\non {describe_devices(setup)}", highlight=False, soft_wrap=True
    )
    pairs_per_device = -(-optimization.pairs // setup.num_devices)
    tokens = abstract_tokens(
        pairs_per_device * setup.num_devices, min(Data().max_tokens, setup.config.max_length)
    )
    loss = make_loss(setup, temperature=optimization.temperature)
    plan = plan_step(setup.zero, setup.params, loss, tokens)
    setup.zero.report(setup.params, setup.opt_state, plan=plan).print(settings.detail, console)
    if settings.plot is not None:
        plot_plan(plan, settings.plot, title=f"one step on {describe_devices(setup)}")
        console.print(f"Timeline drawn to {settings.plot}", highlight=False, soft_wrap=True)
