"""Arguments of the wrong type or kind are refused, and never taken for something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxzero as jz
from jaxzero import interop
from jaxzero.interop import ArrayTensor, Rule, Split

ARRAY = np.arange(4, dtype=np.float32)
SOURCE = {"w": ArrayTensor(ARRAY, "w"), "more": ArrayTensor(ARRAY, "more")}
TREE = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}
RULES = [Rule("w", "w")]


def load(tree: Any = TREE, source: Any = SOURCE, **options: Any) -> Any:
    return interop.load_into(tree, source, **{"rules": RULES, "ignore": ["more"], **options})


def test_one_pattern_to_ignore_is_no_list_of_letters():
    """The `*` in it was a pattern of its own, which ignores every tensor."""
    held = {**SOURCE, "norm.bias": ArrayTensor(ARRAY, "norm.bias")}
    with pytest.raises(ValueError, match=r"holds unknown 'norm\.bias'\."):
        load(source=held, ignore="mor*")
    with pytest.raises(ValueError, match=r"No parameter seems to come from 'norm\.bias'\."):
        load(source=held, ignore="mor*", rules=None)
    assert load(source=held, ignore=("mor*", "norm.*"))["w"].shape == (4,)
    assert load(ignore="mor*")["w"].shape == (4,)
    assert interop.match(TREE, SOURCE, ignore="mor*").unused == ()
    with pytest.raises(
        ValueError, match=r"`ignore` must hold names of tensors, or patterns; got \["
    ):
        load(ignore=[3])


@pytest.mark.parametrize("rules", [Rule("w", "w"), ["w"], "w", 3])
def test_rules_are_several(rules: Any):
    moments = interop.AdamMoments(step=1, exp_avg=SOURCE, exp_avg_sq=SOURCE)
    params = {"w": jnp.zeros(4)}
    for call in (
        lambda: load(rules=rules),
        lambda: interop.match(TREE, SOURCE, rules=rules),
        lambda: interop.tensors_from(params, rules),
        lambda: interop.load_adam(optax.adam(1.0).init(params), params, moments, rules=rules),
    ):
        with pytest.raises(ValueError, match="`rules` must be a list or tuple of `interop.Rule`s"):
            call()


@pytest.mark.parametrize("dtype", [jnp.int32, "float17", np.complex64, bool])
def test_the_dtype_of_floats_is_one(dtype: Any):
    """An integer dtype cut off what is behind the point."""
    with pytest.raises(ValueError, match="`dtype` must be that of floating-point numbers; got"):
        load(dtype=dtype)
    assert load(dtype="bfloat16")["w"].dtype == jnp.bfloat16


def test_complex_numbers_stay_complex():
    """An integer parameter took the real part."""
    held = {"w": ArrayTensor(np.ones(4, np.complex64), "w")}
    for dtype in (jnp.int32, jnp.float32):
        with pytest.raises(ValueError, match=r"has dtype complex64, .* and the other is not"):
            load({"w": jax.ShapeDtypeStruct((4,), dtype)}, held)
    assert load({"w": jax.ShapeDtypeStruct((4,), jnp.complex64)}, held)["w"].dtype == np.complex64


@pytest.mark.parametrize("value", [2**40 + 1, 1e300])
@pytest.mark.parametrize("size", [8, 2])  # 2: padded
def test_numbers_of_64_bits_that_do_not_fit(value: float, size: int):
    """Without `jax_enable_x64`, an integer lost its upper bits when it was put on devices."""
    held = {"w": ArrayTensor(np.full(size, value), "w")}
    zero = jz.Zero(jz.make_mesh(nodes=2))
    tree = {"w": np.zeros(size, held["w"].dtype)}
    with pytest.raises(ValueError, match=r"Tensor w holds .* \(\w+64\), which \w+32 cannot hold"):
        zero.shard(load(tree, held))
    small = load(tree, {"w": ArrayTensor(np.full(size, 3).astype(held["w"].dtype), "w")})
    assert np.asarray(zero.unshard(zero.shard(small))["w"]).tolist() == [3] * size


def test_what_is_no_lazy_tensor(tmp_path: Path):
    """numpy arrays are taken as such; others are refused by name."""
    tree = {"a": TREE["w"], "b": TREE["w"]}
    rules = [Rule(("a", "b"), "w", Split(0, 2))]
    found = load(tree, {"w": np.arange(8, dtype=np.float32)}, rules=rules, ignore=())
    np.testing.assert_array_equal(found["b"].read(), np.arange(4, 8, dtype=np.float32))
    interop.save_tensors({"w": ARRAY}, tmp_path / "out")  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(interop.open_checkpoint(tmp_path / "out")["w"].read(), ARRAY)
    others: dict[str, Any] = {"w": jnp.zeros(4)}
    for call in (
        lambda: load(source=others, ignore=()),
        lambda: interop.save_tensors(others, tmp_path / "other"),
        lambda: interop.write_checkpoint(others, tmp_path / "other", form="safetensors"),
    ):
        with pytest.raises(ValueError, match=r"'w' in `\w+` is no `interop\.LazyTensor` but a Arr"):
            call()
    assert not (tmp_path / "other").exists()


def test_paths_and_forms(tmp_path: Path):
    """An unknown form was written as `torch.save`."""
    form: Any = "pickle"
    with pytest.raises(
        ValueError, match="`form` must be one of safetensors, torch, dcp; got 'pick"
    ):
        interop.write_checkpoint(SOURCE, tmp_path / "out", form=form)
    assert not list(tmp_path.iterdir())
    path: Any = tmp_path
    with pytest.raises(
        ValueError, match=r"`source` must be tensors by name, as `interop\.open_che"
    ):
        interop.match(TREE, path)
    params = {"w": jnp.zeros(4)}
    with pytest.raises(
        ValueError, match=r"`source` must be what `interop\.open_checkpoint` return"
    ):
        interop.load_adam(optax.adam(1.0).init(params), params, path, rules=RULES)


@pytest.mark.parametrize("form", ["torch", "dcp", "safetensors"])
@pytest.mark.parametrize("dtype", [">f4", "<U1", ml_dtypes.int4, ml_dtypes.float8_e4m3fnuz])
def test_dtypes_that_are_not_written(form: Any, dtype: Any, tmp_path: Path):
    """The bytes of a big-endian array were written as if they were little-endian."""
    if form != "safetensors":
        pytest.importorskip("torch", reason="needs torch: it writes the form")
    tensors = {"w": ArrayTensor(np.ones(2).astype(dtype), "w")}
    with pytest.raises(
        ValueError, match=r"Tensor 'w' has dtype .*, which .*\. Cast it to one of boo"
    ):
        interop.write_checkpoint(tensors, tmp_path / "out", form=form)
    assert not list(tmp_path.iterdir())


def test_names_are_text(tmp_path: Path):
    tensors: dict[Any, ArrayTensor] = {1: ArrayTensor(ARRAY, "w")}
    with pytest.raises(ValueError, match="Names of tensors must be text in safetensors; got 1"):
        interop.save_tensors(tensors, tmp_path / "out")
