"""`shares`: micro-batches in proportion to the speed of each node.

A batch is an array of equally many rows for every device, cut into `k` micro-batches. With shares
`s` of the nodes, a device of node `i` runs the first `k * s[i] / max(s)` of its micro-batches. The
rows of the others are padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from .._mesh import AXES, LOCAL, NODE, AnyMesh, physical

Shares = tuple[int, ...]


def known_shares(shares: Sequence[int] | None, nodes: int, microbatches: int) -> Shares | None:
    """Check shares, and divide them by what they have in common; None if all are equal.

    Raises:
        ValueError: they are not one integer of at least 1 for each node, or the micro-batches
            cannot be divided in these proportions.
    """
    if shares is None:
        return None
    found = tuple(shares) if isinstance(shares, Sequence | np.ndarray) else ()
    is_number = (isinstance(x, int | np.integer) and not isinstance(x, bool) for x in found)
    if len(found) != nodes or not all(is_number) or min(found) < 1:
        raise ValueError(
            "`shares` must hold an integer of at least 1 for each node, and here the number of "
            f"nodes is {nodes}; got {shares!r}. `jz.Cluster(...).shares(microbatches)` gives them."
        )
    common = math.gcd(*found)
    known = tuple(int(x) // common for x in found)
    if microbatches % max(known):
        raise ValueError(
            f"`microbatches` is {microbatches}, and for `shares={known}` it must be a multiple of "
            f"{max(known)}: the devices of the fastest node run that many, and those of the others "
            f"fewer in proportion. Give `microbatches={max(known)}` or a multiple of it."
        )
    return None if len(set(known)) == 1 else known


def node_microbatches(microbatches: int, shares: Shares) -> tuple[int, ...]:
    """How many micro-batches the devices of each node run, if the fastest run `microbatches`."""
    return tuple(microbatches * share // max(shares) for share in shares)


def check_shares(shares: Shares | None, halves: bool, mesh: AnyMesh) -> None:
    """Check that the other options of `value_and_grad` go with `shares`.

    Raises:
        NotImplementedError: half-batches are compared, or the mesh has axes of its own.
    """
    if shares is None:
        return
    others = [axis for axis, size in physical(mesh).shape.items() if axis not in AXES and size > 1]
    reasons = {
        "`halves=True`: the halves would have different numbers of rows": halves,
        f"the mesh axes {others} beside {AXES}": bool(others),
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise NotImplementedError(f"`shares` does not work with {reason}. Leave out one.")


def check_share_nodes(mesh: AnyMesh, shares: Shares | None) -> None:
    """Raise `ValueError` if a program of one node is given shares of several."""
    if shares is not None and mesh.shape[NODE] != len(shares):
        raise ValueError(
            f"`shares` has {len(shares)} entries, and this program has {mesh.shape[NODE]} node. "
            "In `zero.local_steps` every node trains by itself: leave it out there."
        )


def counted_rows(
    rows: int, mesh: AnyMesh, microbatches: int, shares: Shares
) -> Bool[np.ndarray, " rows"]:
    """Which rows of a batch of `rows` rows are computed."""
    nodes, local = mesh.shape[NODE], mesh.shape[LOCAL]
    each = rows // (nodes * local)
    counts = np.asarray(node_microbatches(microbatches, shares)) * (each // microbatches)
    is_counted = np.arange(each) < counts[:, None]  # [nodes, each]
    return np.repeat(is_counted, local, axis=0).reshape(-1)
