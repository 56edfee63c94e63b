"""Checkpoints of known families, computed here and in transformers."""

from __future__ import annotations

import pytest

from jaxzero import cli, interop
from jaxzero.interop import Rule
from tests.models import tiny_models

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")


@pytest.mark.parametrize("name", ["gemma1", pytest.param("roberta", marks=pytest.mark.ci)])
def test_known_families_agree_with_transformers(name: str, tmp_path):
    table = tiny_models.DECODERS | tiny_models.ENCODERS
    model = tiny_models.make(*table[name], causal=name in tiny_models.DECODERS)
    result = interop.compare_with_transformers(
        tiny_models.save(model, tmp_path / name), submodules=True
    )
    assert result.agrees and len(result.outputs) > 15, result
    differing = [each for each in result.outputs if not each.agrees]
    if name == "gemma1":  # PyTorch scales embeddings in the layer, jaxzero after it
        assert [x.torch_name for x in differing] == ["model.embed_tokens"]
        assert differing[0].note == f"PyTorch's is {32**0.5:.6g} times ours"
    else:
        assert not differing


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
    monkeypatch.setattr("jaxzero.interop._huggingface.family._registered", {"llama": Exchanged()})
    assert cli.main([*command[:2], str(tmp_path / "c"), "--check-layers"]) == 2
    printed = capsys.readouterr()
    # Up and gate have each other's weights and names, but only the gate is activated.
    assert "The first layer that differs is `model.layers.0.mlp.down_proj`" in printed.out
    assert "computes something else" in printed.err
    assert cli.main([*command[:2], str(tmp_path / "d.bin"), "--check-outputs"]) == 2
    assert "a target that is a directory" in capsys.readouterr().err
