"""Which tables have their rows sent, what that sends, and what the plan says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from tests import zoo

from .models import MODELS, send_rows

NUM, WIDTH = 2**15, 32  # rows of a table, of 4 MiB
IDS = jax.ShapeDtypeStruct((64, 4), jnp.int32)


def _init(key):
    first, second = jax.random.split(key)
    return {
        "t": jax.random.normal(first, (NUM, WIDTH)),
        "w": jax.random.normal(second, (WIDTH, WIDTH)),
    }


def _loss(params, ids):
    return jnp.mean(jnp.sin(params["t"][ids] @ params["w"]))


def _zero(config=None):
    return jz.Zero(jz.make_mesh(nodes=2), config or jz.zero3())


def _plan(loss=_loss, ids=IDS, config=None, init=_init, **options):
    zero = _zero(config)
    return zero.plan(loss, zero.abstract(init, jax.random.key(0)), ids, **options)


def test_what_is_sent_is_what_the_plan_says():
    plan = _plan()
    (rows,) = plan.rows
    assert rows.num == 64 * 4 // 8
    for axis in ("node", "local"):
        sent = [x for x in plan.transfers if x.name == "t" and x.axis == axis]
        assert sum(x.entering_bytes for x in sent) == rows.rows[axis]
    assert not any(x.num_bytes > NUM * WIDTH for x in plan.transfers)
    # A table of 4 MiB that is gathered, and its gradient: 3/4 inside a node, 1/8 into it.
    assert rows.weight == {"local": 2 * 3 * 2**20, "node": 2 * 2**19}
    # 32 rows of 128 bytes and ids of 4, from each of 8 devices; cotangents without ids.
    assert rows.rows == {"local": 2 * 3 * 32 * (4 + 2 * 128), "node": 32 * (4 + 2 * 128)}


@pytest.mark.parametrize(("config", "times"), [(jz.zero3(), 1), (jz.zero3(hpz=jz.HpZ()), 2)])
def test_a_table_would_be_gathered_between_nodes_once_in_a_step_with_hpz(config, times):
    """Otherwise once in each micro-batch, of which these are the bytes."""
    one, two = (_plan(config=config, microbatches=x).rows[0].weight for x in (1, 2))
    assert (one["node"], one["local"]) == (times * two["node"], two["local"])


def test_nothing_as_large_as_the_table_is_held_or_sent():
    zero = _zero()
    params = zero.abstract(_init, jax.random.key(0))
    compiled = jax.jit(zero.value_and_grad(_loss)).lower(params, IDS).compile()
    sent = zoo.hlo.collectives(compiled.as_text())
    sizes = [shape.num_bytes for x in sent for shape in x.results]
    assert sizes and max(sizes) < NUM * WIDTH
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    shard = NUM * WIDTH * 4 // 8
    assert temporaries < 2 * shard  # `jz.ddp()` and gathers hold the table, which is 8 shards


def test_the_plan_and_the_report_say_it(capsys):
    plan = _plan()
    line = "rows move: t float32[32768, 32], 32 rows of a device: 8.12 KiB over node (the table: "
    assert f"{line}1.00 MiB), 48.75 KiB over local (the table: 6.00 MiB)" in str(plan)
    zero = _zero()
    zero.report(zero.abstract(_init, jax.random.key(0)), plan=plan).print("gathers")
    printed = capsys.readouterr().out
    assert "Rows of t are sent where it is looked up: 56.88 KiB into a device." in printed


def test_a_table_that_is_multiplied_too():
    """Its rows move if they are half as many bytes; the gradient of the product is reduced."""

    def init(key):
        return {"t": jax.random.normal(key, (2 * NUM, WIDTH)), "w": jnp.ones((WIDTH, WIDTH))}

    def tied(params, ids):
        rows = jnp.sin(params["t"][ids[:, 0]] @ params["w"])
        return jnp.mean(jnp.sin(rows @ params["t"].T))

    plan = _plan(tied, init=init)
    assert [x.name for x in plan.rows] == ["t"]
    (gather,) = (x for x in plan.steps if x.name == "t" and x.action == "gather")
    (reduction,) = (x for x in plan.steps if x.name == "t" and x.action == "reduce")
    assert (gather.at, reduction.at) == ("dot_general", "transpose")
    assert not _plan(tied).rows


def test_a_table_that_is_looked_up_in_a_loop_and_outside_is_one():
    def loss(params, ids):
        def step(x, ids):
            return jnp.tanh((x + params["t"][ids]) @ params["w"]), None

        rows = params["t"][ids[:, 0]]
        return jnp.mean(jax.lax.scan(step, rows, ids.T)[0])

    plan = _plan(loss)
    assert [x.name for x in plan.rows] == ["t"]


def _small(key):
    return {"t": jax.random.normal(key, (NUM // 16, WIDTH)), "w": jnp.ones((WIDTH, WIDTH))}


def _in_a_loop(params, ids):
    """Read as many rows as before, 2000 times."""

    def step(total, _):
        return total + jnp.sum(jnp.sin(params["t"][ids] @ params["w"])), None

    return jax.lax.scan(step, jnp.zeros(()), None, 2000)[0]


def _in_a_branch(params, ids):
    return jax.lax.cond(ids[0, 0] > 0, _loss, lambda params, ids: jnp.zeros(()), params, ids)


def _from_both_ends(params, ids):
    return jnp.mean(jnp.sin(params["t"][::-1][ids] @ params["w"]))


@pytest.mark.parametrize(
    "case",
    [
        {"init": _small},
        {"ids": jax.ShapeDtypeStruct((2**15, 4), jnp.int32)},
        {"loss": _in_a_loop},
        {"loss": _in_a_branch},
        {"loss": _from_both_ends},
        {"config": jz.ZeroConfig(stage=2)},
        {"config": jz.ZeroConfig(schedule=jz.CommSchedule(deterministic="mesh"))},
        {"halves": True},
        {"shares": (2, 1), "microbatches": 2},
    ],
    ids=lambda case: "-".join(f"{k}={getattr(v, '__name__', k)}" for k, v in case.items()),
)
def test_tables_that_are_gathered(case):
    assert _plan().rows
    assert not _plan(**case).rows


def test_codecs_count():
    """Rows are sent only if they are fewer bytes than the encoded table."""
    ids = jax.ShapeDtypeStruct((2**13, 1), jnp.int32)
    codecs = jz.PerAxis(node=jz.Int4(), local=jz.Int4())
    assert _plan(ids=ids).rows
    assert not _plan(ids=ids, config=jz.ZeroConfig(weights=codecs, gradients=codecs)).rows


def test_a_bag_is_sent_as_one_row():
    def bags(params, ids):
        return jnp.mean(jnp.sin(params["t"][ids].mean(1) @ params["w"]))

    (rows,), (all_rows,) = _plan(bags).rows, _plan().rows
    assert (rows.num, all_rows.num) == (8, 32)
    assert rows.rows["node"] == 4 * 32 + 2 * 8 * 128


def test_ids_of_several_tables_are_one_message(monkeypatch):
    send_rows(monkeypatch)
    model, zero = MODELS["several"], _zero()
    params = zero.abstract(model.init, jax.random.key(0))
    batch = jax.tree.map(np.asarray, model.batch())
    plan = zero.plan(model.loss, params, batch)
    sent = [x for x in plan.transfers if x.axis == "node" and x.dtype == "int32"]
    assert [[name for name, _ in x.parts] for x in sent] == [["bag", "t", "t", "u", "t"]]
