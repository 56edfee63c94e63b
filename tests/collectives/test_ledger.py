"""Names that collectives have in a compiled program."""

import jax
import pytest

from jaxzero._collectives.ledger import labelled


@pytest.mark.parametrize(
    ("names", "scope"),
    [
        (["head"], "gather/head"),
        (["decoder.layers.3.up", "decoder.layers.3.norm.scale"], "gather/decoder.layers.3"),
        (["layers.up[i]", "layers.down[i]"], "gather/layers[i]"),
        (["layers.up[i]", "layers.up[i]"], "gather/layers.up[i]"),
        (["layers.up[i][i]", "layers.down[i]"], "gather/layers[i]"),
        (["embed", "layers.up[i]", "head"], "gather/embed+2"),
        ([], "gather/whole_leaves"),
    ],
)
def test_several_leaves_are_called_by_what_they_share(names, scope):
    def gather(x):
        with labelled("weights", *names):
            return x + 1

    text = str(jax.jit(gather).lower(1.0).compile().as_text())
    assert f"/jaxzero/{scope}/add" in text
