"""A recommender and a two-tower retrieval model in plain JAX: large tables, small networks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

Constrain = Callable[[Array], Array]


def _unchanged(x: Array) -> Array:
    return x


@dataclasses.dataclass(frozen=True)
class Recommender:
    """DLRM (https://arxiv.org/abs/1906.00091): lookups, inner products of pairs, two networks."""

    tables: int = 8
    rows: int = 2_000_000  # of each table
    width: int = 128
    dense: int = 13  # features that are numbers
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (1024, 1024, 512, 256)


@dataclasses.dataclass(frozen=True)
class TwoTower:
    """Users by their id and the mean of the items that they have seen; items by their id."""

    users: int = 8_000_000
    items: int = 4_000_000
    width: int = 128
    seen: int = 32  # items of each user
    hidden: int = 1024


def init_recommender(model: Recommender, key: Array) -> Any:
    """Parameters in float32."""
    keys = jax.random.split(key, 3)
    shape = (model.rows, model.width)
    tables = [jax.random.normal(k, shape) / 16 for k in jax.random.split(keys[0], model.tables)]
    pairs = (model.tables + 1) * model.tables // 2
    return {
        "tables": tables,
        "bottom": _init_network(keys[1], (model.dense, *model.bottom, model.width)),
        "top": _init_network(keys[2], (pairs + model.width, *model.top, 1)),
    }


def recommender_loss(
    model: Recommender, params: Any, batch: Any, constrain: Constrain = _unchanged
) -> Array:
    """The mean cross-entropy of clicks."""
    dense = constrain(_network(params["bottom"], batch["dense"]))
    ids = [batch["ids"][:, i] for i in range(model.tables)]
    found = [constrain(table[i]) for table, i in zip(params["tables"], ids, strict=True)]
    features = jnp.stack([dense, *found], axis=1)
    products = jnp.einsum("bid,bjd->bij", features, features)
    left, right = np.array([*itertools.combinations(range(model.tables + 1), 2)]).T
    x = constrain(jnp.concatenate([dense, products[:, left, right]], axis=1))
    scores = _network(params["top"], x)[:, 0]
    return jnp.mean(jax.nn.softplus(scores) - batch["clicks"] * scores)


def init_two_tower(model: TwoTower, key: Array) -> Any:
    """Parameters in float32."""
    keys = jax.random.split(key, 4)
    sizes = (model.hidden, model.width)
    return {
        "users": jax.random.normal(keys[0], (model.users, model.width)) / 16,
        "items": jax.random.normal(keys[1], (model.items, model.width)) / 16,
        "user": _init_network(keys[2], (2 * model.width, *sizes)),
        "item": _init_network(keys[3], (model.width, *sizes)),
    }


def two_tower_loss(
    model: TwoTower,
    params: Any,
    batch: Any,
    constrain: Constrain = _unchanged,
    gather: Callable[[Array], Array] | None = None,
) -> Array:
    """The mean cross-entropy of each user's item among all items of the batch.

    Args:
        model: its sizes.
        params: of `init_two_tower`.
        batch: `users` `[b]`, `seen` `[b, seen]` and `items` `[b]`, integers.
        constrain: called on activations.
        gather: all-gathers the items, if each device has its own rows of the batch.
    """
    seen = constrain(params["items"][batch["seen"]]).mean(1)
    of_user = jnp.concatenate([constrain(params["users"][batch["users"]]), seen], axis=1)
    users = constrain(_network(params["user"], of_user))
    items = constrain(_network(params["item"], constrain(params["items"][batch["items"]])))
    all_items = items if gather is None else gather(items)
    first = 0 if gather is None else jax.lax.axis_index(("node", "local")) * len(items)
    scores = users @ all_items.T
    own = jnp.take_along_axis(scores, (first + jnp.arange(len(items)))[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=1) - own)


def _init_network(key: Array, sizes: Sequence[int]) -> list[tuple[Array, Array]]:
    pairs = [*itertools.pairwise(sizes)]
    keys = jax.random.split(key, len(pairs))
    return [
        (jax.random.normal(k, shape) * shape[0] ** -0.5, jnp.zeros(shape[1]))
        for k, shape in zip(keys, pairs, strict=True)
    ]


def _network(layers: Sequence[tuple[Array, Array]], x: Array) -> Array:
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias
