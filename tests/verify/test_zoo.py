"""`Zero.verify` calls nothing wrong that is right: every model of the zoo, under each preset."""

import dataclasses
import itertools

import jax
import optax
import pytest

import jaxzero as jz
from tests import zoo

pytestmark = pytest.mark.slow

# Codecs that small leaves use too; otherwise nearly nothing in the zoo would be encoded.
_ENCODED = dataclasses.replace(jz.zeropp(), min_quantized_size=0)
_PRESETS = {"zero3": jz.zero3(), "zeropp": _ENCODED}


def _cases():
    rotation, num = zoo.preset_rotation(tuple(_PRESETS)), itertools.count()
    for name, preset, mesh, always in rotation:
        marks = () if always and next(num) % 6 == 0 else (pytest.mark.exhaustive,)
        yield pytest.param(name, preset, mesh, id=f"{name}-{preset}-{mesh}", marks=marks)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(("name", "preset", "mesh"), list(_cases()))
@pytest.mark.one_in(4)
def test_what_is_right_is_not_called_wrong(name, preset, mesh):
    case = zoo.CASES[name]
    zero = jz.Zero(zoo.make_mesh(mesh), _PRESETS[preset])
    trees, batch = zoo.arguments(case, "float32")
    params = [zero.shard(tree) for tree in trees]
    one = isinstance(case.argnums, int)
    report = zero.verify(
        case.loss,
        *params,
        batch,
        tx=optax.adam(1e-3) if one else None,
        argnums=case.argnums,
        has_aux=case.has_aux,
        variations=False,
    )
    report.raise_if_wrong()
    kinds = {check.kind for check in report.checks}
    assert {"loss", "gradient"} <= kinds and ("update" in kinds) == one
    assert len([x for x in report.checks if x.kind == "gradient"]) == len(_floats(case, trees))


def _floats(case, trees):
    numbers = [case.argnums] if isinstance(case.argnums, int) else case.argnums
    leaves = jax.tree.leaves([trees[i] for i in numbers])
    return [x for x in leaves if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]
