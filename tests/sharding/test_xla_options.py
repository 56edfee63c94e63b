"""The table of compiler options, and what a user adds to it."""

import inspect

import pytest

import jaxzero as jz
from jaxzero import extend
from jaxzero._sharding import xla_options


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(xla_options, "_registered", {})


def test_options_are_added_changed_and_taken_out():
    name, limit = "xla_gpu_experimental_parallel_collective_overlap_limit", 2
    before = jz.compiler_options("cuda")
    extend.register_compiler_options("cuda", {name: limit, "xla_gpu_more": True})
    assert jz.compiler_options("cuda") == before | {name: limit, "xla_gpu_more": True}
    extend.register_compiler_options("cuda", {name: None})
    assert jz.compiler_options("cuda") == {
        key: value for key, value in (before | {"xla_gpu_more": True}).items() if key != name
    }
    assert jz.compiler_options("gpu") == before


def test_a_new_platform_is_known_once_it_is_registered():
    with pytest.raises(ValueError, match="'tpu'; got 'mine'.*register_compiler_options"):
        jz.compiler_options("mine")
    extend.register_compiler_options("mine", {"xla_mine": 3})
    assert jz.compiler_options("mine") == {"xla_mine": 3}
    with pytest.raises(ValueError, match="'tpu', 'mine'; got 'yours'"):
        jz.compiler_options("yours")


def test_stages_leave_out_what_crashes_at_their_conditionals():
    name = "xla_gpu_enable_analytical_latency_estimator"  # with JAX 0.10.2
    options = jz.compiler_options("cuda")
    options.pop(name, None)
    assert jz.compiler_options("cuda", stages=True) == options


def test_what_is_returned_can_be_changed():
    jz.compiler_options("cuda").clear()
    assert jz.compiler_options("cuda")


@pytest.mark.parametrize(
    ("platform", "options", "message"),
    [("", {}, "`platform` must be a name"), ("cuda", {"xla": [1]}, "`options` must map names")],
)
def test_mistakes_are_named(platform, options, message):
    register = inspect.unwrap(extend.register_compiler_options)  # before annotations are checked
    with pytest.raises(ValueError, match=message):
        register(platform, options)
