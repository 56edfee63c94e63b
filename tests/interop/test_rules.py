"""Rules in both directions, against numpy, and what is said where they do not fit."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from jaxzero import interop
from jaxzero.interop import (
    ArrayTensor,
    Flatten,
    LazyTensor,
    Merge,
    MergeHeads,
    Rule,
    Split,
    SplitHeads,
    Transpose,
    Unflatten,
)

RULES = (
    Rule("embed", "wte.weight"),
    Rule("layers.{i}.up", "h.{i}.fc.weight", Transpose()),
    Rule(("layers.{i}.query", "layers.{i}.key"), "h.{i}.qk", Split(0, (6, 2)), Transpose()),
    Rule("layers.{i}.gate_up", ("h.{i}.gate", "h.{i}.up"), Merge(0, 2), Unflatten(0, (2, 5))),
    Rule("layers.{i}.experts", "h.{i}.experts.{e}.w", Transpose()),
    Rule("scanned", "h.{i}.experts.{e}.b"),
    Rule("heads.{k}", "heads", Flatten(0, (2, 4))),
    Rule("conv", "conv", Transpose(2, 3, 1, 0)),
    Rule("bias.{i}", "h.{i}.bias"),  # of a relative in the family: nothing here
)


def checkpoint() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (7, 4), "heads": (3, 2, 4, 5)}
    shapes["conv"] = (6, 3, 2, 2)
    for layer in range(2):
        shapes |= {f"h.{layer}.fc.weight": (8, 4), f"h.{layer}.qk": (8, 4)}
        shapes |= {f"h.{layer}.gate": (5, 4), f"h.{layer}.up": (5, 4)}
        for expert in range(3):
            shapes[f"h.{layer}.experts.{expert}.w"] = (4, 9)
            shapes[f"h.{layer}.experts.{expert}.b"] = (4,)
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def parameters(held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the rules say, said with numpy."""
    made = {"embed": held["wte.weight"], "conv": np.einsum("oihw->hwio", held["conv"])}
    for layer in range(2):
        query, key = np.split(held[f"h.{layer}.qk"], [6])
        made |= {f"layers.{layer}.query": query.T, f"layers.{layer}.key": key.T}
        made[f"layers.{layer}.up"] = held[f"h.{layer}.fc.weight"].T
        made[f"layers.{layer}.gate_up"] = np.stack([held[f"h.{layer}.gate"], held[f"h.{layer}.up"]])
        made[f"layers.{layer}.experts"] = np.stack(
            [held[f"h.{layer}.experts.{expert}.w"].T for expert in range(3)]
        )
    made["scanned"] = np.stack(
        [
            np.stack([held[f"h.{layer}.experts.{expert}.b"] for expert in range(3)])
            for layer in range(2)
        ]
    )
    return made | {f"heads.{k}": held["heads"][k].reshape(8, 5) for k in range(3)}


def lazy(arrays: dict[str, np.ndarray]) -> dict[str, ArrayTensor]:
    return {name: ArrayTensor(array, name) for name, array in arrays.items()}


def shapes_of(arrays: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def load(rules, shapes: dict, tensors: dict, **options) -> dict[str, LazyTensor]:
    """`interop.load_into` for a tree that is flat: each path is a key."""
    tree = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
    return interop.load_into(tree, tensors, rules=rules, **options)


def test_rules_in_both_directions():
    held = checkpoint()
    wanted = parameters(held)
    loaded = load(RULES, shapes_of(wanted), lazy(held))
    assert loaded.keys() == wanted.keys()
    for path, array in wanted.items():
        np.testing.assert_array_equal(loaded[path].read(), array, strict=True)
    written = interop.tensors_from(wanted, RULES)
    assert written.keys() == held.keys()
    for name, array in held.items():
        np.testing.assert_array_equal(written[name].read(), array, strict=True)


def test_a_rule_is_written_as_it_is_read():
    for rule in RULES:
        names = {"Rule": Rule, "Transpose": Transpose, "Split": Split, "Merge": Merge}
        assert eval(str(rule), names | {"Flatten": Flatten, "Unflatten": Unflatten}) == rule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"h.1.fc.weight": None},
            r"checkpoint in `source` lacks 'h\.1\.fc\.weight'\. The rules must",
        ),
        ({"h.1.experts.2.w": None}, r"lacks 'h\.1\.experts\.2\.w'"),
        ({"h.2.qk": (8, 4)}, r"holds unknown 'h\.2\.qk'.* in `ignore`"),
        ({"h.0.experts.3.w": (4, 9)}, r"holds unknown 'h\.0\.experts\.3\.w'"),
        (
            {"h.0.qk": (9, 4)},
            r"'h\.0\.qk' in `source` has shape \(9, 4\), but .* asks for \(8, 4\)",
        ),
        ({"h.0.gate": (5, 3)}, r"'h\.0\.gate' .* \(5, 4\) \(its `layers\.0\.gate_up`\)"),
        ({"heads": (2, 2, 4, 5)}, r"'heads' in `source` has shape .* asks for \(3, 2, 4, 5\)"),
    ],
)
def test_tensors_that_do_not_fit(change: dict, message: str):
    held = checkpoint()
    wanted = shapes_of(parameters(held))
    held |= {name: np.zeros(shape) for name, shape in change.items() if shape is not None}
    held = {name: array for name, array in held.items() if change.get(name, ()) is not None}
    with pytest.raises(ValueError, match=message):
        load(RULES, wanted, lazy(held))


def test_ignored_tensors():
    held = {"a": np.zeros(2), "pooler.weight": np.zeros(3), "pooler.bias": np.zeros(3)}
    rules = [Rule("x", "a")]
    assert load(rules, {"x": (2,)}, lazy(held), ignore=["pooler.*"]).keys() == {"x"}
    with pytest.raises(ValueError, match=r"holds unknown 'pooler\.bias', 'pooler\.weight'\."):
        load(rules, {"x": (2,)}, lazy(held))


@pytest.mark.parametrize(
    ("rules", "shapes", "message"),
    [
        ([Rule("a", "x")], {"a": (2,), "b": (2,)}, "No rule matches 'b'"),
        ([Rule("a", "x"), Rule("a", "y")], {"a": (2,)}, "Two rules match `a`: Rule('a', 'x')"),
        (
            [Rule("a", "x"), Rule("b", "x")],
            {"a": (2,), "b": (2,)},
            "Two rules write the tensor",
        ),
        ([Rule(("a", "b"), "x", Split(0, 2))], {"a": (2,)}, "names `b`, which is not"),
        ([Rule("a", "x.{i}.{j}")], {"a": (2,)}, "stacks over {i}, {j}, so `a` must begin with 2"),
        ([Rule("a.{i}", "x")], {"a.0": (2,), "a.2": (2,)}, "the tree has no element (1,)"),
        (
            [Rule(("a.{i}", "b.{i}"), "x.{i}.{j}", Split(1, 2))],
            {"a.0": (2, 3, 2), "b.0": (3, 3, 2)},
            "so `b.0` must begin with 1 stacked dimension(s), (2,) as in `a.0`",
        ),
        ([Rule(("a", "b"), "x", Split(0, (2, 3)))], {"a": (2,), "b": (2,)}, "which have (2, 2)"),
        ([Rule("a", ("x", "y"), Merge(0, (2, 3)))], {"a": (4,)}, "which has 4 along dimension 0"),
        ([Rule("a", ("x", "y"), Merge(0, 3))], {"a": (6,)}, "names 2 tensors of the checkpoint"),
        ([Rule(("a", "b"), "x", Transpose())], {"a": (2,), "b": (2,)}, "names 1 tensors of the"),
        ([Rule("a", "x", Split(0, 2))], {"a": (2,)}, "takes 2 of the checkpoint's tensors; got 1"),
        ([Rule(("a", "b"), "x", SplitHeads(0, 2, 2))], {"a": (3,), "b": (3,)}, "have (3, 3) along"),
        (
            [Rule(("a", "b"), "x", SplitHeads(0, 2, (2, 1)))],
            {"a": (2,), "b": (2,)},
            "MergeHeads(dim=0, num_heads=2, sizes=(2, 1)) does not fit a and the other tensors",
        ),
        ([Rule("a", ("x", "y"), MergeHeads(0, 2, 2))], {"a": (6,)}, "which has 6 along dimension"),
        ([Rule("a", "x", Transpose(1, 0))], {"a": (2,)}, "`dims` must name each dimension of (2,)"),
        ([Rule("a", "x", Unflatten(0, (2, 3)))], {"a": (3, 2)}, "dimensions from 0 on are (3, 2)"),
        ([Rule("a", "x", Flatten(0, (2, 3)))], {"a": (5,)}, "which has 5 along dimension 0"),
        ([Rule("a", "x", Unflatten(2, (2, 3)))], {"a": (5,)}, "dimensions from 2 on are ()"),
        ([Rule("a", "x", Flatten(1, (5,)))], {"a": (5,)}, "does not fit a, whose shape is (5,)"),
    ],
)
def test_rules_that_do_not_fit_the_tree(rules, shapes, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(rules, shapes, {})


def fused_by_numpy(parts: list[np.ndarray], num_heads: int) -> np.ndarray:
    """Rows of the parts, in turn, head by head."""
    rows = [part.reshape(num_heads, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(rows, axis=1).reshape(-1, *parts[0].shape[1:])


@pytest.mark.parametrize("sizes", [3, (4, 4, 4), (6, 2, 2)])
@pytest.mark.parametrize("rank", [1, 2])
def test_parts_fused_head_by_head(sizes: int | tuple[int, ...], rank: int):
    rng = np.random.default_rng(0)
    rows = (4, 4, 4) if isinstance(sizes, int) else sizes
    parts = [rng.normal(size=(5 * size, 7)[:rank]) for size in rows]
    fused = {"qkv": fused_by_numpy(parts, 5)}
    wanted = dict(zip("qkv", (part.T for part in parts), strict=True))
    rules = [Rule(("q", "k", "v"), "qkv", SplitHeads(0, 5, sizes), Transpose())]
    loaded = load(rules, shapes_of(wanted), lazy(fused))
    for path, array in wanted.items():
        np.testing.assert_array_equal(loaded[path].read(), array, strict=True)
    np.testing.assert_array_equal(interop.tensors_from(wanted, rules)["qkv"].read(), fused["qkv"])
    back = [Rule("qkv", ("q", "k", "v"), Transpose(), MergeHeads(0, 5, sizes))]
    again = load(back, shapes_of(fused), lazy(wanted))
    np.testing.assert_array_equal(again["qkv"].read(), fused["qkv"], strict=True)


@pytest.mark.parametrize("step", [SplitHeads, MergeHeads])
@pytest.mark.parametrize("given", [(0,), (2, 0), (2, (1, -1)), (2, ()), (1.5,)])
def test_counts_of_heads_are_positive_integers(step: type, given: tuple):
    message = (
        "`num_heads` and `sizes` must be positive integers; got|`sizes` must be a tuple of int"
    )
    with pytest.raises(ValueError, match=message):
        step(0, *given)


@pytest.mark.parametrize("dims", [(-1, 0, 1), (2, 0, -2), (0, 1, -1), (-3, -2, -1), (-1, -2, -3)])
def test_dims_counted_from_the_end(dims: tuple[int, ...]):
    """On a cube a wrong inverse shows in values only."""
    held = {"x": np.arange(27.0).reshape(3, 3, 3)}
    rules = [Rule("p", "x", Transpose(*dims))]
    loaded = load(rules, {"p": (3, 3, 3)}, lazy(held))["p"].read()
    np.testing.assert_array_equal(loaded, held["x"].transpose(dims))
    back = interop.tensors_from({"p": loaded}, rules)["x"].read()
    np.testing.assert_array_equal(back, held["x"])


@pytest.mark.parametrize("kind", [list, np.array])
def test_sizes_in_other_containers(kind: type):
    assert Split(0, kind([3, 1])) == Split(0, (3, 1)) and Merge(0, kind([3, 1])).sizes == (3, 1)
    assert SplitHeads(0, np.int64(2), kind([2, 1])) == SplitHeads(0, 2, (2, 1))
    assert Rule(["p", "q"], "x", Split(np.int64(0), np.int64(2))) == Rule(
        ("p", "q"), "x", Split(0, 2)
    )
    held = {"x": np.arange(24.0).reshape(4, 6)}
    rules = [Rule("p", "x", Unflatten(1, kind([2, 3])), Flatten(0, kind([4, 2])))]
    loaded = load(rules, {"p": (8, 3)}, lazy(held))["p"].read()
    np.testing.assert_array_equal(loaded, held["x"].reshape(8, 3))
    np.testing.assert_array_equal(interop.tensors_from({"p": loaded}, rules)["x"].read(), held["x"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Transpose(0, 0), "`dims` must name each dimension once, as in `Transpose(2, 0, 1"),
        (lambda: Transpose(1, 2), "`dims` must name each dimension once"),
        (lambda: Transpose((1, 0)), "`dims` must name each dimension once"),  # type: ignore
        (lambda: Unflatten(-1, (2, 3)), "`dim` must be an integer from 0 on: in the other"),
        (lambda: Flatten(-2, (2, 3)), "Got Flatten(dim=-2, sizes=(2, 3))."),
        (lambda: Merge(-1, 2), "`dim` must be an integer from 0 on"),
        (lambda: Unflatten(0, (2, -1)), "`sizes` must be a tuple of integers from 0 on; got Unfl"),
        (lambda: Unflatten(0, 6), "`sizes` must be a tuple of integers from 0 on; got"),  # type: ignore
        (lambda: Split(0, 2.0), "from 0 on, or the number of equal parts; got"),  # type: ignore
        (lambda: Split(0, 0), "from 0 on, or the number of equal parts; got"),
        (lambda: Rule("a", 3), "`theirs` must be a string or a tuple of them; got 3."),  # type: ignore
        (lambda: Rule("a", "b", Transpose), "`steps` must be steps, such as `Transpose()`; got <"),  # type: ignore
    ],
)
def test_steps_check_themselves(make, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_one_parameter_under_two_names():
    """Tied weights: refused in rules, with a remedy, which works."""
    table = {"embed": np.arange(6.0).reshape(3, 2)}
    for rules in (
        [Rule("embed", "wte.weight"), Rule("embed", "head.weight")],
        [Rule("embed", ("wte.weight", "head.weight"))],
    ):
        with pytest.raises(ValueError, match=r"tied weights\), keep the rule for one.*`ignore`"):
            interop.tensors_from(table, rules)
    tensors = interop.tensors_from(table, [Rule("embed", "wte.weight")])
    tensors["head.weight"] = tensors["wte.weight"]
    rules = [Rule("embed", "wte.weight")]
    loaded = load(rules, {"embed": (3, 2)}, tensors, ignore=["head.weight"])
    np.testing.assert_array_equal(loaded["embed"].read(), table["embed"])
    np.testing.assert_array_equal(tensors["head.weight"].read(), table["embed"])


def test_patterns_of_one_side_have_the_same_variables():
    with pytest.raises(ValueError, match=r"patterns of `theirs` must have the same variables; got"):
        Rule("a.{i}", ("b.{i}", "c"))
