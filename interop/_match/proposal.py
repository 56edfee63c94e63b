"""The result of `match`: proposed rules, those to be confirmed, and undecided parameters."""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxzero._text import escaped, first_names, matches, shown
from jaxzero.interop._rules import Rule, pattern_of

_NUMBER = re.compile(r"\d+")
_LETTERS = "nmlk"  # distinct from the letters "ij" that `derived` uses for stacks
_SHOWN = 8  # the most rules that an error lists


def generalize(rules: Sequence[Rule], paths: Iterable[str]) -> tuple[Rule, ...]:
    """Merge rules that differ only in numbers, by replacing the numbers by variables.

    A number is replaced if it occurs on both sides of a rule. Rules are merged only if, of all
    `paths`, the merged rule matches exactly those that the single rules match together.
    """
    paths = list(paths)
    rules = list(rules)
    for letter in _LETTERS:
        rules, before = _one_variable(rules, letter, paths), rules
        if rules == before:
            break
    return tuple(rules)


def _one_variable(rules: list[Rule], letter: str, paths: list[str]) -> list[Rule]:
    groups: dict[Rule, list[Rule]] = {}
    for rule in rules:
        groups.setdefault(_with_letter(rule, letter), []).append(rule)
    generalized = []
    for general, members in groups.items():
        before = itertools.chain(*(_speaks_of(member, paths) for member in members))
        if _speaks_of(general, paths) == sorted(before):
            generalized.append(general)
        else:
            generalized.extend(members)
    return generalized


def _with_letter(rule: Rule, letter: str) -> Rule:
    """Replace the first number that occurs in all names of a rule by the variable `letter`."""
    numbers = [_NUMBER.findall(name) for name in (*rule.ours, *rule.theirs)]
    shared = set(numbers[0]).intersection(*numbers)
    number = next((each for each in numbers[0] if each in shared), None)
    if number is None:
        return rule

    def general(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            re.sub(rf"(?<!\d){number}(?!\d)", f"{{{letter}}}", name, count=1) for name in names
        )

    return Rule(general(rule.ours), general(rule.theirs), *rule.steps)


def _speaks_of(rule: Rule, paths: list[str]) -> list[str]:
    """Return the paths that a rule matches, sorted."""
    pattern = pattern_of(rule.ours[0])
    return sorted(path for path in paths if pattern.fullmatch(path))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """Proposed rules for `load_into`, and the parameters that could not be decided.

    Attributes:
        rules: rules for the parameters that were decided.
        assumed: each of `rules` that may be wrong -> why: names are similar but not the same, or
            shapes allow another choice. Confirm these rules.
        fused: pattern of names of tensors that fuse query, key and value -> rules as text, one for
            each possible layout. Shapes do not tell which is right.
        rotary: pattern of names of queries and keys whose rotary pairs are in one of two layouts ->
            two rules as text, where `H` stands for a number of heads that shapes do not tell.
        undecided: path of a parameter that no rule covers -> names of tensors it may come from.
        misfits: path of an undecided parameter -> why no tensor fits it, if that is known. Other
            parameters of its module, such as the bias beside a kernel of another shape, are left
            out.
        unused: tensors of the checkpoint that no rule uses.
        left_out: tensors that were ignored, such as torch's `num_batches_tracked`.
    """

    rules: tuple[Rule, ...]
    assumed: Mapping[Rule, str]
    fused: Mapping[str, tuple[str, ...]]
    rotary: Mapping[str, tuple[str, str]]
    undecided: Mapping[str, tuple[str, ...]]
    misfits: Mapping[str, str]
    unused: tuple[str, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        lines = ["rules = (", *(f"    {self._with_reason(rule)}" for rule in self.rules), ")"]
        lines += self._choices(len(self.fused) + len(self.rotary))
        for path, names in self.undecided.items():
            fitting = " or ".join(escaped(name) for name in names)
            fitting = fitting or self.misfits.get(path, "nothing fits")
            lines.append(f"undecided: {escaped(path)}: {fitting}")
        lines += [f"unused: {shown(name)}" for name in self.unused]
        lines += [f"left out: {shown(name)}" for name in self.left_out]
        return "\n".join(lines)

    def raise_if_undecided(self, *, accept: Collection[str] = ()) -> None:
        """Raise unless the rules cover all parameters and tensors, and none has to be confirmed.

        Args:
            accept: patterns (with `*`) for paths of parameters whose assumed rules are right.

        Raises:
            ValueError: the layout of a fused tensor is not known, a parameter is undecided, a
                tensor unused, or a rule is assumed and not accepted. The message has the rules to
                choose from, or to confirm.
        """
        if self.fused or self.rotary:
            raise ValueError(
                "\n".join(self._choices(_SHOWN)) + "\nFind out which one the model that wrote the "
                "checkpoint uses, put its number of attention heads in place of H (of the key's, "
                "if they are fewer), and pass the rule in `accept`. docs/howto/rules.md lists the "
                "layouts of known families."
            )
        if self.undecided:
            path = next(iter(self.misfits or self.undecided))
            names = self.undecided[path]
            fitting = f"may be {first_names(names) if names else 'no tensor at all'}"
            if path in self.misfits:
                fitting = f"fits no tensor: {self.misfits[path]}"
            raise ValueError(
                f"`rules` could not be found for {len(self.undecided)} parameters: "
                f"`{escaped(path)}` {fitting}. "
                "Print `interop.match(tree, source)`, complete its rules, and pass them as `rules`."
            )
        if self.unused:
            raise ValueError(
                f"No parameter seems to come from {first_names(self.unused)}. If that is "
                "right, name them in `ignore`; if not, pass `rules`."
            )
        self._raise_if_assumed(accept)

    def _choices(self, most: int) -> list[str]:
        """Describe the tensors for which the user must choose one of several rules.

        Returns:
            Lines of text, for at most `most` tensors.
        """
        choices = [
            (f"{kind}: {name!r}: {what}", texts)
            for kind, what, layouts in (
                ("fused", _ONE_OF_TWO, self.fused),
                ("rotary", _PAIRS, self.rotary),
            )
            for name, texts in layouts.items()
        ]
        return [
            line for what, texts in choices[:most] for line in (what, *(f"    {x}" for x in texts))
        ]

    def _raise_if_assumed(self, accept: Collection[str]) -> None:
        open_rules = [
            rule for rule in self.assumed if not all(matches(path, accept) for path in rule.ours)
        ]
        if open_rules:
            shown = [f"    {self._with_reason(rule)}" for rule in open_rules[:_SHOWN]]
            if len(open_rules) > _SHOWN:
                shown.append(f"    and {len(open_rules) - _SHOWN} more")
            rules = "\n".join(shown)
            raise ValueError(
                f"{len(open_rules)} of the proposed rules may be wrong:\n{rules}\n"
                "Compare them with the model that wrote the checkpoint. Then pass in `accept` "
                "these rules, corrected where they are wrong, or patterns for the paths of "
                "parameters whose rules are right ('*' for all)."
            )

    def _with_reason(self, rule: Rule) -> str:
        return f"{rule}," + (f"  # confirm: {self.assumed[rule]}" if rule in self.assumed else "")


_ONE_OF_TWO = (
    "query, key and value are fused in this tensor, either each as a whole (`Split`) or head by "
    "head (`SplitHeads`). The shape is the same, so the rule is one of:"
)
_PAIRS = (
    "names of Meta's form, such as `wq` and `tok_embeddings`, mean interleaved rotary pairs; "
    "`jaxzero.models` and transformers rotate halves. `RotaryPairs` converts one to the other, and "
    "shapes do not tell the number of heads. The rule is one of:"
)
