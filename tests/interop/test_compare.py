"""`interop.compare`: right conversions agree, wrong ones do not, and the right layer is named."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxzero import interop
from jaxzero.interop import Flatten, Rule, Transpose, Unflatten

torch = pytest.importorskip("torch", reason="needs torch")

# Flax normalizes by float32 and Python numbers.
pytestmark = pytest.mark.standard_promotion

IMAGES = np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype(np.float32)
IN_NCHW = np.moveaxis(IMAGES, -1, 1)
X = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
FLATTENED = (Unflatten(1, (4, 6, 6)), Transpose(2, 3, 1, 0), Flatten(0, (6, 6, 4)))


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.fc = torch.nn.Linear(4 * 6 * 6, 8)
        self.norm = torch.nn.LayerNorm(8, eps=1e-5)
        self.drop = torch.nn.Dropout(0.5)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.fc(torch.relu(self.conv(x)).flatten(1))
        return self.second(self.first(self.drop(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, epsilon: float, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), padding=1, rngs=rngs)
        self.fc = nnx.Linear(4 * 6 * 6, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, epsilon=epsilon, rngs=rngs)
        self.first, self.second = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        x = self.fc(jax.nn.relu(self.conv(x)).reshape(len(x), -1))
        return self.second(self.first(self.norm(x)))


def net_rules(flattened: Any = FLATTENED, first: str = "first", second: str = "second"):
    theirs = {"conv": "conv", "fc": "fc", "norm": "norm", "first": first, "second": second}
    steps = {"conv": (Transpose(2, 3, 1, 0),), "fc": flattened}
    return (
        Rule("norm.scale", "norm.weight"),
        *(Rule(f"{x}.bias", f"{theirs[x]}.bias") for x in theirs),
        *(
            Rule(f"{x}.kernel", f"{theirs[x]}.weight", *steps.get(x, (Transpose(),)))
            for x in theirs
            if x != "norm"
        ),
    )


def tensors_of(module: Any) -> dict[str, np.ndarray]:
    return {name: x.detach().numpy().copy() for name, x in module.state_dict().items()}


def loaded(tree: Any, module: Any, rules: Any) -> Any:
    read = interop.load_into(tree, tensors_of(module), rules=rules)
    return jax.tree.map(lambda tensor: jnp.asarray(tensor.read()), read)


def net(module: Any, rules: Any, epsilon: float = 1e-5) -> Net:
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Net(epsilon, nnx.Rngs(0))))
    return nnx.merge(graph, loaded(shapes, module, rules))


@pytest.fixture
def module() -> TorchNet:
    torch.manual_seed(0)
    made = TorchNet()
    made.drop.eval()  # to be left as it is
    return made


def test_a_right_conversion_agrees_and_nothing_is_left_behind(module: TorchNet):
    model, call = net(module, net_rules()), vars(Net)["__call__"]
    options = {"torch_inputs": IN_NCHW, "jax_module": model, "submodules": net_rules()}
    for function in (model, jax.jit(lambda x: model(x)), model.__call__):
        result = interop.compare(function, module, IMAGES, **options)
        assert result.agrees and result.first_difference is None, result
        names = [each.torch_name for each in result.outputs]
        assert names == ["conv", "fc", "norm", "first", "second", "output"]
        assert (result.only_in_torch, result.only_in_jax) == (("drop",), ())
        assert "[2, 4, 6, 6]" in result.outputs[0].note and "Only in torch: drop" in str(result)
    assert module.training and not module.drop.training and vars(Net)["__call__"] is call
    assert not any(each._forward_hooks for each in module.modules())
    outputs = interop.compare(jax.jit(model), module, IMAGES, torch_inputs=IN_NCHW)
    assert [each.torch_name for each in outputs.outputs] == ["output"] and outputs.agrees


@pytest.mark.parametrize(
    ("wrong", "epsilon", "name"),
    [
        (net_rules(flattened=(Transpose(),)), 1e-5, "fc"),
        (net_rules(first="second", second="first"), 1e-5, "first"),
        (net_rules(), 1e-3, "norm"),
    ],
    ids=["order of flattened dims", "exchanged weights", "epsilon"],
)
def test_a_wrong_conversion_differs_and_the_layer_is_named(
    module: TorchNet, wrong: Any, epsilon: float, name: str
):
    result = interop.compare(
        net(module, wrong, epsilon), module, IMAGES, torch_inputs=IN_NCHW, submodules=True
    )
    assert not result.agrees and not result.outputs[-1].agrees
    assert result.first_difference is not None and result.first_difference.torch_name == name
    assert f"The first layer that differs is `{name}`" in " ".join(str(result).split())


class Attention(torch.nn.Module):
    """Rotates neighbouring numbers, as Meta's weights do."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wo = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        angle = torch.arange(x.shape[1])[:, None] / 10.0 ** torch.arange(2)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]

        def rotated(y):
            pairs = torch.view_as_complex(y.reshape(*y.shape[:2], 2, 2, 2))
            return torch.view_as_real(pairs * turn).flatten(3)

        scores = torch.einsum("bqhd,bkhd->bhqk", rotated(self.wq(x)), rotated(self.wk(x)))
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), x.reshape(*x.shape[:2], 2, 4))
        return self.wo(mixed.flatten(2))


def attention(kernels: dict[str, Any], x: jax.Array) -> Any:
    """Rotates the halves of a head, and returns what its layers compute."""
    angle = jnp.arange(x.shape[1])[:, None] / 10.0 ** jnp.arange(2)[None]
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]

    def rotated(y):
        a, b = jnp.split(y.reshape(*y.shape[:2], 2, 4), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    query, key = x @ kernels["q"]["kernel"], x @ kernels["k"]["kernel"]
    scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(query), rotated(key))
    heads = x.reshape(*x.shape[:2], 2, 4)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads)
    output = mixed.reshape(x.shape) @ kernels["o"]["kernel"]
    return output, {"q": query, "k": key, "o": output}


@pytest.mark.parametrize("is_right", [True, False])
def test_rotary_pairs(is_right: bool):
    torch.manual_seed(0)
    module, x = Attention(), np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    halves = (Unflatten(0, (2, 2, 2)), Transpose(0, 2, 1, 3), Flatten(0, (2, 2, 2)))
    steps = (*(halves if is_right else ()), Transpose())
    rules = [Rule(f"{name}.kernel", f"w{name}.weight", *steps) for name in "qk"]
    rules.append(Rule("o.kernel", "wo.weight", Transpose()))
    shape = {"kernel": jax.ShapeDtypeStruct((8, 8), np.float32)}
    kernels = loaded(dict.fromkeys("qko", shape), module, rules)
    result = interop.compare(lambda x: attention(kernels, x), module, x, submodules=rules)
    # The steps of the rules say how features of queries and keys changed places.
    assert [each.agrees for each in result.outputs] == [True, True, is_right, is_right], result


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
        self.act = torch.nn.Tanh()

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return {"y": x, "hidden": (x, None), "cache": object()}


class ScannedLayer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return jnp.tanh(linen.Dense(4, name="up")(x)), None


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, x):
        scan = linen.scan(
            ScannedLayer,
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scan(name="layers")(x, None)[0]


class Listed(eqx.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def linen_function(module: Any) -> tuple[Any, dict[str, Any]]:
    model = Scanned()
    ours = "params.layers.up"
    rules = (
        Rule(f"{ours}.kernel", "layers.{i}.weight", Transpose()),
        Rule(f"{ours}.bias", "layers.{i}.bias"),
    )
    variables = loaded(jax.eval_shape(model.init, jax.random.key(0), X), module, rules)
    return (
        lambda x: model.apply(variables, x, mutable="intermediates", capture_intermediates=True)
    ), {"submodules": rules}


def equinox_function(module: Any) -> tuple[Any, dict[str, Any]]:
    rules = [Rule(f"layers.{{i}}.{x}", f"layers.{{i}}.{x}") for x in ("weight", "bias")]
    keys = jax.random.split(jax.random.key(0), 3)
    model = Listed([eqx.nn.Linear(4, 4, key=key) for key in keys])
    arrays, static = eqx.partition(model, eqx.is_array)
    model = eqx.combine(loaded(arrays, module, rules), static)
    return eqx.filter_jit(lambda x: jax.vmap(model)(x)), {
        "submodules": {"layers.{i}": "layers.{i}"},
        "jax_module": model,
    }


def plain_function(module: Any) -> tuple[Any, dict[str, Any]]:
    held = tensors_of(module)

    def run(x):
        seen: dict[str, Any] = {"act": ()}
        for i in range(3):
            seen[f"layers.{i}"] = x @ held[f"layers.{i}.weight"].T + held[f"layers.{i}.bias"][None]
            x = jnp.tanh(seen[f"layers.{i}"])
            seen["act"] += (x,)
        return x, seen

    return run, {"submodules": True}


@pytest.mark.parametrize("make", [linen_function, equinox_function, plain_function])
def test_of_every_library(make: Any):
    torch.manual_seed(0)
    module = Layers()
    function, options = make(module)
    result = interop.compare(function, module, (X,), output="y", **options)
    assert result.agrees and result.first_difference is None, result
    calls = (
        ["act (call 1)", "act (call 2)", "act (call 3)"] if options["submodules"] is True else []
    )
    names = [each.torch_name for each in result.outputs]
    assert sorted(names) == sorted([*(f"layers.{i}" for i in range(3)), *calls, "output.y"])
    assert set(result.only_in_torch) >= {"output.hidden.0", "output.cache (object)"}
    with torch.no_grad():
        module.layers[1].bias[2] += 1e-3
    result = interop.compare(function, module, (X,), output="y", **options)
    first = result.first_difference
    assert first is not None and first.torch_name == "layers.1" and not result.agrees


class Returns(torch.nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, **inputs):
        return self.function(**inputs)


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([1.0, np.nan], [1.0, np.nan], np.nan),
        ([1.0, np.inf], [1.0, np.inf], 0.0),
        ([1.0, np.inf], [1.0, -np.inf], np.inf),
        ([1.0, 2.0], [np.inf, 2.0], np.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1.0], [0.0, 0.0], np.inf),
        ([2**53], [2**53 + 1], np.inf),
        ([1j, 2.0], [1j, 2.0 + 2j], 2 / 8**0.5),
        ([], [], 0.0),
    ],
)
def test_a_difference_is_relative_to_the_largest_value(ours, theirs, difference):
    module = Returns(lambda x: torch.tensor(theirs, dtype=torch.tensor(ours).dtype))
    (output,) = interop.compare(lambda x: np.array(ours), module, {"x": X}).outputs
    np.testing.assert_allclose(output.difference, difference)


def test_integers_must_be_equal_and_nan_is_a_difference():
    module = Returns(lambda x: {"place": x.argmax(-1), "root": x.sqrt(), "none": None})

    def ours(x):
        return {"place": jnp.argmax(x, -1), "root": jnp.sqrt(x), "more": (x,)}

    result = interop.compare(ours, module, {"x": np.abs(X).astype(np.float64)})
    assert result.agrees and result.only_in_jax == ("output.more.0",)
    place, root = interop.compare(ours, module, {"x": X}).outputs
    assert (place.bound, place.agrees, root.agrees) == (0.0, True, False)
    assert np.isnan(root.difference)
    other = interop.compare(lambda x: ours(x) | {"place": jnp.argmin(x, -1)}, module, {"x": X})
    assert not other.outputs[0].agrees


def test_layouts_are_noted_and_outputs_of_one_shape_have_one():
    class Square(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.same = torch.nn.Identity()

        def forward(self, x):
            return self.same(x)

    x = np.random.default_rng(0).normal(size=(4, 4, 4)).astype(np.float32)
    moved = np.moveaxis(x, 1, -1)
    result = interop.compare(lambda _: (moved, {"same": moved}), Square(), x, submodules=True)
    inner, output = result.outputs
    assert inner.agrees and inner.note == "compared channels last"
    assert not output.agrees and not result.agrees
    (output,) = interop.compare(lambda _: moved[:, :2], Square(), x[:, :, :2]).outputs
    assert output.agrees and output.note == "shape in PyTorch: [4, 4, 2]; compared channels last"


def test_bound_of_16_bits():
    """A bfloat16 layer is compared as such, and a deep one is refused."""
    module = torch.nn.Linear(4, 4).bfloat16()
    kernel, bias = (x.detach().float().numpy() for x in module.parameters())
    x = X.astype(jnp.bfloat16)

    def ours(x):
        return x.astype(jnp.float32) @ kernel.T + bias[None]

    (row,) = interop.compare(ours, module, x).outputs
    assert row.agrees and row.dtype == "bfloat16" and row.bound > 2**-7 > row.difference > 0
    deep = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(2000)))
    with pytest.raises(ValueError, match="bfloat16 is too coarse .* Compare both in float32"):
        interop.compare(lambda x: x, deep, x, dtype="bfloat16")


def test_rounding_is_within_the_bound_and_little_more_is_not():
    """Float32 against float64: 30 layers of 64 numbers, with residuals."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(30)]
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList(layers)

    def forward(x):
        for layer in layers:
            x = x + torch.tanh(layer(x))
        return x

    module.forward = forward
    held = [tuple(p.detach().double().numpy() for p in layer.parameters()) for layer in layers]
    x = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32)
    exact = x.astype(np.float64)
    for kernel, bias in held:
        exact = exact + np.tanh(exact @ kernel.T + bias)
    (row,) = interop.compare(lambda _: exact, module, x).outputs
    assert row.bound / 100 < row.difference < row.bound
    (row,) = interop.compare(lambda _: exact * (1 + 2e-4), module, x).outputs
    assert not row.agrees


def test_mistakes():
    module, options = Layers(), {"submodules": True}
    with pytest.raises(ValueError, match="'the only one'; of `module` 'y', 'hidden.0'"):
        interop.compare(jnp.tanh, module, X)
    with pytest.raises(ValueError, match="`output` 'z' is none of 'y', 'hidden.0'"):
        interop.compare(jnp.tanh, module, X, output="z")
    with pytest.raises(ValueError, match=r"needs the outputs .* capture_intermediates=True"):
        interop.compare(jnp.tanh, module, X, output="y", **options)
    with pytest.raises(ValueError, match="ours were called 'a'; those of PyTorch 'layers.0'"):
        interop.compare(lambda x: (x, {"a": x}), module, X, output="y", **options)
    with pytest.raises(ValueError, match="`inputs` hold integers that int32 lacks"):
        interop.compare(lambda x: x, torch.nn.Identity(), np.array([2**40]))
    for wrong in ((jnp.tanh, jnp.tanh), (module, module), (None, module)):
        with pytest.raises(TypeError, match="must be a"):
            interop.compare(*wrong, X)
    other = interop.compare(lambda x: x[:3], torch.nn.Identity(), X)
    assert not other.agrees and "shape in PyTorch: [5, 4]" in str(other)
