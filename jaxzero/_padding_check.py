"""Does an optimizer give padded leaves the updates of their own shapes? Tried on tiny leaves."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._optimizer import TrueShapes
from ._partition import Layout
from ._tree_plan import TreePlan

_REMEDY = "Wrap it: `tx = zero.optimizer(tx)`."


@dataclasses.dataclass(frozen=True)
class _Trial:
    """Tiny leaves with the ranks of the parameters; `layouts` says which of them are padded."""

    plan: TreePlan
    layouts: Sequence[Layout | None]

    def update(self, tx: optax.GradientTransformation, padded: bool) -> list[Any]:
        """What `tx` makes of random gradients, leaf by leaf."""
        random = np.random.default_rng(0)
        params, grads = [], []
        for leaf in self.plan.leaves:
            for values in (params, grads):
                values.append(random.normal(size=(2,) * len(leaf.shape)).astype(leaf.dtype))
        if padded:
            params, grads = (
                [_widen(x, layout) for x, layout in zip(tree, self.layouts, strict=True)]
                for tree in (params, grads)
            )
        # optax relies on the promotion of dtypes that JAX has by default.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return jax.tree.leaves(jax.jit(lambda p, g: self._run(tx, p, g))(params, grads))

    def _run(self, tx: optax.GradientTransformation, params: list[Any], grads: list[Any]) -> Any:
        params, grads = self.plan.whole(params), self.plan.whole(grads)
        # What line searches, Polyak steps and SAM ask for besides gradients.
        known = {
            "value": jnp.float32(1),
            "grad": grads,
            "value_fn": lambda params, *_, **__: optax.tree.norm(params, squared=True),
            "grad_fn": lambda params, *_, **__: params,
        }
        tx = optax.with_extra_args_support(tx)
        accepted = inspect.signature(tx.update).parameters
        takes_any = any(p.kind == p.VAR_KEYWORD for p in accepted.values())
        extra = {key: x for key, x in known.items() if takes_any or key in accepted}
        return tx.update(grads, tx.init(params), params, **extra)[0]


def warn_of_padding(tx: optax.GradientTransformation, plan: TreePlan) -> None:
    """Warn if `tx` gives other updates because some of its leaves are padded, or may do so."""
    padded = [leaf.path for leaf in plan.leaves if leaf.layout and leaf.layout.is_padded]
    if not padded or isinstance(tx, TrueShapes):
        return
    what = f"{len(padded)} leaves are padded with zeros on this mesh, `{padded[0]}` the first, and "
    layouts = [
        leaf.layout if leaf.layout and leaf.layout.is_padded else None for leaf in plan.leaves
    ]
    trial = _Trial(plan, layouts)
    try:
        whole, wide = trial.update(tx, padded=False), trial.update(tx, padded=True)
    except Exception as error:  # whatever code of others raises: it is only tried here
        warnings.warn(
            f"{what}whether this optimizer gives them the updates of their own shapes could not "
            f"be tried ({type(error).__name__}: {error}). If it uses shapes or numbers of "
            f"elements, it does not. {_REMEDY}",
            stacklevel=3,
        )
        return
    if not all(
        np.allclose(np.float32(a), np.float32(b[tuple(slice(n) for n in a.shape)]), rtol=1e-3)
        for a, b in zip(whole, wide, strict=True)
    ):
        warnings.warn(
            f"{what}this optimizer would not give them the updates of their own shapes. {_REMEDY}",
            stacklevel=3,
        )


def _widen(x: np.ndarray, layout: Layout | None) -> np.ndarray:
    """`x` with one row of zeros at the end of the padded dim."""
    return x if layout is None else np.pad(x, [(0, d == layout.dim) for d in range(x.ndim)])
