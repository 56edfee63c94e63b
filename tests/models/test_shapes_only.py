"""A model that is built with `ShapesOnly` has the same shapes as one built with `nnx.Rngs`."""

import jax
import pytest
from flax import nnx

from jaxzero.models import (
    Decoder,
    DecoderConfig,
    ExpertsConfig,
    ModernBert,
    ModernBertConfig,
    Rope,
    ShapesOnly,
)

DECODER = DecoderConfig(
    vocabulary_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=4,
    num_heads=2,
    num_key_value_heads=1,
    head_size=4,
    experts=ExpertsConfig(
        num_experts=3, num_experts_per_token=2, intermediate_size=6, dense_layers=(0, 2)
    ),
)
MODERN_BERT = ModernBertConfig(
    vocabulary_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=3,
    num_heads=2,
    rope=Rope(rotary_size=4),
    local_rope=Rope(rotary_size=4),
)


@pytest.mark.parametrize(("model", "config"), [(Decoder, DECODER), (ModernBert, MODERN_BERT)])
def test_copied_layers_have_the_shapes_of_their_own(model, config):
    fast = nnx.eval_shape(lambda: model(config, rngs=ShapesOnly()))
    slow = nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0)))
    fast_params, slow_params = nnx.state(fast, nnx.Param), nnx.state(slow, nnx.Param)
    assert jax.tree.structure(fast_params) == jax.tree.structure(slow_params)
    same = jax.tree.map(
        lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype), fast_params, slow_params
    )
    assert jax.tree.all(same)
    assert type(fast.layers[0]) is type(slow.layers[0])


def test_copied_layers_share_no_parameters():
    model = nnx.eval_shape(lambda: Decoder(DECODER, rngs=ShapesOnly()))
    params = jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    kernels = [layer.attention.query.kernel for layer in model.layers]
    assert len({id(kernel) for kernel in kernels}) == DECODER.num_layers
    assert len(params) == len({id(x) for x in params})
