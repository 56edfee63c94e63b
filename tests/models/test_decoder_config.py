"""`config.json` of decoders as transformers 4 and 5 wrote it, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxzero import interop
from jaxzero.models import (
    DecoderConfig,
    DynamicScaling,
    ExpertsConfig,
    GroupRouting,
    LatentConfig,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    YarnScaling,
)

from .old_configs import OLD, SIZES


def write(directory: Path, model_type: str, **changes: Any) -> Path:
    content = {"model_type": model_type, **OLD.get(model_type, SIZES), **changes}
    (directory / "config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("model_type", OLD)
def test_old_files_mean_what_transformers_takes_them_for(tmp_path: Path, model_type: str):
    """Read by transformers 5 and written again, a file of transformers 4 says the same."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    transformers.logging.set_verbosity_error()
    old = write(tmp_path, model_type)
    config = transformers.AutoConfig.from_pretrained(old)
    config.save_pretrained(tmp_path / "new")
    assert "transformers_version" in json.loads((tmp_path / "new" / "config.json").read_text())
    assert DecoderConfig.from_json(old) == DecoderConfig.from_json(tmp_path / "new")


def test_what_the_keys_mean(tmp_path: Path):
    def read(model_type: str, **changes: Any) -> DecoderConfig:
        return DecoderConfig.from_json(write(tmp_path, model_type, **changes))

    gpt2 = read("gpt2")
    assert (gpt2.intermediate_size, gpt2.tied_head, gpt2.rope) == (128, True, None)
    assert gpt2.embedding_dropout == gpt2.attention_dropout == gpt2.residual_dropout == 0.1
    scaling = Llama3Scaling(factor=8.0, slow_turns=1.0, fast_turns=4.0, trained_length=32)
    assert read("llama").rope == Rope(rotary_size=8, base=500000.0, scaling=scaling)
    assert read("mistral").sliding_layers == (0, 1, 2, 3)
    assert (read("qwen2").sliding_layers, read("qwen2").sliding_window) == ((), None)
    assert (read("qwen3").sliding_layers, read("qwen3").sliding_window) == ((3,), 8)
    assert read("qwen3").rope == Rope(rotary_size=16, base=1e6, scaling=LinearScaling(factor=2.0))
    gemma2 = read("gemma2")
    assert (gemma2.attention_softcap, gemma2.logit_softcap) == (50.0, 30.0)
    assert gemma2.sliding_layers == (0, 2)
    np.testing.assert_allclose(
        (gemma2.embedding_scale, gemma2.attention_scale), (32**0.5, 24**-0.5)
    )
    gemma3 = read("gemma3_text")
    assert gemma3.sliding_layers == (0, 1, 3)
    assert gemma3.rope == Rope(rotary_size=16, base=1e6, scaling=LinearScaling(factor=8.0))
    assert gemma3.sliding_rope == Rope(rotary_size=16, base=1e4)
    phi3 = read("phi3").rope
    assert phi3 is not None and isinstance(phi3.scaling, LongScaling)
    # sqrt(1 + ln(64 / 16) / ln 16) = sqrt(1.5)
    np.testing.assert_allclose(phi3.scaling.magnitude, 1.5**0.5)
    assert (phi3.rotary_size, phi3.scaling.trained_length) == (4, 16)
    older = json.loads((tmp_path / "config.json").read_text())
    del older["original_max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(older))
    silent = DecoderConfig.from_json(tmp_path).rope
    assert silent is not None and isinstance(silent.scaling, LongScaling)
    assert (silent.scaling.trained_length, silent.scaling.magnitude) == (4096, 1.0)
    both = read("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4}).rope
    assert both is not None and isinstance(both.scaling, Llama3Scaling) and both.base == 500000
    assert read("gemma").activation == "gelu_tanh"
    granite = read("granite")
    assert (granite.attention_scale, granite.embedding_scale) == (2**-7, 12.0)
    assert (granite.residual_scale, granite.logit_scale) == (0.22, 1 / 16)
    stablelm, neox, smollm3 = read("stablelm"), read("gpt_neox"), read("smollm3")
    assert (stablelm.residual, stablelm.query_key_norm) == ("parallel_shared_norm", "each_head")
    assert stablelm.rope == Rope(rotary_size=4)
    assert neox.rope == Rope(rotary_size=8, base=5000.0)
    assert (neox.residual, neox.embedding_dropout, neox.residual_dropout) == (
        "sequential",
        0.1,
        0.1,
    )
    # 0.1 ln 2 + 1
    yarn = YarnScaling(factor=2.0, trained_length=32, magnitude=1.0693147180559945)
    assert smollm3.rope == Rope(rotary_size=8, base=5e6, scaling=yarn)
    assert smollm3.unrotated_layers == (3,)
    cohere2 = read("cohere2")
    assert (cohere2.sliding_layers, cohere2.unrotated_layers) == ((0, 1, 3), (2,))
    assert cohere2.rope == Rope(rotary_size=8, base=5e4, pairs="neighbours")
    deepseek = read("deepseek_v3")
    assert (deepseek.head_size, deepseek.rope.rotary_size) == (16, 4)
    # Published files give both weights as 1, so sines are as they are and the scale is not.
    assert isinstance(deepseek.rope.scaling, YarnScaling) and deepseek.rope.scaling.magnitude == 1
    np.testing.assert_allclose(
        deepseek.attention_scale, 16**-0.5 * (0.1 * np.log(40) + 1) ** 2, rtol=1e-12
    )
    assert deepseek.latent == LatentConfig(
        query_rank=24, key_value_rank=12, plain_size=12, value_size=12
    )
    assert deepseek.experts == ExpertsConfig(
        num_experts=16,
        num_experts_per_token=4,
        intermediate_size=16,
        dense_layers=(0, 1, 2),
        routing=GroupRouting(num_groups=4, num_chosen_groups=2, scale=2.5),
        shared_size=16,
    )
    assert read("deepseek_v3", first_k_dense_replace=4).experts is None
    dynamic = read("llama", rope_scaling={"type": "dynamic", "factor": 2.0}).rope
    assert dynamic is not None
    assert dynamic.scaling == DynamicScaling(factor=2.0, trained_length=64)
    assert read("qwen3_moe").experts == ExpertsConfig(
        num_experts=8,
        num_experts_per_token=4,
        intermediate_size=16,
        normalize=True,
        dense_layers=(0, 2, 3),
    )
    assert read("qwen3_moe", num_experts=0).experts is None


def test_a_silent_gpt_oss_has_yarn(tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    old = write(tmp_path, "gpt_oss", rope_scaling=None)
    transformers.AutoConfig.from_pretrained(old).save_pretrained(tmp_path / "new")
    config = DecoderConfig.from_json(old)
    assert config == DecoderConfig.from_json(tmp_path / "new")
    assert config.rope is not None and isinstance(config.rope.scaling, YarnScaling)


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("gemma3", {}, r"`model_type` in .* is 'gemma3'; decoders are read of .*gemma3_text"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "proportional"}},
            r"`rope_scaling.rope_type` in .* is 'proportional'; .*llama3",
        ),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "lacks rope_scaling.factor"),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0},
            "`rope_scaling.type` in .* needs a `base` above 1; got 1.0",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}},
            "`rope_scaling.beta_fast` in .* is 1.0, less than `beta_slow`, 2.0",
        ),
        (
            "stablelm",
            {"hidden_size": 32, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "DynamicScaling needs a `rotary_size` of at least 4; got 2",
        ),
        ("stablelm", {"hidden_dropout": 0.1}, r"`hidden_dropout` in .* must be 0\.0; got 0\.1"),
        ("gpt_neox", {"rotary_pct": 0.2}, "`rotary_pct` in .* makes 3 of the 16 numbers"),
        ("gpt_neox", {"hidden_size": 33}, "`hidden_size` in .* must be a multiple of"),
        ("smollm3", {"no_rope_layers": [1]}, "`no_rope_layers` in .* has 1 entries for 4 layers"),
        ("smollm3", {"no_rope_layers": [2] * 4}, "`no_rope_layers` in .* must be a list"),
        (
            "smollm3",
            {"layer_types": ["sliding_attention"] * 4},
            "`layer_types` in .* has windows, but `use_sliding_window` is false",
        ),
        ("gpt_oss", {"num_experts_per_tok": 5}, "`num_experts_per_tok` .* is 5, but .* is 4"),
        ("deepseek_v3", {"n_group": 3}, "`n_group` in .* is 3, but `n_routed_experts` is 16"),
        ("deepseek_v3", {"n_group": 16}, "`n_group` in .* is 16, .* groups hold .* at least 2"),
        ("deepseek_v3", {"topk_group": 5}, "`topk_group` in .* is 5, but `n_group` is 4"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 5}, "groups hold 4 experts"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "`scoring_func` in .* must be .sigmoid"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "`num_key_value_heads` in .* is 2, but .* 4 h"),
        ("cohere2", {"sliding_window": None}, "`sliding_window` in .* is null, but the layers"),
        ("llama", {"rope_scaling": {"type": "linear"}}, r"lacks rope_scaling\.factor"),
        ("llama", {"partial_rotary_factor": 0.5}, r"`partial_rotary_factor` in .* is 0\.5"),
        ("llama", {"hidden_act": "tanh"}, r"`hidden_act` in .* is 'tanh'; the decoder computes"),
        ("llama", {"quantization_config": {"bits": 4}}, "its weights are codes of numbers"),
        (
            "llama",
            {"hidden_size": 33},
            "`hidden_size` in .* must be a multiple of .*; got 33 and 4",
        ),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx` in"),
        (
            "gpt2",
            {"add_cross_attention": True},
            "must be false; got true. The decoder computes nothing else",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "`use_bidirectional_attention` in .*"),
        (
            "gemma2",
            {"layer_types": ["chunked_attention"] * 4},
            "`layer_types` .*'chunked_attention'",
        ),
        (
            "gemma2",
            {"layer_types": ["full_attention"] * 3},
            "`layer_types` .* 3 entries for 4 layers",
        ),
        ("gemma3_text", {"sliding_window": None}, "`sliding_window` in .* is null"),
        (
            "mixtral",
            {"router_jitter_noise": 0.1},
            r"`router_jitter_noise` in .* must be 0\.0; got 0\.1",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, model_type: str, change: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_json(write(tmp_path, model_type, **change))


def test_broken_files(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(
        ValueError, match=r"config\.json' cannot be read as JSON .*copy or download"
    ):
        DecoderConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object; got list"):
        DecoderConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(ValueError, match=r"lacks hidden_size, .*Save the checkpoint again"):
        DecoderConfig.from_json(tmp_path)
    content = {"model_type": "mixtral", "num_key_value_heads": 2, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"lacks num_experts_per_tok, num_local_experts"):
        interop.load_decoder(tmp_path)
    for key, value in (("hidden_size", "32"), ("num_attention_heads", 0), ("head_dim", 1.5)):
        with pytest.raises(
            ValueError, match=rf"`{key}` in .*config\.json' must be .*; got {value!r}"
        ):
            DecoderConfig.from_json(write(tmp_path, "llama", **{key: value}))
    with pytest.raises(ValueError, match="lacks vocab_size"):
        DecoderConfig.from_json(write(tmp_path, "llama", vocab_size=None))


def test_arguments_that_are_none(tmp_path):
    write(tmp_path, "llama")
    with pytest.raises(TypeError, match=r"`torch_dtype` is no field of `DecoderConfig`; did you"):
        DecoderConfig.from_json(tmp_path, torch_dtype="bfloat16")
    with pytest.raises(TypeError, match=r"`zzz` is no field of `DecoderConfig`, which has vocab"):
        DecoderConfig.from_json(tmp_path, zzz=1)
