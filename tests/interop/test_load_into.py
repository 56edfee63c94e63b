"""Models of torch in models of Flax and Equinox, by rules and by rules that were found: outputs."""

from __future__ import annotations

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxzero as jz
from jaxzero import interop
from jaxzero.interop import Flatten, Rule, Transpose, Unflatten, match
from jaxzero.interop._tensors.lazy import ArrayTensor
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
    with pytest.warns(UserWarning, match="`Dense_1` is '3', by shape and number alone"):
        loaded = interop.load_into(variables, tensors_of(model))
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
    assert found.assumed == (
        "`final_norm` is 'norm', whose name is the most alike",
        "`token_embed` is 'embed', whose name is the most alike",
    )
    assert len(found.rules) < 20, "layers are numbers of one rule"
    interop.save_tensors(held, tmp_path / "torch")
    zero = jz.Zero(jz.make_mesh(nodes=2))
    with pytest.warns(UserWarning, match="`token_embed` is 'embed', whose name is the most alike"):
        loaded = interop.load_into(state, tmp_path / "torch")
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
    assert found.assumed == ("`left` is 'x', by shape and number alone",)


def test_names_that_are_alike_and_do_not_say_the_same_are_told():
    # Of Llama's norms the other one is right.
    tree = {name: {"scale": shape(4)} for name in ("attention_norm", "mlp_norm")}
    found = match(tree, zeros(input_layernorm__weight=(4,), post_attention_layernorm__weight=(4,)))
    assert Rule("attention_norm.scale", "post_attention_layernorm.weight") in found.rules
    assert len(found.assumed) == 2
    told = "`attention_norm` is 'post_attention_layernorm', whose name is the most alike"
    assert told in found.assumed
    found = match(
        {"layers": [tree] * 3},
        zeros(
            **{
                f"h__{layer}__{name}__weight": (4,)
                for layer in range(3)
                for name in ("input_layernorm", "post_attention_layernorm")
            }
        ),
    )
    assert len(found.assumed) == 2, "once for all layers"


def test_nothing_fits_and_nothing_is_left():
    found = match({"up": {"kernel": shape(3, 4)}}, zeros(up__weight=(5, 3), more=(2,)))
    assert (dict(found.undecided), found.unused) == ({"up.kernel": ()}, ("up.weight", "more"))
    tree = {"up": {"kernel": shape(3, 4)}}
    held = zeros(up__weight=(4, 3), more=(2,))
    with pytest.raises(ValueError, match="No parameter seems to come from 'more'.*`ignore`"):
        interop.load_into(tree, held)
    assert interop.load_into(tree, held, ignore=["mor*"])["up"]["kernel"].shape == (3, 4)


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
    told = ("`out.kernel` is 'out.weight' through [Transpose()], by its name",)
    assert found.assumed == (told if len(other) == 1 else ())


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
