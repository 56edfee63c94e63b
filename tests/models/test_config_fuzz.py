"""Mutated `config.json`: refused by file and key, or read as transformers reads it."""

from __future__ import annotations

import copy
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from jaxzero.models import (
    DECODER_FAMILIES,
    DecoderConfig,
    EncoderConfig,
    ModernBertConfig,
    ViTConfig,
    read_config,
)
from tests.interop.fuzzing import bounds
from tests.mutate_json import dumped, mutations

from .old_configs import OLD

# What transformers says about old names and odd values.
pytestmark = pytest.mark.filterwarnings("ignore")

_BERT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "pad_token_id": 1,
}
_DISTILBERT = {
    "vocab_size": 64,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 64,
    "activation": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.2,
}
_MODERN_BERT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "norm_eps": 1e-5,
    "norm_bias": False,
    "hidden_activation": "gelu",
    "local_attention": 6,
    "global_attn_every_n_layers": 2,
    "global_rope_theta": 1000.0,
    "local_rope_theta": 100.0,
    "mlp_dropout": 0.1,
    "embedding_dropout": 0.1,
}
_VIT = {
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": [16, 8],
    "patch_size": 4,
    "num_channels": 3,
    "qkv_bias": True,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
ENCODERS = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "distilbert": _DISTILBERT,
    "modernbert": _MODERN_BERT,
    "vit": _VIT,
}
CONFIGS = dict.fromkeys(ENCODERS, EncoderConfig) | {
    "modernbert": ModernBertConfig,
    "vit": ViTConfig,
}
DECODERS = {name: content for name, content in OLD.items() if name in DECODER_FAMILIES}
MORE = [
    "model_type", "rope_scaling", "rope_parameters", "rope_scaling.factor", "rope_scaling.type",
    "rope_parameters.rope_type", "rope_parameters.rope_theta", "rope_parameters.full_attention",
    "rope_scaling.original_max_position_embeddings", "rope_scaling.attention_factor",
    "rms_norm_eps", "hidden_act", "tie_word_embeddings", "attention_dropout", "attention_bias",
    "head_dim", "layer_types", "partial_rotary_factor", "initializer_range", "sliding_window",
    "quantization_config", "layer_norm_epsilon", "activation_function", "is_decoder",
    "attn_logit_softcapping", "use_sliding_window", "num_local_experts", "mlp_only_layers",
]  # fmt: skip
# transformers asks that `hidden_size` is a multiple of the number of heads, also where there is a
# `head_dim`, which is all that the model asks for.
STRICTER = {"hidden_size", "num_attention_heads"}


def read(content: dict[str, Any], path: Path) -> Any:
    """The config of a content, or None: it is refused, with an error that names file and key."""
    path.write_text(dumped(content))
    config = CONFIGS.get(str(content.get("model_type")), DecoderConfig)
    started = time.process_time()
    try:
        with bounds():
            return config.from_json(path)
    except ValueError as error:
        message = str(error)
        assert repr(str(path)) in message, message
        assert re.search(rf"`[\w.]+` in {re.escape(repr(str(path)))} | lacks \w+", message), message
        assert len(message) < len(str(path)) + 500, message
        assert message.isprintable(), message
        return None
    finally:
        assert time.process_time() - started < 1


def understood(content: dict[str, Any]) -> Any:
    """The config of transformers; None if it refuses the content."""
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[content["model_type"]].from_dict(content)
    except Exception:  # its own errors are of many types
        return None


def check(name: str, key: str, content: dict[str, Any], directory: Path) -> str:
    """Return what happened: "refused", "equal", or "stricter" if only transformers refuses."""
    ours = read(content, directory / "config.json")
    if ours is None:
        return "refused"
    theirs = understood(content)
    if theirs is None:
        same = key in STRICTER or ours == _without_effect(key, content, directory)
        assert same, f"{name}: transformers refuses {key} of {content}"
        return "stricter"
    theirs.save_pretrained(directory / "theirs")
    again = type(ours).from_json(directory / "theirs")
    assert ours == again, f"{name}: {key} of {content}"
    fields = {"hidden_size": ours.hidden_size, "num_hidden_layers": ours.num_layers}
    fields |= {"num_attention_heads": ours.num_heads}
    if name != "vit":
        fields["vocab_size"] = ours.vocabulary_size
    for theirs_name, value in fields.items():
        assert getattr(theirs, theirs_name) == value, f"{name}: {key} of {content}"
    return "equal"


def _without_effect(key: str, content: dict[str, Any], directory: Path) -> Any:
    """The config of a content in which a number is a float, or which lacks the key.

    transformers refuses 0 for 0.0, and wrong values of keys that the model does not read.
    """
    place = copy.deepcopy(content)
    content, (*sections, last) = place, key.split(".")
    for section in sections:
        place = place[section]
    value = place.pop(last, None)
    if type(value) is int and value.bit_length() < 1000:
        place[last] = float(value)
        if understood(content) is None:
            del place[last]
    return read(content, directory / "config.json")


def _fuzz(directory: Path, *, count: int, seed: int) -> dict[str, int]:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    bases = {
        name: {"model_type": name} | content for name, content in (DECODERS | ENCODERS).items()
    }
    found = {"refused": 0, "equal": 0, "stricter": 0}
    for name, key, content in mutations(bases, more=MORE, count=count, seed=seed):
        found[check(name, key, content, directory)] += 1
    return found


def test_mutated_files_are_refused_or_mean_the_same(tmp_path: Path):
    found = _fuzz(tmp_path, count=60, seed=0)
    assert min(found["refused"], found["equal"]) > 5, found


@pytest.mark.ci
def test_two_thousand_mutated_files(tmp_path: Path):
    found = _fuzz(tmp_path, count=2000, seed=1)
    assert min(found["refused"], found["equal"]) > 200, found


def test_files_that_are_no_configuration(tmp_path: Path):
    path = tmp_path / "config.json"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    for other, message in (("pipe", "a named pipe"), ("zero", "a device")):
        with pytest.raises(ValueError, match=f"{other}' is {message}. Put the regular file back"):
            read_config(tmp_path / other)
    with pytest.raises(ValueError, match="config.json' is a directory, not a JSON file"):
        read_config(tmp_path / "folder")
    for text, message in (
        ('{"a":' * 100_000, "nests objects or lists deeper than 64 levels"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nests objects or lists deeper than 64 levels"),
        ('{"a": ' + "1" * 10_000 + "}", "cannot be read as JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        (" " * (2**24 + 1), "has 16777217 bytes, and at most 16777216 are read"),
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a JSON object; got list"),
        ("", "cannot be read as JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        read_config(path)


@pytest.mark.parametrize(
    ("key", "value", "given"),
    [
        ("rms_norm_eps", float("nan"), "nan"),
        ("rope_theta", "10000.0", "'10000.0'"),
        ("tie_word_embeddings", "false", "'false'"),
        ("num_hidden_layers", True, "true"),
        ("num_hidden_layers", 10**12, "1000000000000"),
        ("num_attention_heads", 4.0, "4.0"),
        ("attention_dropout", 1e400, "inf"),
        ("hidden_size", 10**4000, "an integer of 13288 bits"),
    ],
)
def test_what_a_key_may_hold(tmp_path: Path, key: str, value: Any, given: str):
    path = tmp_path / "config.json"
    path.write_text(dumped({"model_type": "llama"} | OLD["llama"] | {key: value}))
    with pytest.raises(ValueError, match=rf"`{key}` in .*config\.json' must be .*; got {given}\."):
        DecoderConfig.from_json(path)
