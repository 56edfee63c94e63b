"""Configuration of a mixture of experts, as a frozen dataclass that validates itself."""

import dataclasses

from ._checks import check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of the perceptron of a layer.

    Args:
        num_experts: experts per layer.
        num_experts_per_token: experts that process each token.
        intermediate_size: width of an expert.
        normalize: True if the weights of the chosen experts are scaled to sum to 1.
        dense_layers: indices of the layers that have an ordinary perceptron instead.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self):
        check_positive(self)
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"`num_experts_per_token` is {self.num_experts_per_token}, but there are "
                f"`num_experts` = {self.num_experts}. Choose at most all of them."
            )
