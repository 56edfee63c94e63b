"""Models of torch in models of Flax and Equinox, by rules and by rules that were found: outputs."""

from __future__ import annotations

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

import jaxzero as jz
from jaxzero import interop
from jaxzero.interop import ArrayTensor, Flatten, Rule, Transpose, Unflatten, match
from tests.models.tiny_models import read


def tensors_of(model) -> dict[str, ArrayTensor]:
    """The tensors of a torch model, as a checkpoint would hold them."""
    return {name: ArrayTensor(x.numpy(), name) for name, x in model.state_dict().items()}


def same(ours, theirs):
    # Sums of at most 100 products in float32, in another order, through at most 10 layers.
    theirs = theirs.detach().numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1000 * 2**-24 * np.abs(theirs).max())


def with_noise(model):
    """The model in which no bias is 0 and no scale is 1, so that none can stand for another."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def torch_mlp():
    torch = pytest.importorskip("torch", reason="needs torch")
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(6, 16),
        torch.nn.LayerNorm(16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 16),
        torch.nn.LayerNorm(16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 3),
    ]
    return with_noise(torch.nn.Sequential(*layers))


class LinenMLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = linen.Dense(16)(x)
            x = linen.relu(linen.LayerNorm(epsilon=1e-5, use_fast_variance=False)(x))
        return linen.Dense(3)(x)


def test_an_mlp_in_linen_by_rules_that_were_found():
    model = torch_mlp()
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    variables = jax.eval_shape(LinenMLP().init, jax.random.key(0), x)
    with pytest.raises(ValueError, match="'3.weight', .*  # confirm: by shape and number alone"):
        interop.load_into(variables, tensors_of(model))
    loaded = interop.load_into(variables, tensors_of(model), accept="*")
    import torch

    same(LinenMLP().apply(read(loaded), x), model(torch.from_numpy(x)))


def torch_conv_net():
    torch = pytest.importorskip("torch", reason="needs torch")
    torch.manual_seed(0)

    class ConvNet(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = torch.nn.Conv2d(3, 8, 3)
            self.bn1 = torch.nn.BatchNorm2d(8)
            self.conv2 = torch.nn.Conv2d(8, 8, (3, 2))
            self.bn2 = torch.nn.BatchNorm2d(8)
            self.fc = torch.nn.Linear(8 * 2 * 3, 5)

        def forward(self, x):
            x = torch.relu(self.bn1(self.conv1(x)))
            x = torch.relu(self.bn2(self.conv2(x)))
            return self.fc(x.flatten(1))

    model = ConvNet()
    model(3 * torch.randn(4, 3, 6, 6) + 1)  # running statistics that are not 0 and 1
    return with_noise(model)


class NNXConvNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.convs = nnx.List(
            [
                nnx.Conv(3, 8, (3, 3), padding="VALID", rngs=rngs),
                nnx.Conv(8, 8, (3, 2), padding="VALID", rngs=rngs),
            ]
        )
        self.norms = nnx.List(
            [nnx.BatchNorm(8, use_running_average=True, epsilon=1e-5, rngs=rngs) for _ in range(2)]
        )
        self.head = nnx.Linear(8 * 2 * 3, 5, rngs=rngs)

    def __call__(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = jax.nn.relu(norm(conv(x)))
        return self.head(x.reshape(len(x), -1))


def test_a_conv_net_in_nnx_whose_head_needs_a_rule_by_hand():
    model = torch_conv_net()
    graph, state = nnx.split(nnx.eval_shape(lambda: NNXConvNet(nnx.Rngs(0))))
    found = match(state, tensors_of(model))
    assert found.left_out == ("bn1.num_batches_tracked", "bn2.num_batches_tracked")
    assert not found.undecided and not found.unused
    # torch flattens channels, height, width; the model here height, width, channels.
    head = Rule(
        "head.kernel",
        "fc.weight",
        Unflatten(1, (8, 2, 3)),
        Transpose(2, 3, 1, 0),
        Flatten(0, (2, 3, 8)),
    )
    rules = [rule for rule in found.rules if rule.ours != head.ours] + [head]
    loaded = interop.load_into(
        state, tensors_of(model), rules=rules, ignore=["*.num_batches_tracked"]
    )
    x = np.random.default_rng(0).normal(size=(2, 3, 6, 6)).astype(np.float32)
    import torch

    ours = nnx.merge(graph, read(loaded))(x.transpose(0, 2, 3, 1))
    same(ours, model(torch.from_numpy(x)))
    back = interop.tensors_from(loaded, rules)
    for name, tensor in tensors_of(model).items():
        if name not in found.left_out:
            np.testing.assert_array_equal(back[name].read(), tensor.array, strict=True)


class EquinoxConvNet(eqx.Module):
    """The same layout as in torch, but for a bias that has dimensions for the window."""

    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    fc: eqx.nn.Linear

    def __init__(self, key):
        self.conv1 = eqx.nn.Conv2d(3, 8, 3, key=key)
        self.conv2 = eqx.nn.Conv2d(8, 8, (3, 2), key=key)
        self.fc = eqx.nn.Linear(8 * 2 * 3, 5, key=key)

    def __call__(self, x):
        return self.fc(jax.nn.relu(self.conv2(jax.nn.relu(self.conv1(x)))).reshape(-1))


def test_a_conv_net_in_equinox_by_rules_that_were_found():
    torch = pytest.importorskip("torch", reason="needs torch")
    whole = torch_conv_net()
    model = torch.nn.Sequential(
        whole.conv1, torch.nn.ReLU(), whole.conv2, torch.nn.ReLU(), torch.nn.Flatten(), whole.fc
    )
    named = {name: held for name, held in tensors_of(whole).items() if not name.startswith("bn")}
    params, static = eqx.partition(EquinoxConvNet(jax.random.key(0)), eqx.is_array)
    loaded = interop.load_into(params, named)
    x = np.random.default_rng(0).normal(size=(2, 3, 6, 6)).astype(np.float32)
    ours = jax.vmap(eqx.combine(read(loaded), static))(x)
    same(ours, model(torch.from_numpy(x)))


def torch_transformer():
    torch = pytest.importorskip("torch", reason="needs torch")
    torch.manual_seed(0)

    class Transformer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(11, 8)
            self.pos = torch.nn.Parameter(torch.randn(5, 8))
            self.layers = torch.nn.ModuleList(
                torch.nn.TransformerEncoderLayer(8, 2, 20, batch_first=True) for _ in range(3)
            )
            self.norm = torch.nn.LayerNorm(8)
            self.head = torch.nn.Linear(8, 11, bias=False)

        def forward(self, ids):
            x = self.embed(ids) + self.pos
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    return with_noise(Transformer())


def layer_norm(rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(8, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm1, self.norm2 = layer_norm(rngs), layer_norm(rngs)
        self.linear1 = nnx.Linear(8, 20, rngs=rngs)
        self.linear2 = nnx.Linear(20, 8, rngs=rngs)

    def __call__(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.linear2(jax.nn.relu(self.linear1(x))))


class NNXTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, scanned: bool):
        self.token_embed = nnx.Embed(11, 8, rngs=rngs)
        self.position = nnx.Param(jnp.zeros((5, 8)))
        if scanned:
            self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(Block))(rngs)
        else:
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.final_norm = layer_norm(rngs)
        self.head = nnx.Linear(8, 11, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.token_embed(ids) + self.position[...][None]
        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                x = block(x)
        else:
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.blocks
            )
        return self.head(self.final_norm(x))


@pytest.mark.parametrize("scanned", [False, True])
def test_a_transformer_in_nnx_by_rules_that_were_found(scanned: bool, tmp_path):
    model = torch_transformer()
    held = tensors_of(model)
    graph, state, rest = nnx.split(
        nnx.eval_shape(lambda: NNXTransformer(nnx.Rngs(0), scanned)), nnx.Param, ...
    )
    found = match(state, held)
    assert not (found.undecided or found.unused)
    doubtful = {path for rule in found.assumed for path in rule.ours}
    assert doubtful == {"final_norm.scale", "final_norm.bias", "token_embed.embedding"}
    assert len(found.rules) < 20, "layers are numbers of one rule"
    interop.save_tensors(held, tmp_path / "torch")
    zero = jz.Zero(jz.make_mesh(nodes=2))
    loaded = interop.load_into(state, tmp_path / "torch", accept=["final_norm.*", "token_embed.*"])
    params = zero.shard(loaded)
    import torch

    ids = np.random.default_rng(0).integers(0, 11, (2, 5))
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
    ours = nnx.merge(graph, zero.unshard(params), rest)(jnp.asarray(ids, jnp.int32))
    same(ours, model(torch.from_numpy(ids)))
    written = interop.tensors_from(params, found.rules, like=loaded)
    interop.save_tensors(written, tmp_path / "back", max_shard_bytes=1000)
    back = interop.tensors_in(tmp_path / "back")
    assert back.keys() == held.keys()
    for name, tensor in held.items():
        np.testing.assert_array_equal(back[name].read(), tensor.array, strict=True)


def test_a_dtype_that_cannot_hold_a_value():
    source = {
        "w": ArrayTensor(np.array([1.0, 1e5], np.float32), "'w'"),
        "i": ArrayTensor(np.array([7, 2**40]), "'i'"),
    }
    tree = {
        "w": jax.ShapeDtypeStruct((2,), jnp.float32),
        "i": jax.ShapeDtypeStruct((2,), jnp.int32),
    }
    rules = [Rule("w", "w"), Rule("i", "i")]
    loaded = interop.load_into(tree, source, rules=rules, dtype=jnp.float16)
    assert loaded["w"][:1,] == 1 and loaded["i"][:1,] == 7
    with pytest.raises(ValueError, match=r"'w' holds 100000\.0 \(float32\), which float16 cannot"):
        loaded["w"].read()
    with pytest.raises(ValueError, match=r"'i' holds 1099511627776 \(int64\), which int32 cannot"):
        jz.Zero(jz.make_mesh(nodes=2)).shard(loaded)


def test_a_state_dict_in_memory():
    torch = pytest.importorskip("torch", reason="needs torch")
    tree = {
        "w": jax.ShapeDtypeStruct((3, 2), jnp.float32),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
    }
    rules = [Rule("w", "w"), Rule("n", "n")]
    values = torch.tensor([[0.5, -3.0], [1.25, 448.0], [0.0, 2.0]])  # exact in 8 bits
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        for w in (values.to(dtype), values.to(dtype).t().contiguous().t()):
            tensors = {"w": torch.nn.Parameter(w), "n": torch.tensor(7)}
            loaded = interop.load_into(tree, tensors, rules=rules)
            assert str(loaded["w"].dtype) == str(dtype).removeprefix("torch.")
            np.testing.assert_array_equal(loaded["w"].read().astype(np.float32), values.numpy())
            assert loaded["n"].read() == 7
    with_extra = {"w": values, "n": torch.tensor(7), "_extra_state": {"scale": 1.0}}
    assert len(interop.match(tree, with_extra).rules) == 2
    with pytest.raises(ValueError, match="'w' .* is no dense tensor .*Convert it"):
        interop.load_into(tree, {"w": values.to_sparse(), "n": torch.tensor(7)}, rules=rules)


def test_modules_and_parts_of_tensors_are_refused(monkeypatch):
    torch = pytest.importorskip("torch", reason="needs torch")
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    tree, rules = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, [Rule("w", "weight")]
    with pytest.raises(TypeError, match=r"`source` must be .*LayerNorm.*`state_dict\(\)`"):
        interop.load_into(tree, torch.nn.LayerNorm(2), rules=rules)
    with pytest.raises(TypeError, match="`weight` is of PyTorch, a Tensor.*`zero.shard"):
        jz.Zero(jz.make_mesh(nodes=2)).shard(torch.nn.LayerNorm(2).state_dict())

    class DTensor(torch.Tensor):  # that of PyTorch needs processes
        def full_tensor(self):
            raise NotImplementedError

    part = torch.ones(2).as_subclass(DTensor)
    with pytest.raises(ValueError, match="'weight' in `source` is a DTensor.*checkpoint.save"):
        interop.load_into(tree, {"weight": part}, rules=rules)
