"""Split the parameters of a `Decoder` for tensor parallelism inside a node.

    attention    query, key, value by heads (columns); output by heads (rows)
    perceptron   gate and up by columns, down by rows
    experts      each like a perceptron, or expert by expert
    vocabulary   rows of the embedding, columns of the head
    others       whole: norms, routers, positions, short vectors of latent attention

A device then computes its heads and its columns from whole inputs. One sum over devices follows
each half of a layer; XLA adds it, given the shardings alone (Megatron-LM,
https://arxiv.org/abs/1909.08053).
"""

from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from ._attention import Attention
from ._decoder import Decoder
from ._experts import Experts, Mlp
from ._latent_attention import LatentAttention

_Path = tuple[str, ...]
_COLUMNS, _ROWS = -1, -2  # of a kernel `[in, out]`; layers that are scanned have one dim before


def tensor_parallel_specs(
    graph: Any,
    params: Any,
    *,
    size: int,
    axis: str = "local",
    experts: Literal["width", "expert"] = "width",
) -> Any:
    """Return `PartitionSpec`s of a decoder's parameters, for `jz.reshard` and tensor parallelism.

    If `size` does not divide the number of key-value heads, keys and values stay whole on every
    device, and only queries are split. If `size` does not divide the vocabulary, the embedding and
    the head stay whole too.

    Args:
        graph: graph of the model, from `nnx.split` or `interop.load_decoder`.
        params: its parameters, of which only shapes are read; may be those that `jz.Zero` holds.
        size: number of devices along `axis`.
        axis: the mesh axis that splits the model.
        experts: "width" splits each expert like a perceptron: every device computes a part of each.
            "expert" gives each device some of the experts, which are then sent to all devices: with
            `expert_loop="scan"` one expert at a time, with "ragged" all experts of a layer
            together. To send tokens to experts instead, use `jz.Ungathered`.

    Returns:
        A tree like `params` of `PartitionSpec`s.

    Raises:
        ValueError: heads, widths or experts do not divide by `size`, or `size` is not positive.
        NotImplementedError: the model is no `Decoder`.

    Example:
        >>> specs = models.tensor_parallel_specs(graph, params, size=zero.mesh.shape["local"])
        >>> served = jz.reshard(params, zero, specs=specs)
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"`size` must be a number of devices, at least 1; got {size!r}.")
    if experts not in ("width", "expert"):
        raise ValueError(f'`experts` must be "width" or "expert"; got {experts!r}.')
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_array)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in pairs]
    model = nnx.merge(graph, jax.tree.unflatten(treedef, shapes))
    if not isinstance(model, Decoder):
        raise NotImplementedError(
            f"`tensor_parallel_specs` knows decoders only; got a model of type "
            f"`{type(model).__name__}`. Write a tree of `PartitionSpec`s by hand; "
            "`PartitionSpec()` leaves an array whole."
        )
    dims: dict[_Path, int] = {}
    for path, module in nnx.iter_modules(model):
        names = tuple(map(str, path))
        for name, dim in _split_dims(module, size, experts).items():
            dims[(*names, *name.split("."))] = dim
    specs = [
        _spec(_dim(path, dims), x.ndim, axis) for (path, _), x in zip(pairs, shapes, strict=True)
    ]
    return jax.tree.unflatten(treedef, specs)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, nnx.Variable)


def _dim(path: tuple[Any, ...], dims: dict[_Path, int]) -> int | None:
    """Return the dim along which the parameter at `path` is split; None if it stays whole."""
    names = tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
    # A leaf may have keys after the parameter's path, such as `value`.
    fitting = (dims[names[:n]] for n in range(1, len(names) + 1) if names[:n] in dims)
    return next(fitting, None)


def _spec(dim: int | None, ndim: int, axis: str) -> PartitionSpec:
    if dim is None:
        return PartitionSpec()
    return PartitionSpec(*[axis if i == ndim + dim else None for i in range(ndim + dim + 1)])


def _split_dims(module: Any, size: int, experts: str) -> dict[str, int]:
    """Return, for each parameter of a module that is to be split, the split dim.

    Dims are counted from the last: -1, -2. Parameters of inner modules are not included.
    """
    if isinstance(module, Decoder):
        return _of_vocabulary(module, size)
    if isinstance(module, Attention):
        return _of_attention(module, size)
    if isinstance(module, LatentAttention):
        return _of_latent_attention(module, size)
    if isinstance(module, Mlp):
        return _of_perceptron(module, size)
    if isinstance(module, Experts):
        return _of_experts(module, size, experts)
    return {}


def _of_vocabulary(model: Decoder, size: int) -> dict[str, int]:
    if model.config.vocabulary_size % size:
        return {}
    head = {} if model.head is None else _columns("head")
    return {"embedding.embedding": _ROWS, **head}


def _of_attention(module: Attention, size: int) -> dict[str, int]:
    config = module.config
    _check("num_heads", config.num_heads, size)
    names = ["query"] if config.num_key_value_heads % size else ["query", "key", "value"]
    return _columns(*names) | {"output.kernel": _ROWS}


def _of_latent_attention(module: LatentAttention, size: int) -> dict[str, int]:
    _check("num_heads", module.config.num_heads, size)
    query = "query" if module.latent.query_rank is None else "query_up"
    return _columns(query, "key_value_up") | {"output.kernel": _ROWS}


def _of_perceptron(module: Mlp, size: int) -> dict[str, int]:
    _check("the width of a perceptron", module.down.in_features, size)
    return _columns("gate", "up") | {"down.kernel": _ROWS}


def _of_experts(module: Experts, size: int, experts: str) -> dict[str, int]:
    if experts == "expert":
        _check("num_experts", module.experts.num_experts, size)
        names = ("gate", "up", "down")  # kernels [experts, in, out], biases [experts, out]
        return {name: -3 for name in names} | {f"{name}_bias": -2 for name in names}
    _check("the width of an expert", module.experts.intermediate_size, size)
    by_columns = ("gate", "up", "gate_bias", "up_bias")
    return {name: _COLUMNS for name in by_columns} | {"down": _ROWS}


def _columns(*names: str) -> dict[str, int]:
    return {f"{name}.{kind}": -1 for name in names for kind in ("kernel", "bias")}


def _check(name: str, number: int, size: int) -> None:
    if number % size:
        raise ValueError(
            f"{name} is {number}, which does not divide by `size`={size} devices. Use a mesh axis "
            "whose number of devices divides it, or `PartitionSpec()` for whole arrays."
        )
