"""Reorder the rows of a query or key between the two layouts of rotary pairs.

Rotary position embeddings turn pairs of a head's elements by an angle. Code in the style of Meta's
Llama pairs neighbours, (0, 1), (2, 3), ...: *interleaved*. Hugging Face transformers and
`jaxzero.models` pair the two *halves*, (0, k/2), (1, k/2 + 1), ... Both compute the same scores if
the rows of the weights are reordered, and shapes do not tell the layouts apart.
"""

import dataclasses
import operator
from typing import Literal, get_args

from jaxzero.interop._tensors import LazyTensor, concatenate

from .steps import Step, Tensors

Layout = Literal["halves", "interleaved"]


@dataclasses.dataclass(frozen=True)
class RotaryPairs(Step):
    """Reorder the outputs of a query or key from interleaved rotary pairs to halves, or back.

    `RotaryPairs(heads)` converts `wq.weight` and `wq.bias` of a checkpoint in Meta's form for a
    model that rotates halves. For `wk`, pass the number of key heads, which may be smaller. The
    value is not rotated.

    Attributes:
        num_heads: heads along `dim`; for a rule of several tensors (after `Split`) a number for
            each, and 0 for those that are not rotated: `RotaryPairs((32, 8, 0))`.
        to: the layout of the parameters; the checkpoint has the other one.
        dim: dimension of the outputs.
        rotary_dim: elements of each head that are rotated, from its first on; None for all.
    """

    num_heads: int | tuple[int, ...]
    to: Layout = "halves"
    dim: int = 0
    rotary_dim: int | None = None

    def __post_init__(self):
        counts = self.num_heads if isinstance(self.num_heads, tuple | list) else (self.num_heads,)
        try:
            counts = tuple(map(operator.index, counts))
        except TypeError:
            counts = ()
        if not counts or min(counts) < 0:
            raise ValueError(f"`num_heads` must be an integer or a tuple of them; got {self}.")
        if self.to not in get_args(Layout):
            raise ValueError(f"`to` must be one of {get_args(Layout)}; got {self}.")
        if not isinstance(self.dim, int) or self.dim < 0:
            raise ValueError(f"`dim` must be an integer from 0 on; got {self}.")
        if self.rotary_dim is not None and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(f"`rotary_dim` must be a positive even number; got {self}.")
        is_one = not isinstance(self.num_heads, tuple | list)
        object.__setattr__(self, "num_heads", counts[0] if is_one else counts)

    def __call__(self, tensors: Tensors) -> Tensors:
        counts = self.num_heads
        counts = counts if isinstance(counts, tuple) else (counts,) * len(tensors)
        if len(counts) != len(tensors):
            raise ValueError(
                f"{self} has {len(counts)} numbers of heads for {len(tensors)} tensors. Give one "
                "for each, and 0 for a tensor that is not rotated."
            )
        return tuple(
            self._reordered(each, count) if count else each
            for each, count in zip(tensors, counts, strict=True)
        )

    def _reordered(self, tensor: LazyTensor, num_heads: int) -> LazyTensor:
        total = tensor.shape[self.dim] if self.dim < tensor.ndim else 0
        size = total // num_heads
        rotary = size if self.rotary_dim is None else self.rotary_dim
        if size * num_heads != total or not 0 < rotary <= size or rotary % 2:
            raise ValueError(
                f"{self} does not fit {tensor.label}, whose shape is {tensor.shape}: dimension "
                f"{self.dim} must be whole heads of at least 2 elements, of which an even number "
                "is rotated."
            )
        before, after = tensor.shape[: self.dim], tensor.shape[self.dim + 1 :]
        # Element 2 j + s of interleaved pairs is element s * rotary / 2 + j of halves, so the
        # conversion transposes `[rotary / 2, 2]`, and back `[2, rotary / 2]`.
        heads, at = tensor.reshape((*before, num_heads, size, *after)), self.dim + 1
        turned = heads.narrow(at, 0, rotary)
        pairs = (rotary // 2, 2) if self.to == "halves" else (2, rotary // 2)
        dims = list(range(turned.ndim + 1))
        dims[at], dims[at + 1] = at + 1, at
        turned = turned.reshape((*before, num_heads, *pairs, *after)).transpose(*dims)
        turned = turned.reshape((*before, num_heads, rotary, *after))
        if rotary < size:
            turned = concatenate((turned, heads.narrow(at, rotary, size)), at)
        return turned.reshape(tensor.shape)

    @property
    def inverse(self) -> "RotaryPairs":
        """The step that reorders in the other direction."""
        other: Layout = "interleaved" if self.to == "halves" else "halves"
        return dataclasses.replace(self, to=other)

    def __repr__(self) -> str:
        given = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)[1:]
            if getattr(self, field.name) != field.default
        )
        return f"RotaryPairs({', '.join((str(self.num_heads), *given))})"
