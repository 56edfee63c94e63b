"""Adam's moments between PyTorch and optax: into any chain, and back into PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def test_moments_of_scalars_and_empty_arrays():
    tree = {"scale": jnp.float32(2), "none": jnp.zeros((0, 3))}
    zero = jz.Zero(jz.make_mesh(nodes=2))
    tx = optax.adam(1e-3)
    rules = [Rule(name, name) for name in tree]
    adam: Any = tx.init(tree)[0]
    made = adam._replace(mu=tree, nu=tree, count=jnp.int32(3))
    moments = interop.adam_from((made,), tree, rules=rules)
    for before in (tx.init(tree), zero.init_optimizer(tx, zero.shard(tree))):
        state = interop.load_adam(before, tree, moments, rules=rules)
        assert float(state[0].mu["scale"]) == float(state[0].nu["scale"]) == 2
        assert state[0].mu["none"].shape == (0, 3) and int(state[0].count) == 3


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
    with pytest.raises(ValueError, match=r"`param_groups` names '.*' twice"):
        interop.torch_state_dict(moments, [*given, given[0]])


def test_a_torch_file_with_its_optimizer(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="needs torch: it writes the file")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))

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
        "0": {"kernel": jnp.zeros((3, 3)), "bias": jnp.zeros(3)},
        "1": {"kernel": jnp.zeros((3, 3)), "bias": jnp.zeros(3)},
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
    with pytest.raises(ValueError, match=r"`exp_avg` of '0.bias' in .* has shape \(3, 3\)"):
        checkpoint.adam(["0.weight", "0.bias", "1.weight", "1.bias"])
    moments = checkpoint.adam(["0.weight", "1.weight", "0.bias", "1.bias"])
    np.testing.assert_array_equal(
        moments.exp_avg["1.weight"].read(),
        torch.load(path, weights_only=True)["optimizer"]["state"][1]["exp_avg"].numpy(),
    )

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
    larger = {**params, "embed": jnp.zeros((13, 6))}
    with pytest.raises(
        ValueError, match=r"shape \(13, 6\) for `embed`, whose shape in .*\(11, 6\)"
    ):
        interop.load_adam(optax.adam(0.1).init(larger), params, checkpoint, rules=torch_run.RULES)
    with pytest.raises(ValueError, match="`rules` are required unless `source` is a `Checkpoint`"):
        interop.load_adam(state, params, checkpoint.adam())


def test_adams_that_make_no_one_state(params):
    """Of two states for a parameter the last was taken. Different steps are kept."""
    twice = optax.chain(optax.scale_by_adam(), optax.scale_by_adam()).init(params)
    with pytest.raises(ValueError, match="Two Adams in `opt_state` have moments of `down.bias`"):
        interop.adam_from(twice, params, rules=torch_run.RULES)
    both = {"decayed": optax.adamw(1e-3), "plain": optax.adam(1e-3)}
    state: Any = optax.partition(both, groups).init(params)
    plain = state.inner_states["plain"]
    adam, *others = plain.inner_state
    later = plain._replace(inner_state=(adam._replace(count=jnp.int32(2)), *others))
    state = state._replace(inner_states={**state.inner_states, "plain": later})
    taken = interop.adam_from(state, params, rules=torch_run.RULES)
    assert taken.step == 2 and set(taken.steps.values()) == {0}
    names = [name for name, tensor in taken.exp_avg.items() if tensor.ndim > 1]
    assert sorted(taken.steps) == sorted(names)


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


def test_a_frozen_parameter_has_no_moments(checkpoint, params):
    """The error says how to leave it out of Adam; and then the state is loaded."""
    tree = {**params, "frozen": jnp.zeros((6, 6))}
    rules = (*torch_run.RULES, Rule("frozen", "frozen.weight", Transpose()))
    message = r"`exp_avg`\) lacks 'frozen.weight'\. .*`optax.masked` or `optax.multi_transform`"
    with pytest.raises(ValueError, match=message):
        interop.load_adam(optax.adam(0.1).init(tree), tree, checkpoint, rules=rules)
    labels = {name: "frozen" if name == "frozen" else "trained" for name in tree}
    mask = {name: label == "trained" for name, label in labels.items()}
    both = {"trained": optax.adam(0.1), "frozen": optax.set_to_zero()}
    for tx in (optax.masked(optax.adam(0.1), mask), optax.multi_transform(both, labels)):
        state = interop.load_adam(tx.init(tree), tree, checkpoint, rules=rules)
        taken = interop.adam_from(state, tree, rules=rules)
        assert taken.step == 3 and taken.exp_avg.keys() == checkpoint.adam().exp_avg.keys()


def test_a_schedule_goes_on_as_in_torch(checkpoint, params):
    """torch's scheduler, after three steps, gives the learning rate of the fourth update."""
    torch = pytest.importorskip("torch", reason="needs torch: its scheduler is the oracle")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (2 + i))
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    (rate,) = scheduler.get_last_lr()

    def schedule(count):
        return 1 / (2.0 + count)

    wanted = None
    for tx in (
        optax.chain(optax.scale_by_adam(), optax.scale(-rate)),
        optax.adam(schedule),
        optax.inject_hyperparams(optax.adam)(learning_rate=schedule),
        optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda i: -schedule(i))),
        optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(schedule)),
    ):
        state = interop.load_adam(tx.init(params), params, checkpoint, rules=torch_run.RULES)
        updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        wanted = updates if wanted is None else wanted
        for got, want in zip(jax.tree.leaves(updates), jax.tree.leaves(wanted), strict=True):
            # `inject_hyperparams` rounds `b2` to 24 bits, of which 1 - b2**4 loses 8.
            np.testing.assert_allclose(got, want, rtol=2**-15)


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_the_checkpoint_does_not_hold_begins_anew(wrapped: bool, checkpoint, params):
    """A mean that begins at 0 is corrected for that by its counter, which must begin there too."""
    adam, ema = optax.scale_by_adam(), optax.ema(0.99)
    tx = optax.chain(adam, optax.masked(ema, dict.fromkeys(params, True)) if wrapped else ema)
    state = interop.load_adam(tx.init(params), params, checkpoint, rules=torch_run.RULES)
    gradients = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(gradients, state, params)
    wanted, _ = adam.update(gradients, state[0], params)
    for got, want in zip(jax.tree.leaves(updates), jax.tree.leaves(wanted), strict=True):
        # The corrected mean of one value is the value; 1 - 0.99 loses 7 bits of 24.
        np.testing.assert_allclose(got, want, rtol=2**-15)


@pytest.mark.parametrize(
    "tx",
    [
        optax.scale_by_belief(),
        optax.scale_by_lion(),
        optax.scale_by_factored_rms(),
        optax.scale_by_amsgrad(),
        optax.contrib.scale_by_ademamix(),
    ],
)
def test_other_optimizers_of_a_partition_are_left_alone(tx, checkpoint, params):
    labels = {name: "adam" if name != "embed" else "other" for name in params}
    both = optax.partition({"adam": optax.adam(0.1), "other": tx}, labels)
    ignore = ["embed.weight"]
    before: Any = both.init(params)
    state = interop.load_adam(before, params, checkpoint, rules=torch_run.RULES, ignore=ignore)
    old, new = (x.inner_states["other"] for x in (before, state))
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(state.inner_states["adam"].inner_state[0].count) == 3


def test_counters_of_updates_are_set(checkpoint, params):
    def begins(step, *_, **__):
        return step >= 2

    tx = optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(0)),
        optax.conditionally_transform(optax.adam(1e-3), begins),
        optax.add_decayed_weights(lambda count: 0.1 / (1 + count)),
    )
    state = interop.load_adam(tx.init(params), params, checkpoint, rules=torch_run.RULES)
    assert int(state[0].count) == int(state[1].step) == int(state[2].count) == 3
    assert int(state[1].inner_state[0].count) == 3
    assert state[0].rng_key is not None and state[1].step.dtype == jnp.int32
