"""The mesh axis `tokens`: neighbouring devices of a node that share the tokens of their rows.

`node` and `local` split rows, and a program runs on each of their devices by itself. Devices along
`tokens` run one such program together: the compiler (GSPMD) partitions it, guided by constraints on
the dims of tokens. So inside the program an array has the values and the shape of full rows, and
the results of a function do not depend on the axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Shaped

TOKENS = "tokens"
_EXCHANGE = "tokens by "
# A dim of at least this size is taken for one of features, and not of layers or experts, of which
# even large models have fewer.
MIN_FEATURES = 256


def split_tokens(x: Shaped[Array, ...], dim: int = 1) -> Shaped[Array, ...]:
    """Split a dim of tokens over the mesh axis `tokens`; without that axis, return `x` unchanged.

    A model that calls this for its activations needs no other change for long rows: the devices
    along the axis then compute, and keep for backward, their part of the tokens only. Once after
    the embedding and once in each layer is enough, the compiler infers the rest. It is a constraint
    on where elements lie, and does not change their values. It may be called anywhere in a function
    given to `zero`: in loops, under `jax.checkpoint` and `jax.vmap`.

    Args:
        x: activations of any dtype, `[rows, tokens, ...]`.
        dim: the dim of tokens; negative ones count from the end.

    Returns:
        `x`, with the same shape and values.

    Raises:
        ValueError: `x` has no such dim, its size does not divide by that of the axis, or the axis
            is not automatic.
    """
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"`dim` must be a dim of `x`, which has the shape {x.shape}; got {dim}. It is the dim "
            "that counts tokens."
        )
    num = num_token_parts()
    if x.shape[dim] % num:
        raise ValueError(
            f"`x` has {x.shape[dim]} tokens in dim {dim}, and the mesh axis `{TOKENS}` splits them "
            f"over {num} devices. Pad rows to a multiple of {num}."
        )
    return split_over_tokens(x, dim)


def num_token_parts() -> int:
    """Return the size of the axis `tokens` of the program being traced; 1 without that axis."""
    mesh = jax.sharding.get_abstract_mesh()
    if TOKENS not in mesh.axis_names:
        return 1
    if mesh.axis_types[mesh.axis_names.index(TOKENS)] != AxisType.Auto:
        raise ValueError(
            f"The mesh axis `{TOKENS}` must be automatic where tokens are split over it; here it "
            f"is {mesh.axis_types[mesh.axis_names.index(TOKENS)]}. Make the mesh with "
            "`jz.make_mesh(tokens=...)`, and call this outside of a `jax.shard_map` over the axis."
        )
    return mesh.shape[TOKENS]


def split_over_tokens(x: Any, dim: int | None) -> Any:
    """Constrain `x` to be split on `dim` over the mesh axis `tokens`; if `dim` is None, whole.

    On a mesh without that axis, return `x`.
    """
    if num_token_parts() == 1:
        return x
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim if dim is not None else []
    if dim is not None:
        entries[dim] = TOKENS
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def exchange_over_tokens(x: Any, dim: int | None, collective: str) -> Any:
    """Change how `x` is split over `tokens`, as `split_over_tokens` does, so that GSPMD sends it.

    `collective` is the name of the collective that GSPMD uses. It becomes a named scope of the
    constraint. From that, `exchange_of` reads the name, both in forward and for the transpose in
    backward, which sends as many bytes.
    """
    with jax.named_scope(f"{_EXCHANGE}{collective}"):
        return split_over_tokens(x, dim)


def exchange_of(equation: Any) -> str | None:
    """Return the name that `exchange_over_tokens` gave to an equation's collective; else None."""
    if equation.primitive.name != "sharding_constraint":
        return None
    found = re.search(f"{_EXCHANGE}([a-z-]+)", str(equation.source_info.name_stack))
    return None if found is None else found[1]


def weight_dim_of_tokens(shape: tuple[int, ...], other: int, num: int) -> int | None:
    """Return the dim of a weight that is split over `num` devices along `tokens`.

    It is one of the last two dims, but not `other`, which `node` and `local` split. None if neither
    dim is long enough and divides evenly: the weight is then whole along `tokens`.
    """
    last = range(max(len(shape) - 2, 0), len(shape))
    dims = [i for i in last if i != other and shape[i] >= MIN_FEATURES and shape[i] % num == 0]
    return dims[-1] if dims and num > 1 else None


def on_token_parts(function: Callable, in_dims: Any, out_dims: Any) -> Callable:
    """Wrap a function of trees of arrays to run on each device's part along the axis `tokens`.

    Collectives over `node` and `local` inside `function` then send these parts. Outside of this
    wrapper GSPMD would gather the parts along `tokens` before each collective.

    Args:
        function: returns a tree of arrays.
        in_dims: a tuple of tree prefixes: the dim on which each argument is split, or None.
        out_dims: a tree prefix: the dim on which results are joined; None if results are equal on
            all devices along the axis.
    """

    def specs(dims: Any) -> Any:
        def spec(dim: int | None) -> PartitionSpec:
            return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, TOKENS)

        return jax.tree.map(spec, dims, is_leaf=lambda x: x is None)

    return jax.shard_map(
        function,
        in_specs=specs(in_dims),
        out_specs=specs(out_dims),
        axis_names={TOKENS},
        check_vma=False,
    )


def whole_weight(x: Any) -> Any:
    """All-gather a weight over `tokens`, after its gather over `node` and `local`."""
    return split_over_tokens(x, None)


def split_weight(x: Any, other: int) -> Any:
    """Split a weight, or its shard, over `tokens` as `weight_dim_of_tokens` says.

    `other` is the dim that `node` and `local` split.
    """
    dim = weight_dim_of_tokens(x.shape, other, num_token_parts())
    return x if dim is None else split_over_tokens(x, dim)


def split_weight_gradient(x: Any, other: int) -> Any:
    """Sum the gradient of a full weight over `tokens`, into the parts of `split_weight`.

    The gradient is first constrained to be whole, then to be split. With the second constraint
    alone, the compiler gathers the activations of all tokens, and each device computes its part of
    the gradient from these.
    """
    parts = split_weight(x, other)
    return x if parts is x else split_weight(whole_weight(x), other)


def check_tokens_axis(mesh: Any) -> None:
    """Raise `NotImplementedError` if a mesh has an axis `tokens` that is not automatic."""
    if isinstance(mesh, Mesh) and TOKENS in mesh.axis_names:
        kind = mesh.axis_types[mesh.axis_names.index(TOKENS)]
        if kind != AxisType.Auto:
            raise NotImplementedError(
                f"The mesh axis `{TOKENS}` must be of type Auto; got {kind.name}. Over an explicit "
                "axis the type of every array in a model would have to say how it is split. "
                "`jz.make_mesh(tokens=..., axis_type=jax.sharding.AxisType.Explicit)` makes `node` "
                f"and `local` explicit, and `{TOKENS}` automatic."
            )
