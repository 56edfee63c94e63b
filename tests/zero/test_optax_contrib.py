"""Every optimizer of `optax.contrib`: two updates equal those on one device."""

import optax
import optax.contrib as oc
import pytest

from .optax_updates import assert_equal_to_one_device

# optax mixes dtypes and ranks, as JAX does by default.
pytestmark = pytest.mark.standard_promotion

TREES = {
    "divides": ("2x4-auto", {"up": (8, 24), "bias": (24,), "down": (24, 16)}),
    "padded": ("2x3-auto", {"up": (8, 25), "bias": (25,), "down": (25, 16)}),
}
# What an update needs besides: the loss, a gradient elsewhere, or the loss as a function.
OPTIMIZERS = {
    "acprop": (oc.acprop(0.1), ()),
    "ademamix": (oc.ademamix(0.1), ()),
    "adopt": (oc.adopt(0.1), ()),
    "cocob": (oc.cocob(0.1), ()),
    "dadapt_adamw": (oc.dadapt_adamw(1.0), ()),
    "dog": (oc.dog(1.0), ()),
    "dowg": (oc.dowg(1.0), ()),
    "galore": (oc.galore(0.1, rank=4), ()),
    "madgrad": (oc.madgrad(0.1), ()),
    "mechanize": (oc.mechanize(optax.sgd(0.1)), ()),
    "momo": (oc.momo(0.5), ("value",)),
    "momo_adam": (oc.momo_adam(0.1), ("value",)),
    "muon": (oc.muon(0.1), ()),
    "normalize": (optax.chain(oc.normalize(), optax.sgd(0.1)), ()),
    "prodigy": (oc.prodigy(1.0), ()),
    "reduce_on_plateau": (
        optax.chain(optax.sgd(0.1), oc.reduce_on_plateau(patience=0, rtol=1.0)),
        ("value",),
    ),
    "sam": (oc.sam(optax.sgd(0.1), optax.chain(oc.normalize(), optax.sgd(0.05))), ()),
    "sam_opaque": (
        oc.sam(optax.sgd(0.1), optax.chain(oc.normalize(), optax.sgd(0.05)), opaque_mode=True),
        ("grad_fn",),
    ),
    "schedule_free": (oc.schedule_free(optax.sgd(0.1), 0.1), ()),
    "schedule_free_adamw": (oc.schedule_free_adamw(0.1), ()),
    "schedule_free_sgd": (oc.schedule_free_sgd(0.1), ()),
    "simplified_ademamix": (oc.simplified_ademamix(0.01), ()),
    "sophia": (oc.sophia(0.1, update_interval=1), ("obj_fn",)),
    "split_real_and_imaginary": (oc.split_real_and_imaginary(optax.adam(0.1)), ()),
}
# These want the gradient of every example, which no mean over devices is.
OF_EXAMPLES = {"differentially_private_aggregate", "dpsgd"}


def test_nothing_that_optax_has_is_left_out():
    factories = {
        name
        for name in dir(oc)
        if name[0].islower() and callable(getattr(oc, name)) and not name.startswith("scale_by_")
    }
    helpers = {"hutchinson_estimator_diag_hessian", "schedule_free_eval_params"}
    assert factories - helpers - OF_EXAMPLES == set(OPTIMIZERS) - {"sam_opaque"}


def _each():
    """Padded leaves take twice as long; a few are always run, and the others by `.ci/run`."""
    for name in OPTIMIZERS:
        yield pytest.param(name, "divides", id=f"{name}-divides")
        marks = () if name in ("cocob", "muon", "sam_opaque") else pytest.mark.ci
        yield pytest.param(name, "padded", id=f"{name}-padded", marks=marks)


@pytest.mark.parametrize(("name", "tree"), list(_each()))
@pytest.mark.one_in(3)
def test_two_updates_equal_those_on_one_device(name, tree):
    (tx, extras), (mesh, shapes) = OPTIMIZERS[name], TREES[tree]
    assert_equal_to_one_device(
        name, tx, extras, mesh, shapes, num_updates=2, is_wrapped=tree == "padded"
    )
