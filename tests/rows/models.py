"""Models that look up tables, each with its parameters, its batch, and which tables move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxzero._execute import table_rows

ROWS = 16  # of a batch


def send_rows(monkeypatch: pytest.MonkeyPatch, moves: bool = True) -> None:
    """Send rows of every table that can have them sent, however small, or of none."""
    monkeypatch.setattr(table_rows, "_pays", lambda rows, weight: moves)


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss of parameters and a batch.

    Attributes:
        loss: the mean over rows.
        tables: shapes of the tables; there is also a matrix `w`.
        moves: the tables whose rows are sent.
        width: of the matrix.
        high: the batch has ids from `-high` to `high`, out of bounds too.
    """

    loss: Callable[[Any, Any], Any]
    tables: dict[str, tuple[int, ...]]
    moves: tuple[str, ...]
    width: int = 8
    high: int = 60

    def init(self, key: Any, dtype: Any = None) -> Any:
        shapes = {**self.tables, "w": (self.width, self.width)}
        keys = jax.random.split(key, len(shapes))
        normal = jax.random.normal
        return {
            name: normal(k, x, dtype or float)
            for k, (name, x) in zip(keys, shapes.items(), strict=True)
        }

    def batch(self) -> Any:
        random = np.random.default_rng(0)
        ids = random.integers(-self.high, self.high, (ROWS, 4))
        ids[::3, 1] = ids[0, 0]  # duplicates, on several devices
        return {"ids": ids, "x": random.normal(size=(ROWS, 1))}


def head(params: Any, rows: Any, x: Any) -> Any:
    """Something of which each element depends on each of a row."""
    y = jnp.tanh(rows.reshape(rows.shape[0], -1, params["w"].shape[0]) @ params["w"])
    return jnp.mean(y**2 * x[:, :, None])


def _lookup(read: Callable[[Any, Any], Any], shape: tuple[int, ...] = (64, 8)) -> Model:
    def loss(params: Any, batch: Any) -> Any:
        return head(params, read(params["t"], batch["ids"]), batch["x"])

    return Model(loss, {"t": shape}, ("t",))


def _taken(mode: str, **options: Any) -> Model:
    def read(table: Any, ids: Any) -> Any:
        return table.at[ids].get(mode=mode, **options)

    model = _lookup(read)
    return dataclasses.replace(model, high=90)


def _scanned(params: Any, batch: Any) -> Any:
    def step(carry: Any, ids: Any) -> Any:
        y = jnp.tanh((carry + params["t"][ids]) @ params["w"])
        return y, y

    start = jnp.zeros((batch["ids"].shape[0], 8), params["t"].dtype)
    _, y = jax.lax.scan(step, start, batch["ids"].T)
    return head(params, jnp.moveaxis(y, 0, 1), batch["x"])


def _checkpointed(params: Any, batch: Any) -> Any:
    @jax.checkpoint
    def inner(params: Any, ids: Any) -> Any:
        return jnp.tanh(params["t"][ids] @ params["w"])

    return head(params, inner(params, batch["ids"]), batch["x"])


def _several(params: Any, batch: Any) -> Any:
    ids = batch["ids"]
    bag = params["bag"][ids].mean(1)
    rows = params["t"][ids[:, 0]] * bag + params["t"][ids[:, 1] + 3]
    rows += jnp.take(params["u"], ids[:, 0], axis=0, mode="clip")
    return head(params, rows, batch["x"]) + 0.1 * jnp.mean(params["t"][jnp.arange(5)] ** 3)


def _all_kinds(params: Any, batch: Any) -> Any:
    """A table that is multiplied too."""
    rows = jnp.tanh(params["u"][batch["ids"][:, 1]] * params["u"][batch["ids"][:, 2]])
    return _several(params, batch) + jnp.mean(jnp.sin(rows @ params["u"].T))


def _rounded(params: Any, batch: Any) -> Any:
    """Filled with a number that 16 bits round, and summed up in another dtype."""
    rows = params["t"].at[batch["ids"]].get(mode="fill", fill_value=1 / 3)
    rows = rows.astype(jnp.bfloat16).astype(params["w"].dtype)
    return head(params, rows.sum(1), batch["x"])


def _no_ids(params: Any, batch: Any) -> Any:
    return _tied(params, batch) + jnp.sum(params["u"][batch["ids"][:, :0]])


def _tied(params: Any, batch: Any) -> Any:
    rows = params["t"][batch["ids"]].sum(1)
    return head(params, rows, batch["x"]) + jnp.mean(jnp.sin(rows @ params["t"].T))


def _one_hot(params: Any, batch: Any) -> Any:
    found = jax.nn.one_hot(batch["ids"], 64, dtype=params["t"].dtype) @ params["t"]
    return head(params, found, batch["x"])


def _one_hot_as_written_out(params: Any, batch: Any) -> Any:
    """Compared by hand, one-hot along the first dim, and the table before the vectors."""
    numbers = jnp.arange(64, dtype=batch["ids"].dtype)[:, None, None]
    vectors = (batch["ids"][None] == numbers).astype(params["t"].dtype)
    rows = jnp.einsum("vhd,vbl->hdbl", params["t"], vectors)
    return head(params, jnp.moveaxis(rows, (2, 3), (0, 1)), batch["x"])


def _one_hot_scanned(params: Any, batch: Any) -> Any:
    @jax.checkpoint
    def step(carry: Any, ids: Any) -> Any:
        vectors = jax.nn.one_hot(ids, 64, dtype=params["t"].dtype)
        y = jnp.tanh((carry + vectors @ params["t"]) @ params["w"])
        return y, y

    start = jnp.zeros((batch["ids"].shape[0], 8), params["t"].dtype)
    _, y = jax.lax.scan(step, start, batch["ids"].T)
    return head(params, jnp.moveaxis(y, 0, 1), batch["x"]) + _one_hot(params, batch)


def _multi_hot(params: Any, batch: Any) -> Any:
    vectors = jax.nn.one_hot(batch["ids"], 64, dtype=params["t"].dtype).sum(1)
    return head(params, vectors @ params["t"], batch["x"])


def _mixed(params: Any, batch: Any) -> Any:
    """Read in 16 bits, and cast after."""
    low = params["t"].astype(jnp.bfloat16)[batch["ids"]]
    rows = params["u"][batch["ids"]].astype(jnp.bfloat16) * low
    return head(params, rows.astype(params["w"].dtype), batch["x"])


MODELS: dict[str, Model] = {
    "index": _lookup(lambda table, ids: table[ids]),
    "fill": _taken("fill", fill_value=2.5),
    "clip": _taken("clip"),
    "wrap": _lookup(lambda table, ids: jnp.take(table, ids, axis=0, mode="wrap")),
    "promise": _lookup(lambda table, ids: table.at[ids].get(mode="promise_in_bounds")),
    "bag": _lookup(lambda table, ids: table[ids].sum(1)),
    "bag_fill": dataclasses.replace(
        _lookup(lambda table, ids: table.at[ids].get(mode="fill", fill_value=1.5).sum(1)), high=90
    ),
    "cube": _lookup(lambda table, ids: table[ids], (64, 3, 8)),
    "columns": _lookup(lambda table, ids: table[ids], (62, 8)),
    "columns_bag": _lookup(lambda table, ids: table[ids].sum(1), (62, 16)),
    "padded": dataclasses.replace(_lookup(lambda table, ids: table[ids].sum(1), (61, 6)), width=6),
    "padded_columns": dataclasses.replace(
        _lookup(lambda table, ids: table[ids][..., :8], (7, 12)), high=7
    ),
    "several": Model(
        _several, {"t": (64, 8), "u": (64, 8), "bag": (64, 8)}, ("t", "u", "bag"), high=61
    ),
    "all_kinds": Model(
        _all_kinds, {"t": (64, 8), "u": (64, 8), "bag": (64, 8)}, ("t", "u", "bag"), high=61
    ),
    "scanned": Model(_scanned, {"t": (64, 8)}, ("t",)),
    "checkpointed": Model(_checkpointed, {"t": (64, 8)}, ("t",)),
    "tied": Model(_tied, {"t": (64, 8)}, ("t",)),
    "rounded": Model(_rounded, {"t": (64, 8)}, ("t",), high=90),
    "no_ids": Model(_no_ids, {"t": (64, 8), "u": (64, 8)}, ("t",)),
    "one_hot": Model(_one_hot, {"t": (64, 8)}, ("t",), high=90),
    "one_hot_written_out": Model(_one_hot_as_written_out, {"t": (64, 3, 8)}, ("t",)),
    "one_hot_scanned": Model(_one_hot_scanned, {"t": (64, 8)}, ("t",)),
    "multi_hot": Model(_multi_hot, {"t": (64, 8)}, ()),
    "mixed": Model(_mixed, {"t": (64, 8), "u": (64, 8)}, ("t", "u")),
}
