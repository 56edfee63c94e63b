"""Run plain JAX on one device with all rows, and sample how far roundings may move its results.

The device is one of the mesh if it has the room, otherwise the host's CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .._collectives import readable_bytes
from .._host_memory import available_bytes
from .._mesh import AXES, AnyMesh, map_devices, physical
from .problem import Problem, on_host
from .roundings import draws_numbers, moved, shifted
from .samples import Samples

# Precision of float32 matrix products where platforms choose it: TF32 on GPUs, bfloat16 on TPUs.
_PRODUCT_EPS = {"cuda": 2.0**-10, "gpu": 2.0**-10, "rocm": 2.0**-10, "tpu": 2.0**-7}


class OneDevice:
    """Computes a problem by plain JAX on one device, and samples how roundings change results.

    Args:
        problem: the call to compute, with all rows.
        device: the device that plain JAX runs on.
        platform: the platform of the step that the results are compared with.
        spread: for each array of the problem, how much codecs may change each of its elements, an
            array of the same shape; None: there are no codecs.
    """

    def __init__(
        self, problem: Problem, device: Any, platform: str, spread: Sequence[Any] | None = None
    ):
        self.problem = problem
        same = device.platform == platform
        self.product_eps = 0.0 if same else _PRODUCT_EPS.get(platform, 0.0)
        self.mesh = Mesh(np.array([[device]]), AXES)
        self.device, self.platform = device, platform
        self.arrays = self._placed(problem.arrays)
        self.spread = None if spread is None else self._placed(spread)
        self._sampled: Callable | None = None
        self.program = jax.jit(self._mapped(problem.loss_and_grads)).lower(self.arrays).compile()

    @classmethod
    def chosen(
        cls,
        problem: Problem,
        given: Problem,
        mesh: AnyMesh,
        reference: Any,
        spread: Sequence[Any] | None,
        say: Callable[[str], None],
    ) -> OneDevice:
        """Compile a problem for the device that `choose_device` returns.

        If `reference` is None and the compiled program does not fit on that device, it is compiled
        for the host's CPU instead.

        Args:
            problem: the call to compute.
            given: the call that the step runs, whose arrays decide which device has the memory.
            mesh: the mesh of the step.
            reference: see `choose_device`.
            spread: see `OneDevice`.
            say: a function that is called with sentences about the memory that is needed.
        """
        device, said = choose_device(given, mesh, reference)
        say(said)
        platform = physical(mesh).devices.flat[0].platform
        one = cls(problem, device, platform, spread)
        if reference is None and not one.fits and device.platform != "cpu":
            one = cls(problem, named_device("cpu"), platform, spread)
        say(one.described())
        return one

    def _placed(self, arrays: Sequence[Any]) -> list[Any]:
        return [jax.device_put(x, self.device) for x in arrays]

    def set_spread(self, spread: Sequence[Any]) -> None:
        """Replace `spread` by arrays of the same shapes and dtypes."""
        self.spread = self._placed(spread)

    def _mapped(self, function: Callable, num: int = 1) -> Callable:
        everywhere = PartitionSpec()
        return map_devices(function, self.mesh, (everywhere,) * num, everywhere)

    def _bytes(self, *names: str) -> int:
        sizes = self.program.memory_analysis()
        return sum(getattr(sizes, f"{name}_size_in_bytes", 0) for name in names)

    @property
    def fits(self) -> bool:
        """Whether the device has room for results and temporary memory beside the arguments."""
        return self._bytes("output", "temp") <= free_bytes(self.device)

    def described(self) -> str:
        """Return a sentence that says how many bytes the program needs, and on which device.

        Raises:
            ValueError: the device has not enough memory left.
        """
        needed = readable_bytes(self._bytes("argument", "output", "temp"))
        if not self.fits:
            raise ValueError(
                f"Plain JAX on one device needs {needed}, and {self.device} has "
                f"{readable_bytes(int(free_bytes(self.device)))} left beside its arguments. Give "
                "another `reference`, fewer rows, or a smaller model of the same layers."
            )
        return f"Plain JAX on one device: {needed} on {self.device}."

    def in_float64(self) -> list[Any]:
        """Compute the results of `run` with all floats in 64 bits.

        Raises:
            ValueError: the function does not run in float64.
        """
        with jax.enable_x64(True):
            wide = [
                np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
                for x in self.problem.arrays
            ]
            try:
                arrays = [jax.device_put(x, self.device) for x in wide]
                return on_host(jax.jit(self._mapped(self.problem.loss_and_grads))(arrays))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"`float64=True`: the function does not run in float64: {error}"
                ) from error

    def run(self) -> list[Any]:
        """Compute the loss, `aux` and the gradients, as arrays on the host."""
        return on_host(self.program(self.arrays))

    def samples(self, results: Sequence[Any], redraw: bool, encoded: bool) -> Samples:
        """Measure how far results change if each operation's result is moved by its rounding error.

        Args:
            results: the results of `run`, with which the changed results are compared.
            redraw: whether to draw other random numbers too.
            encoded: whether to move each element of the arguments by `spread` too.
        """

        def sample(arrays, spread, seed, redraw, encoded):
            if self.spread is not None:
                pairs = zip(arrays, spread, strict=True)
                arrays = [shifted(x, encoded * by, seed) for x, by in pairs]
            function = self.problem.loss_and_grads
            return moved(function, (arrays,), seed, redraw, self.product_eps)

        if self._sampled is None:
            self._sampled = jax.jit(self._mapped(sample, 5))
        sampled, options = self._sampled, (jnp.array(redraw), jnp.float32(encoded))

        def run(seed: Any) -> list[Any]:
            return on_host(sampled(self.arrays, self.spread or [], seed, *options))

        return Samples.of(run, results)

    @property
    def is_random(self) -> bool:
        """Whether the program draws random numbers."""
        answers = []

        def note(arrays: Sequence[Any]) -> Any:
            answers.append(draws_numbers(self.problem.loss_and_grads, arrays))
            return jnp.zeros([])

        jax.eval_shape(self._mapped(note), self.arrays)
        return answers[0]


def choose_device(problem: Problem, mesh: AnyMesh, reference: Any) -> tuple[Any, str]:
    """Return the device for plain JAX, and a sentence about the memory that plain JAX needs.

    Args:
        problem: the call to compute.
        mesh: the mesh of the step.
        reference: a device, or the name of a platform such as "cpu". None: a device of the mesh if
            it has the memory, otherwise the host's CPU.

    Raises:
        ValueError: `reference` is not a device of this process, or the device has not enough memory
            left.
    """
    least = least_bytes(problem)
    needs = (
        f"Plain JAX on one device holds at least {readable_bytes(least)} of parameters, gradients "
        "and rows"
    )
    if reference is None:
        own = own_device(mesh)
        device = own if least <= free_bytes(own) else named_device("cpu")
    else:
        device = named_device(reference) if isinstance(reference, str) else reference
        if not isinstance(device, jax.Device) or device.process_index != jax.process_index():
            raise ValueError(
                "`reference` must be a device of this process (`jax.local_devices()`) or the name "
                f"of a platform, such as 'cpu'; got {reference!r}."
            )
    free = free_bytes(device)
    if least > free:
        raise ValueError(
            f"{needs}, and {device} has {readable_bytes(int(free))} left. Verify a smaller model "
            "of the same layers, or give another `reference`."
        )
    return device, f"{needs}, on {device}."


def own_device(mesh: AnyMesh) -> Any:
    """Return a device of the mesh that belongs to this process."""
    return next(x for x in physical(mesh).devices.flat if x.process_index == jax.process_index())


def free_bytes(device: Any) -> float | int:
    """Return the bytes that a device has left; infinity if they are not known."""
    if device.platform == "cpu":
        free = available_bytes()
        return float("inf") if free is None else free
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return float("inf")
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def named_device(platform: str) -> Any:
    """Return the first device of a platform.

    Raises:
        ValueError: JAX has not started that platform.
    """
    try:
        return jax.local_devices(backend=platform)[0]
    except RuntimeError as error:
        raise ValueError(
            f"`reference`: JAX has no platform {platform!r} here ({error}). Start it with "
            "both, as by `JAX_PLATFORMS=cuda,cpu`."
        ) from error


def least_bytes(problem: Problem) -> int:
    """Return the bytes of the arguments and gradients of a call, the least that it needs."""
    sizes = [np.size(x) * getattr(x.dtype, "itemsize", 8) for x in problem.arrays]  # 8: random keys
    return sum(sizes) + sum(sizes[i] for i in problem.differentiated)
