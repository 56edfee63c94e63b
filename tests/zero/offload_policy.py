"""The policy of `jax.checkpoint` that the tests of offloaded activations use."""

from __future__ import annotations

from typing import Any

import jax


def offload_only(name: str) -> Any:
    """Keep the activations called `name` in host memory, and compute all others again."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[name],
        offload_src="device",
        offload_dst="pinned_host",
    )
