"""Propose rules that map tensors of a checkpoint to parameters, from names and shapes alone.

1. Names are parsed into modules (`names`). Two modules *fit* if they have the same roles (weight,
   bias, running mean and variance) and known steps convert each shape to the other.
2. Of the modules that fit, the most similar are paired (`pairs`). Ties remain undecided.
3. If several steps are possible for a tensor, it takes the steps of the other tensors of its kind;
   if there are none, the usual steps for the parameter's name.
4. Rules that differ only in numbers are merged (`generalize`).

Undecided parameters are reported rather than guessed, also where a tensor fuses query, key and
value in an unknown layout (`fused`). `assumed` lists the rules that rest on names that
are similar but not the same, and that the user must confirm.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from jaxzero._text import matches
from jaxzero._without_gc import without_gc
from jaxzero.interop._rules import (
    RotaryPairs,
    Rule,
    Shapes,
    Split,
    Transpose,
    WeightNorm,
    pattern_of,
    patterns_in,
    rules_in,
    uses_of,
)
from jaxzero.interop._tensors import named_leaves, other_names

from .derived import from_tensors, parts_of, stacks_of, tensors_of, with_weights
from .fused import find_fused
from .layouts import Layer, Question, flattened, is_meta, layer_of, rotary, text_of
from .names import Module, modules_of
from .pairs import Pair, Steps, misfits_of, pair
from .proposal import Proposal, generalize

# torch's update counter of running statistics, and the state of Transformer Engine's fp8.
_LEFT_OUT = ("*num_batches_tracked", "*_extra_state")


@without_gc()  # garbage collection takes a third of the time with a hundred thousand names
def match(
    tree: Any,
    source: Mapping[str, Any],
    *,
    rules: Iterable[Rule] = (),
    ignore: Iterable[str] = (),
) -> Proposal:
    """Propose which parameter comes from which tensor, from names and shapes.

    It supports linear layers, convolutions and attention of Flax, Equinox and PyTorch, also fused
    as in `torch.nn.MultiheadAttention`; norms with and without running statistics; embeddings;
    layers that are numbered differently, or stacked for a scan; torch's weight norm. The proposal
    asks what names and shapes leave open: in which order an image was flattened beside a linear
    layer, which elements rotary embeddings pair, and the layout of fused attention. A transposed
    convolution, which torch lays out differently, is recognized by its name only. Review the
    proposed rules and keep them in your code.

    Args:
        tree: parameters of the model: arrays or `jax.ShapeDtypeStruct`s.
        source: tensors of the checkpoint, by name: from `open_checkpoint`, or a `state_dict`.
        rules: rules that are known. They are kept, and rules are proposed for all other parameters.
        ignore: patterns (with `*`) for names of tensors that are not parameters.

    Raises:
        ValueError: one of `rules` matches no parameter of `tree`, or two match the same.
    """
    leaves = named_leaves(tree).leaves
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    if not isinstance(source, Mapping):
        raise ValueError(
            f"`source` must be tensors by name, as `interop.open_checkpoint` gives; got {source!r}."
        )
    given_rules = rules_in(rules)
    ignore = (*patterns_in(ignore), *_LEFT_OUT)
    out = [name for name in source if matches(name, ignore)]
    # What is left out may be no tensor, as the extra state of a module is.
    tensors = {name: x for name, x in source.items() if hasattr(x, "shape") or name not in out}
    held = {name: tuple(x.shape) for name, x in tensors.items()}
    known_paths, known_names, known_layers = _covered(given_rules, shapes, held)
    ours = modules_of({path: shapes[path] for path in leaves if path not in known_paths})
    left = {name: x for name, x in held.items() if name not in {*out, *known_names}}
    weights, normed = with_weights(left)
    single = modules_of(weights)
    with_stacks = [*single, *stacks_of(single)]
    parts = parts_of(single)
    pairs, rivals = pair(ours, [*with_stacks, *parts, *stacks_of(parts)])
    order = {path: number for number, path in enumerate(leaves)}
    pairs.sort(key=lambda each: min(order[path] for path in each.ours.members))
    decided, reasons, open_steps = _settle(pairs)
    asked = flattened(decided, known_layers, with_weights(held)[0])
    asked |= rotary(decided, held, leaves)
    decided_rules, open_parts = _rules(decided, asked)
    used = {name for each in pairs for name in each.theirs.members}.union(known_names)
    paired = {each.ours.name for each in pairs}
    lone = [module for module in ours if module.name not in paired]
    left_over = _unused(with_stacks, used)
    fused = find_fused(lone, left_over, list(leaves), interleaved=is_meta([*held, *leaves]))
    unused = _unused(with_stacks, used | fused.members)
    used |= fused.members
    used.update(*(tensors_of(name, old=how.old) for name, how in normed.items() if name in used))
    made = known_paths.union(*(rule.ours for rule in decided_rules))
    undecided = rivals | open_steps | open_parts | fused.undecided | _open_pairs(asked)
    undecided = {path: undecided[path] for path in leaves if path not in made}
    proposed = (*given_rules, *generalize(from_tensors(decided_rules, normed), leaves))
    tied = [name for name in other_names(source, used) if name not in out]
    return Proposal(
        rules=proposed,
        assumed=_by_rule(reasons, asked, proposed),
        fused=fused.layouts,
        rotary=_layouts(asked, leaves),
        undecided=undecided,
        misfits=misfits_of(
            [module for module in lone if all(undecided.get(x) == () for x in module.members)],
            unused,
        ),
        unused=tuple(name for name in source if name not in {*used, *out, *tied}),
        left_out=(*out, *tied),
    )


def _unused(modules: Iterable[Module], used: set[str]) -> list[Module]:
    return [module for module in modules if used.isdisjoint(module.members)]


def _covered(
    rules: tuple[Rule, ...], shapes: Shapes, held: Shapes
) -> tuple[set[str], set[str], list[Layer]]:
    """Return what the caller's rules already cover.

    Args:
        rules: the rules of the caller.
        shapes: path -> shape of the parameters.
        held: name -> shape of the tensors in the checkpoint.

    Returns:
        Paths of the parameters that the rules match; names of the tensors that the rules use; and
        the linear layers and convolutions whose weights are among these tensors.
    """
    paths: set[str] = set()
    for rule in rules:
        patterns = [pattern_of(each) for each in rule.ours]
        matched = {path for path in shapes if any(each.fullmatch(path) for each in patterns)}
        if not matched:
            raise ValueError(f"{rule} matches no parameter of the tree. Correct its `ours`.")
        paths |= matched
    uses = uses_of(rules, {path: shapes[path] for path in paths})
    steps_of = {
        name: use.rule.steps for use in uses for names in use.theirs.values() for name in names
    }
    layers = (layer_of(x, held[x], steps) for x, steps in steps_of.items() if x in held)
    return paths, set(steps_of), [each for each in layers if each is not None]


def _open_pairs(asked: Mapping[str, Question]) -> dict[str, tuple[str, ...]]:
    return {
        path: (f"{each.name!r} with rotary pairs in one of two layouts",)
        for path, each in asked.items()
        if each.steps is None
    }


def _layouts(asked: Mapping[str, Question], paths: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return two possible rules for each query or key whose number of heads is unknown.

    Args:
        asked: path of a parameter -> the question about its layout.
        paths: paths of all parameters.

    Returns:
        Pattern of the tensors' names -> rule with rotary pairs reordered, and rule without, as
        text.
    """
    rules = [Rule(path, x.name, *x.other) for path, x in asked.items() if x.steps is None]
    return {
        rule.theirs[0]: (text_of(rule), str(_without_pairs(rule)))
        for rule in generalize(rules, paths)
    }


def _without_pairs(rule: Rule) -> Rule:
    steps = (step for step in rule.steps if not isinstance(step, RotaryPairs))
    return Rule(rule.ours, rule.theirs, *steps)


def _by_rule(
    reasons: Mapping[str, str], asked: Mapping[str, Question], rules: Iterable[Rule]
) -> dict[Rule, str]:
    """Return rule -> why it may be wrong, from the reasons for the parameters that it matches.

    Args:
        reasons: path of a parameter -> why its pair or its steps may be wrong.
        asked: path of a parameter -> the question about its layout.
        rules: the proposed rules.
    """
    assumed = {}
    for rule in rules:
        patterns = [pattern_of(each) for each in rule.ours]

        def speaks_of(path: str, patterns: list = patterns) -> bool:
            return any(each.fullmatch(path) for each in patterns)

        whys = [why for path, why in reasons.items() if speaks_of(path)]
        for path, question in asked.items():
            if question.steps is not None and speaks_of(path):
                computed = [step for step in rule.steps[:1] if isinstance(step, WeightNorm)]
                other = Rule(rule.ours, rule.theirs, *computed, *question.other)
                whys.append(f"{question.why}; or else {text_of(other)}")
        if whys:
            assumed[rule] = "; ".join(dict.fromkeys(whys))
    return assumed


def _settle(
    pairs: list[Pair],
) -> tuple[list[tuple[Pair, dict[str, Steps]]], dict[str, str], dict[str, tuple[str, ...]]]:
    """Choose the steps of each pair of modules.

    If several sequences of steps are possible for a tensor, it takes the steps that the other
    tensors of its kind take. Tensors are of one kind if they have equally many dimensions, and if
    the paths of their parameters have the same last component. Only whether the steps transpose is
    compared.

    Returns:
        Pairs with steps for each role; path -> why its pair or its steps may be wrong; and path ->
        the possible steps, for parameters whose steps are not decided.
    """
    habits: dict[tuple[str, int], set[bool]] = collections.defaultdict(set)
    for paired in pairs:
        for role, ways in paired.ways.items():
            if len(ways) == 1:
                habits[_kind(paired, role)].add(_is_transposed(ways[0]))
    decided, assumed, undecided = [], {}, {}
    for paired in pairs:
        steps = {}
        for role, ways in paired.ways.items():
            path, name = paired.ours.tensors[role].name, paired.theirs.tensors[role].name
            habit = habits[_kind(paired, role)]
            chosen = _choose(ways, habit)
            if chosen is None:
                undecided[path] = tuple(f"{name!r} through {list(way)}" for way in ways)
            else:
                steps[role] = chosen
            why = [paired.doubt] if paired.doubt is not None else []
            if not habit:  # then there are two ways at least: a single one would be the habit
                why.append(f"the shape also allows the steps {list(ways[1])}")
            if why:
                assumed[path] = "; ".join(why)
        decided.append((paired, steps))
    return decided, assumed, undecided


def _choose(ways: list[Steps], habit: set[bool]) -> Steps | None:
    if not habit:  # no other tensor of the kind is decided: the usual steps for the name
        return ways[0]
    usual = [way for way in ways if _is_transposed(way) in habit]
    return usual[0] if len(usual) == 1 else None


def _kind(each: Pair, role: str) -> tuple[str, int]:
    return each.ours.tensors[role].name.rpartition(".")[2], len(each.theirs.tensors[role].shape)


def _is_transposed(steps: Steps) -> bool:
    return any(isinstance(step, Transpose) for step in steps)


def _rules(
    decided: list[tuple[Pair, dict[str, Steps]]], asked: Mapping[str, Question]
) -> tuple[list[Rule], dict[str, tuple[str, ...]]]:
    rules, undecided = [], {}
    parts: dict[tuple[str, Steps], dict[int, str]] = collections.defaultdict(dict)
    for paired, steps in decided:
        for role, chosen in steps.items():
            path, name = paired.ours.tensors[role].name, paired.theirs.tensors[role].name
            if path in asked:
                chosen = asked[path].steps
            if chosen is None:
                continue
            if paired.theirs.part is None:
                rules.append(Rule(path, name, *chosen))
            else:
                parts[name, chosen][paired.theirs.part] = path
    for (name, chosen), paths in parts.items():
        if len(paths) == 3:
            ours = tuple(paths[part] for part in range(3))
            rules.append(Rule(ours, name, Split(0, 3), *chosen))
        else:
            undecided |= {path: (f"a third of {name!r}",) for path in paths.values()}
    return rules, undecided


def settled(
    tree: Any,
    source: Any,
    *,
    rules: Iterable[Rule] | None,
    accept: str | Rule | Iterable[str | Rule],
    ignore: Iterable[str],
) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """Return the rules that a caller has given, or else the rules that `match` proposes.

    Args:
        tree: parameters of the model.
        source: tensors of the checkpoint by name; not used with `rules`.
        rules: the caller's rules; None to propose some.
        accept, ignore: as in `load_into`.

    Raises:
        ValueError: a proposed rule is neither sure nor accepted, or something is undecided.

    Returns:
        Rules, and patterns for names of tensors that are not parameters.
    """
    ignore = patterns_in(ignore)
    if rules is not None:
        if accept:
            raise ValueError("`accept` is for rules that are proposed, when `rules` is left out.")
        return rules_in(rules), ignore
    if isinstance(accept, str | Rule) or not isinstance(accept, Iterable):
        given = (accept,)
    else:
        given = tuple(accept)
    given_rules = [each for each in given if isinstance(each, Rule)]
    patterns = [each for each in given if isinstance(each, str)]
    if len(given_rules) + len(patterns) != len(given):
        raise ValueError(
            "`accept` takes rules, and patterns for paths of parameters such as 'layers.*' ('*' "
            f"for all); got {accept!r}."
        )
    paths = named_leaves(tree).leaves
    for pattern in patterns:
        if not any(matches(path, [pattern]) for path in paths):
            raise ValueError(
                f"{pattern!r} in `accept` matches no parameter. Paths are such as "
                f"{next(iter(paths), '(the tree is empty)')!r}."
            )
    proposal = match(tree, source, rules=given_rules, ignore=ignore)
    proposal.raise_if_undecided(accept=patterns)
    return proposal.rules, (*ignore, *proposal.left_out)
