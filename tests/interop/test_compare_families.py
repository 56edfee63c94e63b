"""Checkpoints of known families, computed here and in transformers."""

from __future__ import annotations

import pytest

from jaxzero import cli, interop
from jaxzero.interop import Rule
from tests.models import tiny_models

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")


FAMILIES = tiny_models.DECODERS | tiny_models.MORE_DECODERS | tiny_models.ENCODERS
MARKS = {x: pytest.mark.ci for x in ("gemma1", "phi3-partial", "roberta")}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=MARKS.get(x, pytest.mark.exhaustive)) for x in FAMILIES],
)
def test_known_families_agree_with_transformers(name: str, tmp_path):
    model = tiny_models.make(*FAMILIES[name], causal=name not in tiny_models.ENCODERS)
    source = tiny_models.save(model, tmp_path / name)
    result = interop.compare_with_transformers(source, submodules=True)
    assert result.agrees and len(result.outputs) > 15, result
    differing = {each.torch_name: each.note for each in result.outputs if not each.agrees}
    # PyTorch scales Gemma's embeddings in the layer, jaxzero after it.
    scaled = {"model.embed_tokens": f"PyTorch's is {32**0.5:.6g} times ours"}
    assert differing == (scaled if name.startswith("gemma") else {})


def test_every_layer_of_a_vit_is_compared(tmp_path):
    """transformers gives its modules other names than its files."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_labels": 3}
    config = transformers.ViTConfig(num_hidden_layers=1, image_size=8, patch_size=4, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    result = interop.compare_with_transformers(tmp_path, submodules=True)
    assert result.agrees and result.first_difference is None, result
    layers = [each for each in result.outputs if each.jax_name.startswith("vit.layers.0.")]
    assert len(layers) == 8


@pytest.mark.ci
def test_the_command_names_the_layer_that_a_wrong_family_gets_wrong(tmp_path, capsys, monkeypatch):
    llama = interop.decoder_family("llama")

    class Exchanged(interop.DecoderFamily):
        model_type = "llama"

        def fields(self, content, path):
            return llama.fields(content, path)

        def rules(self, config):
            other = {"gate": "up", "up": "gate"}
            for rule in llama.rules(config):
                *start, layer, leaf = rule.ours[0].split(".")
                yield Rule(
                    ".".join([*start, other.get(layer, layer), leaf]), *rule.theirs, *rule.steps
                )

    source = tiny_models.save(tiny_models.make(*tiny_models.DECODERS["llama"]), tmp_path / "a")
    command = ["convert", str(source), str(tmp_path / "b"), "--check-outputs"]
    assert cli.main(command) == 0 and "The outputs agree" in capsys.readouterr().out
    monkeypatch.setattr("jaxzero.interop._huggingface.families._registered", {"llama": Exchanged()})
    assert cli.main([*command[:2], str(tmp_path / "c"), "--check-layers"]) == 2
    printed = capsys.readouterr()
    # Up and gate have each other's weights and names, but only the gate is activated.
    assert "The first layer that differs is `model.layers.0.mlp.down_proj`" in printed.out
    assert "computes something else" in printed.err
    assert cli.main([*command[:2], str(tmp_path / "d.bin"), "--check-outputs"]) == 2
    assert "a target that is a directory" in capsys.readouterr().err
