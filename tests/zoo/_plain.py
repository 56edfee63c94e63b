"""Plain functions over pytrees of every shape, and gradients of every degenerate kind."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._case import affine, case, dense, normal, squared, vectors


def _layers(key):
    return [dense(key, 0, 8, 16), dense(key, 1, 16, 12), dense(key, 2, 12, 4)]


def _apply(layers, x):
    for layer in layers[:-1]:
        x = jnp.tanh(affine(layer, x))
    return affine(layers[-1], x)


@case(_layers, vectors(8, 4))
def mlp(params, batch):
    return squared(_apply(params, batch["x"]), batch)


@case(lambda key: [dense(key, 0, 7, 11), dense(key, 1, 11, 5), dense(key, 2, 5, 3)], vectors(7, 3))
def mlp_of_odd_widths(params, batch):
    return squared(_apply(params, batch["x"]), batch)


@case(lambda key: normal(key, 0, 8, 4), vectors(8, 4))
def one_array_for_a_tree(params, batch):
    return squared(batch["x"] @ params, batch)


@case(lambda key: normal(key, 0, 13), vectors(13, 1))
def one_odd_vector(params, batch):
    return squared((batch["x"] @ params)[:, None], batch)


class _Pair(NamedTuple):
    first: dict
    second: dict


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Model:
    layers: tuple
    scale: jax.Array
    activation: str = dataclasses.field(metadata={"static": True})


@case(lambda key: _Pair(dense(key, 0, 8, 16), dense(key, 1, 16, 4)), vectors(8, 4))
def named_tuple(params, batch):
    hidden = jnp.tanh(affine(params.first, batch["x"]))
    return squared(affine(params.second, hidden), batch)


@case(
    lambda key: _Model(
        layers=(dense(key, 0, 8, 16), {"deep": [dense(key, 1, 16, 4)]}),
        scale=np.float32(0.7),
        activation="tanh",
    ),
    vectors(8, 4),
)
def dataclass_with_static_fields(params, batch):
    hidden = getattr(jnp, params.activation)(affine(params.layers[0], batch["x"]))
    return squared(params.scale * affine(params.layers[1]["deep"][0], hidden), batch)


@case(
    lambda key: {
        "w": normal(key, 0, 8, 4),
        "scale": np.float32(1.3),
        "shift": np.full((1,), 0.2, np.float32),
        "no_rows": np.zeros((0, 8), np.float32),
        "no_columns": np.zeros((3, 0, 2), np.float32),
        "nothing": None,
    },
    vectors(8, 4),
)
def scalars_and_empty_leaves(params, batch):
    rows = jnp.concatenate([params["no_rows"], params["w"].T], axis=0)
    prediction = params["scale"] * (batch["x"] @ rows.T) + params["shift"].reshape(1, 1)
    return squared(prediction, batch) + jnp.sum(params["no_columns"])


@case(
    lambda key: {"used": normal(key, 0, 8, 4), "unused": [normal(key, 1, 5, 3), np.float32(2.0)]},
    vectors(8, 4),
)
def unused_parameters(params, batch):
    return squared(batch["x"] @ params["used"], batch)


@case(lambda key: {"w": normal(key, 0, 8, 4), "s": np.float32(1.0)}, vectors(8, 4))
def loss_without_parameters(params, batch):
    return jnp.mean(batch["x"] ** 2)


@case(lambda key: {"w": normal(key, 0, 8, 4)}, vectors(8, 4))
def constant_loss(params, batch):
    return jnp.zeros(())


@case(lambda key: {"s": np.float32(1.5), "w": normal(key, 0, 8, 4)}, vectors(8, 4))
def loss_is_a_parameter(params, batch):
    return params["s"]


@case(lambda key: {"w": normal(key, 0, 8, 4), "v": normal(key, 1, 5)}, vectors(8, 4))
def gradient_is_a_parameter(params, batch):
    return 0.5 * jnp.sum(params["w"] ** 2) + 0.5 * jnp.vdot(params["v"], params["v"])


@case(lambda key: {"w": normal(key, 0, 8, 4), "v": normal(key, 1, 7)}, vectors(8, 4))
def gradient_is_a_constant(params, batch):
    return jnp.sum(params["w"]) - 3.0 * jnp.mean(params["v"])


@case(lambda key: {"a": normal(key, 0, 8, 4), "b": normal(key, 1, 8, 4)}, vectors(8, 4))
def one_gradient_of_two_leaves(params, batch):
    return squared(batch["x"] @ (params["a"] + params["b"]), batch)


@case(
    lambda key: {name: normal(key, i, 5, 3) for i, name in enumerate("abc")},
    vectors(5, 3),
)
def one_gradient_of_two_leaves_and_its_negative(params, batch):
    return squared(batch["x"] @ (params["a"] - params["b"] + params["c"]), batch)


def _shared(key):
    w = normal(key, 0, 8, 8)
    return {"a": w, "b": w, "out": normal(key, 1, 8, 4)}


@case(_shared, vectors(8, 4))
def one_array_in_two_leaves(params, batch):
    return squared(jnp.tanh(batch["x"] @ params["a"]) @ params["b"] @ params["out"], batch)


@case(lambda key: {"w": normal(key, 0, 8, 12), "b": normal(key, 1, 12)}, vectors(8, 8))
def used_twice(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    penalty = jnp.sum(params["w"] ** 2) + jnp.sum(params["b"] ** 2)
    return squared(hidden @ params["w"].T, batch) + 1e-2 * penalty


@case(lambda key: normal(key, 0, 8, 8), vectors(8, 8))
def used_ten_times(params, batch):
    x = batch["x"]
    for _ in range(10):
        x = jnp.tanh(x @ params)
    return squared(x, batch)


_NUMPY_TABLE = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


@case(lambda key: normal(key, 0, 8, 4), vectors(8, 4))
def constants_closed_over(params, batch):
    table = jnp.asarray(_NUMPY_TABLE, params.dtype)
    mask = jnp.asarray(np.arange(4) % 2 == 0)
    prediction = batch["x"] @ jnp.where(mask[None], params, table)
    return squared(prediction, batch) + jnp.sum(table * params)


@case(lambda key: (normal(key, 0, 8, 6), normal(key, 1, 6, 4)), vectors(8, 4), trees=2, argnums=0)
def frozen_second_tree(first, second, batch):
    return squared(jnp.tanh(batch["x"] @ first) @ second, batch)


@case(
    lambda key: (
        {
            "w": normal(key, 0, 8, 6),
            "order": jnp.arange(6)[::-1],
            "none": None,
            "step": jnp.int32(3),
        },
        {"a": normal(key, 1, 8, 2), "b": normal(key, 2, 2, 6), "out": normal(key, 3, 6, 4)},
    ),
    vectors(8, 4),
    trees=2,
    argnums=1,
)
def low_rank_update_of_frozen_integers(base, update, batch):
    assert base["none"] is None
    scale = 1.0 / (1.0 + base["step"].astype(batch["x"].dtype))
    w = base["w"] + scale * (update["a"] @ update["b"])
    hidden = jnp.tanh(batch["x"] @ w)[:, base["order"]]
    return squared(hidden @ update["out"], batch)


@case(
    lambda key: (dense(key, 0, 8, 6), dense(key, 1, 6, 6), dense(key, 2, 6, 4)),
    vectors(8, 4),
    trees=3,
    argnums=(2, 0),
)
def several_argnums_out_of_order(first, frozen, last, batch):
    hidden = jnp.tanh(affine(first, batch["x"]))
    return squared(affine(last, jnp.tanh(affine(frozen, hidden))), batch)


@case(lambda key: (normal(key, 0, 8, 4),), vectors(8, 4), trees=1, argnums=(0,))
def argnums_of_one(params, batch):
    return squared(batch["x"] @ params, batch)


@case(_layers, vectors(8, 4), has_aux=True)
def aux_holds_parameters_and_activations(params, batch):
    prediction = _apply(params, batch["x"])
    aux = {"weights": params, "mean": prediction.mean(), "per_output": prediction.mean(0)}
    return squared(prediction, batch), aux


@case(lambda key: normal(key, 0, 8, 4), vectors(8, 4), has_aux=True)
def aux_is_empty(params, batch):
    return squared(batch["x"] @ params, batch), None


@case(lambda key: normal(key, 0, 8, 4), vectors(8, 4), has_aux=True)
def aux_is_the_loss_and_a_constant(params, batch):
    loss = squared(batch["x"] @ params, batch)
    return loss, (loss, jnp.ones((3,), batch["x"].dtype))
