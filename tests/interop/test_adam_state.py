"""Adam's moments between PyTorch and optax: into any chain, and back into PyTorch."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from jaxzero import interop
from jaxzero.interop import Rule, Transpose

from . import torch_run

DEEPSPEED = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"
pytestmark = pytest.mark.standard_promotion  # optax


@pytest.fixture(scope="module")
def checkpoint() -> interop.Checkpoint:
    return interop.open_checkpoint(DEEPSPEED / "zero2")


@pytest.fixture(scope="module")
def params(checkpoint: interop.Checkpoint):
    loaded = interop.load_into(
        torch_run.shapes(),
        checkpoint,
        rules=torch_run.RULES,
        ignore=["frozen.weight", "scale", torch_run.TIED],
    )
    return jax.tree.map(lambda tensor: jnp.asarray(tensor.read()), loaded)


def groups(params):
    return jax.tree.map(lambda x: "decayed" if x.ndim > 1 else "plain", params)


CHAINS = {
    "adam": lambda: optax.adam(optax.linear_schedule(1.0, 0.0, 9)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "partition": lambda: optax.partition(
        {"decayed": optax.adamw(1e-3), "plain": optax.adam(1e-3)}, groups
    ),
    "masked": lambda: optax.masked(optax.adam(1e-3), lambda p: {**dict.fromkeys(p, True)}),
    "steps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
    "scaled": lambda: interop.scale_loss(optax.adam(1e-3), interop.DynamicScale()),
    "bfloat16": lambda: optax.adam(1e-3, mu_dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_moments_are_put_into_any_chain_and_taken_out(chain: str, checkpoint, params):
    tx = CHAINS[chain]()
    before = tx.init(params)
    state = interop.load_adam(before, params, checkpoint, rules=torch_run.RULES)
    assert jax.tree.structure(state) == jax.tree.structure(before)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
    named = jax.tree_util.tree_leaves_with_path(state)
    counts = {jax.tree_util.keystr(path): x for path, x in named if "count" in str(path[-1])}
    assert counts and all(int(count) == 3 for count in counts.values()), counts
    moments = checkpoint.adam()
    taken = interop.adam_from(state, params, rules=torch_run.RULES)
    assert taken.step == 3 and taken.exp_avg.keys() == moments.exp_avg.keys()
    dtype = jnp.bfloat16 if chain == "bfloat16" else np.float32
    for name in moments.exp_avg:
        wanted = moments.exp_avg[name].read().astype(dtype)
        np.testing.assert_array_equal(taken.exp_avg[name].read(), wanted)
        np.testing.assert_array_equal(
            taken.exp_avg_sq[name].read(), moments.exp_avg_sq[name].read()
        )


def test_moments_of_padded_leaves_are_taken_out(checkpoint, params):
    zero = jz.Zero(jz.make_mesh(nodes=1, devices=jax.devices()[:7]))
    state = zero.init_optimizer(optax.adam(1e-3), zero.shard(params))
    state = interop.load_adam(state, params, checkpoint, rules=torch_run.RULES)
    taken = interop.adam_from(state, params, rules=torch_run.RULES)
    for name, wanted in checkpoint.adam().exp_avg.items():
        np.testing.assert_array_equal(taken.exp_avg[name].read(), wanted.read())


def test_a_run_goes_back_to_torch(checkpoint, params):
    torch = pytest.importorskip("torch", reason="needs torch: the run ends there")
    from tests.models import torch_model

    tx = optax.adamw(1e-3)
    state = interop.load_adam(tx.init(params), params, checkpoint, rules=torch_run.RULES)
    moments = interop.adam_from(state, params, rules=torch_run.RULES)
    model = torch_model.Model()
    model.load_state_dict({name: torch.tensor(x.read()) for name, x in checkpoint.items()})
    optimizer = torch.optim.AdamW(torch_model.groups(model), **torch_model.ADAMW)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(interop.torch_state_dict(moments, given))
    expected = torch_run.expected_of(DEEPSPEED / "zero2")
    for batch, wanted in zip(expected["batches"], expected["losses"], strict=True):
        optimizer.zero_grad()
        loss = model(torch.tensor(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), torch_model.CLIP)
        optimizer.step()
        assert abs(loss.item() - wanted) < 1e-5
    with pytest.raises(ValueError, match=r"`param_groups` leaves out 'down\.bias'"):
        interop.torch_state_dict(moments, given[:1])


def test_a_torch_file_with_its_optimizer(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="needs torch: it writes the file")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))

    def saved(*groups: dict, **options) -> Path:
        optimizer = torch.optim.AdamW(groups, lr=0.1, **options)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
        torch.save(state, tmp_path / "run.pt")
        return tmp_path / "run.pt"

    parameters = list(model.parameters())
    rules = (
        Rule("{i}.kernel", "{i}.weight", Transpose()),
        Rule("{i}.bias", "{i}.bias"),
    )
    tree = {
        "0": {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)},
        "1": {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3)},
    }
    path = saved({"params": parameters})
    checkpoint = interop.open_checkpoint(path)
    state = interop.load_adam(optax.adam(0.1).init(tree), tree, checkpoint, rules=rules)
    kept = torch.load(path, weights_only=True)["optimizer"]["state"]
    assert int(state[0].count) == 2
    np.testing.assert_array_equal(state[0].mu["1"]["kernel"], kept[2]["exp_avg"].numpy().T)
    np.testing.assert_array_equal(state[0].nu["0"]["bias"], kept[1]["exp_avg_sq"].numpy())

    split = ({"params": parameters[::2], "weight_decay": 0.0}, {"params": parameters[1::2]})
    checkpoint = interop.open_checkpoint(saved(*split))
    with pytest.raises(ValueError, match=r"identifies its 4 parameters by number.*Pass `names=`"):
        checkpoint.adam()
    with pytest.raises(ValueError, match=r"`names` must name the 4 parameters.*got 1"):
        checkpoint.adam(["0.weight"])
    with pytest.raises(
        ValueError, match=r"`exp_avg` of '0.bias' in .* has shape \(3, 4\)|\(4, 3\)"
    ):
        checkpoint.adam(["0.weight", "0.bias", "1.weight", "1.bias"])
    moments = checkpoint.adam(["0.weight", "1.weight", "0.bias", "1.bias"])
    assert moments.exp_avg["1.weight"].shape == (3, 4)

    checkpoint = interop.open_checkpoint(saved({"params": parameters}, amsgrad=True))
    with pytest.raises(ValueError, match=r"of '0.weight' in .* holds .*max_exp_avg_sq"):
        checkpoint.adam()


def test_mistakes(checkpoint, params):
    with pytest.raises(ValueError, match="has no state of Adam"):
        interop.load_adam(optax.sgd(0.1).init(params), params, checkpoint, rules=torch_run.RULES)
    state = optax.adam(0.1).init(params)
    smaller = {name: x for name, x in params.items() if name != "norm"}
    with pytest.raises(ValueError, match=r"moments of `norm\.bias` \(2 such paths\)"):
        interop.load_adam(state, smaller, checkpoint, rules=torch_run.RULES)
    with pytest.raises(ValueError, match=r"holds unknown 'norm\.bias', 'norm\.weight'"):
        smaller_state = optax.adam(0.1).init(smaller)
        interop.load_adam(smaller_state, smaller, checkpoint, rules=torch_run.RULES)
    interop.load_adam(smaller_state, smaller, checkpoint, rules=torch_run.RULES, ignore=["norm.*"])
    with pytest.raises(ValueError, match="`rules` are required unless `source` is a `Checkpoint`"):
        interop.load_adam(state, params, checkpoint.adam())


def simigrad(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    return jz.simigrad(inner, target_similarity=0.5, initial=4, min_steps=4, max_steps=4)


def test_what_counts_micro_batches_begins_a_batch(checkpoint, params):
    gradients = jax.tree.map(jnp.ones_like, params)
    schedule = optax.linear_schedule(1.0, 0.0, 9)
    plain = optax.adam(schedule)
    state = interop.load_adam(plain.init(params), params, checkpoint, rules=torch_run.RULES)
    wanted, _ = plain.update(gradients, state, params)
    for make in (simigrad, lambda tx: optax.MultiSteps(tx, 4)):
        tx = make(optax.adam(schedule))
        state = interop.load_adam(tx.init(params), params, checkpoint, rules=torch_run.RULES)
        for number in range(4):
            updates, state = tx.update(gradients, state, params)
            # The mean of four gradients of 1 is 1, exactly.
            expected = wanted if number == 3 else jax.tree.map(jnp.zeros_like, params)
            for got, want in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
                # Updates are about 1, after fewer than 16 roundings of 2**-24.
                np.testing.assert_allclose(got, want, rtol=2**-20, atol=2**-20)


@pytest.mark.parametrize(
    "accumulating",
    [optax.apply_every(8), optax.contrib.reduce_on_plateau(patience=2, accumulation_size=4)],
)
def test_counters_of_accumulation_stay(accumulating, checkpoint, params):
    tx = optax.chain(optax.adam(1e-3), accumulating)
    state = interop.load_adam(tx.init(params), params, checkpoint, rules=torch_run.RULES)
    assert int(state[0][0].count) == 3
    assert state[1].count.dtype == jnp.int32 and int(state[1].count) == 0
