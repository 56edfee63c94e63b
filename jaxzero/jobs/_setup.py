"""What training and the dry look share: devices, checkpoint, sharding and optimizer."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._codecs import Cast
from .._config import Hops, ZeroConfig
from .._mesh import make_mesh
from .._zero import Zero
from ..interop import load_encoder
from ..models import EncoderConfig
from ._devices import choose_devices
from ._packaged_checkpoint import packaged_checkpoint
from ._settings import Devices, Optimization, Sharding, WireDtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A checkpoint, split over devices, and the optimizer that will train it."""

    checkpoint: Path
    config: EncoderConfig
    graph: Any  # nnx.GraphDef[Encoder]
    zero: Zero
    params: Any
    optimizer: optax.GradientTransformation
    opt_state: Any

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.zero.mesh.size


def set_up(
    checkpoint: Path | None, devices: Devices, sharding: Sharding, optimization: Optimization
) -> Setup:
    """Make the mesh and load the checkpoint onto it; each device's slices alone are read.

    Raises:
        ValueError: the settings do not fit the machine, or the checkpoint cannot be loaded.
    """
    checkpoint = packaged_checkpoint() if checkpoint is None else checkpoint
    # First of all: it has to come before anything that starts a JAX backend.
    mesh = make_mesh(devices.nodes, devices=choose_devices(devices.devices))
    zero = Zero(mesh, config=_zero_config(sharding))
    loaded = load_encoder(checkpoint, dtype=jnp.float32)
    params = zero.shard(loaded.params)
    optimizer = _optimizer(optimization)
    return Setup(
        checkpoint=checkpoint,
        config=loaded.config,
        graph=loaded.graph,
        zero=zero,
        params=params,
        optimizer=optimizer,
        opt_state=zero.init_optimizer(optimizer, params),
    )


def describe_devices(setup: Setup) -> str:
    """One line for people: `8 fake CPU devices, 2 nodes x 4`."""
    mesh = setup.zero.mesh
    device = jax.devices()[0]
    kind = "fake CPU devices" if device.platform == "cpu" else f"{device.device_kind} devices"
    return f"{mesh.size} {kind}, {mesh.shape['node']} nodes x {mesh.shape['local']}"


def _zero_config(sharding: Sharding) -> ZeroConfig:
    return ZeroConfig(
        stage=sharding.stage,
        weights=_hops(sharding.gather_dtype),
        gradients=_hops(sharding.reduce_dtype),
    )


def _hops(dtype: WireDtype) -> Hops:
    codec = None if dtype == "float32" else Cast(jnp.dtype(dtype))
    return Hops(node=codec, local=codec)


def _optimizer(optimization: Optimization) -> optax.GradientTransformation:
    peak, warmup = optimization.learning_rate, optimization.warmup_steps
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    # Falling to 0 averages out the noise of small batches, which a constant rate would end with.
    fall = optax.linear_schedule(peak, 0, max(optimization.steps - warmup, 1))
    rate = optax.join_schedules([rise, fall], [warmup])
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
