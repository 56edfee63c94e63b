"""Mistakes get a `ValueError` that names the argument and the tree path, before any compile."""

import contextlib
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxzero as jz
from jaxzero.interop import ArrayTensor
from tests import zoo

from .compiles import COMPILES


@contextlib.contextmanager
def _raises(*parts: str):
    """A `ValueError` whose text holds all `parts`, in this order, with nothing compiled."""
    before = len(COMPILES)
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, parts))):
        yield
    assert len(COMPILES) == before, "something was compiled before the error"


@pytest.fixture
def annotations_unchecked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users


@pytest.fixture(scope="module")
def zero():
    return jz.Zero(zoo.make_mesh("2x4-auto"))


@pytest.fixture(scope="module")
def params(zero):
    return zero.shard({"layers": [np.ones((8, 4), np.float32)], "bias": np.ones(3, np.float32)})


def _batch(n=16):
    return {"x": np.ones((n, 8), np.float32), "y": {"label": np.zeros(n, np.int32)}}


def _loss(params, batch):
    return jnp.mean(batch["x"] @ params["layers"][0]) + jnp.sum(params["bias"])


def test_compiles_are_counted():
    before = len(COMPILES)
    jax.jit(lambda x: x + 17.5)(np.float32(1))
    assert len(COMPILES) > before


def test_batch_that_does_not_divide(zero, params):
    with _raises("`batch`", "x", "(12, 8)", "8"):
        zero.value_and_grad(_loss)(params, _batch(12))


def test_one_leaf_of_the_batch_that_does_not_divide(zero, params):
    batch = _batch() | {"y": {"label": np.zeros(15, np.int32)}}
    with _raises("`batch`", "16 rows", "label", "15"):
        zero.value_and_grad(_loss)(params, batch)


def test_batch_that_does_not_divide_into_microbatches(zero, params):
    with _raises("`batch`", "x", "micro"):
        zero.value_and_grad(_loss, microbatches=3)(params, _batch(16))


def test_batch_that_does_not_divide_in_apply(zero, params):
    with _raises("`batch`", "x"):
        zero.apply(_loss)(params, _batch(12))


def test_errors_are_the_same_under_jit(zero, params):
    with _raises("`batch`", "x", "(12, 8)"):
        jax.jit(zero.value_and_grad(_loss))(params, _batch(12))


def test_shape_changed_since_init(zero, params):
    changed = {"layers": [np.ones((8, 5), np.float32)], "bias": params["bias"]}
    with _raises("`params`", "layers", "(8, 5)", "(8, 4)", "zero.init"):
        zero.value_and_grad(_loss)(changed, _batch())


def test_parameters_that_were_never_laid_out():
    fresh = jz.Zero(zoo.make_mesh("2x4-auto"))
    tree = {"layers": [np.ones((8, 4), np.float32)], "bias": np.ones(3, np.float32)}
    with _raises("`params`", "zero.init"):
        fresh.value_and_grad(_loss)(tree, _batch())


def test_mesh_without_our_axes():
    mesh = jax.make_mesh((2, 4), ("data", "local"), (jax.sharding.AxisType.Auto,) * 2)
    with _raises("`mesh`", "node", "data", "jz.make_mesh"):
        jz.Zero(mesh)


@pytest.mark.parametrize(
    "mesh",
    [jz.make_mesh, (2, 4), jax.sharding.AbstractMesh((2, 4), ("node", "local"))],
    ids=["function", "shape", "abstract"],
)
def test_something_else_than_a_mesh(mesh, annotations_unchecked):
    with _raises("`mesh` must be a mesh of devices", "jz.make_mesh()", "got"):
        jz.Zero(mesh)


def test_a_zero_without_a_mesh():
    with pytest.raises(TypeError, match="missing .*'mesh'"):
        jz.Zero()  # pyright: ignore[reportCallIssue]


def test_a_zero_with_the_config_first(request):
    if request.config.getoption("jaxtyping_packages", None):
        pytest.skip("where annotations are checked, they refuse it before")
    with _raises("`mesh` comes before `config`", "jz.Zero(jz.make_mesh(), config)"):
        jz.Zero(jz.zeropp())  # pyright: ignore[reportArgumentType]


def test_what_a_zero_shows_of_its_config():
    config = jz.ZeroConfig(stage=2, gradients=jz.PerAxis(node=jz.Int8(block=64)))
    shown = "node=2, local=4; ZeroConfig(stage=2, gradients=PerAxis(node=Int8(block=64)))"
    assert repr(jz.Zero(jz.make_mesh(nodes=2), config)) == f"Zero({shown})"


def test_nodes_that_do_not_divide_the_devices():
    with _raises("`nodes`", "8", "3"):
        jz.make_mesh(nodes=3, devices=jax.devices()[:8])


def test_integer_leaf_that_should_be_differentiated(zero):
    params = zero.shard({"w": np.ones((8, 4), np.float32), "steps": np.arange(4, dtype=np.int32)})
    with _raises("`params`", "steps", "int", "argnums"):
        zero.value_and_grad(lambda params, batch: jnp.mean(batch @ params["w"]))(
            params, np.ones((8, 8), np.float32)
        )


def test_loss_that_is_no_scalar(zero, params):
    with _raises("loss", "scalar", "[2, 4]"):
        zero.value_and_grad(lambda p, batch: batch["x"] @ p["layers"][0])(params, _batch())


def test_loss_that_is_a_tuple(zero, params):
    with _raises("loss", "scalar", "tuple", "has_aux"):
        zero.value_and_grad(lambda p, b: (_loss(p, b), None))(params, _batch())


def test_loss_that_is_complex(zero, params):
    with _raises("loss", "real", "complex64"):
        zero.value_and_grad(lambda p, b: lax.complex(_loss(p, b), jnp.float32(1)))(params, _batch())


def test_loss_that_is_an_integer(zero, params):
    with _raises("loss", "int32"):
        zero.value_and_grad(lambda p, b: jnp.int32(3))(params, _batch())


def test_function_without_the_aux_it_promises(zero, params):
    with _raises("has_aux", "(loss, aux)"):
        zero.value_and_grad(_loss, has_aux=True)(params, _batch())


def test_function_without_the_weight_it_promises(zero, params):
    with _raises("weighted", "(sum, weight)"):
        zero.value_and_grad(_loss, weighted=True)(params, _batch())


def test_weight_that_is_no_scalar(zero, params):
    with _raises("weight", "scalar", "[2]"):
        zero.value_and_grad(lambda p, b: (_loss(p, b), jnp.ones(2)), weighted=True)(
            params, _batch()
        )


def test_integer_aux_without_aux_reduce(zero, params):
    def loss(params, batch):
        return _loss(params, batch), {"loss": _loss(params, batch), "n": {"seen": jnp.int32(1)}}

    with _raises("aux", "seen", "int32", "`aux_reduce`", "sum"):
        zero.value_and_grad(loss, has_aux=True)(params, _batch())


def test_unknown_aux_reduce(zero):
    with _raises("`aux_reduce`", "median"):
        zero.value_and_grad(_loss, has_aux=True, aux_reduce={"n": "median"})


def test_aux_reduce_that_does_not_fit(zero, params):
    step = zero.value_and_grad(
        lambda p, b: (_loss(p, b), {"n": jnp.int32(1)}), has_aux=True, aux_reduce={"m": "sum"}
    )
    with _raises("`aux_reduce`"):
        step(params, _batch())


def test_second_argument_of_the_batch_length(zero, params):
    with _raises("`batch`", "`labels`", "`batch_argnums=`"):
        zero.value_and_grad(lambda params, batch, labels: _loss(params, batch))(
            params, _batch(), np.zeros(16, np.int32)
        )


def test_in_specs_of_the_wrong_length(zero, params):
    with _raises("`in_specs`", "3", "2"):
        zero.value_and_grad(_loss, in_specs=(None, None, None))(params, _batch())


def test_argnums_out_of_range(zero, params):
    with _raises("`argnums`", "2"):
        zero.value_and_grad(_loss, argnums=2)(params, _batch())


@pytest.mark.parametrize("argnums", ["params", None, (0, "x"), 1.0])
def test_argnums_that_are_no_positions(zero, params, argnums, annotations_unchecked):
    with _raises("`argnums` must be the position", repr(argnums)):
        zero.value_and_grad(_loss, argnums)
    with _raises("`tangent_argnums` must be the position", repr(argnums)):
        zero.plan(_loss, params, _batch(), tangent_argnums=argnums)


def test_argnums_of_the_batch(zero, params):
    with _raises("`batch`", "zero.init"):
        zero.value_and_grad(_loss, argnums=1)(params, _batch())


def test_microbatches_of_zero(zero):
    with _raises("`microbatches`", "0"):
        zero.value_and_grad(_loss, microbatches=0)


def test_unshard_of_a_foreign_tree(zero):
    with _raises("tree", "foreign", "zero.init"):
        zero.unshard({"foreign": np.ones(3, np.float32)})


def test_optimizer_for_foreign_parameters(zero):
    with _raises("tree", "foreign", "zero.init"):
        zero.init_optimizer(optax.adam(1e-3), {"foreign": np.ones(3, np.float32)})


def test_stage_and_split_that_do_not_exist():
    # Tests check annotations, so what is a `ValueError` for users may be a `TypeError` here.
    with pytest.raises((ValueError, TypeError), match="(?s)stage.*4"):
        jz.ZeroConfig(stage=4)
    with pytest.raises((ValueError, TypeError), match="(?s)split.*node"):
        jz.ZeroConfig(split="node")


def test_a_number_where_an_array_was_laid_out(zero):
    zero.shard({"scale": np.float32(2.0), "w": np.ones(8, np.float32)})
    tree = {"scale": 2.0, "w": np.ones(8, np.float32)}
    with pytest.raises(ValueError, match=r"`scale` is not an array; got float"):
        zero.unshard(tree)


@pytest.mark.parametrize("method", ["shard", "report", "unshard"])
def test_a_function_where_a_tree_was_expected(zero, method):
    with pytest.raises(TypeError, match="A tree of arrays is expected, .* got <function .* order"):
        getattr(zero, method)(lambda params: params)


@pytest.mark.parametrize("method", ["init", "abstract"])
def test_arguments_of_init_that_are_no_arrays(method):
    zero, key = jz.Zero(jz.make_mesh(nodes=2)), jax.random.key(0)
    with _raises("Argument 1 for `init_fn`", "'gelu'", "functools.partial"):
        getattr(zero, method)(lambda key, activation: key, key, "gelu")


def test_parameters_where_init_wants_a_function(annotations_unchecked):
    """A module that is made is callable, with a batch: `zero.init(model)` called it."""
    zero, tree = jz.Zero(jz.make_mesh(nodes=2)), {"w": np.ones(8, np.float32)}
    for made in (tree, nnx.Linear(2, 3, rngs=nnx.Rngs(0))):
        with pytest.raises(
            TypeError, match=r"`init_fn` must be a function.*`zero.shard\(params\)`"
        ):
            zero.init(made)
    bound = jax.tree_util.Partial(lambda w, key: {"w": 2 * w}, tree["w"])  # a function with arrays
    np.testing.assert_array_equal(zero.init(bound, jax.random.key(0))["w"], 2 * tree["w"])


def test_what_is_no_optimizer(zero, params, annotations_unchecked):
    for refused in (
        lambda: zero.init_optimizer(optax.adam, params),  # without its arguments
        lambda: zero.init_optimizer(params, optax.adam(1e-3)),
        lambda: zero.optimizer(optax.adam),
        lambda: zero.value_and_update(optax.adam(1e-3), _loss),
        lambda: zero.apply_gradients(optax.adam, params, (), params),
    ):
        with pytest.raises(TypeError, match="`tx` must be an optimizer of optax"):
            refused()


def test_a_number_of_devices_where_devices_are_given(annotations_unchecked):
    with pytest.raises(TypeError, match=r"`devices` must be .*`jax.devices\(\)\[:4\]`"):
        jz.make_mesh(nodes=2, devices=4)


def test_parameters_that_are_still_in_files(zero, params):
    loaded = {"layers": [ArrayTensor(np.ones((8, 4), np.float32), "w")], "bias": params["bias"]}
    with _raises("`params`", "layers", "is on no device", "zero.shard(tree)"):
        zero.value_and_grad(_loss)(loaded, _batch())


def test_the_batch_in_the_place_of_the_parameters(zero, params):
    with _raises("`batch` (argument 0)", "x", "first argument", "argnums"):
        zero.value_and_grad(lambda batch, params: _loss(params, batch))(_batch(), params)
