"""What the tables of all families are made of: rules of one module, and of a stack of layers."""

from collections.abc import Iterable

from jaxzero.interop._rules import Rule, Transpose

LAYER = "layers.{i}"  # of ours, in a list


def embedding(ours: str, theirs: str) -> tuple[Rule, ...]:
    """A table of vectors."""
    return (Rule(f"{ours}.embedding", f"{theirs}.weight"),)


def linear(ours: str, theirs: str) -> tuple[Rule, ...]:
    """A projection: `torch.nn.Linear` keeps `[out, in]`, ours is `[in, out]`."""
    return (
        Rule(f"{ours}.kernel", f"{theirs}.weight", Transpose()),
        Rule(f"{ours}.bias", f"{theirs}.bias"),
    )


def norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    """LayerNorm, or RMSNorm, which has no bias."""
    return (
        Rule(f"{ours}.scale", f"{theirs}.weight"),
        Rule(f"{ours}.bias", f"{theirs}.bias"),
    )


def stacked(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The same rules for layers that are one stack here: without `{i}` on our side."""
    return tuple(
        Rule(tuple(path.replace(LAYER, "layers") for path in rule.ours), rule.theirs, *rule.steps)
        for rule in rules
    )
