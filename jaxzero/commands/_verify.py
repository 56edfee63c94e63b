"""`jaxzero verify`: check that a step computes what plain JAX computes on one device."""

import jax
from rich.console import Console

from .._mesh import make_mesh
from .._sharding import ZeroConfig, zero3, zeropp, zeropp4
from .._zero import Zero
from ..jobs import choose_devices
from ._job import load_job
from ._settings import Verify

_PRESETS = {"zero3": zero3, "zeropp": zeropp, "zeropp4": zeropp4}


def verify(settings: Verify, console: Console) -> bool:
    """Print how one step compares with plain JAX on one device; return whether all holds.

    Raises:
        ValueError: the function returns no job, its batch has no values, or no device has the
            memory for plain JAX.
    """
    devices = choose_devices(settings.devices)  # before the job, which may start a backend
    loss_fn, init_fn, batch, tx = load_job(settings.function, f"`{settings.function}`")
    if not callable(loss_fn):
        raise ValueError(
            f"`{settings.function}` must return one loss for `jaxzero verify`; it returned "
            f"{type(loss_fn).__name__}. Return the one that is to be verified."
        )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
        raise ValueError(
            f"`{settings.function}` must return a batch with values for `jaxzero verify`; it has "
            "`ShapeDtypeStruct`s, with which `jaxzero plan` is content. Return arrays."
        )
    zero = Zero(make_mesh(nodes=settings.nodes, devices=devices), _config(settings))
    with console.status("verifying") as status:
        report = zero.verify(
            loss_fn,
            zero.init(init_fn),
            batch,
            tx=tx,
            reference=settings.reference,
            float64=settings.float64,
            microbatches=settings.microbatches,
            has_aux=settings.has_aux,
            weighted=settings.weighted,
            progress=status.update,
        )
    text = "\n".join(report.lines(console.width, settings.limit))
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return report.ok


def _config(settings: Verify) -> ZeroConfig:
    return _PRESETS[settings.preset]()
