"""Ask for layouts that no shape tells: the order of flattened images, and that of rotary pairs.

torch flattens an image channels first, `[c, h, w]`, and Flax channels last, `[h, w, c]`. A linear
layer that reads one, or whose outputs are reshaped to one, needs its rows reordered. Which layer
that is follows from the numbers of channels and from the order of the layers in the checkpoint.
Whether a model rotates halves or interleaved pairs is known of Meta's names only (`RotaryPairs`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxzero.interop._rules import (
    Flatten,
    RotaryPairs,
    Rule,
    Step,
    Transpose,
    Unflatten,
)

from .names import Tensor, pieces_of, words_of
from .pairs import TRANSPOSED, Pair
from .possible_steps import Steps

Decided = Sequence[tuple[Pair, Mapping[str, Steps]]]
_META = re.compile(r"(^|\.)(wq|wk|wqkv|rope\.freqs|freqs_cis|tok_embeddings)(\.|$)")
_FREQUENCIES = re.compile(r"(^|\.)(rope\.freqs|freqs_cis)$")


class Question(NamedTuple):
    """Two rules for one parameter, of which shapes allow both.

    Attributes:
        name: the tensor.
        steps: those that are proposed; None if they hold an unknown number of heads.
        other: those of the other rule.
        why: what to find out.
    """

    name: str
    steps: Steps | None
    other: Steps
    why: str


class Layer(NamedTuple):
    """A linear layer or a convolution of the checkpoint, in torch's layout."""

    name: str
    inputs: int
    outputs: int
    is_convolution: bool
    is_transposed: bool


def layer_of(name: str, shape: tuple[int, ...], steps: Iterable[Step]) -> Layer | None:
    """The layer of a weight, from the steps that turn it into a kernel; None if it is none."""
    turns = [each for each in steps if isinstance(each, Transpose)]
    if len(shape) == 2:
        return Layer(name, shape[1], shape[0], False, False)
    window = tuple(range(2, len(shape)))
    if len(shape) < 3 or not any(x.dims in ((*window, 1, 0), (*window, 0, 1)) for x in turns):
        return None
    is_transposed = bool(TRANSPOSED.search(name)) or (*window, 0, 1) in [x.dims for x in turns]
    inputs, outputs = shape[:2] if is_transposed else shape[1::-1]
    return Layer(name, inputs, outputs, True, is_transposed)


def flattened(
    decided: Decided, known: Iterable[Layer], order: Sequence[str]
) -> dict[str, Question]:
    """Ask about linear layers beside convolutions, and norms between them.

    Args:
        decided: pairs of modules with the steps of each role.
        known: layers of rules that the caller has given.
        order: names of all tensors, in the order of the checkpoint.

    Returns:
        Path of a parameter -> the question.
    """
    layers = {each.name: each for each in known}
    for each, steps in decided:
        tensor = each.theirs.tensors.get("weight")
        if tensor is None or "weight" not in steps or each.theirs.part is not None:
            continue
        layer = layer_of(_first(each, tensor), tensor.shape, steps["weight"])
        is_table = each.ours.tensors["weight"].name.endswith("embedding")
        if layer is not None and not is_table:
            layers[layer.name] = layer
    if not any(layer.is_convolution for layer in layers.values()):
        return {}
    names, in_order = _ordered(order, layers)
    line = [layers[name] for name in names if name in layers]
    found: dict[str, Question] = {}
    asked: set[str] = set()
    for each, steps in decided:
        tensor = each.theirs.tensors.get("weight")
        layer = tensor and layers.get(_first(each, tensor))
        if layer is None or layer.is_convolution or each.theirs.part is not None:
            continue
        at = line.index(layer)
        image, is_sure = _before(line, at, asked)
        before = image and _Image(image.name, image.outputs, layer.inputs)
        image = _after(line, at, in_order)
        after = image and _Image(image.name, image.inputs, layer.outputs)
        if before is not None:
            asked.add(layer.name)
        found |= _questions(each, steps, before, after, is_sure)
        here = names.index(layer.name)
        if before is not None and is_sure:
            there = names.index(before.name)
            between = names[there + 1 if there < here else 0 : here]
            found |= _norms(decided, before, set(between))
        if after is not None:
            there = names.index(after.name)
            found |= _norms(decided, after, set(names[here + 1 : there if there > here else None]))
    return found


class _Image(NamedTuple):
    """An image that a linear layer reads or makes: `size` numbers, beside a convolution."""

    name: str
    channels: int
    size: int

    def channels_last(self, dim: int, num_dims: int) -> Steps:
        """The steps that reorder a dimension from channels first to channels last."""
        if self.size % self.channels:
            return ()
        dims = list(range(num_dims + 1))
        dims[dim], dims[dim + 1] = dim + 1, dim
        rest = self.size // self.channels
        first, last = (self.channels, rest), (rest, self.channels)
        return (Unflatten(dim, first), Transpose(*dims), Flatten(dim, last))

    def why(self, what: str) -> str:
        """The question, before the other rule."""
        if self.size % self.channels:
            return (
                f"{what} a flattened image of {self.channels} channels ({self.name!r}) beside "
                "other numbers; torch has channels first and Flax last. If so, reorder the tensor "
                "as an array and load from `{**checkpoint, name: array}`"
            )
        rest = self.size // self.channels
        return (
            f"{what} a flattened image of {self.channels} channels ({self.name!r}), "
            f"[{self.channels}, {rest}] in torch and [{rest}, {self.channels}] in Flax"
        )


def _first(each: Pair, tensor: Tensor) -> str:
    return min(each.theirs.members) if each.theirs.stack else tensor.name


def _ordered(order: Sequence[str], layers: Mapping[str, Layer]) -> tuple[list[str], bool]:
    """Names in the order of definition, and whether the checkpoint has that order.

    safetensors sorts names as text, with 10 before 2; then numbers at least are in order.
    """
    names = [name for name in order if name in layers]
    if names != sorted(names):
        return list(order), True
    return sorted(order, key=pieces_with_numbers), False


def pieces_with_numbers(name: str) -> list[tuple[str, int]]:
    pieces = [*pieces_of(name), "0"]
    return [(text, int(number)) for text, number in zip(pieces[::2], pieces[1::2], strict=True)]


def _before(line: Sequence[Layer], at: int, asked: set[str]) -> tuple[Layer | None, bool]:
    """The convolution whose flattened image a linear layer may read, and whether it surely does.

    It is the last one before the layer whose channels divide the inputs, unless a linear layer, or
    the channels themselves, give as many numbers.
    """
    size, earlier = line[at].inputs, line[:at][::-1]
    is_first = not any(x.is_convolution for x in earlier)
    is_sure, nearest = True, None
    for layer in (*earlier, *line[:at:-1]) if is_first else earlier:
        if layer.outputs == size:
            if layer.is_convolution or layer.name not in asked or layer.inputs != size:
                return None, True
            image, _ = _before(line, line.index(layer), asked)
            return image, False  # the layer may follow the square one, or stand beside it
        if layer.is_convolution and size % layer.outputs == 0:
            if layer.outputs > 1:
                return layer, is_sure
            is_sure = False  # the order of one channel is the same
        elif layer.is_convolution and nearest is None and not is_first:
            nearest = layer if size > 2 * layer.outputs else None
    return nearest, False


def _after(line: Sequence[Layer], at: int, in_order: bool) -> Layer | None:
    """The convolution for whose input the outputs of a linear layer may be reshaped."""
    size, later = line[at].outputs, line[at + 1 :]
    if any(not x.is_convolution and x.inputs == size for x in later):
        return None
    following = [x for x in later if x.is_convolution][:1]
    if not in_order:
        root = line[at].name.partition(".")[0]
        following = [x for x in following if x.name.partition(".")[0] == root]
        following += [x for x in line if x.is_transposed]
    for layer in following:
        if layer.inputs == size:
            return None
        if layer.inputs > 1 and size % layer.inputs == 0:
            return layer
    return None


def _questions(
    each: Pair,
    steps: Mapping[str, Steps],
    before: _Image | None,
    after: _Image | None,
    is_sure: bool,
) -> dict[str, Question]:
    found = {}
    for role, plain in steps.items():
        ours, theirs = each.ours.tensors[role], each.theirs.tensors[role]
        is_weight = role == "weight"
        as_stored = is_weight and ours.name.endswith("kernel") and Transpose() not in plain
        outputs, inputs = (1, 0) if as_stored else (0, 1)
        why, reordered = [], ()
        if before is not None and is_weight:
            why.append(before.why("its inputs may be"))
            reordered += before.channels_last(inputs, 2)
        if after is not None:
            why.append(after.why("its outputs may be"))
            reordered += after.channels_last(outputs, len(theirs.shape))
        if why:
            other = (*reordered, *plain)
            two = (other, plain) if is_sure else (plain, other)
            found[ours.name] = Question(theirs.name, *two, "; ".join(why))
    return found


def _norms(decided: Decided, image: _Image, names: set[str]) -> dict[str, Question]:
    """Norms of a flattened image have its order too."""
    return {
        each.ours.tensors[role].name: Question(
            each.theirs.tensors[role].name,
            image.channels_last(0, 1),
            plain,
            image.why("it may normalise"),
        )
        for each, steps in decided
        if each.theirs.members <= names
        for role, plain in steps.items()
        if each.theirs.tensors[role].shape == (image.size,) and not plain
    }


def rotary(
    decided: Decided, shapes: Mapping[str, tuple[int, ...]], paths: Iterable[str]
) -> dict[str, Question]:
    """Ask about queries and keys, if names of the checkpoint or of the model are Meta's.

    Args:
        decided: pairs of modules with the steps of each role.
        shapes: name -> shape, of all tensors of the checkpoint.
        paths: paths of all parameters.

    Returns:
        Path of a parameter -> the question.
    """
    from_meta, to_meta = is_meta(shapes), is_meta(paths)
    if not from_meta and not to_meta:
        return {}
    rotated = [(each, steps) for each, steps in decided if _is_rotated(each)]
    sizes = [2 * shape[-1] for name, shape in shapes.items() if shape and _FREQUENCIES.search(name)]
    rotary_dim = sizes[0] if sizes else None
    most = max((x.shape[0] for each, _ in rotated for x in each.theirs.tensors.values()), default=0)
    heads = [x for two in rotated if (x := _head_dim(*two, most)) is not None]
    head_dim = heads[0] if heads else rotary_dim
    to = "halves" if from_meta else "interleaved"
    found = {}
    for each, steps in rotated:
        for role, plain in steps.items():
            ours, theirs = each.ours.tensors[role], each.theirs.tensors[role]
            as_stored = ours.name.endswith("kernel") and Transpose() not in plain
            dim = len(theirs.shape) - 1 if as_stored else 0
            num_heads = 0 if head_dim is None else theirs.shape[dim] // head_dim
            part = rotary_dim if rotary_dim != head_dim else None
            turned = (RotaryPairs(num_heads, to, dim, part), *plain)
            if from_meta and to_meta:
                found[ours.name] = Question(theirs.name, plain, turned, _BOTH_META)
            else:
                steps_known = turned if num_heads else None
                why = _FROM_META if from_meta else _TO_META
                found[ours.name] = Question(
                    theirs.name, steps_known, plain if num_heads else turned, why
                )
    return found


_FROM_META = (
    "names of Meta's form mean interleaved rotary pairs, and the step turns them for a model that "
    "rotates halves, as `jaxzero.models` and transformers"
)
_TO_META = (
    "names of Meta's form in the model mean that it rotates interleaved pairs, and those of the "
    "checkpoint that it has halves"
)
_BOTH_META = (
    "names of Meta's form mean interleaved rotary pairs on both sides; a model that rotates halves "
    "needs them turned"
)


def is_meta(names: Iterable[str]) -> bool:
    """Whether names have the form of Meta's Llama, whose rotary pairs are interleaved."""
    return any(map(_META.search, names))


def _is_rotated(each: Pair) -> bool:
    """Whether a module is a query or a key, or a norm of one."""
    words = (words_of(name) & {"query", "key"} for name in (each.theirs.name, each.ours.name))
    return each.theirs.part is None and any(len(found) == 1 for found in words)


def _head_dim(each: Pair, steps: Mapping[str, Steps], most: int) -> int | None:
    """The size of a head, where the model has a dim for heads, or norms of single heads."""
    for role, plain in steps.items():
        split = [step for step in plain if isinstance(step, Unflatten)]
        if split:
            return split[-1].sizes[-1]
        shape = each.theirs.tensors[role].shape
        if "norm" in words_of(each.theirs.name) and shape[-1] < most:
            return shape[-1]
    return None


def text_of(rule: Rule) -> str:
    """A rule as text, with `H` for an unknown number of heads."""
    return str(rule).replace("RotaryPairs(0", "RotaryPairs(H")
