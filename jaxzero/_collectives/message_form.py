"""The form in which collectives send arrays, by platform.

CPUs and GPUs keep arrays in plain rows, so a bucket is one array `[devices, bytes]` into which the
messages of several leaves are joined. A TPU keeps the last two dims of an array in tiles of 8 x
128. There, moving bytes between rows `[devices, m]` and the shape of a weight crosses all tiles,
and XLA compiles for minutes: reading 4M codes out of 8 rows takes 4 s of compile time, and out of
`[8, m / 128, 128]` 0.1 s; an all-gather of rows of 5.5M bfloat16 takes 26 s, and one for each leaf
in its own shape 0.3 s in all (JAX 0.12.0, v5e, `benchmarks.compiled.tpu_messages`). So there large
leaves travel alone, floats in their own shapes and dtype, and codes as columns, whose blocks lie
across rows of lanes (`pallas_kernels._columns`). The numbers are the same in both forms.

`_FORMS` has the platforms that do not take the default form.
"""

from __future__ import annotations

import dataclasses

from .._mesh import AnyMesh, physical


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageForm:
    """How the arrays of collectives are shaped.

    Attributes:
        tiled: whether each leaf is sent alone, in a shape whose minor dims fill tiles, and floats
            in their own dtype; otherwise as rows of bits, `[devices, m]`.
        join_below_bytes: leaves without a codec are joined into one message only if each sends
            fewer bytes than this; None joins all.
    """

    tiled: bool = False
    join_below_bytes: int | None = None

    @classmethod
    def of(cls, mesh: AnyMesh) -> MessageForm:
        """The form for the platform of the devices of `mesh`."""
        return _FORMS.get(physical(mesh).devices.flat[0].platform, cls())

    def joins(self, num_bytes: int) -> bool:
        """Whether a leaf without a codec, which sends `num_bytes`, is joined with others."""
        return self.join_below_bytes is None or num_bytes < self.join_below_bytes


TILED = MessageForm(tiled=True, join_below_bytes=2**16)
_FORMS = {"tpu": TILED}
