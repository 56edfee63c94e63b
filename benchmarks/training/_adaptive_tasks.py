"""Tasks of the adaptive batch study: a byte decoder, and a convolutional network on digits.

A task defines the number of examples, micro-batches, optimizer and range of batch sizes;
`simigrad.py` decides how many micro-batches one update takes. An example is a window of bytes or
an image.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.shared._byte_decoder import Size, init, losses
from benchmarks.shared._corpus import (
    HELD_OUT_PACKAGES,
    TRAIN_PACKAGES,
    Corpus,
    distinct_windows,
    even_windows,
    read_packages,
)

Tree = Any
Equal = Literal["examples", "updates"]  # what runs have in common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """What is trained.

    Attributes:
        name: of the task, in rows and files.
        has_predicted_time: whether rows have a predicted time, in which an example counts as a
            sequence of Llama-7B (`_step_costs`).
        metric: what `evaluate` gives, with its unit.
        budget: examples in all, a multiple of `rows * per_call`.
        rows: examples in a micro-batch.
        per_call: micro-batches in one call of the compiled step.
        sizes: fixed batches, in micro-batches; the first and last bound the others.
        target: similarity for the walk and the jump.
        learning_rate: the highest, for the smallest batch; where it is tuned, the first trial.
        lr_scaling: what the rate of a larger batch is proportional to: the size of the batch
            ("linear"), or the square root of it.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    has_predicted_time: ClassVar[bool] = False
    budget: int
    rows: int
    per_call: int
    sizes: tuple[int, ...]
    target: float
    learning_rate: float
    lr_scaling: Literal["linear", "sqrt"]

    def __post_init__(self):
        if self.budget % (self.rows * self.per_call):
            raise ValueError(
                f"`budget` must be a multiple of {self.rows} rows x {self.per_call} "
                f"micro-batches; got {self.budget}."
            )
        if min(self.sizes) < 2 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(
                f"`sizes` must rise, from 2 micro-batches (two halves) or more; got {self.sizes}."
            )

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates that are tried for each variant; one: nothing is tuned."""
        return (self.learning_rate,)

    @property
    def budgets(self) -> dict[Equal, int]:
        """How many examples, and how many updates, every variant gets where these are equal."""
        return {"examples": self.budget}

    @property
    def corpus(self) -> dict[str, Any] | None:
        """Sizes and a hash of what was read; None: it is the same everywhere."""
        return None

    @abc.abstractmethod
    def optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        """The optimizer, with a learning rate or a schedule that counts updates."""

    @abc.abstractmethod
    def init(self, key: jax.Array) -> Tree: ...

    @abc.abstractmethod
    def loss(self, params: Tree, batch: Tree) -> jax.Array:
        """The mean over a micro-batch."""

    @abc.abstractmethod
    def batches(self, seed: int) -> Iterator[Tree]:
        """Yield `per_call` stacked micro-batches at a time, enough for every variant."""

    @abc.abstractmethod
    def evaluate(self, params: Tree) -> dict[str, float]:
        """Held-out loss and further scores, by name; `metric` describes the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes(Task):
    """A decoder from scratch on the sources of installed packages, with AdamW.

    A run sees no window twice. Whole packages are held out.

    Attributes:
        updates: how many, where variants are compared at equal updates.
        trials: learning rates that are tried, over `learning_rate`.
        size: of the decoder.
        held_out: windows that are judged.
        train_packages: whose sources it learns.
        held_out_packages: whose sources it is judged on.
    """

    name: ClassVar[str] = "bytes"
    metric: ClassVar[str] = "held-out loss, nats per byte"
    has_predicted_time: ClassVar[bool] = True

    budget: int = 2**16
    updates: int = 256
    rows: int = 8
    per_call: int = 32
    sizes: tuple[int, ...] = (2, 8, 32)
    target: float = 0.1
    learning_rate: float = 2e-3
    trials: tuple[float, ...] = (1.0, 0.5, 2.0)
    lr_scaling: Literal["linear", "sqrt"] = "sqrt"
    size: Size = Size()
    held_out: int = 6144
    train_packages: tuple[str, ...] = TRAIN_PACKAGES
    held_out_packages: tuple[str, ...] = HELD_OUT_PACKAGES

    @property
    def learning_rates(self) -> tuple[float, ...]:
        return tuple(self.learning_rate * trial for trial in self.trials)

    @property
    def budgets(self) -> dict[Equal, int]:
        return {"examples": self.budget, "updates": self.updates}

    @property
    def corpus(self) -> dict[str, Any]:
        return self._corpus.described()

    @property
    def _corpus(self) -> Corpus:
        return read_packages(self.train_packages, self.held_out_packages)

    def optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(learning_rate, b2=0.95, weight_decay=0.1),
        )

    def init(self, key: jax.Array) -> Tree:
        return init(self.size, key)

    def loss(self, params: Tree, batch: Tree) -> jax.Array:
        return losses(self.size, params, batch).mean()

    def batches(self, seed: int) -> Iterator[Tree]:
        call = self.per_call * self.rows
        most = max(self.budget, self.updates * self.rows * self.sizes[-1]) // call + 1
        generator = np.random.default_rng(seed)
        windows = distinct_windows(self._corpus.train, most * call, self.size.length, generator)
        for part in windows.reshape(most, self.per_call, self.rows, -1):
            yield part.astype(np.int32)

    def evaluate(self, params: Tree) -> dict[str, float]:
        windows = even_windows(self._corpus.held_out, self.held_out, self.size.length)
        parts = windows.reshape(-1, 96, self.size.length + 1)
        return {"held_out_loss": float(_part_losses(self.size, params, parts).mean())}


@functools.partial(jax.jit, static_argnums=0)
def _part_losses(size: Size, params: Tree, parts: jax.Array) -> jax.Array:
    return jax.lax.map(lambda tokens: losses(size, params, tokens).mean(), parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """A small conv net on the 1797 handwritten digits that scikit-learn carries, with SGD.

    Each image is shifted by up to one pixel each way, anew each time it is seen. Every fifth one
    is held out.
    """

    name: ClassVar[str] = "digits"
    metric: ClassVar[str] = "held-out loss, nats per image"

    budget: int = 2**16
    rows: int = 8
    per_call: int = 64
    sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    target: float = 0.3
    learning_rate: float = 0.02
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    channels: int = 12

    def optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        return optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(learning_rate, momentum=0.9))

    def init(self, key: jax.Array) -> Tree:
        c = self.channels
        shapes = {"first": (3, 3, 1, c), "second": (3, 3, c, 2 * c), "last": (4 * 4 * 2 * c, 10)}
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        he = jax.nn.initializers.he_normal()
        return {
            name: {"kernel": he(keys[name], shape), "bias": jnp.zeros(shape[-1])}
            for name, shape in shapes.items()
        }

    def loss(self, params: Tree, batch: Tree) -> jax.Array:
        images, labels = batch
        scores = _scores(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    def batches(self, seed: int) -> Iterator[Tree]:
        generator, (images, labels) = np.random.default_rng(seed), _read_digits()
        is_train = np.arange(len(images)) % 5 != 0
        images, labels = images[is_train], labels[is_train]
        order = np.empty(0, np.int64)
        while True:
            number = self.per_call * self.rows
            while len(order) < number:  # epoch after epoch, each in an order of its own
                order = np.concatenate([order, generator.permutation(len(images))])
            taken, order = order[:number], order[number:]
            shape = (self.per_call, self.rows)
            shifted = _shifted(images[taken], generator)
            yield shifted.reshape(*shape, 8, 8), labels[taken].reshape(shape)

    def evaluate(self, params: Tree) -> dict[str, float]:
        images, labels = _read_digits()
        scores = _scores(params, jnp.asarray(images[::5]))
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, labels[::5]).mean()
        accuracy = (scores.argmax(-1) == labels[::5]).mean()
        return {"held_out_loss": float(loss), "held_out_accuracy": float(accuracy)}


@functools.cache
def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images, float32 `[1797, 8, 8]` in 0 to 1, and labels, int32."""
    from sklearn.datasets import load_digits  # of the extra `benchmarks`

    digits: Any = load_digits()
    return (digits.images / 16).astype(np.float32), digits.target.astype(np.int32)


def _shifted(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Shift each image by -1, 0 or 1 pixels in both directions."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    rows, columns = generator.integers(0, 3, (2, len(images), 1, 1))
    i, j = np.arange(8)[None, :, None], np.arange(8)[None, None]
    return padded[np.arange(len(images))[:, None, None], rows + i, columns + j]


@jax.jit
def _scores(params: Tree, images: jax.Array) -> jax.Array:
    """Float `[n, 8, 8]` to `[n, 10]`."""

    def conv(x, layer, stride):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, layer["kernel"], (stride, stride), "SAME", dimension_numbers=dims
        )
        return jax.nn.relu(x + layer["bias"][None, None, None])

    x = conv(images[..., None], params["first"], 1)
    x = conv(x, params["second"], 2)
    return x.reshape(len(x), -1) @ params["last"]["kernel"] + params["last"]["bias"][None]


TASKS: dict[str, Callable[[], Task]] = {"digits": Digits, "bytes": Bytes}
