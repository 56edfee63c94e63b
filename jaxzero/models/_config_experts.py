"""Read the experts of a decoder's `config.json`.

transformers 4 writes `num_experts` where 5 writes `num_local_experts`. Both are read.
"""

from .._checked_json import JsonKeys as Content
from ._experts_config import ClampedGate, ExpertsConfig, GroupRouting


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


def gpt_oss_experts(content: Content, num_layers: int) -> ExpertsConfig:
    """Experts with biases and a clamped gate in every layer, of width `intermediate_size`."""
    content.require("num_local_experts", "num_experts_per_tok")
    _check_chosen(content, "num_local_experts")
    return ExpertsConfig(
        num_experts=content["num_local_experts"],
        num_experts_per_token=content["num_experts_per_tok"],
        intermediate_size=content["intermediate_size"],
        bias=True,
        clamped_gate=ClampedGate(
            limit=content.get("swiglu_limit", 7.0), slope=content.get("swiglu_alpha", 1.702)
        ),
    )


def deepseek_experts(content: Content, num_layers: int) -> ExpertsConfig | None:
    """Experts in groups, and one that is shared, in all layers but the first."""
    count, num_dense = "n_routed_experts", content["first_k_dense_replace"]
    content.require(count, "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
    if num_dense >= num_layers:
        return None
    _check_chosen(content, count)
    num, num_groups, num_chosen = content[count], content["n_group"], content["topk_group"]
    if num % num_groups or num < 2 * num_groups:
        raise content.error(
            "n_group", f"is {num_groups}, but `{count}` is {num}; groups hold as many, at least 2"
        )
    if num_chosen > num_groups:
        raise content.error("topk_group", f"is {num_chosen}, but `n_group` is {num_groups}")
    if content["num_experts_per_tok"] > num // num_groups * num_chosen:
        raise content.error(
            "num_experts_per_tok",
            f"is {content['num_experts_per_tok']}, but `topk_group` groups hold "
            f"{num // num_groups * num_chosen} experts",
        )
    return ExpertsConfig(
        num_experts=num,
        num_experts_per_token=content["num_experts_per_tok"],
        intermediate_size=content["moe_intermediate_size"],
        normalize=content.get("norm_topk_prob", True),
        dense_layers=tuple(range(num_dense)),
        routing=GroupRouting(
            num_groups=num_groups,
            num_chosen_groups=num_chosen,
            scale=content["routed_scaling_factor"],
        ),
        shared_size=content["n_shared_experts"] * content["moe_intermediate_size"],
    )


def _check_chosen(content: Content, count: str) -> None:
    if not content["num_experts_per_tok"] <= content[count]:
        raise content.error(
            "num_experts_per_tok",
            f"is {content['num_experts_per_tok']}, but `{count}` is {content[count]}",
        )
