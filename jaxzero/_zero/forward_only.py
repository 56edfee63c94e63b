"""Refuse reverse-mode differentiation of a sharded program, with a message that says what to do.

`value_and_grad` differentiates before it shards. To transpose what it has made would hold every
gathered weight until backward, pass through codecs, and JAX cannot do it: equations of the program
are typed without the mesh (`_mesh.per_device`), and those of its transpose with it. Forward mode
works: `jax.jvp` of the gradients gives Hessian-vector products.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def forward_only(tree: Any) -> Any:
    """The same arrays; reverse-mode differentiation of them raises `NotImplementedError`."""
    return jax.tree.map(
        lambda x: _same_p.bind(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree
    )


def _refuse(cotangent: Any, x: Any) -> Any:
    raise NotImplementedError(
        "`jax.grad`, `jax.vjp` and other reverse-mode derivatives of a function that `zero.apply` "
        "or `zero.value_and_grad` has returned are not possible. Give the function itself to "
        "`zero.value_and_grad`, with everything that is computed of its results inside. "
        "Hessian-vector products are the `jax.jvp` of its gradients."
    )


_same_p = Primitive("forward_only")
_same_p.def_impl(lambda x: x)
_same_p.def_abstract_eval(lambda x: x)
ad.deflinear2(_same_p, _refuse)
batching.defvectorized(_same_p)
mlir.register_lowering(_same_p, lambda ctx, x: [x])
