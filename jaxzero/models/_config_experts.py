"""Read the experts of a decoder's `config.json`.

transformers 4 writes `num_experts` where 5 writes `num_local_experts`. Both are read.
"""

from .._checked_json import JsonKeys as Content
from ._experts_config import ExpertsConfig


def mixtral_experts(content: Content, num_layers: int) -> ExpertsConfig:
    """Experts in every layer, of width `intermediate_size`."""
    content.require("num_local_experts", "num_experts_per_tok")
    _check_chosen(content, "num_local_experts")
    return ExpertsConfig(
        num_experts=content["num_local_experts"],
        num_experts_per_token=content["num_experts_per_tok"],
        intermediate_size=content["intermediate_size"],
        normalize=True,
    )


def qwen3_experts(content: Content, num_layers: int) -> ExpertsConfig | None:
    """Experts in every nth layer except those listed, with a separate width."""
    count = "num_local_experts" if "num_local_experts" in content else "num_experts"
    content.require(count, "num_experts_per_tok", "moe_intermediate_size")
    every = content.get("decoder_sparse_step", 1)
    named = content.get("mlp_only_layers") or ()
    dense = [i for i in range(num_layers) if (i + 1) % every or i in named]
    if content[count] == 0 or len(dense) == num_layers:
        return None
    _check_chosen(content, count)
    return ExpertsConfig(
        num_experts=content[count],
        num_experts_per_token=content["num_experts_per_tok"],
        intermediate_size=content["moe_intermediate_size"],
        normalize=content.get("norm_topk_prob", False),
        dense_layers=tuple(dense),
    )


def _check_chosen(content: Content, count: str) -> None:
    if not content["num_experts_per_tok"] <= content[count]:
        raise content.error(
            "num_experts_per_tok",
            f"is {content['num_experts_per_tok']}, but `{count}` is {content[count]}",
        )
