"""The perceptrons of decoder layers: plain, gated, and mixtures of experts.

    plain: down(f(up(x)))        gated: down(f(gate(x)) up(x))

In a mixture (https://arxiv.org/abs/2101.03961) a router sends each token to k experts:

    y = sum of w_e mlp_e(x)            over the k experts that the router chose

    softmax:  p = softmax(logits); the k largest p_e are the weights
    groups:   p = sigmoid(logits); the k largest p_e + correction_e in the best groups are chosen,
              their p_e are the weights

Weights are float32 for 16-bit logits. The choice itself has no gradient. A shared perceptron may
add its output for every token.

There are two implementations. "ragged" sorts the tokens by expert, and each expert computes its own
(`_grouped`); the weights of all experts of a layer that a device has are in memory at once. "scan"
loops over experts and applies each to every token: ZeRO then gathers the weights of one expert at a
time, for num_experts / k times the arithmetic. Where experts stay split inside a node
(`jz.Ungathered`), tokens are sent to them (`jz.exchange_tokens`), in either case.

Dimensions: b batch, t tokens, n tokens of the batch, k experts per token, e experts, g groups, m
experts per group, d hidden, f width of an expert.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .._mesh import exchange_tokens
from .._sums import widened
from ._attention import make_linear
from ._decoder_config import DecoderConfig
from ._grouped import apply_by_group
from ._part_configs import ClampedGate, ExpertsConfig, GroupRouting
from ._router_losses import RouterBalance, router_balance

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
Routed = tuple[Float[Array, "n k"], Int[Array, "n k"]]  # weight and index of each chosen expert
_EXPERT_LEAF = re.compile(r"\.mlp\.(gate|up|down)(_bias)?(\.value)?$")
Gated = Callable[[Array, Array], Array]  # combines the results of the projections gate and up


class Mlp(nnx.Module):
    """Projection to `wide` numbers, activation and projection back, applied to each token."""

    def __init__(self, config: DecoderConfig, wide: int, *, rngs: nnx.Rngs):
        hidden, bias = config.hidden_size, config.mlp_bias
        self.activation = config.activation
        self.gate = make_linear(config, hidden, wide, bias, rngs) if config.gated_mlp else None
        self.up = make_linear(config, hidden, wide, bias, rngs)
        self.down = make_linear(config, wide, hidden, bias, rngs)

    def __call__(self, x_btd: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        activate = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.down(activate(self.up(x_btd)))
        return self.down(activate(self.gate(x_btd)) * self.up(x_btd))


def route_by_softmax(logits_ne: Float[Array, "n e"], experts: ExpertsConfig) -> Routed:
    """Choose the experts of each token with the largest probabilities, largest first."""
    shares_ne = jax.nn.softmax(logits_ne.astype(widened(logits_ne.dtype)), axis=-1)
    shares_nk, chosen_nk = jax.lax.top_k(shares_ne, experts.num_experts_per_token)
    if experts.normalize:
        shares_nk = shares_nk / shares_nk.sum(axis=-1, keepdims=True)
    return shares_nk, chosen_nk


def route_by_groups(
    logits_ne: Float[Array, "n e"],
    correction_e: Float[Array, "e"],
    experts: ExpertsConfig,
    routing: GroupRouting,
) -> Routed:
    """Choose the experts of each token by score, from the best groups of experts only.

    `GroupRouting` states the rule, and the module docstring the scores.
    """
    shares_ne = jax.nn.sigmoid(logits_ne.astype(widened(logits_ne.dtype)))
    scores_ne = jax.lax.stop_gradient(shares_ne + correction_e.astype(shares_ne.dtype)[None])
    scores_ngm = scores_ne.reshape(len(scores_ne), routing.num_groups, -1)
    worth_ng = jax.lax.top_k(scores_ngm, 2)[0].sum(axis=-1)
    best = jax.lax.top_k(worth_ng, routing.num_chosen_groups)[1]
    allowed_ng = (best[:, :, None] == jnp.arange(routing.num_groups)[None, None]).any(axis=1)
    scores_ngm = jnp.where(allowed_ng[:, :, None], scores_ngm, -jnp.inf)
    _, chosen_nk = jax.lax.top_k(scores_ngm.reshape(scores_ne.shape), experts.num_experts_per_token)
    shares_nk = jnp.take_along_axis(shares_ne, chosen_nk, axis=-1)
    if experts.normalize:
        # Sigmoids may all be 0; the same guard as in transformers.
        shares_nk = shares_nk / (shares_nk.sum(axis=-1, keepdims=True) + 1e-20)
    return shares_nk * routing.scale, chosen_nk


class Projection(NamedTuple):
    """A matrix of each expert, and the bias of each expert if there are biases."""

    kernel: Float[Array, "e i o"]
    bias: Float[Array, "e o"] | None


@dataclasses.dataclass
class Routers:
    """Collects the balance of each layer's router, while the layers are computed one after another.

    Attributes:
        balance: the balance of all layers so far; 0 for layers without experts.
        index: the index of the layer that is computed now.
        mask: False for padding.
    """

    balance: RouterBalance
    index: int | Int[Array, ""]
    mask: Bool[Array, "b t"] | None

    @staticmethod
    def start(num_layers: int, num_experts: int) -> RouterBalance:
        """Return the balance before the first layer: zeros for all layers."""
        zeros = jnp.zeros(num_layers)
        return RouterBalance(zeros, zeros, jnp.zeros((num_layers, num_experts)))

    def add(
        self, logits_ne: Float[Array, "n e"], chosen_nk: Int[Array, "n k"], experts: ExpertsConfig
    ) -> None:
        mask_n = None if self.mask is None else self.mask.reshape(-1)
        new = router_balance(logits_ne, chosen_nk, mask_n, sigmoids=experts.routing is not None)
        self.balance = jax.tree.map(
            lambda all_layers, x: all_layers.at[self.index].set(x.astype(all_layers.dtype)),
            self.balance,
            new,
        )


class Experts(nnx.Module):
    """A mixture of gated MLPs, where `num_experts_per_token` of them process each token."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, *, rngs: nnx.Rngs):
        self.config, self.experts = config, experts
        initial = nnx.initializers.normal(config.initializer_range)
        num, hidden, wide = experts.num_experts, config.hidden_size, experts.intermediate_size
        # Sigmoids of many experts differ by little: their logits are not rounded to 16 bits.
        in_groups, narrow = experts.routing is not None, jnp.dtype(config.compute_dtype)
        logits_dtype = widened(narrow) if in_groups else narrow
        self.router = make_linear(config, hidden, num, experts.bias, rngs, logits_dtype)
        self.correction = nnx.Param(jnp.zeros(num)) if in_groups else None
        self.gate = nnx.Param(initial(rngs.params(), (num, hidden, wide)))
        self.up = nnx.Param(initial(rngs.params(), (num, hidden, wide)))
        self.down = nnx.Param(initial(rngs.params(), (num, wide, hidden)))
        self.gate_bias = nnx.Param(jnp.zeros((num, wide))) if experts.bias else None
        self.up_bias = nnx.Param(jnp.zeros((num, wide))) if experts.bias else None
        self.down_bias = nnx.Param(jnp.zeros((num, hidden))) if experts.bias else None
        self.shared = (
            None if experts.shared_size is None else Mlp(config, experts.shared_size, rngs=rngs)
        )

    def __call__(
        self, x_btd: Float[Array, "b t d"], routers: Routers | None = None
    ) -> Float[Array, "b t d"]:
        """Return the weighted sum of each token's chosen experts, plus any shared perceptron.

        If given, `routers` records the balance of the router.
        """
        x_nd = x_btd.reshape(-1, x_btd.shape[-1])
        projections = (
            _projection(self.gate, self.gate_bias, x_nd.dtype),
            _projection(self.up, self.up_bias, x_nd.dtype),
            _projection(self.down, self.down_bias, x_nd.dtype),
        )
        activate = ACTIVATIONS[self.config.activation]
        clamped = self.experts.clamped_gate
        gated = _gated_by(activate) if clamped is None else _clamped_gated(clamped)
        mlp = functools.partial(_mlp, gated)
        logits_ne = self.router(x_nd)
        (shares_nk, chosen_nk), num_local = self.route(logits_ne), len(projections[0].kernel)
        if routers is not None:
            routers.add(logits_ne, chosen_nk, self.experts)
        if self.config.expert_loop == "scan" and num_local == self.experts.num_experts:
            y_nd = _one_by_one(mlp, projections, x_nd, (shares_nk, chosen_nk))
        else:
            y_nd, _ = exchange_tokens(
                functools.partial(apply_by_group, mlp, projections),
                x_nd,
                chosen_nk,
                shares_nk,
                num_experts=self.experts.num_experts,
                num_local=num_local,
            )
        y_btd = y_nd.reshape(x_btd.shape)
        return y_btd if self.shared is None else y_btd + self.shared(x_btd)

    def route(self, logits_ne: Float[Array, "n e"]) -> Routed:
        """Return the weights and the indices of the k experts of each token."""
        routing = self.experts.routing
        if routing is None or self.correction is None:
            return route_by_softmax(logits_ne, self.experts)
        return route_by_groups(logits_ne, self.correction[...], self.experts, routing)


def _projection(kernel: nnx.Param, bias: nnx.Param | None, dtype: jnp.dtype) -> Projection:
    return Projection(kernel[...].astype(dtype), None if bias is None else bias[...].astype(dtype))


def _gated_by(activate: Callable[[Array], Array]) -> Gated:
    return lambda gate, up: activate(gate) * up


def _clamped_gated(clamped: ClampedGate) -> Gated:
    def gated(gate: Array, up: Array) -> Array:
        gate = jnp.minimum(gate, clamped.limit)
        up = jnp.clip(up, -clamped.limit, clamped.limit)
        return (up + 1) * gate * jax.nn.sigmoid(clamped.slope * gate)

    return gated


def _mlp(gated: Gated, projections: tuple[Projection, ...], x: Float[Array, "n d"]) -> Array:
    gate, up, down = projections
    return _product(gated(_product(x, gate), _product(x, up)), down)


def _one_by_one(
    mlp: Callable[[tuple[Projection, ...], Array], Array],
    projections: tuple[Projection, ...],
    x_nd: Float[Array, "n d"],
    routed: Routed,
) -> Float[Array, "n d"]:
    shares_nk, chosen_nk = routed

    def add_expert(total_nd, scanned):
        number, expert = scanned
        share_n = jnp.where(chosen_nk == number, shares_nk, 0.0).sum(axis=-1)
        y_nd = mlp(expert, x_nd)
        # Added in the dtype of shares, float32 or wider, and rounded once.
        return total_nd + share_n[:, None] * y_nd.astype(share_n.dtype), None

    numbers = jnp.arange(len(projections[0].kernel), dtype=chosen_nk.dtype)
    start = jnp.zeros(x_nd.shape, shares_nk.dtype)
    total_nd, _ = jax.lax.scan(add_expert, start, (numbers, projections))
    return total_nd.astype(x_nd.dtype)


def _product(x: Array, projection: Projection) -> Array:
    product = x @ projection.kernel
    return product if projection.bias is None else product + projection.bias[None]


def expert_leaves(params: Any) -> tuple[str, ...]:
    """Return the paths of those leaves of a decoder that hold its experts.

    Args:
        params: the parameters of a `Decoder`, of which only paths are read.

    Returns:
        Paths for `jz.Ungathered(paths, dim)`; `dim` is 1 with `scan_layers`, and otherwise 0.
    """
    paths, _ = zip(*jax.tree_util.tree_flatten_with_path(params)[0], strict=True)
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path in paths)
    return tuple(x for x in names if _EXPERT_LEAF.search(x))
