"""Compare the programs of many training steps, and their results, before and after a refactoring.

    git stash && python -m benchmarks.compiled.lowered write before && git stash pop
    python -m benchmarks.compiled.lowered compare before

Each program is the loss and gradients (or the whole update) of one model of the tests' zoo, or of a
decoder, under one config, on one mesh, traced and lowered but not compiled. Source locations are
left out, and functions are numbered in the order of their definitions, so renaming a Python
function makes no difference. `write` and `compare` take the same flags:

    --target h200   programs for a mesh of absent GPUs; needs jaxzero[aot]
    --bits          also run each program on fake CPU devices, and compare hashes of its results
    --every 8       one program of so many
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

import jaxzero as jz
from benchmarks.shared import _llama
from tests import zoo

from ._h200 import h200_mesh

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
_EXPERTS = dataclasses.replace(_SIZE, experts=4)
_HOST = jz.Offload(weights=True, gradients=True, optimizer=True, min_size=32)
_TX = optax.adamw(1e-3)
_TOKENS = 16

Target = Literal["cpu", "h200"]
Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # function, arguments, keywords


@dataclasses.dataclass(frozen=True)
class Program:
    """One training step.

    Attributes:
        name: of the file that keeps it.
        mesh: its mesh, by the name that the zoo gives it.
        step: the function to be jitted, and its arguments, from a mesh and a function that makes
            sharded trees: `shard(zero, tree)`.
    """

    name: str
    mesh: str
    step: Callable[[jax.sharding.Mesh, Callable[..., Any]], Step]

    def lowered(self, target: Target) -> str:
        """Its StableHLO; on absent devices its parameters are abstract."""
        nodes, local = (int(x) for x in self.mesh.partition("-")[0].split("x"))
        mesh = zoo.make_mesh(self.mesh) if target == "cpu" else h200_mesh(nodes, local)
        step, arguments, keywords = self.step(mesh, lambda zero, tree: zero.abstract(lambda: tree))
        with jax.set_mesh(mesh):
            return numbered(jax.jit(step).lower(*arguments, **keywords).as_text())

    def bits(self) -> str:
        """A hash of its results on fake CPU devices."""
        mesh = zoo.make_mesh(self.mesh)
        step, arguments, keywords = self.step(mesh, lambda zero, tree: zero.shard(tree))
        results = jax.jit(step)(*arguments, **keywords)
        found = hashlib.sha256()
        for x in jax.tree.leaves(results):
            found.update(np.asarray(x).tobytes())
        return found.hexdigest()


def programs() -> Iterator[Program]:
    """All programs."""
    meshes = itertools.cycle(_MESHES)
    for name, preset in itertools.product(list(zoo.CASES)[::_EVERY], ("zero3", *zoo.PRESETS)):
        yield _of_zoo(name, preset, next(meshes), "")
    for name, config, option in itertools.product(_VARIED, _CONFIGS, _OPTIONS):
        yield _of_zoo(name, config, next(meshes), option)
    schedules = [
        (f"prefetch{prefetch}-{'unrolled' if unrolled else 'scanned'}", prefetch, unrolled)
        for prefetch, unrolled in itertools.product((0, 1, 2), (False, True))
    ]
    for config, (name, prefetch, unrolled) in itertools.product(
        ("zero3", "zeropp", "zeropp4", "feedback"), schedules
    ):
        size = dataclasses.replace(_SIZE, unrolled=unrolled)
        yield _decoder(f"{name}-{config}", _CONFIGS[config], size, prefetch)
        if config not in ("zero3", "zeropp"):
            continue
        host = dataclasses.replace(_CONFIGS[config], offload=_HOST)
        yield _decoder(f"{name}-{config}-offload", host, size, prefetch)
        yield _decoder(f"{name}-{config}-update", host, size, prefetch, updates=True)
        yield _decoder(f"{name}-{config}-k4", _CONFIGS[config], size, prefetch, microbatches=4)
    window = dataclasses.replace(_HOST, window=2)
    host = dataclasses.replace(jz.zero3(), offload=window)
    yield _decoder("scanned-zero3-offload-window2", host, _SIZE)
    yield _decoder("scanned-zero3-update-window2", host, _SIZE, updates=True)
    for config, size in itertools.product(("zero3", "zeropp", "zeropp4"), (_SIZE, _EXPERTS)):
        layers = "experts" if size.experts else "scanned"
        for separate in (False, True):
            name = f"{layers}-{config}-ends{separate}"
            yield _decoder(name, _CONFIGS[config], size, separate_ends=separate)
    for config in ("zero3", "zeropp"):
        yield _decoder(f"scanned-{config}-shares", _CONFIGS[config], _SIZE, shares=(2, 1))


def _of_zoo(name: str, config: str, mesh: str, option: str) -> Program:
    case, options = zoo.CASES[name], _OPTIONS[option]

    def step(mesh: jax.sharding.Mesh, shard: Callable[..., Any]) -> Step:
        zero = jz.Zero(mesh, _CONFIGS[config])
        trees = [shard(zero, tree) for tree in case.init(jax.random.key(0))]
        batch = jax.tree.map(np.asarray, case.batch(jax.random.key(1), _EXAMPLES))
        function = zero.value_and_grad(case.loss, case.argnums, has_aux=case.has_aux, **options)
        several = isinstance(case.argnums, tuple)
        numbers = case.argnums if isinstance(case.argnums, tuple) else (case.argnums,)
        states = tuple(_wire_state(zero, trees[i]) for i in numbers)
        state = {"wire_state": states if several else states[0]} if states[0] is not None else {}
        return function, (*trees, batch), state

    return Program("-".join(filter(None, (name, config, mesh, option))), mesh, step)


def _wire_state(zero: jz.Zero, params: Any) -> Any:
    """The state of its codecs; None if the config needs none."""
    if not zero.config.needs_wire_state:
        return None
    is_abstract = isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct)
    init = zero.init_wire_state
    return jax.eval_shape(init, params) if is_abstract else init(params)


def _decoder(
    name: str,
    config: jz.ZeroConfig,
    size: _llama.LlamaSize,
    prefetch: int = 1,
    *,
    updates: bool = False,
    separate_ends: bool | None = None,
    shares: tuple[int, ...] | None = None,
    **options: Any,
) -> Program:
    """A step of a small decoder; with `updates` by `value_and_update`."""

    def step(mesh: jax.sharding.Mesh, shard: Callable[..., Any]) -> Step:
        schedule = jz.CommSchedule(
            prefetch=prefetch, bucket_bytes=2**16, separate_ends=separate_ends
        )
        zero = jz.Zero(mesh, dataclasses.replace(config, schedule=schedule))
        params = shard(zero, _llama.init(size, jax.random.key(0)))
        shape = 8 * zero.num_devices, _TOKENS
        batch = np.random.default_rng(0).integers(0, size.vocabulary, shape, np.int32)
        loss = functools.partial(_llama.loss, size)
        if updates:
            state = zero.init_optimizer(_TX, params)
            return zero.value_and_update(loss, _TX), (params, state, batch), {}
        function = zero.value_and_grad(loss, **options)
        if shares is not None:

            def weighted(params: Any, batch: Any) -> Any:
                tokens, weights = batch
                return loss(params, tokens) * weights.sum(), weights.sum()

            uneven = {"shares": shares, "microbatches": max(shares)}
            function = zero.value_and_grad(weighted, weighted=True, **uneven)
            batch = jz.pad_batch(batch, zero, **uneven)
        state = _wire_state(zero, params)
        return function, (params, batch), {} if state is None else {"wire_state": state}

    return Program(f"decoder-{name}", "2x4-auto", step)


def numbered(text: str) -> str:
    """`text` with its functions named by the order of their definitions."""
    names = re.findall(r"func\.func (?:public |private )?@([\w.$-]+)", text)
    numbers = {name: f"f{i}" for i, name in enumerate(names)}
    return re.sub(r"@([\w.$-]+)", lambda m: "@" + numbers.get(m[1], m[1]), text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which programs.

    Attributes:
        folder: of the files, one for each program, and of `bits.json`.
        target: what they are lowered for.
        bits: whether they are run, too.
        every: one program of so many.
    """

    folder: tyro.conf.Positional[Path]
    target: Target = "cpu"
    bits: bool = False
    every: int = 1

    def __post_init__(self):
        if self.bits and self.target != "cpu":
            raise ValueError("`bits` needs `target` of cpu: on absent devices nothing runs.")

    def programs(self) -> Iterator[Program]:
        return itertools.islice(programs(), 0, None, self.every)

    def run(self) -> int:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Write(Chosen):
    """Write a file for each program into a folder."""

    def run(self) -> int:
        self.folder.mkdir(parents=True)
        bits = {}
        for program in self.programs():
            text = program.lowered(self.target)
            (self.folder / f"{program.name}.mlir").write_text(text)
            if self.bits:
                bits[program.name] = program.bits()
        (self.folder / "bits.json").write_text(json.dumps(bits, indent=1))
        print(f"{len(list(self.folder.glob('*.mlir')))} programs in {self.folder}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(Chosen):
    """Lower every program again, and compare it, byte for byte, with that of a folder."""

    def run(self) -> int:
        console = Console(soft_wrap=True)
        known = json.loads((self.folder / "bits.json").read_text())
        equal, different, other_bits = 0, 0, 0
        for program in self.programs():
            before = (self.folder / f"{program.name}.mlir").read_text()
            after = program.lowered(self.target)
            equal += before == after
            if before != after:
                different += 1
                lines = difflib.unified_diff(before.split("\n"), after.split("\n"), n=0)
                console.print(f"{program.name} differs:", *itertools.islice(lines, 2, 8), sep="\n")
            if self.bits and program.bits() != known[program.name]:
                other_bits += 1
                console.print(f"{program.name} has other results")
        console.print(f"{equal} programs are equal, {different} differ")
        if self.bits:
            console.print(f"{other_bits} have other results")
        return int(different + other_bits > 0)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(tyro.cli(Write | Compare).run())
