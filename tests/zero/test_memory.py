"""What ZeRO-3 is for: full weights and gradients exist one layer at a time.

For unrolled layers, temporary memory of the compiled program against that of `jit` with sharded
parameters (GSPMD), in a process of its own: XLA:CPU drops optimization barriers before its last
common-subexpression pass, which would merge the gathers of forward and backward (GPU and TPU keep
the barriers). With the options that users are told to pass, it is little without that too. For
scanned layers, no array of the size of the stack is anywhere in the HLO.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from benchmarks.shared import _gspmd
from tests import zoo

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

_FLAGS = (
    "--xla_disable_hlo_passes=cse --xla_cpu_enable_concurrency_optimized_scheduler=false "
    "--xla_backend_optimization_level=0"
)
_LAYERS, _WIDTH = 24, 256
_ROWS = 512  # enough that GSPMD, too, prefers moving weights to moving activations


def _unrolled_init(key):
    return [_layer_init(jax.random.fold_in(key, i)) for i in range(_LAYERS)]


def _layer_init(key):
    return {
        "up": jax.random.normal(key, (_WIDTH, 2 * _WIDTH)),
        "down": jax.random.normal(key, (2 * _WIDTH, _WIDTH)),
    }


def _stacked_init(key):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *_unrolled_init(key))


def _layer(x, p):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def _unrolled_loss(params, x):
    for p in params:
        x = jax.checkpoint(_layer)(x, p)
    return jnp.mean(x**2)


def _indexed_loss(params, x):
    for i in range(_LAYERS):
        x = jax.checkpoint(_layer)(x, jax.tree.map(lambda p, i=i: p[i], params))
    return jnp.mean(x**2)


def _plain_loss(params, x):
    for p in params:
        x = _layer(x, p)
    return jnp.mean(x**2)


_UNROLLED = {
    "remat": (_unrolled_init, _unrolled_loss),
    "no_remat": (_unrolled_init, _plain_loss),
    "indexed_stack": (_stacked_init, _indexed_loss),
}


def _measure(name: str) -> dict[str, float]:
    """Temporary bytes per device of both compiled programs."""
    init, loss = _UNROLLED[name]
    mesh = jz.make_mesh(2)
    zero = jz.Zero(mesh)
    params = zero.abstract(init, jax.random.key(0))
    x = jax.ShapeDtypeStruct(
        (_ROWS, _WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(("node", "local")))
    )
    ours = jax.jit(zero.value_and_grad(loss)).lower(params, x).compile()
    split = _gspmd.shardings(params, mesh)
    params = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), params, split)
    out = (NamedSharding(mesh, P()), split)
    gspmd = jax.jit(jax.value_and_grad(loss), out_shardings=out).lower(params, x).compile()
    return {
        "ours": ours.memory_analysis().temp_size_in_bytes,
        "gspmd": gspmd.memory_analysis().temp_size_in_bytes,
        "gathers": sum(c.op == "all-gather" for c in zoo.hlo.collectives(ours.as_text())),
    }


@functools.cache
def _measured(name: str) -> dict[str, float]:
    environment = {
        **os.environ,
        "XLA_FLAGS": _FLAGS,
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.zero.test_memory", name],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_unrolled_layers_take_a_third_of_the_memory_of_gspmd():
    got = _measured("remat")
    assert got["ours"] < got["gspmd"] / 3, got
    # All but the last layer's, which is needed at once.
    assert got["gathers"] >= 2 * (2 * _LAYERS - 1), "backward does not gather again"


@pytest.mark.ci
@pytest.mark.parametrize("name", ["no_remat", "indexed_stack"])
def test_other_unrolled_layers_take_less_memory_than_gspmd(name):
    got = _measured(name)
    assert got["ours"] < got["gspmd"] / 3, got
    assert got["gathers"] >= 2 * (2 * _LAYERS - 1), "backward does not gather again"


def test_with_the_compiler_options_a_cpu_holds_few_layers_as_well():
    """Without them XLA:CPU in JAX 0.10 gathers all layers before it computes the first."""
    layers, width = 12, 128

    def init():
        shapes = {"up": (width, 2 * width), "down": (2 * width, width)}
        return [{name: jnp.zeros(shape) for name, shape in shapes.items()} for _ in range(layers)]

    zero = jz.Zero(jz.make_mesh(2))
    lowered = jax.jit(zero.value_and_grad(_plain_loss)).lower(
        zero.abstract(init), jax.ShapeDtypeStruct((64, width), jnp.float32)
    )
    compiled = lowered.compile(compiler_options=jz.compiler_options("cpu"))
    weights = layers * 2 * (2 * width * width) * 4
    assert compiled.memory_analysis().temp_size_in_bytes < weights / 2


# Scanned layers.

_DEPTH, _IN, _OUT = 8, 32, 48  # a stack of eight layers, which eight devices would divide


def _scan_init(key, dtype=jnp.float32):
    return {
        "up": jax.random.normal(key, (_DEPTH, _IN, _OUT), dtype),
        "down": jax.random.normal(key, (_DEPTH, _OUT, _IN), dtype),
    }


def _scan_loss(cast=None, remat=None, reverse=False, turn=False):
    def body(x, p):
        if cast is not None:
            p = jax.tree.map(lambda w: w.astype(cast).astype(x.dtype), p)
        if turn:
            p = {"up": p["down"].T, "down": p["up"].T}
        return _layer(x, p), None

    body = remat(body) if remat else body

    def loss(params, x):
        dtype = jnp.result_type(params["up"])
        x, _ = lax.scan(body, x.astype(dtype), params, reverse=reverse)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def _index_in_scan(params, x):
    def body(x, i):
        return _layer(x, jax.tree.map(lambda p: p[i], params)), None

    return jnp.mean(lax.scan(body, x, jnp.arange(_DEPTH))[0] ** 2)


def _scan_in_scan(params, x):
    def group(x, stack):
        return lax.scan(lambda x, p: (_layer(x, p), None), x, stack)

    groups = jax.tree.map(lambda p: p.reshape(2, _DEPTH // 2, *p.shape[1:]), params)
    return jnp.mean(lax.scan(group, x, groups)[0] ** 2)


def _two_scans(params, x):
    for reverse in (False, True):
        x, _ = lax.scan(lambda x, p: (_layer(x, p), None), x, params, reverse=reverse)
    return jnp.mean(x**2)


def _cast_before(params, x):
    stack = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def body(x, p):
        return _layer(x, jax.tree.map(lambda w: w.astype(x.dtype), p)), None

    return jnp.mean(lax.scan(body, x, stack)[0] ** 2)


def _turned_before(params, x):
    stack = {name: jnp.swapaxes(p, 1, 2) for name, p in params.items()}
    stack = {"up": stack["down"], "down": stack["up"]}
    return jnp.mean(lax.scan(lambda x, p: (_layer(x, p), None), x, stack)[0] ** 2)


_checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)
_SCANNED = {
    "float32": _scan_loss(),
    "reverse": _scan_loss(reverse=True),
    "turned_in_the_body": _scan_loss(turn=True),
    "bfloat16_in_the_body": _scan_loss(cast=jnp.bfloat16),
    "remat": _scan_loss(remat=_checkpoint),
    "remat_that_saves_dots": _scan_loss(
        remat=functools.partial(_checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "remat_and_bfloat16": _scan_loss(cast=jnp.bfloat16, remat=_checkpoint),
    "remat_that_prevents_cse": _scan_loss(remat=jax.checkpoint),
    "two_scans": _two_scans,
    "scan_in_scan": _scan_in_scan,
    "cast_before": _cast_before,
    "turned_before": _turned_before,
}


def _compiled(loss, mesh, dtype=jnp.float32, microbatches=1):
    zero = jz.Zero(zoo.make_mesh(mesh))
    params = zero.abstract(functools.partial(_scan_init, dtype=dtype), jax.random.key(0))
    step = zero.value_and_grad(loss, microbatches=microbatches)
    x = jax.ShapeDtypeStruct((24, _IN), jnp.float32)
    return jax.jit(step).lower(params, x).compile().as_text()


def _assert_no_stack(text):
    """The largest array is smaller than a whole stack, and layers are gathered one at a time."""
    wide = zoo.hlo.floats_of_at_least(text, _DEPTH * _IN * _OUT)
    assert not wide, "a whole stack exists:\n" + "\n".join(wide)
    gathers = [c for c in zoo.hlo.collectives(text) if c.op == "all-gather"]
    assert any(shape.size >= _IN * _OUT for c in gathers for shape in c.results)


@pytest.mark.parametrize("name", _SCANNED)
@pytest.mark.one_in(3)
def test_no_stack_of_weights_or_gradients_in_a_scan(name):
    mesh = ("2x4-auto", "2x3-auto")[list(_SCANNED).index(name) % 2]
    _assert_no_stack(_compiled(_SCANNED[name], mesh))


@pytest.mark.parametrize("mesh", ["1x8-explicit", "3x2-auto", "2x2x2-auto"])
@pytest.mark.one_in(3)
def test_no_stack_in_a_scan_on_other_meshes(mesh):
    _assert_no_stack(_compiled(_scan_loss(remat=_checkpoint), mesh))


def test_no_stack_of_bfloat16_parameters():
    _assert_no_stack(_compiled(_scan_loss(), "2x4-auto", jnp.bfloat16))


def test_no_stack_with_microbatches():
    _assert_no_stack(_compiled(_scan_loss(), "2x4-auto", microbatches=3))


def test_stack_whose_layers_divide_and_whose_dims_do_not():
    """Eight layers of 9 x 11 on eight devices: the layers are still gathered one at a time."""

    def init(key):
        return jax.random.normal(key, (8, 9, 9))

    def loss(params, x):
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)

    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.abstract(init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((8, 9), jnp.float32)
    text = jax.jit(zero.value_and_grad(loss)).lower(params, x).compile().as_text()
    wide = zoo.hlo.floats_of_at_least(text, 8 * 9 * 9)
    assert not wide, "a whole stack exists:\n" + "\n".join(wide)


def test_shapes_and_collectives_are_read():
    text = "%a = f32[2,64]{1,0} all-gather(f32[1,64]{1,0} %p), dimensions={0}\n%b = bf16[] add(...)"
    assert [str(shape) for shape in zoo.hlo.shapes(text)] == [
        "f32[2, 64]",
        "f32[1, 64]",
        "bf16[]",
    ]
    (gather,) = zoo.hlo.collectives(text)
    assert gather.op == "all-gather"
    assert gather.results[0].num_bytes == 512
    assert np.isclose(len(zoo.hlo.floats_of_at_least(text, 128)), 1)


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))
