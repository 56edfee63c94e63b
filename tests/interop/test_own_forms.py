"""Forms of checkpoint and decoder families that are defined outside of the package."""

import numpy as np
import pytest

from jaxzero import interop
from jaxzero.interop._huggingface import families
from jaxzero.interop._load import open as forms


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    monkeypatch.setattr(forms, "_registered", [])
    monkeypatch.setattr(families, "_registered", {})


class _Raw(interop.CheckpointForm):
    """One tensor, the bytes of a file."""

    name = "raw"

    def __init__(self, suffix=".raw"):
        self.suffix = suffix

    def recognizes(self, path):
        return path.suffix == self.suffix

    def open(self, path, *, key=None, records=()):
        data = np.frombuffer(path.read_bytes(), np.uint8)
        tensors = {key or "data": interop.ArrayTensor(data, str(path))}
        return interop.Checkpoint(path=path, form=self.name, tensors=tensors)


def test_a_form_is_tried_before_those_here(tmp_path):
    path = tmp_path / "model.bin"  # else of `torch.save`
    path.write_bytes(b"abc")
    assert interop.open_checkpoint(path, forms=[_Raw(".bin")])["data"].read().tobytes() == b"abc"
    with pytest.raises(ValueError, match="model.bin"):
        interop.open_checkpoint(path)
    interop.register_checkpoint_form(_Raw(".bin"))
    assert list(interop.open_checkpoint(path, key="k")) == ["k"]


def test_a_form_that_returns_something_else_is_refused(tmp_path):
    class Odd(_Raw):
        def open(self, path, *, key=None, records=()):
            return {"w": np.ones(3)}

    (tmp_path / "x.raw").write_bytes(b"")
    with pytest.raises(ValueError, match="`open` of the form Odd must return an.*got dict"):
        interop.open_checkpoint(tmp_path / "x.raw", forms=[Odd()])


def test_a_class_is_no_form():
    with pytest.raises(ValueError, match=r"such as `MyForm\(\)`; got <class"):
        interop.register_checkpoint_form(_Raw)


class _Family(interop.DecoderFamily):
    model_type = "mine"

    def fields(self, content, path):
        return {}

    def rules(self, config):
        return ()


def test_a_family_is_found_by_its_model_type(tmp_path):
    with pytest.raises(ValueError, match="`model_type` is 'mine'; decoders .*`family=interop.Deco"):
        interop.decoder_family("mine")
    mine = _Family()
    interop.register_decoder_family(mine)
    assert interop.decoder_family("mine") is mine
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(ValueError, match="`model_type` in .*config.json' is 'other'.*llama, mine"):
        interop.load_decoder(tmp_path)


def test_no_family_is_refused():
    class Nameless(_Family):
        model_type = None

    for wrong in (_Family, Nameless(), "llama"):
        with pytest.raises(ValueError, match="instance of a subclass of `interop.DecoderFamily`"):
            interop.register_decoder_family(wrong)


def test_a_known_family_reads_a_config_whatever_its_model_type(tmp_path):
    sizes = {"vocab_size": 7, "hidden_size": 8, "intermediate_size": 9, "num_hidden_layers": 1}
    content = sizes | {"num_attention_heads": 8, "max_position_embeddings": 4, "head_dim": 2}
    fields = interop.decoder_family("mistral").fields(content | {"model_type": "x"}, tmp_path)
    assert fields["num_key_value_heads"] == 8 and fields["sliding_window"] == 4096
