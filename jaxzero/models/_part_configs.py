"""Configs of the parts of decoders, and checks of configs by the annotations of their fields."""

import dataclasses
import typing
from typing import Any


def check_positive(config: Any, *, or_zero: tuple[str, ...] = ()) -> None:
    """Raise `ValueError` if a field annotated `int` or `int | None` is not positive.

    Fields named in `or_zero` may also be 0.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_count = field.type is int or (field.type == (int | None) and value is not None)
        least = 0 if field.name in or_zero else 1
        if is_count and not (isinstance(value, int) and value >= least):
            kind = "an integer of at least 0" if least == 0 else "a positive integer"
            raise ValueError(f"`{field.name}` must be {kind}; got {value!r}.")


def check_choices(config: Any) -> None:
    """Raise `ValueError` if a field annotated `Literal[...]` has a value not listed there."""
    for field in dataclasses.fields(config):
        if typing.get_origin(field.type) is not typing.Literal:
            continue
        value, choices = getattr(config, field.name), typing.get_args(field.type)
        if value not in choices:
            raise ValueError(
                f"`{field.name}` must be one of {', '.join(map(repr, choices))}; got {value!r}."
            )


def check_dropout(config: Any) -> None:
    """Raise `ValueError` if a field named `..._dropout` is not in [0, 1)."""
    for field in dataclasses.fields(config):
        if field.name.endswith("_dropout") and not 0 <= getattr(config, field.name) < 1:
            raise ValueError(
                f"`{field.name}` must be in [0, 1); got {getattr(config, field.name)!r}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRouting:
    """The rule that chooses a token's experts from the few best groups of experts, by sigmoids.

    The score of an expert is the sigmoid of its logit plus a learned correction. The correction
    decides which experts are chosen, but does not enter their weights. No gradient reaches it.

    Args:
        num_groups: groups of equal size that the experts form, in order.
        num_chosen_groups: groups that a token's experts come from. A group is judged by its two
            best experts.
        scale: multiplies the weights of the chosen experts.

    References:
        DeepSeek-V3 (https://arxiv.org/abs/2412.19437).
    """

    num_groups: int
    num_chosen_groups: int
    scale: float = 1.0

    def __post_init__(self):
        check_positive(self)
        if self.num_chosen_groups > self.num_groups:
            raise ValueError(
                f"`num_chosen_groups` is {self.num_chosen_groups}, but there are `num_groups` = "
                f"{self.num_groups}. Choose at most all of them."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedGate:
    """The gated activation (up + 1) gate sigmoid(slope gate), where gate and up are clamped.

    Args:
        limit: `gate` is at most this; `up` is between its negative and this.
        slope: the slope of the sigmoid.
    """

    limit: float = 7.0
    slope: float = 1.702


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The config of a mixture of experts, which replaces the perceptron of a layer.

    Args:
        num_experts: experts per layer.
        num_experts_per_token: experts that process each token.
        intermediate_size: width of an expert.
        normalize: True if the weights of the chosen experts are scaled to sum to 1.
        dense_layers: indices of the layers that have an ordinary perceptron instead.
        routing: how experts are chosen; None for the largest probabilities of a softmax.
        shared_size: width of a perceptron that processes every token besides; None for none.
        bias: True if the router and the projections of the experts have biases.
        clamped_gate: the activation and gate of experts; None for those of `DecoderConfig`.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()
    routing: GroupRouting | None = None
    shared_size: int | None = None
    bias: bool = False
    clamped_gate: ClampedGate | None = None

    def __post_init__(self):
        check_positive(self)
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"`num_experts_per_token` is {self.num_experts_per_token}, but there are "
                f"`num_experts` = {self.num_experts}. Choose at most all of them."
            )
        if self.routing is not None:
            self._check_groups(self.routing)

    def _check_groups(self, routing: GroupRouting) -> None:
        size, rest = divmod(self.num_experts, routing.num_groups)
        if rest or size < 2:
            raise ValueError(
                f"`num_experts` is {self.num_experts} and `num_groups` is {routing.num_groups}. "
                "Groups must be of equal size, with at least two experts."
            )
        if self.num_experts_per_token > size * routing.num_chosen_groups:
            raise ValueError(
                f"`num_experts_per_token` is {self.num_experts_per_token}, but the chosen groups "
                f"hold {size * routing.num_chosen_groups} experts. Choose at most all of them."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """The config of latent attention, whose keys and values come from one short vector per token.

    Args:
        query_rank: size of the vector that queries come from; None if they come from the input.
        key_value_rank: size of the vector that keys and values come from.
        plain_size: how many numbers of a query and of a key are not rotated.
        value_size: how many numbers the value of one head has.
        norm_epsilon: the epsilon of the norms of the short vectors.
    """

    query_rank: int | None = None
    key_value_rank: int
    plain_size: int
    value_size: int
    norm_epsilon: float = 1e-6

    def __post_init__(self):
        check_positive(self)
