"""The meshes that the zoo runs on, and which case meets which."""

import jax
from jax.sharding import AxisType, Mesh

from ._case import AXES, CASES

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
_EIGHT = ("1x8", "2x4", "4x2", "8x1", "2x2x2")  # "2x2x2" has a third axis, "tensor"
_SIX = ("2x3", "3x2")  # nothing in the zoo divides by six by design: padding everywhere


def make_mesh(name: str) -> Mesh:
    """A mesh from its name, such as "2x3-explicit"; its third axis, if any, is always automatic."""
    sizes, _, kind = name.partition("-")
    shape = tuple(int(size) for size in sizes.split("x"))
    num_devices = 1
    for size in shape:
        num_devices *= size
    types = ({"auto": AUTO, "explicit": EXPLICIT}[kind],) * 2 + (AUTO,) * (len(shape) - 2)
    names = (*AXES, "tensor")[: len(shape)]
    return jax.make_mesh(shape, names, types, devices=jax.devices()[:num_devices])


def _kinds(sizes: tuple[str, ...]) -> list[str]:
    return [f"{size}-{kind}" for size in sizes for kind in ("auto", "explicit")]


def rotation(dtype: str) -> list[tuple[str, str, bool]]:
    """(case, mesh, whether it is among those that are always run) for one dtype.

    Each case runs on eight devices and on six (now and then on one): one of them in float32, the
    other in float64. Always run is one of the two, every third in float64. Cases that compute in
    16 bits run in "float32" only, and always.
    """
    eight, six, one = _kinds(_EIGHT), _kinds(_SIX), _kinds(("1x1",))
    found = []
    for i, (name, case) in enumerate(CASES.items()):
        small = one[i // 10 % 2] if i % 10 == 9 else six[i // 2 % 4]
        meshes = [eight[i % 10], small] if i // 10 % 2 else [small, eight[i % 10]]
        is_double = dtype == "float64"
        if case.tolerance is not None:
            found += [(name, mesh, True) for mesh in meshes if not is_double]
        else:
            found.append((name, meshes[is_double], is_double == (i % 3 == 0)))
    return found


def preset_rotation(presets: tuple[str, ...]) -> list[tuple[str, str, str, bool]]:
    """(case, preset, mesh, whether it is among the few that are always run).

    Every case under every preset, each on another mesh. Compiling codecs takes seconds, so only
    every twelfth case is always run, under one preset; on each size of mesh and both kinds of axes.
    """
    meshes = _kinds(_EIGHT + _SIX)
    return [
        (
            name,
            preset,
            meshes[(i // 12 + i + 5 * j) % len(meshes)],
            i % 24 == 12 * j + i // 24 % 2,
        )
        for i, name in enumerate(CASES)
        for j, preset in enumerate(presets)
    ]
