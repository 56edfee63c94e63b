"""Building blocks of the rule tables: rules of common modules, and of stacked layers."""

from collections.abc import Iterable

from jaxzero.interop._rules import Rule, Transpose

LAYER = "layers.{i}"  # path of a layer in our tree, if layers are a list


def embedding(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Rule of an embedding table."""
    return (Rule(f"{ours}.embedding", f"{theirs}.weight"),)


def linear(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Rules of a linear layer: `torch.nn.Linear` stores `[out, in]`, our kernel is `[in, out]`."""
    return (
        Rule(f"{ours}.kernel", f"{theirs}.weight", Transpose()),
        Rule(f"{ours}.bias", f"{theirs}.bias"),
    )


def norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Rules of a LayerNorm, or of an RMSNorm, which has no bias."""
    return (
        Rule(f"{ours}.scale", f"{theirs}.weight"),
        Rule(f"{ours}.bias", f"{theirs}.bias"),
    )


def stacked(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Convert rules for a list of layers to rules for stacked layers, by dropping our `{i}`."""
    return tuple(
        Rule(tuple(path.replace(LAYER, "layers") for path in rule.ours), rule.theirs, *rule.steps)
        for rule in rules
    )
