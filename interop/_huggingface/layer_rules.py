"""Building blocks of the rule tables: rules of common modules, and of stacked layers.

A rule that matches no parameter is ignored, so one table serves models with and without biases.
"""

from collections.abc import Iterable

from jaxzero.interop._rules import Rule, Step, Transpose

LAYER = "layers.{i}"  # path of a layer in our tree, if layers are a list
QUERY_KEY_VALUE = tuple(f"{LAYER}.attention.{part}" for part in ("query", "key", "value"))
GATE_UP = (f"{LAYER}.mlp.gate", f"{LAYER}.mlp.up")


def embedding(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Rule of an embedding table."""
    return (Rule(f"{ours}.embedding", f"{theirs}.weight"),)


def linear(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Rules of a linear layer: `torch.nn.Linear` stores `[out, in]`, our kernel is `[in, out]`."""
    return (
        Rule(f"{ours}.kernel", f"{theirs}.weight", Transpose()),
        Rule(f"{ours}.bias", f"{theirs}.bias"),
    )


def fused(ours: Iterable[str], theirs: str, split: Step) -> tuple[Rule, ...]:
    """Rules of linear layers that are fused in the checkpoint; `split` divides their outputs."""
    ours = tuple(ours)
    return (
        Rule(tuple(f"{each}.kernel" for each in ours), f"{theirs}.weight", split, Transpose()),
        Rule(tuple(f"{each}.bias" for each in ours), f"{theirs}.bias", split),
    )


def attention(theirs: str, query: str, key: str, value: str, output: str) -> tuple[Rule, ...]:
    """Rules of the four projections of attention, whose names follow `theirs`."""
    names = {"query": query, "key": key, "value": value, "output": output}
    return tuple(
        rule
        for ours, name in names.items()
        for rule in linear(f"{LAYER}.attention.{ours}", f"{theirs}.{name}")
    )


def norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Rules of a LayerNorm, or of an RMSNorm, which has no bias."""
    return (Rule(f"{ours}.scale", f"{theirs}.weight"), Rule(f"{ours}.bias", f"{theirs}.bias"))


def stacked(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Convert rules for a list of layers to rules for stacked layers, by dropping our `{i}`."""
    return tuple(
        Rule(tuple(path.replace(LAYER, "layers") for path in rule.ours), rule.theirs, *rule.steps)
        for rule in rules
    )
