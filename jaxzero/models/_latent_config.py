"""Configuration of latent attention, as a frozen dataclass that validates itself."""

import dataclasses

from ._checks import check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Attention whose keys and values come from one short vector per token.

    Args:
        query_rank: size of the vector that queries come from; None if they come from the input.
        key_value_rank: size of the vector that keys and values come from.
        plain_size: numbers of a query and of a key that are not rotated.
        value_size: numbers of a value of one head.
        norm_epsilon: of the norms of the short vectors.
    """

    query_rank: int | None = None
    key_value_rank: int
    plain_size: int
    value_size: int
    norm_epsilon: float = 1e-6

    def __post_init__(self):
        check_positive(self)
