"""Fused query, key and value of transformers models, by the layouts that docs/howto/rules.md lists.

The oracle is the model: the input of its fused layer, and the query, key and value that its own
code makes of the output.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxzero import interop
from jaxzero.interop import ArrayTensor, Rule, Split, SplitHeads, Transpose

HEADS, HEAD, WIDTH = 4, 6, 24
COMMON = {"vocab_size": 11, "hidden_size": WIDTH, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": HEADS, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = {"vocab_size": 11, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 8}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


@dataclasses.dataclass(frozen=True)
class Fused:
    """A family: its config, its fused layer, and the steps that its tensors take."""

    family: str
    config: dict[str, Any]
    layer: str  # name of the fused layers, `{i}` for the number
    steps: tuple[Any, ...]
    cut: str = "eager_attention_forward"  # the function that makes, or is given, q, k, v
    parts: tuple[str, ...] = ("query", "key", "value")  # in the order of the tensor


NEOX = Fused(
    "gpt_neox",
    COMMON | {"intermediate_size": 32},
    "gpt_neox.layers.{i}.attention.query_key_value",
    (SplitHeads(0, HEADS), Transpose()),
)
FALCON = Fused(
    "falcon",
    COMMON | {"new_decoder_architecture": False, "multi_query": False, "bias": True},
    "transformer.h.{i}.self_attention.query_key_value",
    (SplitHeads(0, HEADS), Transpose()),
    "FalconAttention._split_heads",
)
BIG_CODE = Fused(
    "gpt_bigcode",
    GPT2 | {"multi_query": False},
    "transformer.h.{i}.attn.c_attn",
    (SplitHeads(0, HEADS), Transpose()),
)
FAMILIES = {
    "GPT-NeoX": NEOX,
    "BLOOM": Fused(
        "bloom",
        COMMON | {"n_layer": 2, "n_head": HEADS},
        "transformer.h.{i}.self_attention.query_key_value",
        (SplitHeads(0, HEADS), Transpose()),
        "BloomAttention._reshape",
    ),
    "Falcon": FALCON,
    "Falcon, one key and value": dataclasses.replace(
        FALCON,
        config=FALCON.config | {"multi_query": True},
        steps=(Split(0, (WIDTH, HEAD, HEAD)), Transpose()),
    ),
    "Falcon, groups": dataclasses.replace(
        FALCON,
        config=FALCON.config | {"new_decoder_architecture": True, "num_kv_heads": 2},
        steps=(SplitHeads(0, 2, (2 * HEAD, HEAD, HEAD)), Transpose()),
    ),
    "GPT-BigCode": BIG_CODE,
    "GPT-BigCode, one key and value": dataclasses.replace(
        BIG_CODE,
        config=BIG_CODE.config | {"multi_query": True},
        steps=(Split(0, (WIDTH, HEAD, HEAD)), Transpose()),
    ),
    "CodeGen": Fused(
        "codegen",
        GPT2 | {"rotary_dim": 2},
        "transformer.h.{i}.attn.qkv_proj",
        (SplitHeads(0, 4), Transpose()),
        "CodeGenAttention._attn",
        ("query", "value", "key"),
    ),
    "GPT-2": Fused("gpt2", GPT2, "transformer.h.{i}.attn.c_attn", (Split(1, 3),)),
    "Phi-3": Fused(
        "phi3",
        COMMON | {"num_key_value_heads": 2, "intermediate_size": 32},
        "model.layers.{i}.self_attn.qkv_proj",
        (Split(0, (WIDTH, 2 * HEAD, 2 * HEAD)), Transpose()),
    ),
}
NAMES = {"gpt_neox": "GPTNeoX", "gpt2": "GPT2", "gpt_bigcode": "GPTBigCode", "codegen": "CodeGen"}


def model_of(fused: Fused) -> Any:
    """A tiny model of the family, with noise on every parameter."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch = pytest.importorskip("torch", reason="needs torch")
    torch.manual_seed(0)
    name = NAMES.get(fused.family, fused.family.capitalize())
    config = getattr(transformers, f"{name}Config")(**fused.config, attn_implementation="eager")
    head = "LMHeadModel" if fused.family == "gpt2" else "ForCausalLM"
    model = getattr(transformers, name + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def tensors_of(model: Any) -> dict[str, ArrayTensor]:
    return {name: ArrayTensor(x.numpy(), name) for name, x in model.state_dict().items()}


def parts_of(fused: Fused, layer: int) -> tuple[str, ...]:
    return tuple(f"layers.{layer}.attention.{part}" for part in fused.parts)


def rules_of(fused: Fused, held: dict[str, ArrayTensor]) -> list[Rule]:
    """Rules for the fused tensors; the others keep their names."""
    pattern = re.compile(re.escape(fused.layer).replace(r"\{i\}", r"\d+") + r"\.(weight|bias)")
    rules = [Rule(f"rest.{name}", name) for name in held if not pattern.fullmatch(name)]
    bias_steps = tuple(
        dataclasses.replace(step, dim=0) for step in fused.steps if not isinstance(step, Transpose)
    )
    for ours, theirs, steps in (
        ("kernel", "weight", fused.steps),
        ("bias", "bias", bias_steps),
    ):
        paths = tuple(f"layers.{{i}}.attention.{part}.{ours}" for part in fused.parts)
        if fused.layer.format(i=0) + f".{theirs}" in held:
            rules.append(Rule(paths, f"{fused.layer}.{theirs}", *steps))
    return rules


def shapes_of(fused: Fused, held: dict[str, ArrayTensor], rules: list[Rule]) -> dict[str, Any]:
    """The tree of a model with a kernel and a bias for each of query, key and value."""
    shapes = {rule.ours[0]: held[rule.theirs[0]].shape for rule in rules if len(rule.ours) == 1}
    total = next(held[n].size for n in held if n == fused.layer.format(i=0) + ".weight") // WIDTH
    key = (total - WIDTH) // 2
    for layer in range(2):
        for part in parts_of(fused, layer):
            size = WIDTH if part.endswith("query") else key
            shapes[f"{part}.kernel"] = (WIDTH, size)
            if any(rule.ours[0].endswith(".bias") for rule in rules if len(rule.ours) == 3):
                shapes[f"{part}.bias"] = (size,)
    return {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in shapes.items()}


def qkv_of(fused: Fused, model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list, list]:
    """Inputs of the fused layers, and the query, key and value that the model computes.

    Each sequence is one token, so that rotary embeddings change nothing.
    """
    import torch

    module = importlib.import_module(f"transformers.models.{fused.family}.modeling_{fused.family}")
    *owner, function = fused.cut.split(".")
    place = getattr(module, owner[0]) if owner else module
    original: Callable = getattr(place, function)
    inputs, outputs = [], []

    def observed(*args, **kwargs):
        result = original(*args, **kwargs)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        outputs.append([x.numpy() for x in (given if len(given) >= 3 else result)[:3]])
        return result

    monkeypatch.setattr(place, function, observed)
    for layer in range(2):
        linear = model.get_submodule(fused.layer.format(i=layer))
        linear.register_forward_pre_hook(lambda _, args: inputs.append(args[0].numpy()))
    with torch.no_grad():
        model(torch.arange(5)[:, None], use_cache=False)
    return inputs, outputs


@pytest.mark.parametrize("name", FAMILIES)
def test_query_key_and_value_are_those_of_the_model(name: str, tmp_path: Path, monkeypatch):
    fused = FAMILIES[name]
    model = model_of(fused)
    held = tensors_of(model)
    rules = rules_of(fused, held)
    interop.save_tensors(held, tmp_path / "source")
    loaded = interop.load_into(shapes_of(fused, held, rules), tmp_path / "source", rules=rules)
    inputs, outputs = qkv_of(fused, model, monkeypatch)
    assert len(inputs) == len(outputs) == 2
    for layer, (x, wanted) in enumerate(zip(inputs, outputs, strict=True)):
        x = x.reshape(5, WIDTH)
        for part, theirs in zip(("query", "key", "value"), wanted, strict=True):
            path = f"layers.{layer}.attention.{part}"
            ours = x @ loaded[f"{path}.kernel"].read()
            if f"{path}.bias" in loaded:
                ours += loaded[f"{path}.bias"].read()
            heads = ours.reshape(5, -1, HEAD)
            theirs = theirs.reshape(5, -1, HEAD)
            if heads.shape != theirs.shape:  # Falcon repeats keys and values for each query
                heads = np.repeat(heads, theirs.shape[1] // heads.shape[1], axis=1)
            # Sums of 24 products in float32.
            atol = 100 * 2**-24 * np.abs(theirs).max()
            np.testing.assert_allclose(heads, theirs, rtol=0, atol=atol)
    back = interop.save_tensors(interop.tensors_from(loaded, rules), tmp_path / "back")
    file = "model.safetensors"
    assert (back / file).read_bytes() == (tmp_path / "source" / file).read_bytes()


def named(step: object) -> str:
    """The step as the matcher prints it, which does not know the number of heads."""
    return re.sub(r"num_heads=\d+", "num_heads=H", repr(step))


@pytest.mark.parametrize(
    "name", ["GPT-NeoX", "BLOOM", "GPT-2", "Phi-3", "Falcon, one key and value"]
)
def test_a_matcher_that_meets_a_fused_tensor_prints_both_rules(name: str):
    fused = FAMILIES[name]
    held = tensors_of(model_of(fused))
    rules = rules_of(fused, held)
    shapes = shapes_of(fused, held, rules)
    rest = [rule for rule in rules if len(rule.ours) == 1]
    found = interop.match(shapes, held, rules=rest)
    fused_rules = [rule for rule in rules if len(rule.ours) == 3]
    assert len(found.fused) == len(fused_rules) and not found.unused
    assert {path.rpartition(".")[0] for path in found.undecided} == {
        path for layer in range(2) for path in parts_of(fused, layer)
    }
    for rule in fused_rules:
        letters = [name for name in found.fused if name.replace("{n}", "{i}") == rule.theirs[0]]
        whole, head_by_head = (text.replace("{n}", "{i}") for text in found.fused[letters[0]])
        right = str(rule).replace(repr(rule.steps[0]), named(rule.steps[0]))
        assert right in (whole, head_by_head)
        assert ", Split(" in whole and "SplitHeads(" in head_by_head
        assert all(text in str(found).replace("{n}", "{i}") for text in (whole, head_by_head))
    for accept in (rest, [*rest, "*"]):
        with pytest.raises(
            ValueError, match=r"are fused .*\n +Rule\(.* Split\(.*\n +Rule\(.* SplitH"
        ):
            interop.load_into(shapes, held, accept=accept)
    loaded = interop.load_into(shapes, held, accept=rules)
    by_rules = interop.load_into(shapes, held, rules=rules)
    for path, tensor in by_rules.items():
        np.testing.assert_array_equal(loaded[path].read(), tensor.read())


def test_a_tree_that_has_heads_tells_their_number():
    shapes = {f"{part}.kernel": (WIDTH, HEADS, HEAD) for part in ("query", "key", "value")}
    tree = {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in shapes.items()}
    held = {"qkv.weight": ArrayTensor(np.zeros((3 * WIDTH, WIDTH), np.float32), "qkv.weight")}
    for text in interop.match(tree, held).fused["qkv.weight"]:
        (rule,) = [eval(text, vars(interop))]  # noqa: S307
        assert rule.steps[0] in (Split(0, 3), SplitHeads(0, HEADS))
        assert interop.load_into(tree, held, accept=rule)["query.kernel"].shape == (24, 4, 6)


def test_a_fused_parameter_may_have_the_other_layout():
    tree = {"attention": {"qkv": {"kernel": jax.ShapeDtypeStruct((24, 72), np.float32)}}}
    name = "attention.query_key_value.weight"
    held = {name: ArrayTensor(np.zeros((72, 24), np.float32), name)}
    with pytest.raises(ValueError, match=r"confirm: if both fuse query, key and value in the same"):
        interop.load_into(tree, held)
    assert interop.load_into(tree, held, accept="attention.*")


def test_the_embeddings_of_gpt_neox_are_not_swapped(tmp_path: Path):
    model_of(NEOX).save_pretrained(tmp_path)
    held = interop.open_checkpoint(tmp_path)
    shape = {"embed": (11, WIDTH), "kernel": (WIDTH, 11)}
    tree = {name: jax.ShapeDtypeStruct(sizes, np.float32) for name, sizes in shape.items()}
    tree = {"embed": {"embedding": tree["embed"]}, "head": {"kernel": tree["kernel"]}}
    ignore = ["gpt_neox.layers.*", "gpt_neox.final_layer_norm.*"]
    with pytest.raises(
        ValueError, match=r"Rule\('embed\.embedding', 'gpt_neox\.embed_in\.weight'\)"
    ):
        interop.load_into(tree, held, ignore=ignore)
    loaded = interop.load_into(tree, held, ignore=ignore, accept="embed.*")
    embed, head = (held[name].read() for name in ("gpt_neox.embed_in.weight", "embed_out.weight"))
    np.testing.assert_array_equal(loaded["embed"]["embedding"].read(), embed)
    np.testing.assert_array_equal(loaded["head"]["kernel"].read(), head.T)
