"""Ask the user about layouts that shapes do not show: of flattened images, and of rotary pairs.

torch flattens an image channels first, `[c, h, w]`, and Flax channels last, `[h, w, c]`. A linear
layer that reads such an image, or makes one, needs its inputs or its outputs reordered. Which
layers these are is guessed from numbers of channels and from the order of layers in the checkpoint.
Whether a model rotates halves or interleaved pairs is known only from the names of Meta's Llama.
"""

import collections
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxzero.interop._rules import Flatten, RotaryPairs, Rule, Step, Transpose, Unflatten

from .names import Tensor, pieces_of, words_of
from .pairs import TRANSPOSED, Pair, Steps

Decided = Sequence[tuple[Pair, Mapping[str, Steps]]]
_META = re.compile(r"(^|\.)(wq|wk|wqkv|rope\.freqs|freqs_cis|tok_embeddings)(\.|$)")
_FREQUENCIES = re.compile(r"(^|\.)(rope\.freqs|freqs_cis)$")

_DECODES = re.compile("decod|generat|unflatten", re.IGNORECASE)


class Question(NamedTuple):
    """A question to the user: which of two possible rules is right for a parameter.

    Attributes:
        name: name of the checkpoint's tensor.
        steps: steps of the proposed rule; None if they depend on an unknown number of heads.
        other: steps of the other rule.
        why: what the user has to find out.
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
    """Return the layer that a tensor is the weight of; None if it is no weight of a layer.

    The `steps` turn the tensor into a parameter; they tell convolutions from other tensors.
    """
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
    decided: Decided, given: Iterable[Layer], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Question]:
    """Ask about linear layers that may read or make a flattened image, and norms over the image.

    Args:
        decided: pairs of modules, with the steps of each role.
        given: layers of rules that the caller has given.
        shapes: name -> shape of all tensors, in the order of the checkpoint.

    Returns:
        Path of a parameter -> a question that the user has to answer.
    """
    layers = {layer.name: layer for layer in given}
    for pair, steps in decided:
        tensor = pair.theirs.tensors.get("weight")
        if tensor is None or "weight" not in steps or pair.theirs.part is not None:
            continue
        layer = layer_of(_first(pair, tensor), tensor.shape, steps["weight"])
        is_table = pair.ours.tensors["weight"].name.endswith("embedding")
        if layer is not None and not is_table:
            layers[layer.name] = layer
    if not any(layer.is_convolution for layer in layers.values()):
        return {}
    line = _Line(layers, shapes)
    reads = line.images_read()
    questions: dict[str, Question] = {}
    for pair, steps in decided:
        tensor = pair.theirs.tensors.get("weight")
        layer = tensor and layers.get(_first(pair, tensor))
        if layer is None or layer.is_convolution or pair.theirs.part is not None:
            continue
        image, is_sure = reads.get(layer.name, (None, True))
        before = image and _Image(image.name, image.outputs, layer.inputs)
        image = line.image_made(layer, reads)
        after = image and _Image(image.name, image.inputs, layer.outputs)
        questions |= _questions(pair, steps, before, after, is_sure)
        for image in (before if is_sure else None, after):
            if image is not None:
                questions |= _norms(decided, image, line.names_beside(layer, image))
    return questions


class _Image(NamedTuple):
    """A flattened image that a linear layer reads, or that its outputs make up."""

    name: str  # of the convolution that makes or reads the image
    channels: int
    size: int  # channels, height and width multiplied; or with other numbers beside the image

    def channels_last(self, dim: int, num_dims: int) -> Steps:
        """Return steps that reorder dimension `dim` of `num_dims` from channels first to last.

        The result is `()` if the dimension holds other numbers besides the image.
        """
        if self.size % self.channels:
            return ()
        dims = list(range(num_dims + 1))
        dims[dim], dims[dim + 1] = dim + 1, dim
        rest = self.size // self.channels
        first, last = (self.channels, rest), (rest, self.channels)
        return (Unflatten(dim, first), Transpose(*dims), Flatten(dim, last))

    def why(self, what: str) -> str:
        """Return the question as text, which begins with `what`, such as "its inputs may be"."""
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


class _Line:
    """The layers of a checkpoint, in the order of the model's definition if the file shows it.

    A safetensors file sorts names as text (10 before 2); these are sorted by numbers instead.
    """

    def __init__(self, layers: Mapping[str, Layer], shapes: Mapping[str, tuple[int, ...]]):
        names = [name for name, shape in shapes.items() if shape]
        self._is_sorted = names == sorted(names)
        self._names = sorted(names, key=_with_numbers) if self._is_sorted else names
        self._place = {name: place for place, name in enumerate(self._names)}
        self._layers = sorted(layers.values(), key=lambda x: self._place[x.name])
        self._outputs = collections.Counter(x.outputs for x in self._layers)
        self._convolutions = [x for x in self._layers if x.is_convolution]

    def images_read(self) -> dict[str, tuple[Layer, bool]]:
        """Find the linear layers that may read the flattened image of a convolution.

        Returns:
            Name of a linear layer -> (convolution, whether the layer surely reads its image). If
            so, the rule that reorders inputs is proposed; if not, the plain rule.
        """
        first = self._place[self._convolutions[0].name]
        channels = {x.outputs for x in self._convolutions}
        images: dict[str, tuple[Layer, bool]] = {}
        for at, layer in enumerate(self._layers):
            if not layer.is_convolution:
                earlier = (self._layers[k] for k in range(at - 1, -1, -1))
                # Named before all convolutions, as `classifier` before `features` in a sorted file,
                # it may follow the last of them.
                is_first = self._place[layer.name] < first
                later = (self._layers[k] for k in range(len(self._layers) - 1, at, -1))
                image = _before(layer, itertools.chain(earlier, later if is_first else ()), images)
                if image is not None and not (is_first and layer.inputs % image[0].outputs):
                    as_many = self._is_sorted and layer.inputs in channels
                    images[layer.name] = (image[0], image[1] and not as_many)
        return images

    def image_made(self, layer: Layer, reads: Collection[str]) -> Layer | None:
        """Return the convolution that may read a linear layer's outputs as an image, or None."""
        size, place = layer.outputs, self._place[layer.name]
        if self._last_reader(reads).get(size, -1) > place:
            return None  # a later linear layer reads as many numbers, which need not be an image
        later = (x for x in self._convolutions if self._place[x.name] > place)
        following = [*itertools.islice(later, 1)]
        # Names in a sorted file do not tell what follows: only parts of decoders are considered.
        if self._is_sorted:
            following = [x for x in self._convolutions if x.inputs > 1 and size % x.inputs == 0]
            decodes = _DECODES.search(layer.name)
            following = [
                x for x in following if x.is_transposed or (decodes and _DECODES.search(x.name))
            ]
        if any(x.inputs == size for x in following):
            return None  # an image of one pixel: each output is a channel
        return next((x for x in following if x.inputs > 1 and size % x.inputs == 0), None)

    def _last_reader(self, reads: Collection[str]) -> dict[int, int]:
        """Return number of inputs -> place of the last linear layer, not in `reads`, with it."""
        if not hasattr(self, "_readers"):
            linear = (x for x in self._layers if not x.is_convolution and x.name not in reads)
            self._readers = {x.inputs: self._place[x.name] for x in linear}
        return self._readers

    def names_beside(self, layer: Layer, image: "_Image") -> set[str] | None:
        """Return the names of tensors, one of which may be a norm over an image.

        They lie between the linear layer `layer` and the convolution of `image`. None stands for
        all names: no other layer has as many outputs as the image has numbers.
        """
        own = layer.outputs == image.size
        if self._outputs[image.size] == own:
            return None
        ends = sorted((self._place[layer.name], self._place[image.name]))
        return set(self._names[ends[0] + 1 : ends[1]])


def _with_numbers(name: str) -> list[tuple[str, int]]:
    pieces = [*pieces_of(name), "0"]
    return [(text, int(number)) for text, number in zip(pieces[::2], pieces[1::2], strict=True)]


def _before(
    linear: Layer, earlier: Iterable[Layer], images: Mapping[str, tuple[Layer, bool]]
) -> tuple[Layer, bool] | None:
    """Find the convolution whose flattened image a linear layer may read.

    It is the nearest one in `earlier` whose number of channels divides the inputs of `linear`.
    There is none if a layer in between has as many outputs as `linear` has inputs, or if the
    convolution itself has as many channels: then no image is flattened.

    Args:
        linear: the linear layer.
        earlier: the layers before it, the nearest first.
        images: what `images_read` has found for linear layers before `linear`.

    Returns:
        The convolution, and whether `linear` surely reads its image; or None.
    """
    size, is_sure, beside = linear.inputs, True, None
    for layer in earlier:
        if layer.outputs == size:
            # If that is a square layer that reads an image, `linear` may follow it, or read the
            # same image.
            is_square = not layer.is_convolution and layer.inputs == size and layer.name in images
            return (images[layer.name][0], False) if is_square else None
        if layer.is_convolution and size % layer.outputs == 0:
            if layer.outputs > 1:
                return layer, is_sure
            is_sure = False  # one channel has the same order
        elif layer.is_convolution and beside is None:
            beside = layer
    return None if beside is None or size < 2 * beside.outputs else (beside, False)


def _questions(
    paired: Pair,
    steps: Mapping[str, Steps],
    before: _Image | None,
    after: _Image | None,
    is_sure: bool,
) -> dict[str, Question]:
    """Return path -> question for a linear layer that may read image `before` or make `after`.

    Each question has two rules: the plain one, with `steps` for each role, and one that reorders
    the image. If `is_sure`, the one that reorders is proposed; otherwise the plain one.
    """
    questions = {}
    for role, plain in steps.items():
        ours, theirs = paired.ours.tensors[role], paired.theirs.tensors[role]
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
            questions[ours.name] = Question(theirs.name, *two, "; ".join(why))
    return questions


def _norms(decided: Decided, image: _Image, names: set[str] | None) -> dict[str, Question]:
    """Return path -> question for the norms in `names` (None: all) that may normalize an image."""
    return {
        each.ours.tensors[role].name: Question(
            each.theirs.tensors[role].name,
            image.channels_last(0, 1),
            plain,
            image.why("it may normalise"),
        )
        for each, steps in decided
        if {x.shape for x in each.theirs.tensors.values()} == {(image.size,)}
        if names is None or each.theirs.members <= names
        for role, plain in steps.items()
        if not plain
    }


def rotary(
    decided: Decided, shapes: Mapping[str, tuple[int, ...]], paths: Iterable[str]
) -> dict[str, Question]:
    """Find queries and keys whose rotary pairs checkpoint and model may lay out differently.

    There are questions only if names in `shapes` (the checkpoint's) or `paths` (the model's) are
    Meta's. Return path of a parameter -> question.
    """
    from_meta, to_meta = is_meta(shapes), is_meta(paths)
    if not from_meta and not to_meta:
        return {}
    rotated = [(paired, steps) for paired, steps in decided if _is_rotated(paired)]
    sizes = [2 * shape[-1] for name, shape in shapes.items() if shape and _FREQUENCIES.search(name)]
    rotary_dim = sizes[0] if sizes else None
    tensors = [tensor for paired, _ in rotated for tensor in paired.theirs.tensors.values()]
    most = max((tensor.shape[0] for tensor in tensors), default=0)
    heads = [x for two in rotated if (x := _head_dim(*two, most)) is not None]
    head_dim = heads[0] if heads else rotary_dim
    to = "halves" if from_meta else "interleaved"
    questions = {}
    for paired, steps in rotated:
        for role, plain in steps.items():
            ours, theirs = paired.ours.tensors[role], paired.theirs.tensors[role]
            as_stored = ours.name.endswith("kernel") and Transpose() not in plain
            dim = len(theirs.shape) - 1 if as_stored else 0
            num_heads = 0 if head_dim is None else theirs.shape[dim] // head_dim
            part = rotary_dim if rotary_dim != head_dim else None
            turned = (RotaryPairs(num_heads, to, dim, part), *plain)
            if from_meta and to_meta:
                questions[ours.name] = Question(theirs.name, plain, turned, _BOTH_META)
            else:
                steps_known = turned if num_heads else None
                why = _FROM_META if from_meta else _TO_META
                questions[ours.name] = Question(
                    theirs.name, steps_known, plain if num_heads else turned, why
                )
    return questions


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
    """Return whether names have the form of Meta's Llama, whose rotary pairs are interleaved."""
    return any(map(_META.search, names))


def _is_rotated(paired: Pair) -> bool:
    """Return whether a pair of modules is a query or a key, or the norm of one."""
    names = (paired.theirs.name, paired.ours.name)
    words = (words_of(name) & {"query", "key"} for name in names)
    return paired.theirs.part is None and any(len(parts) == 1 for parts in words)


def _head_dim(paired: Pair, steps: Mapping[str, Steps], most: int) -> int | None:
    """Return the size of a head, if a query, key or norm shows it; else None.

    A dimension for heads in the model shows it, split off by `steps` (role -> steps). So does a
    norm over single heads, recognized by having fewer elements than `most`, the largest number of
    rows of a query or key.
    """
    for role, plain in steps.items():
        split = [step for step in plain if isinstance(step, Unflatten)]
        if split:
            return split[-1].sizes[-1]
        shape = paired.theirs.tensors[role].shape
        if "norm" in words_of(paired.theirs.name) and shape[-1] < most:
            return shape[-1]
    return None


def text_of(rule: Rule) -> str:
    """Return a rule as text, with `H` for an unknown number of heads."""
    return str(rule).replace("RotaryPairs(0", "RotaryPairs(H")
