"""Check that each array of a windowed leaf can be replaced by its new value, in its place."""

from __future__ import annotations

from collections.abc import Sequence

from .._program import Constant
from .analysis import Analysis
from .layouts import UpdateLayouts

_REMEDY = (
    "Keep the leaf in device memory: leave it out of the patterns of "
    "`jz.Offload(weights=..., gradients=..., optimizer=...)`."
)


def check_outputs(analysis: Analysis, layouts: UpdateLayouts, owners: Sequence[int | None]) -> None:
    """Raise `NotImplementedError` for a new value that cannot be written window by window.

    Args:
        analysis: of the update.
        layouts: of its trees.
        owners: for each input of the program the windowed leaf that it belongs to, or None.
    """
    num_gradients = len(layouts.gradients.leaves)
    leaves = layouts.leaves[num_gradients:]
    outputs = analysis.program.block.outputs
    of_outputs = owners[num_gradients : num_gradients + len(leaves)]
    for leaf, owner, new in zip(leaves, of_outputs, outputs, strict=True):
        made_of = analysis.leaf_of(new)
        if made_of not in (owner, None):
            source = layouts.params.leaves[made_of].path
            raise NotImplementedError(
                f"The optimizer computes `{leaf.path}` from elements of the leaf `{source}`, which "
                f"is in host memory, and that leaf's state does not include it. {_REMEDY}"
            )
        if owner is None:
            continue
        if made_of is None and not analysis.repeats_scalar(new):
            raise NotImplementedError(
                f"The optimizer computes `{leaf.path}`, which is in host memory, from other arrays "
                f"than those of its leaf. {_REMEDY}"
            )
        dtype = new.value.dtype if isinstance(new, Constant) else new.dtype
        if dtype != leaf.dtype:
            raise NotImplementedError(
                f"The optimizer changes the dtype of `{leaf.path}` from {leaf.dtype} to {dtype}; "
                f"an array in host memory is updated in its place. {_REMEDY}"
            )
