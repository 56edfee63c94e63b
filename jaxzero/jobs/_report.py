"""`jaxzero report`: what would be split how, held where, and sent by a step. Trains nothing."""

from rich.console import Console

from ._node_bytes import abstract_tokens, plan_step
from ._settings import Data, Optimization, Report
from ._setup import describe_devices, set_up
from ._step import make_loss


def report(settings: Report, console: Console) -> None:
    """Print the tables, of a step on the batch that `jaxzero train` takes by default.

    Raises:
        ValueError: the settings do not fit the machine, or the checkpoint cannot be loaded.
    """
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
    setup.zero.report(setup.params, setup.opt_state, plan=plan).print(console)
