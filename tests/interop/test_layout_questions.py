"""What shapes do not tell is asked: the order of flattened images, and that of rotary pairs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxzero import interop
from jaxzero.interop import ArrayTensor, RotaryPairs, Rule, Transpose, match

torch = pytest.importorskip("torch")
nn = torch.nn


def tensors_of(model: Any, *, sort: bool = False) -> dict[str, ArrayTensor]:
    held = {name: ArrayTensor(x.numpy(), name) for name, x in model.state_dict().items()}
    held = {name: x for name, x in held.items() if x.ndim}
    return {name: held[name] for name in sorted(held)} if sort else held


def tree_of(model: Any, *, first: bool = False) -> dict:
    """The shapes of the same model in Flax, or with `first` in Equinox: channels first."""
    tree: dict = {}
    for name, x in model.state_dict().items():
        shape, (*path, last) = tuple(x.shape), name.split(".")
        if not shape:
            continue
        if last == "weight" and not first:
            last = "kernel" if len(shape) > 1 else "scale"
            shape = (*shape[2:], *shape[1::-1]) if len(shape) > 1 else shape
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        last = {"running_mean": "mean", "running_var": "var"}.get(last, last)
        at[last] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


def asked_of(model: Any, *, sort: bool = False, first: bool = False) -> dict[str, str]:
    """Path of each parameter that is asked about -> the reason."""
    found = match(tree_of(model, first=first), tensors_of(model, sort=sort))
    assert not found.undecided and not found.unused, str(found)
    asked = {path: why for rule, why in found.assumed.items() for path in rule.ours}
    return {path: why for path, why in asked.items() if "flattened image" in why}


class Named(nn.Module):
    def __init__(self, **layers: Any):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def vgg() -> Any:
    sizes = [(3, 8), (8, 8), (8, 12), (12, 12), (12, 16)]
    features = [x for a, b in sizes for x in (nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU())]
    head = [nn.Linear(16 * 9, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 32), nn.ReLU()]
    return Named(
        features=nn.Sequential(*features), classifier=nn.Sequential(*head, nn.Linear(32, 10))
    )


READ = {  # name -> the model, and the layers that read a flattened image
    "lenet": (
        lambda: Named(
            conv1=nn.Conv2d(3, 8, 3), conv2=nn.Conv2d(8, 16, 3), fc1=nn.Linear(256, 32),
            fc2=nn.Linear(32, 10),
        ),
        {"fc1.kernel": 16},
    ),
    "1d": (lambda: Named(conv=nn.Conv1d(3, 8, 3), fc=nn.Linear(40, 5)), {"fc.kernel": 8}),
    "3d": (lambda: Named(conv=nn.Conv3d(3, 8, 3), fc=nn.Linear(216, 5)), {"fc.kernel": 8}),
    "sequential": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(), nn.Flatten(),
            nn.Linear(54, 20), nn.ReLU(), nn.Linear(20, 3),
        ),
        {"5.kernel": 6},
    ),
    "vgg": (vgg, {"classifier.0.kernel": 16}),
    "depthwise": (
        lambda: Named(
            conv=nn.Conv2d(3, 8, 3), depthwise=nn.Conv2d(8, 8, 3, groups=8), fc=nn.Linear(32, 5)
        ),
        {"fc.kernel": 8},
    ),
    "grouped": (
        lambda: Named(conv=nn.Conv2d(4, 8, 3, groups=2), fc=nn.Linear(32, 5)),
        {"fc.kernel": 8},
    ),
    "transposed": (
        lambda: Named(deconv=nn.ConvTranspose2d(4, 6, 3), fc=nn.Linear(54, 5)),
        {"fc.kernel": 6},
    ),
    "two heads": (
        lambda: Named(
            conv=nn.Conv2d(3, 8, 3), actor=nn.Linear(72, 4), critic=nn.Linear(72, 1)
        ),
        {"actor.kernel": 8, "critic.kernel": 8},
    ),
    "dueling": (
        lambda: Named(
            conv=nn.Conv2d(3, 8, 3), fc_value=nn.Linear(72, 16), value=nn.Linear(16, 1),
            fc_advantage=nn.Linear(72, 16), advantage=nn.Linear(16, 4),
        ),
        {"fc_value.kernel": 8, "fc_advantage.kernel": 8},
    ),
    "normalised": (
        lambda: Named(
            conv=nn.Conv2d(3, 8, 3), bn=nn.BatchNorm2d(8), norm=nn.BatchNorm1d(72),
            fc=nn.Linear(72, 5),
        ),
        {"norm.scale": 8, "norm.bias": 8, "norm.mean": 8, "norm.var": 8, "fc.kernel": 8},
    ),
    "square": (
        lambda: Named(conv=nn.Conv2d(3, 16, 3), fc1=nn.Linear(64, 64), fc2=nn.Linear(64, 10)),
        {"fc1.kernel": 16, "fc2.kernel": None},
    ),
    "beside other inputs": (
        lambda: Named(conv=nn.Conv2d(3, 8, 3), fc=nn.Linear(72 + 5, 4)),
        {"fc.kernel": None},
    ),
    "one channel": (
        lambda: Named(
            conv=nn.Conv2d(3, 8, 3), value=nn.Conv2d(8, 1, 1), fc=nn.Linear(16, 4)
        ),
        {"fc.kernel": None},
    ),
    "latent": (
        lambda: Named(
            encoder=nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)), mean=nn.Linear(64, 5),
            var=nn.Linear(64, 5), decoder_input=nn.Linear(5, 64),
            decoder=nn.Sequential(nn.ConvTranspose2d(16, 16, 3), nn.Conv2d(16, 3, 3)),
        ),
        {"mean.kernel": 16, "var.kernel": 16, "decoder_input.kernel": 16, "decoder_input.bias": 16},
    ),
    "generator": (
        lambda: Named(
            fc=nn.Linear(5, 72), bn=nn.BatchNorm1d(72), deconv=nn.ConvTranspose2d(8, 8, 3),
            out=nn.Conv2d(8, 3, 3)
        ),
        {"fc.kernel": 8, "fc.bias": 8, "bn.scale": 8, "bn.bias": 8, "bn.mean": 8, "bn.var": 8},
    ),
}  # fmt: skip
READ_NOTHING = {
    "pooled": lambda: Named(conv=nn.Conv2d(3, 8, 3), bn=nn.BatchNorm2d(8), fc=nn.Linear(8, 16)),
    "pooled, then a head": lambda: Named(
        conv=nn.Conv2d(3, 8, 3), fc1=nn.Linear(8, 16), fc2=nn.Linear(16, 8)
    ),
    "embedded patches": lambda: Named(
        patch=nn.Conv2d(3, 16, 4), query=nn.Linear(16, 16), up=nn.Linear(16, 64),
        down=nn.Linear(64, 16), head=nn.Linear(16, 10),
    ),
    "no convolution": lambda: Named(up=nn.Linear(8, 64), down=nn.Linear(64, 8)),
}  # fmt: skip


@pytest.mark.parametrize("sort", [False, True], ids=["in order", "sorted"])
@pytest.mark.parametrize("name", READ)
def test_layers_that_read_a_flattened_image_are_asked_about(name: str, sort: bool):
    make, wanted = READ[name]
    model = make()
    held = tensors_of(model, sort=sort)
    assert asked_of(model, sort=sort).keys() == wanted.keys()
    with pytest.raises(ValueError, match=r"confirm: .*flattened image of \d+ channels .*Rule\("):
        interop.load_into(tree_of(model), held)
    loaded = interop.load_into(tree_of(model), held, accept="*")
    for path, channels in wanted.items():
        *parts, last = path.split(".")
        at = loaded
        for part in parts:
            at = at[part]
        tensor = held[".".join((*parts, TORCH.get(last, last)))].read()
        if channels is None or name in ("latent", "generator") and last == "kernel":
            continue
        first = tensor.reshape(*tensor.shape[:-1], channels, -1)  # [..., c, h w]
        np.testing.assert_array_equal(
            at[last].read(), np.swapaxes(first, -1, -2).reshape(tensor.shape).T
        )


TORCH = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}


@pytest.mark.parametrize("name", READ_NOTHING)
def test_where_nothing_is_ambiguous_nothing_is_asked(name: str):
    for sort in (False, True):
        assert asked_of(READ_NOTHING[name](), sort=sort) == {}


def test_equinox_flattens_as_torch_does():
    model = READ["lenet"][0]()
    assert asked_of(model, first=True) == {}


def test_given_rules_count_as_layers():
    model = READ["lenet"][0]()
    known = [Rule("conv{i}.kernel", "conv{i}.weight", Transpose(2, 3, 1, 0))]
    found = match(tree_of(model), tensors_of(model), rules=known)
    assert [rule.ours for rule in found.assumed] == [("fc1.kernel",)]
    known.append(Rule("fc1.kernel", "fc1.weight", Transpose()))
    assert not match(tree_of(model), tensors_of(model), rules=known).assumed


def test_outputs_of_a_convnet_equal_torch():
    """The proposed rules give torch's outputs, in both directions of the flattened image."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.conv, model.fc = nn.Conv2d(2, 4, 3), nn.Linear(4 * 2 * 3, 4 * 2 * 3)
    model.out, rng = nn.Conv2d(4, 3, 1), np.random.default_rng(0)
    x = rng.normal(size=(2, 2, 4, 5)).astype(np.float32)
    tree, held = tree_of(model), tensors_of(model)
    loaded = interop.load_into(tree, held, accept="*")
    p = jax.tree.map(lambda t: jnp.asarray(t.read()), loaded)

    def conv(x: jax.Array, layer: dict) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, layer["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y + layer["bias"][None, None, None]

    y = conv(jnp.transpose(x, (0, 2, 3, 1)), p["conv"]).reshape(2, -1)
    y = (y @ p["fc"]["kernel"] + p["fc"]["bias"][None]).reshape(2, 2, 3, 4)
    got = conv(y, p["out"])
    with torch.no_grad():
        z = model.fc(model.conv(torch.from_numpy(x)).flatten(1)).reshape(2, 4, 2, 3)
        wanted = model.out(z).numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=24 * 2**-23 * np.abs(wanted).max())
    back = interop.tensors_from(p, match(tree, held).rules, like=loaded)
    assert all(np.array_equal(back[name].read(), held[name].read()) for name in held)


D, HEADS, KEYS, SIZE = 8, 4, 2, 6


def rotary_shapes(*, bias: bool = False) -> tuple[dict, dict[str, ArrayTensor]]:
    rng = np.random.default_rng(1)
    tree, held = {}, {}
    for ours, theirs, heads in (("query", "wq", HEADS), ("key", "wk", KEYS), ("value", "wv", KEYS)):
        tree[ours] = {"kernel": jax.ShapeDtypeStruct((D, heads * SIZE), jnp.float32)}
        name = f"layers.0.attention.{theirs}"
        held[f"{name}.weight"] = rng.normal(size=(heads * SIZE, D)).astype(np.float32)
        if bias:
            tree[ours]["bias"] = jax.ShapeDtypeStruct((heads * SIZE,), jnp.float32)
            held[f"{name}.bias"] = rng.normal(size=heads * SIZE).astype(np.float32)
    held = {name: ArrayTensor(x, name) for name, x in held.items()}
    return {"layers": [{"attention": tree}]}, held


def halves(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads from interleaved pairs to halves, written anew: even rows, then odd ones."""
    x = x.reshape(heads, SIZE, *x.shape[1:])
    return np.concatenate((x[:, ::2], x[:, 1::2]), 1).reshape(-1, *x.shape[2:])


def test_an_unknown_number_of_heads_is_asked_for():
    tree, held = rotary_shapes()
    found = match(tree, held)
    assert [rule.theirs[0][-9:] for rule in found.rules] == ["wv.weight"]
    assert len(found.rotary) == 2 and "RotaryPairs(H), Transpose()" in str(found)
    for accept in ((), "*"):
        with pytest.raises(ValueError, match=r"interleaved rotary pairs.*\n.*RotaryPairs\(H\)"):
            interop.load_into(tree, held, accept=accept)
    rules = [
        Rule(f"layers.0.attention.{a}.kernel", f"layers.0.attention.{b}.weight", *steps)
        for a, b, steps in (
            ("query", "wq", (RotaryPairs(HEADS), Transpose())),
            ("key", "wk", (RotaryPairs(KEYS), Transpose())),
        )
    ]
    at = interop.load_into(tree, held, accept=rules)["layers"][0]["attention"]
    for ours, theirs, heads in (("query", "wq", HEADS), ("key", "wk", KEYS)):
        wanted = halves(held[f"layers.0.attention.{theirs}.weight"].read(), heads).T
        np.testing.assert_array_equal(at[ours]["kernel"].read(), wanted)
        part = at[ours]["kernel"][2:5, 1:9]
        np.testing.assert_array_equal(part, wanted[2:5, 1:9])
    back = interop.tensors_from(
        jax.tree.map(lambda t: jnp.asarray(t.read()), {"layers": [{"attention": at}]}),
        match(tree, held, rules=rules).rules,
    )
    assert all(np.array_equal(back[name].read(), held[name].read()) for name in held)


@pytest.mark.parametrize("how", ["rope.freqs", "a dim for heads", "a norm of one head"])
def test_heads_that_something_tells(how: str):
    tree, held = rotary_shapes(bias=True)
    attention, ignore = tree["layers"][0]["attention"], ()
    if how == "rope.freqs":
        ignore = "rope.freqs"
        held["rope.freqs"] = ArrayTensor(np.zeros(SIZE // 2, np.float32), "rope.freqs")
    elif how == "a dim for heads":
        for name, heads in (("query", HEADS), ("key", KEYS), ("value", KEYS)):
            shapes = {"kernel": (D, heads, SIZE), "bias": (heads, SIZE)}
            attention[name] = {k: jax.ShapeDtypeStruct(x, jnp.float32) for k, x in shapes.items()}
    else:
        for name, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            attention[name] = {"scale": jax.ShapeDtypeStruct((SIZE,), jnp.float32)}
            full = f"layers.0.attention.{theirs}.weight"
            held[full] = ArrayTensor(np.arange(SIZE, dtype=np.float32), full)
    with pytest.raises(ValueError, match=r"RotaryPairs\(4\).*confirm: .* or else Rule\("):
        interop.load_into(tree, held, ignore=ignore)
    loaded = interop.load_into(tree, held, ignore=ignore, accept="*")["layers"][0]["attention"]
    for ours, theirs, heads in (("query", "wq", HEADS), ("key", "wk", KEYS)):
        for role, theirs_role in (("kernel", "weight"), ("bias", "bias")):
            wanted = halves(held[f"layers.0.attention.{theirs}.{theirs_role}"].read(), heads)
            got = loaded[ours][role].read()
            np.testing.assert_array_equal(got.reshape(wanted.T.shape), wanted.T)
        if how == "a norm of one head":
            assert loaded[f"{ours}_norm"]["scale"].read().tolist() == [0, 2, 4, 1, 3, 5]


def test_names_of_meta_on_our_side_or_on_both():
    tree, held = rotary_shapes()
    at = tree["layers"][0]["attention"]
    ours = {"layers": [{"attention": {f"w{name[0]}": leaf for name, leaf in at.items()}}]}
    found = match(ours, held)  # the same names: plain rules, to be confirmed
    assert not found.rotary and len(found.assumed) == 2
    assert all("RotaryPairs(H)" in why for why in found.assumed.values())
    other = {name.replace(".w", ".").replace("layers", "h"): x for name, x in held.items()}
    found = match(ours, other)
    assert "RotaryPairs(H, to='interleaved'), Transpose()" in str(found)


def test_fused_weights_with_names_of_meta():
    tree = {
        x: {"kernel": jax.ShapeDtypeStruct((D, HEADS, SIZE), jnp.float32)}
        for x in ("query", "key", "value")
    }
    fused = np.random.default_rng(2).normal(size=(3 * HEADS * SIZE, D)).astype(np.float32)
    held = {"wqkv.weight": ArrayTensor(fused, "wqkv.weight")}
    (texts,) = match(tree, held).fused.values()
    assert [("RotaryPairs((4, 4, 0))" in text, "SplitHeads" in text) for text in texts] == [
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    rule = eval(texts[2], vars(interop))  # the text can be pasted
    loaded = interop.load_into(tree, held, accept=rule)
    for name, rows in zip(("query", "key", "value"), np.split(fused, 3), strict=True):
        wanted = rows if name == "value" else halves(rows, HEADS)
        np.testing.assert_array_equal(loaded[name]["kernel"].read().reshape(D, -1), wanted.T)
    two = {"query": HEADS, "key": KEYS, "value": KEYS}
    tree = {x: {"kernel": jax.ShapeDtypeStruct((D, n * SIZE), jnp.float32)} for x, n in two.items()}
    held["wqkv.weight"] = ArrayTensor(fused[: 8 * SIZE], "wqkv.weight")
    assert "RotaryPairs((H, G, 0))" in match(tree, held).fused["wqkv.weight"][2]


def test_a_part_of_each_head_is_rotated():
    x = ArrayTensor(np.arange(12, dtype=np.float32), "x")
    (got,) = RotaryPairs(2, rotary_dim=4)((x,))
    assert got.read().tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    (back,) = RotaryPairs(2, rotary_dim=4).inverse((got,))
    assert back.read().tolist() == list(range(12))
    whole = tuple(ArrayTensor(np.arange(4.0), name) for name in "qkv")
    assert [t.read().tolist() for t in RotaryPairs((1, 2, 0))(whole)] == [
        [0, 2, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RotaryPairs(-1), "`num_heads` must be an integer or a tuple"),
        (lambda: RotaryPairs(2, to="pairs"), "`to` must be one of"),  # pyright: ignore
        (lambda: RotaryPairs(2, rotary_dim=3), "`rotary_dim` must be a positive even number"),
        (lambda: RotaryPairs((1, 2))((ArrayTensor(np.ones(4), "x"),)), "2 numbers of heads for 1"),
        (lambda: RotaryPairs(3)((ArrayTensor(np.ones(4), "x"),)), "does not fit x"),
        (lambda: RotaryPairs(2, dim=1)((ArrayTensor(np.ones(4), "x"),)), "does not fit x"),
    ],
)
def test_rotary_pairs_that_are_wrong(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
