"""Building blocks of the rule tables: rules of common modules, and of stacked layers.

A rule that matches no parameter is ignored, so one table serves models with and without biases.
"""

from collections.abc import Iterable

from jaxzero.interop._rules import Rule, Step, Transpose

LAYER = "layers.{i}"  # path of a layer in our tree, if layers are a list
QUERY_KEY_VALUE = tuple(f"{LAYER}.attention.{part}" for part in ("query", "key", "value"))
GATE_UP = (f"{LAYER}.mlp.gate", f"{LAYER}.mlp.up")


def embedding(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Return the rule that maps an embedding table `theirs` to the module `ours`."""
    return (Rule(f"{ours}.embedding", f"{theirs}.weight"),)


def linear(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Return the rules of a linear layer, whose weight `[out, in]` in torch is transposed."""
    return (
        Rule(f"{ours}.kernel", f"{theirs}.weight", Transpose()),
        Rule(f"{ours}.bias", f"{theirs}.bias"),
    )


def fused(ours: Iterable[str], theirs: str, split: Step) -> tuple[Rule, ...]:
    """Return the rules of linear layers that the checkpoint fuses into one layer, `theirs`.

    The step `split` divides the outputs of the fused layer among the modules `ours`.
    """
    ours = tuple(ours)
    return (
        Rule(tuple(f"{each}.kernel" for each in ours), f"{theirs}.weight", split, Transpose()),
        Rule(tuple(f"{each}.bias" for each in ours), f"{theirs}.bias", split),
    )


def attention(theirs: str, query: str, key: str, value: str, output: str) -> tuple[Rule, ...]:
    """Return the rules of attention's four projections.

    `theirs` is the module of attention in the checkpoint; the other arguments are the names of its
    projections.
    """
    names = {"query": query, "key": key, "value": value, "output": output}
    return tuple(
        rule
        for ours, name in names.items()
        for rule in linear(f"{LAYER}.attention.{ours}", f"{theirs}.{name}")
    )


def norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Return the rules of a LayerNorm; they also fit an RMSNorm, which has no bias."""
    return (Rule(f"{ours}.scale", f"{theirs}.weight"), Rule(f"{ours}.bias", f"{theirs}.bias"))


def stacked(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Convert rules for a list of layers to rules for stacked layers.

    The paths of parameters lose their `{i}`; the names of tensors keep it.
    """
    return tuple(
        Rule(tuple(path.replace(LAYER, "layers") for path in rule.ours), rule.theirs, *rule.steps)
        for rule in rules
    )
