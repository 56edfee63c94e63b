"""Adam's moments whose parameters PyTorch numbers: each is its parameter's, or `names` is asked."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxzero import interop
from jaxzero.interop import Rule, Transpose

torch = pytest.importorskip("torch", reason="needs torch: it writes the files")
pytestmark = pytest.mark.standard_promotion  # optax


class Tied(torch.nn.Module):
    """The second name of a tied weight comes before a parameter of its shape."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.last, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.head.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        return self.last(self.head(self.embed(x)))


def normed() -> Any:
    return torch.nn.Sequential(
        *(
            kind(4, 4) if kind is torch.nn.Linear else kind(4)
            for kind in (torch.nn.Linear, torch.nn.BatchNorm1d) * 2
        )
    )


def trained(model: Any, groups: Any = None, *, late: Iterable[Any] = (), steps: int = 3) -> Any:
    """An AdamW after some steps, of which the first leaves out the parameters `late`."""
    optimizer = torch.optim.AdamW(groups or model.parameters(), lr=0.1, betas=(0.8, 0.95))
    for number in range(steps):
        optimizer.zero_grad()
        model(
            torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        ).square().sum().backward()
        for parameter in late if number == 0 else ():
            parameter.grad = None
        optimizer.step()
    return optimizer


def saved(folder: Path, model: Any, optimizer: Any) -> Path:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "run.pt")
    return folder / "run.pt"


def check_moments(moments: interop.AdamMoments, model: Any, optimizer: Any) -> None:
    """They are, by name, those that the optimizer holds."""
    held = {
        name: optimizer.state[x] for name, x in model.named_parameters() if x in optimizer.state
    }
    held = {name: state for name, state in held.items() if state}
    assert moments.exp_avg.keys() == moments.exp_avg_sq.keys() == held.keys()
    for name, state in held.items():
        for kind, found in (("exp_avg", moments.exp_avg), ("exp_avg_sq", moments.exp_avg_sq)):
            np.testing.assert_array_equal(found[name].read(), state[kind].numpy(), err_msg=name)
        assert moments.steps.get(name, moments.step) == int(state["step"]), name


@pytest.mark.parametrize("make", [normed, Tied])
def test_buffers_tied_weights_and_parameters_without_gradients(make: Callable, tmp_path: Path):
    model = make()
    optimizer = trained(model)
    check_moments(
        interop.open_checkpoint(saved(tmp_path, model, optimizer)).adam(), model, optimizer
    )


def test_frozen_parameters_that_the_optimizer_does_not_have(tmp_path: Path):
    first, second, third = (torch.nn.Linear(4, 4), torch.nn.Linear(4, 5), torch.nn.Linear(5, 5))
    model = torch.nn.Sequential(first, second, third)
    optimizer = trained(model, [*second.parameters(), *third.parameters()])
    path = saved(tmp_path, model, optimizer)
    check_moments(interop.open_checkpoint(path).adam(), model, optimizer)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = trained(model, [*model[0].parameters(), *model[2].parameters()])
    checkpoint = interop.open_checkpoint(saved(tmp_path, model, optimizer))
    with pytest.raises(ValueError, match=r"number 0, of shape \(4, 4\), may be '0.weight' or '1.w"):
        checkpoint.adam()
    check_moments(checkpoint.adam(["0.weight", "0.bias", "2.weight", "2.bias"]), model, optimizer)


def test_buffers_that_could_be_parameters(tmp_path: Path):
    model = normed()
    model[1].register_buffer("scale", torch.ones(4))
    checkpoint = interop.open_checkpoint(saved(tmp_path, model, trained(model)))
    with pytest.raises(ValueError, match=r"of shape \(4,\), may be .* Pass `names=`, the names in"):
        checkpoint.adam()


LATE = {"0.kernel": (4, 4), "0.bias": (4,), "1.kernel": (4, 4), "1.bias": (4,)}
RULES = [Rule("{i}.kernel", "{i}.weight", Transpose()), Rule("{i}.bias", "{i}.bias")]


def late_layer(folder: Path) -> tuple[Any, Any, interop.Checkpoint, dict[str, Any]]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = trained(model, late=[*model[1].parameters()], steps=4)
    tree = {path: jnp.zeros(shape) for path, shape in LATE.items()}
    return model, optimizer, interop.open_checkpoint(saved(folder, model, optimizer)), tree


def updates_of(optimizer: Any, model: Any) -> dict[str, np.ndarray]:
    """What PyTorch adds to each parameter at a gradient of 1, by the paths of the tree."""
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    for group in optimizer.param_groups:
        group |= {"lr": 1.0, "weight_decay": 0.0}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    after = {name: (x.detach() - before[name]).numpy() for name, x in model.named_parameters()}
    return {name.replace("weight", "kernel"): x.T for name, x in after.items()}


def test_a_layer_that_was_added_late(tmp_path: Path):
    """With an Adam of its own it is updated as in PyTorch; in one Adam, as the error says."""
    model, optimizer, checkpoint, tree = late_layer(tmp_path)
    check_moments(checkpoint.adam(), model, optimizer)
    assert repr(checkpoint.adam()).startswith(
        "<AdamMoments after 4 steps (fewer of 2 parameters): "
    )
    adam = optax.adam(1.0, b1=0.8, b2=0.95)
    apart = optax.partition({"0": adam, "1": adam}, {path: path[0] for path in tree})
    state = interop.load_adam(apart.init(tree), tree, checkpoint, rules=RULES)
    back = interop.adam_from(state, tree, rules=RULES)
    assert (back.step, back.steps) == (4, {"1.weight": 3, "1.bias": 3})
    group = {"lr": 0.1, "params": [name for name, _ in model.named_parameters()]}
    steps = [
        int(each["step"]) for each in interop.torch_state_dict(back, [group])["state"].values()
    ]
    assert steps == [4, 4, 3, 3]
    ones = {path: jnp.ones(shape) for path, shape in LATE.items()}
    exact, _ = apart.update(ones, state, tree)
    with pytest.raises(
        ValueError, match=r"`0\.\w+` took 4, and `1\.\w+` 3\. .*`steps=4` mul"
    ) as raised:
        interop.load_adam(adam.init(tree), tree, checkpoint, rules=RULES)
    together = interop.load_adam(adam.init(tree), tree, checkpoint, rules=RULES, steps=4)
    changed, _ = adam.update(ones, together, tree)
    (factor,) = set(np.round(np.ravel(np.divide(changed["1.kernel"], exact["1.kernel"])), 4))
    assert f"`steps=4` multiplies the next update of `1.kernel` by {factor:.4g}" in str(
        raised.value
    ).replace("1.bias", "1.kernel")
    for path, wanted in updates_of(optimizer, model).items():
        # Updates are at most 1, after some tens of roundings of 2**-24.
        np.testing.assert_allclose(exact[path], wanted, rtol=0, atol=2**-18)


@pytest.mark.parametrize(("steps", "message"), [(0, "a positive number of"), (3, "Leave it out")])
def test_steps_that_are_not_needed_or_no_number(steps: int, message: str, tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    checkpoint = interop.open_checkpoint(saved(tmp_path, model, trained(model)))
    tree = {path: jnp.zeros(shape) for path, shape in LATE.items()}
    with pytest.raises(ValueError, match=f"`steps` .*{message}"):
        interop.load_adam(optax.adam(0.1).init(tree), tree, checkpoint, rules=RULES, steps=steps)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A directory as the Trainer writes it, with the optimizer that it makes.

    The Trainer itself needs accelerate to run.
    """
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    settings = transformers.BertConfig(
        hidden_size=4, num_hidden_layers=11, num_attention_heads=2, intermediate_size=4,
        vocab_size=4, max_position_embeddings=4,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(settings)
    stand_in = types.SimpleNamespace(
        model=model,
        optimizer=None,
        args=types.SimpleNamespace(weight_decay=0.1),
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {}),
        get_decay_parameter_names=lambda x: transformers.Trainer.get_decay_parameter_names(None, x),
    )
    optimizer = transformers.Trainer.create_optimizer(stand_in)
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    folder = tmp_path_factory.mktemp("checkpoint-1")
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text("{}")
    return folder, model, optimizer


def test_the_order_of_the_trainer(trainer: tuple[Path, Any, Any], tmp_path: Path):
    folder, model, optimizer = trainer
    check_moments(interop.open_checkpoint(folder).adam(), model, optimizer)
    (tmp_path / "trainer_state.json").write_text("{}")  # without transformers, from a file of torch
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    check_moments(interop.open_checkpoint(tmp_path).adam(), model, optimizer)
    (tmp_path / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="nothing says how they were divided into 2 groups"):
        interop.open_checkpoint(tmp_path).adam()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformers_version": "4.1.0"}, r"saved with transformers 4\.1\.0, where"),
        ({"architectures": ["Trainer"]}, "makes no 'Trainer' of config.json .there is no such"),
        ({"architectures": ["GPT2Model"]}, "of 'GPT2Model' has another name or shape"),
        ({"num_hidden_layers": 10**9}, "more layers than tensors"),
        ({"architectures": None}, "no config.json names its class"),
    ],
)
def test_an_order_that_is_not_known(change: dict, message: str, trainer, tmp_path: Path):
    folder, _, _ = trainer
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_bytes()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = interop.open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=f"the order .* is not in safetensors, and .*{message}"):
        checkpoint.adam()


def test_an_optimizer_in_a_file_of_its_own(tmp_path: Path):
    """As Accelerate saves it, and as people do."""
    model = Tied()
    optimizer = trained(model)
    names = [name for name, _ in model.named_parameters()]
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    check_moments(interop.open_checkpoint(tmp_path).adam(), model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer_1.bin")
    checkpoint = interop.open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"holds the optimizers optimizer\.bin, optimizer_1\.bin"):
        checkpoint.adam(names)
    with pytest.raises(ValueError, match=r"open_checkpoint\(model, optimizer=.*_1\.bin'"):
        interop.open_checkpoint(tmp_path / "optimizer_1.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        checkpoint = interop.open_checkpoint(path, optimizer=tmp_path / "optimizer_1.bin")
        check_moments(checkpoint.adam(), model, optimizer)
    run = saved(tmp_path, model, optimizer)
    for given, why in (("optimizer.bin", "is given, and it has one"), ("x.pt", "is not a file")):
        model_path = run if given == "optimizer.bin" else tmp_path
        with pytest.raises(ValueError, match=f"`optimizer` must be .*{given}' {why}"):
            interop.open_checkpoint(model_path, optimizer=tmp_path / given)
    checkpoint = interop.open_checkpoint(run.parent, optimizer=tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin' holds no state of an optimizer"):
        checkpoint.adam(names)
