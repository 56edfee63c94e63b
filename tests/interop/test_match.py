"""Rules that are proposed for odd trees: ties, squares, fused tensors, dtypes, and refusals."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxzero import interop
from jaxzero.interop import ArrayTensor, Rule, Transpose, match


def zeros(**shapes: tuple[int, ...]) -> dict[str, ArrayTensor]:
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: ArrayTensor(np.zeros(shape, np.float32), name) for name, shape in names.items()}


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_a_tie_is_told_and_not_guessed():
    tree = {"left": {"kernel": shape(3, 4)}, "right": {"kernel": shape(3, 4)}}
    found = match(tree, zeros(x__weight=(4, 3), y__weight=(4, 3)))
    assert found.rules == ()
    assert found.undecided == {
        "left.kernel": ("x.weight", "y.weight"),
        "right.kernel": ("x.weight", "y.weight"),
    }
    assert "undecided: left.kernel: x.weight or y.weight" in str(found)
    with pytest.raises(ValueError, match=r"2 parameters: `left\.kernel` may be 'x\.weight', 'y\.w"):
        interop.load_into(tree, zeros(x__weight=(4, 3), y__weight=(4, 3)))


def test_a_tie_that_another_name_breaks():
    tree = {"left": {"kernel": shape(3, 4)}, "query": {"kernel": shape(3, 4)}}
    found = match(tree, zeros(x__weight=(4, 3), q_proj__weight=(4, 3)))
    assert found.rules == (
        Rule("left.kernel", "x.weight", Transpose()),
        Rule("query.kernel", "q_proj.weight", Transpose()),
    )
    assert found.assumed == {found.rules[0]: "by shape and number alone"}


def test_names_that_are_alike_and_do_not_say_the_same_are_to_be_confirmed():
    # Of Llama's norms the other one is right.
    tree = {name: {"scale": shape(4)} for name in ("attention_norm", "mlp_norm")}
    held = zeros(input_layernorm__weight=(4,), post_attention_layernorm__weight=(4,))
    found = match(tree, held)
    wrong = Rule("attention_norm.scale", "post_attention_layernorm.weight")
    assert found.assumed[wrong] == "the most similar name" and len(found.assumed) == 2
    assert f"    {wrong},  # confirm: the most similar name" in str(found)
    with pytest.raises(ValueError, match=r"2 of the proposed rules may be wrong:\n    Rule\('att"):
        interop.load_into(tree, held)
    with pytest.raises(
        ValueError, match=r"1 of the proposed rules .*\n    Rule\('mlp_norm\.scale'"
    ):
        interop.load_into(tree, held, accept="attention_norm.*")
    right = Rule("attention_norm.scale", "input_layernorm.weight")  # and one is left for the other
    loaded = interop.load_into(tree, held, accept=right)
    assert loaded["attention_norm"]["scale"].label == "input_layernorm.weight"
    assert loaded["mlp_norm"]["scale"].label == "post_attention_layernorm.weight"
    several = {
        f"h__{layer}__{name}__weight": (4,)
        for layer in range(3)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    found = match({"layers": [tree] * 3}, zeros(**several))
    assert len(found.assumed) == 2, "once for all layers"
    assert interop.load_into({"layers": [tree] * 3}, zeros(**several), accept="layers.*")


def test_a_number_that_disagrees_is_to_be_confirmed():
    # `Dense_1` fits fc2 by its number; what is left for `Dense_0` may be wrong, or both.
    tree = {"Dense_0": {"kernel": shape(4, 4)}, "Dense_1": {"kernel": shape(4, 4)}}
    tree |= {"Dense_2": {"kernel": shape(4, 5)}}
    held = zeros(fc1__weight=(5, 4), fc2__weight=(4, 4), fc3__weight=(4, 4))
    rule = Rule("Dense_0.kernel", "fc3.weight", Transpose())
    assert match(tree, held).assumed == {rule: "the names agree, their numbers do not"}
    with pytest.raises(ValueError, match="1 of the proposed rules may be wrong"):
        interop.load_into(tree, held)


def test_an_adam_state_is_not_loaded_by_rules_that_were_not_confirmed():
    tree = {name: shape(4) for name in ("attention_norm", "mlp_norm")}
    held = zeros(input_layernorm=(4,), post_attention_layernorm=(4,))
    source = interop.Checkpoint(
        path=Path("run"),
        form="a test",
        tensors=held,
        moments=lambda _: interop.AdamMoments(step=3, exp_avg=held, exp_avg_sq=held),
    )
    params = {name: jnp.zeros(4) for name in tree}
    state = optax.adam(1e-3).init(params)
    with pytest.raises(ValueError, match="2 of the proposed rules may be wrong"):
        interop.load_adam(state, tree, source)
    assert interop.load_adam(state, tree, source, accept="*")[0].count == 3
    with pytest.raises(ValueError, match="`accept` is for rules that are proposed"):
        interop.load_adam(state, tree, source, rules=match(tree, held).rules, accept="*")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accept": True}, r"`accept` takes rules, and patterns for paths .*; got True"),
        ({"accept": [3]}, r"`accept` takes rules, and patterns for paths .*; got \[3\]"),
        ({"accept": "head.*"}, r"'head\.\*' in `accept` matches no parameter\. Paths .* 'up'\."),
        ({"accept": Rule("head", "up")}, r"Rule\('head', 'up'\) matches no parameter of the tree"),
        ({"accept": Rule("up", "down")}, r"No parameter seems to come from 'up'"),
        ({"accept": "*", "rules": [Rule("up", "up")]}, "`accept` is for rules that are proposed"),
    ],
)
def test_what_is_accepted_is_a_rule_or_a_pattern(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        interop.load_into({"up": shape(3)}, zeros(up=(3,)), **options)


def test_nothing_fits_and_nothing_is_left():
    found = match({"up": {"kernel": shape(3, 4)}}, zeros(up__weight=(5, 3), more=(2,)))
    assert (dict(found.undecided), found.unused) == ({"up.kernel": ()}, ("up.weight", "more"))
    tree = {"up": {"kernel": shape(3, 4)}}
    held = zeros(up__weight=(4, 3), more=(2,))
    with pytest.raises(ValueError, match="No parameter seems to come from 'more'.*`ignore`"):
        interop.load_into(tree, held)
    assert interop.load_into(tree, held, ignore=["mor*"])["up"]["kernel"].shape == (3, 4)


SHAPES = {
    f"layers.{i}.{name}": sizes
    for i in range(3)
    for name, sizes in {"up.bias": (8,), "up.weight": (8, 4), "norm.weight": (4,)}.items()
}


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    ("leaf", "change", "message"),
    [
        ("up.kernel", (5, 8), r"its shape is \(5, 8\), and '{0}up\.weight', the n.* has \(8, 4\)"),
        ("up.bias", (9,), r"its shape is \(9,\), and '{0}up\.bias', the nearest .* has \(8,\)\."),
        ("norm.scale", (5,), r"its shape is \(5,\), and '{0}norm\.weight', the .* has \(4,\)\."),
        ("norm.bias", (4,), r"the checkpoint has no such tensor beside '{0}norm\.weight'\."),
        ("up.bias", None, ""),  # of `up.kernel`: the checkpoint has a bias
    ],
)
def test_the_leaf_that_does_not_fit_is_named(at: int, leaf: str, change, message: str):
    """And not another leaf of its module, such as the bias beside a kernel of another shape."""
    sizes = {"up.bias": (8,), "up.kernel": (4, 8), "norm.scale": (4,)}
    layers = [{name: dict() for name in ("up", "norm")} for _ in range(3)]
    for i, layer in enumerate(layers):
        for name, given in (sizes | ({leaf: change} if i == at else {})).items():
            if given is not None:
                module, _, last = name.partition(".")
                layer[module][last] = shape(*given)
    where, theirs = f"layers\\.{at}\\.", f"layers\\.{at}\\."
    if message.startswith("the checkpoint") or not message:
        theirs = r"layers\.\d\."  # layers of other roles are not counted with it
    message = message or r"the model has nothing beside it for '{0}up\.bias'\."
    named = leaf if change else "up.kernel"
    wanted = f"`{where}{re.escape(named)}` fits no tensor: {message.format(theirs)}"
    held = {name: ArrayTensor(np.zeros(each), name) for name, each in SHAPES.items()}
    with pytest.raises(ValueError, match=wanted):
        interop.load_into({"layers": layers}, held)
    assert f"undecided: layers.{at}.{named}: " in str(match({"layers": layers}, held))


def test_a_transposed_convolution_is_to_be_confirmed():
    """With as many inputs as outputs, shapes fit the rule of an ordinary one."""
    for name in ("deconv", "conv_transpose", "UpConv"):
        tree = {name: {"kernel": shape(3, 3, 4, 4), "bias": shape(4)}}
        held = zeros(**{f"{name}__weight": (4, 4, 3, 3), f"{name}__bias": (4,)})
        assert set(match(tree, held).assumed.values()) == {
            "a transposed convolution may exchange inputs and outputs, and flip its window"
        }
    tree = {"conv": {"kernel": shape(3, 3, 4, 4)}}
    assert not match(tree, zeros(conv__weight=(4, 4, 3, 3))).assumed


def test_the_leaf_of_a_stack_that_does_not_fit():
    tree = {"layers": {"up": {"kernel": shape(3, 4, 9), "bias": shape(3, 8)}}}
    held = {
        name: ArrayTensor(np.zeros(each), name) for name, each in SHAPES.items() if "up" in name
    }
    with pytest.raises(ValueError, match=r"`layers\.up\.kernel` fits no .* has \(3, 8, 4\)\."):
        interop.load_into(tree, held)


def test_one_leaf_of_other_names_that_does_not_fit():
    tree = {"Dense_0": {"kernel": shape(5, 8), "bias": shape(8)}}
    with pytest.raises(
        ValueError, match=r"`Dense_0\.kernel` .*\(5, 8\), and '0\.weight', .*\(8, 4"
    ):
        interop.load_into(tree, zeros(**{"0__weight": (8, 4), "0__bias": (8,)}))


@pytest.mark.parametrize(
    ("other", "steps"),
    [
        ((5, 4), (Transpose(),)),  # another matrix is transposed, as in torch.nn.Linear
        ((4, 5), ()),  # it is not, as in GPT-2
        ((4,), (Transpose(),)),  # nothing says: a `kernel` is transposed, and that is told
    ],
)
def test_a_square_matrix_is_turned_as_others_are(other, steps):
    tree = {"up": {"kernel": shape(4, 5)}} if len(other) == 2 else {"up": {"scale": shape(4)}}
    tree |= {"out": {"kernel": shape(4, 4)}}
    found = match(tree, zeros(up__weight=other, out__weight=(4, 4)))
    assert Rule("out.kernel", "out.weight", *steps) in found.rules
    rule = Rule("out.kernel", "out.weight", *steps)
    told = {rule: "the shape also allows the steps []"}
    assert found.assumed == (told if len(other) == 1 else {})


def test_a_square_matrix_among_both_kinds_is_undecided():
    tree = {name: {"kernel": shape(4, 5)} for name in ("up", "down")}
    tree |= {"out": {"kernel": shape(4, 4)}}
    held = zeros(up__weight=(4, 5), down__weight=(5, 4), out__weight=(4, 4))
    assert match(tree, held).undecided == {
        "out.kernel": ("'out.weight' through [Transpose()]", "'out.weight' through []")
    }


def test_a_third_of_a_fused_tensor_is_not_enough():
    tree = {"attention": {"query": {"kernel": shape(4, 4)}}}
    found = match(tree, zeros(attn__in_proj_weight=(12, 4)))
    assert found.undecided == {"attention.query.kernel": ("a third of 'attn.in_proj_weight'",)}


@pytest.mark.parametrize(("rows", "is_fused"), [(8, False), (12, True), (16, False)])
def test_a_fused_tensor_has_the_rows_of_query_key_and_value(rows, is_fused):
    tree = {"attention": {x: {"kernel": shape(4, 4)} for x in ("query", "key", "value")}}
    found = match(tree, zeros(attn__qkv__weight=(rows, 4)))
    assert [*found.fused] == ["attn.qkv.weight"] * is_fused


def test_dtypes():
    tree = {"x": shape(2), "count": jax.ShapeDtypeStruct((), jnp.int32)}
    held = {
        "x": ArrayTensor(np.ones(2, jnp.bfloat16), "x"),
        "count": ArrayTensor(np.array(3, np.int64), "count"),
    }
    rules = [Rule("x", "x"), Rule("count", "count")]
    as_held = interop.load_into(tree, held, rules=rules)
    assert (as_held["x"].dtype, as_held["count"].dtype) == (jnp.bfloat16, np.int32)
    cast = interop.load_into(tree, held, rules=rules, dtype=np.float32)
    assert (cast["x"].dtype, cast["count"].dtype) == (np.float32, np.int32)
    swapped = [Rule("x", "count"), Rule("count", "x")]
    tree = {"x": shape(), "count": jax.ShapeDtypeStruct((2,), jnp.int32)}
    with pytest.raises(ValueError, match=r"Tensor .* has dtype .*, but `.*` of the model has"):
        interop.load_into(tree, held, rules=swapped)


def test_trees_that_are_refused():
    with pytest.raises(ValueError, match=r"leaf `act` is not an array; got .*equinox\.filter"):
        interop.load_into({"act": jax.nn.relu}, {}, rules=[])
    with pytest.raises(ValueError, match=r"Two leaves of the tree are called `a\.b`"):
        interop.load_into({"a.b": shape(1), "a": {"b": shape(1)}}, {}, rules=[])
    rules = [Rule("x", "x")]
    with pytest.raises(ValueError, match="`y` is in only one of the two trees"):
        interop.tensors_from({"x": np.zeros(2)}, rules, like={"x": shape(2), "y": shape(2)})
    with pytest.raises(ValueError, match=r"have shape \(3,\) at `x`, the model has \(2,\)"):
        interop.tensors_from({"x": np.zeros(3)}, rules, like={"x": shape(2)})
    with pytest.raises(ValueError, match=r"have shape \(3,\) at `x`, the model has \(2,\)"):
        interop.tensors_from({"x": jnp.zeros(3)}, rules, like={"x": shape(2)})


@pytest.mark.parametrize("load", [interop.load_decoder, interop.load_encoder])
def test_the_error_for_another_family_leads_to_the_matcher(tmp_path: Path, load):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    interop.save_tensors(zeros(x=(2,)), tmp_path / "weights", source=tmp_path)
    with pytest.raises(ValueError, match=r"'mamba'; .*interop\.match.* \(docs/howto/rules\.md\)"):
        load(tmp_path / "weights")
