"""Recurrent layers of torch with two biases, and weight norm, against torch and Flax cells."""

from __future__ import annotations

import warnings
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxzero import interop
from jaxzero.interop import AddBiases, ArrayTensor, Rule, Split, Transpose, WeightNorm, match

torch = pytest.importorskip("torch")

D, H = 5, 4
X = np.random.default_rng(0).normal(size=(2, 3, D)).astype(np.float32)
BIASES = ("bias_ih_l0", "bias_hh_l0")


def tensors_of(model: Any) -> dict[str, ArrayTensor]:
    return {name: ArrayTensor(x.numpy(), name) for name, x in model.state_dict().items()}


def gates(names: str, leaf: str) -> tuple[str, ...]:
    return tuple(f"{name}.{leaf}" for name in names.split())


def separate(cell: str, inner: str, outer: str, bias: str) -> list[Rule]:
    """Rules for a cell with a layer for each gate."""
    count = len(inner.split())
    return [
        Rule(gates(inner, "kernel"), "weight_ih_l0", Split(0, count), Transpose()),
        Rule(gates(outer, "kernel"), "weight_hh_l0", Split(0, count), Transpose()),
        Rule(gates(bias, "bias"), BIASES, AddBiases(cell), Split(0, 4)),  # pyright: ignore
    ]


LSTM = separate("lstm", "ii if ig io", "hi hf hg ho", "hi hf hg ho")
LSTM_NNX = separate("lstm", "ii if_ ig io", "hi hf hg ho", "hi hf hg ho")
LSTM_FUSED = [
    Rule("dense_i.kernel", "weight_ih_l0", Transpose()),
    Rule("dense_h.kernel", "weight_hh_l0", Transpose()),
    Rule("dense_h.bias", BIASES, AddBiases("lstm", back="halves")),
]
GRU = separate("gru", "ir iz in", "hr hz hn", "ir iz in hn")
CELLS = {
    "Linen LSTMCell": (linen.LSTMCell, torch.nn.LSTM, LSTM),
    "Linen OptimizedLSTMCell": (linen.OptimizedLSTMCell, torch.nn.LSTM, LSTM),
    "Linen GRUCell": (linen.GRUCell, torch.nn.GRU, GRU),
    "NNX LSTMCell": (nnx.LSTMCell, torch.nn.LSTM, LSTM_NNX),
    "NNX OptimizedLSTMCell": (nnx.OptimizedLSTMCell, torch.nn.LSTM, LSTM_FUSED),
}


@pytest.mark.parametrize("name", CELLS)
def test_cells_of_flax_compute_what_torch_computes(name: str):
    cell, layer, rules = CELLS[name]
    torch.manual_seed(0)
    theirs = layer(D, H, batch_first=True)
    held = tensors_of(theirs)
    if name.startswith("Linen"):
        model = linen.RNN(cell(H))
        shapes = jax.eval_shape(model.init, jax.random.key(0), X)["params"]["cell"]
    else:
        graph, shapes, rest = nnx.split(cell(D, H, rngs=nnx.Rngs(0)), nnx.Param, ...)
    loaded = interop.load_into(shapes, held, rules=rules)
    params = jax.tree.map(lambda t: jnp.asarray(t.read()), loaded)
    if name.startswith("Linen"):
        got = model.apply({"params": {"cell": params}}, X)
    else:
        got = nnx.RNN(nnx.merge(graph, params, rest))(X)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(X))[0].numpy()
    # Outputs are below 1, of sums of D + H + 2 products in each of 3 steps.
    np.testing.assert_allclose(got, wanted, rtol=0, atol=3 * (D + H + 2) * 2**-23)

    back = {k: t.read() for k, t in interop.tensors_from(params, rules, like=loaded).items()}
    again = interop.load_into(shapes, back, rules=rules)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.read(), b), again, params)
    first, second = (back[bias] for bias in BIASES)
    if rules is LSTM_FUSED:
        np.testing.assert_array_equal(first, second)
    else:
        assert not second[: 2 * H].any() and first.any()
        assert (rules is GRU) == second[2 * H :].any(), "of GRU, n of both stays"


@pytest.mark.parametrize("is_inverse", [False, True])
def test_moments_of_a_sum_are_refused(is_inverse: bool):
    rule = Rule("bias", ("b_ih", "b_hh"), AddBiases("rnn"))
    if is_inverse:
        rule = Rule(rule.theirs, rule.ours, AddBiases("rnn").inverse)
    params = dict.fromkeys(rule.ours, jnp.zeros(4))
    state = optax.adam(1e-3).init(params)
    held = {name: np.ones(4, np.float32) for name in rule.theirs}
    moments = interop.AdamMoments(step=1, exp_avg=held, exp_avg_sq=held)
    for call in (
        lambda: interop.load_adam(state, params, moments, rules=[rule]),
        lambda: interop.adam_from(state, params, rules=[rule]),
    ):
        with pytest.raises(ValueError, match="computes a parameter from several tensors, so the"):
            call()


@pytest.mark.parametrize("dim", [0, 1, 2, None])
@pytest.mark.parametrize("old", [True, False], ids=["weight_g", "parametrizations"])
def test_weight_norm_is_proposed_computed_and_exported(dim: int | None, old: bool):
    utils = torch.nn.utils
    normed = utils.weight_norm if old else utils.parametrizations.weight_norm
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = normed(torch.nn.Conv1d(D, H, 3), dim=dim)
    for p in model.parameters():
        p.data.normal_()
    held = {f"layers.{i}.{name}": x for i in range(2) for name, x in tensors_of(model).items()}
    x = torch.zeros(1, D, 3)
    with torch.no_grad():
        model(x)
        wanted = model.weight.numpy().transpose(2, 1, 0)
    layer = {"kernel": jax.ShapeDtypeStruct((3, D, H), np.float32)}
    layer["bias"] = jax.ShapeDtypeStruct((H,), np.float32)
    tree = {"layers": [layer, layer]}
    found = match(tree, held)
    assert not found.assumed and not found.unused
    assert any(rule.steps[:1] == (WeightNorm(dim),) for rule in found.rules), str(found)
    loaded = interop.load_into(tree, held)
    kernel = loaded["layers"][1]["kernel"]
    # A norm of at most D * H * 3 squares, and three roundings.
    error = (D * H * 3 + 3) * 2**-24 * np.abs(wanted).max()
    np.testing.assert_allclose(kernel.read(), wanted, rtol=0, atol=error)
    np.testing.assert_array_equal(kernel[:, 1:3, 2:3], kernel.read()[:, 1:3, 2:3])
    params = jax.tree.map(lambda t: jnp.asarray(t.read()), loaded)
    back = interop.tensors_from(params, found.rules, like=loaded)
    assert back.keys() == held.keys()
    start = "layers.1."
    own = {k.removeprefix(start): v for k, v in back.items() if k.startswith(start)}
    model.load_state_dict({k: torch.from_numpy(np.array(v.read())) for k, v in own.items()})
    with torch.no_grad():
        model(x)
        again = model.weight.numpy().transpose(2, 1, 0)
    np.testing.assert_allclose(again, wanted, rtol=0, atol=2 * error)


def test_scanned_layers_with_weight_norm():
    held = {}
    for i in range(3):
        g = np.full((4, 1), i + 1.0, np.float32)
        held |= {f"h.{i}.up.weight_g": g, f"h.{i}.up.weight_v": np.eye(4, 3, dtype=np.float32)}
    held = {name: ArrayTensor(x, name) for name, x in held.items()}
    tree = {"up": {"kernel": jax.ShapeDtypeStruct((3, 3, 4), np.float32)}}
    rule = Rule("up.kernel", ("h.{i}.up.weight_g", "h.{i}.up.weight_v"), WeightNorm(), Transpose())
    assert match(tree, {k: v for k, v in held.items()}).rules == (rule,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AddBiases("conv"), "`cell` must be one of"),  # pyright: ignore
        (lambda: AddBiases("gru", back="last"), "`back` must be one of"),  # pyright: ignore
        (lambda: AddBiases("gru")(of(4, 4)), "of one size that 3 divides; got shapes"),
        (lambda: AddBiases("lstm")(of(4, 5)), "takes the two biases of a layer"),
        (lambda: AddBiases("gru").inverse(of(6)), "one bias of 4 equal parts"),
        (lambda: WeightNorm(-1), "`dim` must be an integer from 0 on, or None"),
        (lambda: WeightNorm()(of(4, 5)), "takes the norms, and the directions; got shapes"),
    ],
)
def test_computing_steps_that_do_not_fit(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def of(*sizes: int) -> tuple[ArrayTensor, ...]:
    return tuple(ArrayTensor(np.ones(size, np.float32), "x") for size in sizes)
