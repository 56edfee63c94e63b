"""A hop over `local` that is one kernel, in a training step: its bits, and what it refuses.

The collectives of `pallas_kernels` say by themselves what the kernel computes: their reference, of
which `tests.kernels.test_remote` shows that the kernel gives the same bits. Here the reference runs
in the place of the kernel, but for one step, which runs the kernel among emulated peers.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxzero as jz
from jaxzero import pallas_kernels as kernels
from jaxzero._collectives.comm_spec import CommSpec
from jaxzero.pallas_kernels import _collectives
from tests import zoo
from tests.kernels.test_remote import IS_OLD, needs_mosaic

INT8 = jz.Int8(block=64)
AT_RANDOM = jz.Int4(block=32, rounding="stochastic")
WIDTH, LAYERS = 24, 3


def by_kernel(codec):
    return dataclasses.replace(codec, implementation="nvlink")


@pytest.fixture
def reference(monkeypatch):
    """Every exchange by one kernel is its reference; returns the number of parts of each."""
    exchanged, of_parts = [], _collectives._of_parts

    def wants_kernel(implementation, *_):
        assert implementation == "mosaic_gpu"
        return False

    def noting(one, x, parts):
        exchanged.append(len(parts))
        return of_parts(one, x, parts)

    monkeypatch.setattr(_collectives, "_wants_kernel", wants_kernel)
    monkeypatch.setattr(_collectives, "_of_parts", noting)
    monkeypatch.setattr(kernels, "remote_gap", lambda platform: None)
    return exchanged


def loss(params, batch):
    """Layers of two matrices and a bias, scanned or a list; the embedding is read in bfloat16."""

    def layer(x, weights):
        inner = jnp.tanh(x @ weights["up"] + weights["bias"])
        return x + inner @ weights["down"].astype(jnp.float32), None

    x = batch @ params["embedding"].astype(jnp.bfloat16).astype(jnp.float32)
    if isinstance(params["layers"], dict):
        x, _ = lax.scan(layer, x, params["layers"])
    else:
        for weights in params["layers"]:
            x, _ = layer(x, weights)
    return jnp.mean(x**2)


def params_of(*, scanned):
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, 40), "bias": (40,), "down": (40, WIDTH)}
    stack = {
        name: rng.normal(size=(LAYERS, *shape)).astype(np.float32) * 0.3
        for name, shape in shapes.items()
    }
    stack["bias"] = np.broadcast_to(stack["bias"][:, None], (LAYERS, 1, 40)).copy()
    layers = stack if scanned else [{k: v[i] for k, v in stack.items()} for i in range(LAYERS)]
    return {"embedding": rng.normal(size=(7, WIDTH)).astype(np.float32), "layers": layers}


def step(config, mesh, params):
    zero = jz.Zero(zoo.make_mesh(mesh), config)
    batch = np.random.default_rng(1).normal(size=(8, 7)).astype(np.float32)
    value, grads = zero.value_and_grad(loss)(zero.shard(params), batch)
    return jax.device_get((value, zero.unshard(grads)))


def same(codec):
    return codec


def config_of(make, weights=INT8, gradients=AT_RANDOM, **options):
    """A config with codecs, of which `make` makes those over `local`."""
    node = jz.Int4(block=64, rounding="stochastic")
    if options.get("stage", 3) == 3:
        options["weights"] = jz.PerAxis(node=jz.Int8(block=128), local=make(weights))
    gradients = jz.PerAxis(node=node, local=make(gradients))
    return jz.ZeroConfig(gradients=gradients, min_quantized_size=0, **options)


CASES = {
    "one node": ("1x4-explicit", {}),
    "two nodes": ("2x2-auto", {}),
    "slices": ("2x2-explicit", {"hpz": jz.HpZ(codec=None)}),
    "encoded slices": ("2x2-explicit", {"hpz": jz.HpZ(codec=jz.Int8(block=128))}),
    "stage 1": ("2x2-auto", {"stage": 1}),
    "data parallel": ("2x2-auto", {"stage": 0}),
}
PAIRS = [
    pytest.param(
        case,
        scanned,
        marks=[] if (case, scanned) == ("encoded slices", True) else pytest.mark.exhaustive,
    )
    for case in CASES
    for scanned in (True, False)
]


@pytest.mark.parametrize(("case", "scanned"), PAIRS)
def test_a_step_has_the_bits_of_xla(reference, case, scanned):
    mesh, options = CASES[case]
    params = params_of(scanned=scanned)
    want = step(config_of(same, **options), mesh, params)
    assert not reference
    got = step(config_of(by_kernel, **options), mesh, params)
    assert reference
    assert "stage" in options or max(reference) > 1  # in stage 3 some arrays share a kernel
    jax.tree.map(np.testing.assert_array_equal, got, want)


@needs_mosaic
@pytest.mark.exhaustive
def test_a_step_with_the_kernel_has_the_bits_of_xla(monkeypatch):
    """In Pallas' interpreter, with an exchange in the place of stores to peers."""
    from jaxzero.pallas_kernels import _memory
    from tests.kernels import _emulated_peers

    _emulated_peers.replace_stores(monkeypatch)
    params = params_of(scanned=False)
    del params["layers"][1:]
    want = step(config_of(same), "1x2-auto", params)
    with _memory.interpreted():
        got = step(config_of(by_kernel), "1x2-auto", params)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_mesh_that_cannot_run_it_is_refused():
    reason = "JAX 0.11.2" if IS_OLD else "a kernel for NVIDIA GPUs.*platform cpu"
    with pytest.raises(NotImplementedError, match=rf"`weights.local` cannot be .*{reason}.*XLA"):
        step(config_of(by_kernel), "2x2-auto", params_of(scanned=True))


def test_simulated_devices_are_refused():
    zero = jz.Zero(jz.make_mesh(1, simulate=4), config_of(by_kernel))
    params = zero.shard(params_of(scanned=True))
    with pytest.raises(NotImplementedError, match="its devices are simulated"):
        zero.value_and_grad(loss)(params, np.ones((8, 7), np.float32))


def test_one_device_of_a_node_needs_no_kernel():
    """There is no hop over `local`, so that any mesh will do."""
    mesh = jz.make_mesh(2, devices=jax.devices()[:2])
    assert CommSpec.of(mesh, config_of(by_kernel)).sizes["local"] == 1


def test_sums_over_half_of_a_node_are_refused(reference):
    """The kernel adds up what it receives; between nodes the halves are whole nodes."""
    with pytest.raises(NotImplementedError, match="`gradients.local` cannot.*half of the devices"):
        CommSpec.of(jz.make_mesh(1), gradients_by_kernel(), halves=True)
    assert CommSpec.of(jz.make_mesh(2), gradients_by_kernel(), halves=True).halves


def gradients_by_kernel():
    return jz.ZeroConfig(gradients=jz.PerAxis(local=by_kernel(INT8)))


def test_an_axis_of_tokens_is_refused(reference):
    with pytest.raises(NotImplementedError, match="the mesh axis `tokens` splits"):
        CommSpec.of(jz.make_mesh(1, tokens=2), gradients_by_kernel())


def test_messages_cannot_be_sent_on(reference):
    """A slice that is kept encoded by the same codec would be sent as it is: the kernel encodes."""
    config = config_of(by_kernel, hpz=jz.HpZ(codec=INT8))
    with pytest.raises(NotImplementedError, match=r"`weights.local` cannot be .*HpZ\(codec=None\)"):
        step(config, "2x2-auto", params_of(scanned=True))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda codec: jz.PerAxis(node=codec), "node"),
        (lambda codec: jz.HpZ(codec=codec), "codec"),
        (lambda codec: jz.ErrorFeedback(codec=codec), "codec"),
        (lambda codec: jz.LocalSteps(every=4, codec=codec), "codec"),
        (lambda codec: jz.Zero(jz.make_mesh()).shard({"w": np.ones(64)}, codec=codec), "codec"),
        (lambda codec: jz.reshard({}, jz.Zero(jz.make_mesh()), specs=None, codec=codec), "codec"),
    ],
)
def test_other_hops_take_no_kernel(make, name):
    with pytest.raises(ValueError, match=f"`{name}` of .* must be a codec whose messages are arr"):
        make(by_kernel(INT8))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"hadamard": 32}, "Hadamard rotation"), ({"block": 4096}, "at most 2048 numbers")],
)
def test_what_the_kernel_cannot_encode_is_refused(options, reason):
    with pytest.raises(ValueError, match=f'implementation="nvlink".*{reason}'):
        jz.Int8(implementation="nvlink", **options)


def test_a_plan_says_what_one_kernel_sends(reference):
    zero = jz.Zero(jz.make_mesh(1), config_of(by_kernel))
    params = zero.shard(params_of(scanned=True))
    plan = str(zero.plan(loss, params, np.ones((8, 7), np.float32)))
    assert "weights over local: int8/64 (nvlink)" in plan
    assert "gradients over local: int4/32+SR (nvlink)" in plan
