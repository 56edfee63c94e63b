"""Compare the StableHLO of many training steps before and after a refactoring.

    git stash && python -m benchmarks.compiled.lowered write before && git stash pop
    python -m benchmarks.compiled.lowered compare before

Each program is the loss and gradients of one model of the tests' zoo (or of a scanned decoder)
under one config, on one mesh of fake CPU devices, traced and lowered but not compiled. Source
locations are left out, and functions are numbered in the order of their definitions, so renaming a
Python function makes no difference.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

import jaxzero as jz
from benchmarks.shared import _llama
from tests import zoo

_EXAMPLES = 96  # a multiple of four micro-batches on 6 and on 8 devices
_EVERY = 9  # of the models of the zoo one in so many is lowered, under each preset
_VARIED = ("scanned_layers_of_divisible_width", "unrolled_with_remat", "mlp_of_odd_widths")
_MESHES = ("2x4-auto", "2x3-explicit", "4x2-explicit", "3x2-auto")
_INT8 = jz.Int8(block=32)
_FEEDBACK = dataclasses.replace(
    zoo.PRESETS["zeropp"],
    gradients=jz.PerAxis(node=jz.ErrorFeedback(jz.Int4(block=32, hadamard=32)), local=_INT8),
)
_CASTS = jz.PerAxis(node=jz.Cast(jnp.bfloat16), local=jz.Cast(jnp.bfloat16))
_CONFIGS = {
    "zero3": jz.zero3(),
    **zoo.PRESETS,
    "feedback": _FEEDBACK,
    "casts": jz.zero3(weights=_CASTS, gradients=_CASTS),
    "float8": jz.zero3(weights=jz.PerAxis(node=jz.Float8(block=32), local=jz.Float8(block=32))),
    "hpz_whole": jz.ZeroConfig(hpz=jz.HpZ(codec=None)),
    "hsdp": jz.hsdp(gradients=jz.PerAxis(node=_INT8)),
    "ddp": jz.ddp(),
    "stage1": jz.ZeroConfig(stage=1),
    "stage2": jz.ZeroConfig(stage=2, gradients=jz.PerAxis(node=_INT8, local=_INT8)),
}
_OPTIONS = {"": {}, "k4": {"microbatches": 4}, "halves": {"halves": True}}
_SIZE = _llama.LlamaSize(layers=4, width=64, hidden=128, heads=4, vocabulary=96)

Lower = Callable[[], str]


def programs() -> Iterator[tuple[str, Lower]]:
    """(name, function that lowers) of each program."""
    meshes = itertools.cycle(_MESHES)
    for name, preset in itertools.product(list(zoo.CASES)[::_EVERY], ("zero3", *zoo.PRESETS)):
        yield _of_zoo(name, preset, next(meshes), "")
    for name, config, option in itertools.product(_VARIED, _CONFIGS, _OPTIONS):
        yield _of_zoo(name, config, next(meshes), option)
    for config, prefetch, unrolled in itertools.product(
        ("zero3", "zeropp", "zeropp4", "feedback"), (0, 1, 2), (False, True)
    ):
        yield _of_decoder(config, prefetch, unrolled)


def _of_zoo(name: str, config: str, mesh: str, option: str) -> tuple[str, Lower]:
    return "-".join(filter(None, (name, config, mesh, option))), functools.partial(
        _lower_zoo, zoo.CASES[name], _CONFIGS[config], mesh, _OPTIONS[option]
    )


def _lower_zoo(case: zoo.Case, config: jz.ZeroConfig, mesh: str, options: dict[str, Any]) -> str:
    zero = jz.Zero(zoo.make_mesh(mesh), config)
    trees = [zero.shard(tree) for tree in case.init(jax.random.key(0))]
    batch = jax.tree.map(np.asarray, case.batch(jax.random.key(1), _EXAMPLES))
    step = zero.value_and_grad(case.loss, case.argnums, has_aux=case.has_aux, **options)
    state = {}
    if config.needs_wire_state:
        several = isinstance(case.argnums, tuple)
        numbers = case.argnums if isinstance(case.argnums, tuple) else (case.argnums,)
        states = tuple(zero.init_wire_state(trees[i]) for i in numbers)
        state["wire_state"] = states if several else states[0]
    return jax.jit(step).lower(*trees, batch, **state).as_text()


def _of_decoder(config: str, prefetch: int, unrolled: bool) -> tuple[str, Lower]:
    name = f"decoder-{'unrolled' if unrolled else 'scanned'}-{config}-prefetch{prefetch}"
    return name, functools.partial(_lower_decoder, _CONFIGS[config], prefetch, unrolled)


def _lower_decoder(config: jz.ZeroConfig, prefetch: int, unrolled: bool) -> str:
    schedule = jz.CommSchedule(prefetch=prefetch, bucket_bytes=2**16)
    zero = jz.Zero(zoo.make_mesh("2x4-auto"), dataclasses.replace(config, schedule=schedule))
    size = dataclasses.replace(_SIZE, unrolled=unrolled)
    params = zero.abstract(functools.partial(_llama.init, size), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((zero.num_devices, 16), jnp.int32)
    state = {}
    if config.needs_wire_state:
        state["wire_state"] = jax.eval_shape(zero.init_wire_state, params)
    step = jax.jit(zero.value_and_grad(functools.partial(_llama.loss, size)))
    return step.lower(params, batch, **state).as_text()


def numbered(text: str) -> str:
    """`text` with its functions named by the order of their definitions."""
    names = re.findall(r"func\.func (?:public |private )?@([\w.$-]+)", text)
    numbers = {name: f"f{i}" for i, name in enumerate(names)}
    return re.sub(r"@([\w.$-]+)", lambda m: "@" + numbers.get(m[1], m[1]), text)


@dataclasses.dataclass(frozen=True)
class Write:
    """Write a file for each program into `folder`."""

    folder: tyro.conf.Positional[Path]

    def run(self) -> int:
        self.folder.mkdir(parents=True)
        for name, lower in programs():
            (self.folder / f"{name}.mlir").write_text(numbered(lower()))
        print(f"{len(list(self.folder.iterdir()))} programs in {self.folder}")
        return 0


@dataclasses.dataclass(frozen=True)
class Compare:
    """Lower every program again and compare it, byte for byte, with that of `folder`."""

    folder: tyro.conf.Positional[Path]

    def run(self) -> int:
        console = Console(soft_wrap=True)
        equal = different = 0
        for name, lower in programs():
            before, after = (self.folder / f"{name}.mlir").read_text(), numbered(lower())
            equal += before == after
            if before != after:
                different += 1
                lines = difflib.unified_diff(before.split("\n"), after.split("\n"), n=0)
                console.print(f"{name} differs:", *itertools.islice(lines, 2, 8), sep="\n")
        console.print(f"{equal} programs are equal, {different} differ")
        return int(different > 0)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(tyro.cli(Write | Compare).run())
