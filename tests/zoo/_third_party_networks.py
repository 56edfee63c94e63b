"""Networks of other libraries: Haiku, Keras 3 on JAX, jraph."""

import functools
import os

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np

from ._case import (
    THIRD_PARTY,
    affine,
    case,
    cross_entropy,
    dense,
    filled,
    images,
    normal,
    sequences,
    squared,
)

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras  # noqa: E402  (it reads its backend from the environment)

_WIDTH = 8


@hk.transform
def _transformer(x):
    for _ in range(2):
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        init = hk.initializers.VarianceScaling()
        x = x + hk.MultiHeadAttention(2, 4, w_init=init, model_size=_WIDTH)(y, y, y)
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = x + hk.nets.MLP([12, _WIDTH], activation=jax.nn.gelu)(y)
    return hk.Linear(3)(x.mean(1))


def _haiku_init(key):
    x = jax.ShapeDtypeStruct((1, 4, _WIDTH), jnp.float32)
    return filled(key, jax.eval_shape(_transformer.init, key, x))


@case(_haiku_init, sequences(4, _WIDTH, 3), register=THIRD_PARTY)
def haiku_transformer(params, batch):
    return squared(_transformer.apply(params, None, batch["x"]), batch)


@hk.transform_with_state
def _counted(x):
    """A network with state: how many batches it has seen."""
    seen = hk.get_state("seen", (), jnp.float32, init=jnp.zeros)
    hk.set_state("seen", seen + 1)
    x = hk.Conv1D(12, 3)(x)
    return hk.Linear(3)(jax.nn.relu(x).mean(1))


def _counted_init(key):
    x = jax.ShapeDtypeStruct((1, 4, _WIDTH), jnp.float32)
    return filled(key, jax.eval_shape(_counted.init, key, x)[0])


@case(_counted_init, sequences(4, _WIDTH, 3), has_aux=True, register=THIRD_PARTY)
def haiku_with_state(params, batch):
    start = {"~": {"seen": jnp.zeros((), batch["x"].dtype)}}
    y, state = _counted.apply(params, start, None, batch["x"])
    return squared(y, batch), state


@functools.cache
def _keras_model():
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6, 6, 2)),
            layers.Conv2D(9, 3, activation="relu"),
            layers.GroupNormalization(3),
            layers.Flatten(),
            layers.Dense(15, activation="gelu"),
            layers.LayerNormalization(),
            layers.Dense(5),
        ]
    )
    rest = [np.asarray(x.value) for x in model.non_trainable_variables]
    return model, rest


def _keras_init(key):
    shapes = [x.value for x in _keras_model()[0].trainable_variables]
    return filled(key, shapes)


@case(_keras_init, images(6, 2, 5), register=THIRD_PARTY)
def keras_convolutions(params, batch):
    model, rest = _keras_model()
    logits, *_ = model.stateless_call(params, rest, batch["image"])
    return cross_entropy(logits, batch["label"])


_NODES, _EDGES = 5, 7


def _graph_init(key):
    return {
        "edge": [dense(key, i, 3 + 2 * _WIDTH if i else 3 + 2 * 4, 3) for i in range(2)],
        "node": [dense(key, 2 + i, (_WIDTH if i else 4) + 6, _WIDTH) for i in range(2)],
        "out": dense(key, 5, _WIDTH, 3),
    }


def _graphs(key, n):
    ends = jax.random.randint(key, (2, n, _EDGES), 0, _NODES, jnp.int32)
    return {
        "nodes": normal(key, 0, n, _NODES, 4, scale=1.0),
        "edges": normal(key, 1, n, _EDGES, 3, scale=1.0),
        "senders": np.asarray(ends[0]),
        "receivers": np.asarray(ends[1]),
        "y": normal(key, 2, n, 3, scale=1.0),
    }


@case(_graph_init, _graphs, register=THIRD_PARTY)
def jraph_graph_network(params, batch):
    def predict(nodes, edges, senders, receivers):
        graph = jraph.GraphsTuple(
            nodes=nodes,
            edges=edges,
            senders=senders,
            receivers=receivers,
            globals=None,
            n_node=jnp.array([_NODES]),
            n_edge=jnp.array([_EDGES]),
        )
        for edge, node in zip(params["edge"], params["node"], strict=True):
            network = jraph.GraphNetwork(
                update_edge_fn=lambda edges, sent, received, _, edge=edge: jnp.tanh(
                    affine(edge, jnp.concatenate([edges, sent, received], -1))
                ),
                update_node_fn=lambda nodes, sent, received, _, node=node: jnp.tanh(
                    affine(node, jnp.concatenate([nodes, sent, received], -1))
                ),
            )
            graph = network(graph)
        return affine(params["out"], jnp.mean(graph.nodes, 0, keepdims=True))[0]

    keys = ("nodes", "edges", "senders", "receivers")
    return squared(jax.vmap(predict)(*(batch[key] for key in keys)), batch)
