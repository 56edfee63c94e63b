"""Names with the wrappers of PyTorch: `torch.compile`, FSDP, activation checkpointing, DDP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxzero import interop
from jaxzero.interop import Rule, save_tensors

from . import tiny_checkpoint
from .test_partition_layout import DEEPSPEED, opened, shapes_changed

WRAPPED = "up._checkpoint_wrapped_module.weight"


def test_names(tmp_path: Path):
    plain_names = {
        "_orig_mod.layers.0.weight": "layers.0.weight",
        "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.up.bias": "layers.0.up.bias",
        "my_orig_mod.weight": "my_orig_mod.weight",
        "module.weight": "module.weight",
        "_orig_mod": "_orig_mod",
    }
    numbers = {name: np.full(1, number) for number, name in enumerate(plain_names)}
    save_file(numbers, tmp_path / "one.safetensors")
    found = interop.open_checkpoint(tmp_path / "one.safetensors")
    assert {name: found[name].read() for name in found} == {
        plain: numbers[name] for name, plain in plain_names.items()
    }
    both = {"a.b": np.ones(1), "_orig_mod.a.b": np.ones(1)}
    save_file(both, tmp_path / "both.safetensors")
    with pytest.raises(ValueError, match=r"both\.safetensors' holds both '(_orig.*|a\.b)' and '"):
        interop.open_checkpoint(tmp_path / "both.safetensors")


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3"])
def test_shapes_of_deepspeed_with_wrappers(monkeypatch, case: str):
    """DeepSpeed 0.19.8 writes them in `param_shapes`, and not in the model beside it."""

    def wrapped(group: dict) -> dict:
        return {WRAPPED if name == "up.weight" else name: shape for name, shape in group.items()}

    wanted = interop.open_checkpoint(DEEPSPEED / case)
    found = opened(monkeypatch, case, model=shapes_changed(wrapped))
    assert found.keys() == wanted.keys()
    for ours, theirs in (
        (found["up.weight"], wanted["up.weight"]),
        (found.adam().exp_avg["up.weight"], wanted.adam().exp_avg["up.weight"]),
    ):
        np.testing.assert_array_equal(ours.read(), theirs.read())


def test_universal_has_both_names(tmp_path: Path):
    """`ds_to_universal.py` takes the name without moments from the model state."""
    step = Path(shutil.copytree(DEEPSPEED / "universal" / "step3", tmp_path / "step3"))
    (step / "zero" / "up.weight").rename(step / "zero" / WRAPPED)
    (step / "zero" / "up.weight").mkdir()
    norm = step / "zero" / "norm.bias" / "fp32.pt"
    shutil.copyfile(norm, step / "zero" / "up.weight" / "fp32.pt")
    wanted = interop.open_checkpoint(DEEPSPEED / "universal")
    found = interop.open_checkpoint(step)
    assert found.keys() == wanted.keys()
    np.testing.assert_array_equal(found["up.weight"].read(), wanted["up.weight"].read())
    assert found.adam().exp_avg.keys() == wanted.adam().exp_avg.keys()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch._dynamo
@pytest.mark.ci
def test_torch_save_of_a_compiled_model(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="needs torch: it writes the file")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(compiled.named_parameters(), lr=0.1)
    compiled._orig_mod(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": compiled.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "run.pt")
    checkpoint = interop.open_checkpoint(tmp_path / "run.pt")
    assert checkpoint.keys() == model.state_dict().keys() == checkpoint.adam().exp_avg.keys()
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(checkpoint[name].read(), value.numpy())


def test_parts_of_a_compiled_model(tmp_path: Path):
    """The index has the wrappers, as the files do."""
    torch = pytest.importorskip("torch", reason="needs torch: it writes the files")
    parts = {
        f"pytorch_model-0000{i}-of-00002.bin": f"_orig_mod.{name}" for i, name in enumerate("ab", 1)
    }
    for number, (file, name) in enumerate(parts.items()):
        torch.save({name: torch.full((2,), float(number))}, tmp_path / file)
    index = {"weight_map": {name: file for file, name in parts.items()}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = interop.open_checkpoint(tmp_path)
    assert {name: found[name].read().tolist() for name in found} == {"a": [0, 0], "b": [1, 1]}


def test_a_prefix_that_stays_is_named(tmp_path: Path):
    tensors = {f"module.{name}": interop.ArrayTensor(np.ones(2, np.float32), name) for name in "ab"}
    path = save_tensors(tensors, tmp_path / "ddp")
    tree = {name: jnp.zeros(2) for name in "ab"}
    with pytest.raises(ValueError, match=r"lacks 'a', 'b'.*these names with 'module\.' before the"):
        interop.load_into(tree, path, rules=[Rule("a", "a"), Rule("b", "b")])
    with pytest.raises(ValueError, match=r"lacks 'a', 'c'.*The rules must name every tensor"):
        interop.load_into(dict.fromkeys("ac", jnp.zeros(2)), path, rules=[Rule(x, x) for x in "ac"])


def test_a_prefix_of_a_decoder_is_named(tmp_path: Path):
    """Its head has no `model.`, so names have two prefixes."""
    names = ("module.model.embed.weight", "module.model.layers.0.up.weight", "module.head.weight")
    tensors = {name: interop.ArrayTensor(np.ones(2, np.float32), name) for name in names}
    wanted = ["embed.weight", "layers.0.up.weight", "head.weight"]

    def load(wanted: list[str]) -> None:
        rules = [Rule(name, name) for name in wanted]
        interop.load_into(dict.fromkeys(wanted, jnp.zeros(2)), tensors, rules=rules)

    with pytest.raises(
        ValueError, match=r"with 'module\.' before them\. Write it in the rules, or"
    ):
        load(wanted)
    with pytest.raises(ValueError, match=r"The rules must name every tensor; .* in `ignore`\.$"):
        load([*wanted, "norm.weight"])


def test_how_to_remove_the_prefix_of_a_family(tmp_path: Path):
    """Its rules are not the user's; with another tensor missing, it is no prefix."""
    held = {f"module.{name}": array for name, array in tiny_checkpoint.tensors().items()}
    path = tiny_checkpoint.write(tmp_path, held)
    with pytest.raises(
        ValueError, match=r"with 'module\.' before them\. To remove it, save a copy with `inter"
    ):
        interop.load_encoder(path)
    del held["module.embeddings.word_embeddings.weight"]
    save_file(held, path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"It must hold the tensors of a plain encoder.*prefixes\.$"
    ):
        interop.load_encoder(path)
