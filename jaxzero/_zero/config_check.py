"""Check that a mesh and a config suit each other."""

from __future__ import annotations

from .._collectives import check_tree
from .._mesh import STAGE, TOKENS, AnyMesh, check_mesh
from .._sharding import ZeroConfig, without_defaults, zero3
from .host_memory import check_platform


def checked_config(mesh: AnyMesh, config: ZeroConfig | None) -> ZeroConfig:
    """Return the config, or `zero3()` for None, after checking that it suits the mesh.

    Raises:
        ValueError: an argument has the wrong type, or the mesh does not suit the config.
        NotImplementedError: the config uses host memory, and the platform of the mesh has none; or
            the mesh has the axis `tokens`, with which an option of the config does not work.
    """
    if isinstance(mesh, ZeroConfig):
        raise ValueError(
            "`mesh` comes before `config`: `jz.Zero(jz.make_mesh(), config)`; got "
            f"{without_defaults(mesh)}."
        )
    check_mesh(mesh)
    config = zero3() if config is None else config
    if not isinstance(config, ZeroConfig):
        raise ValueError(
            f"`config` must be a `jz.ZeroConfig`, such as `jz.zero3()`; got {config!r}."
        )
    if config.stages is None and mesh.shape.get(STAGE, 1) > 1:
        raise ValueError(
            "`mesh` has stages, and `config` divides no layers between them. Leave out `stages` of "
            "`jz.make_mesh`, or take a config such as `jz.pipeline(microbatches=16)`."
        )
    if config.stages is not None and TOKENS in mesh.shape:
        raise NotImplementedError(
            f"A pipeline of `stages` cannot have the mesh axis `{TOKENS}` yet. Leave out `tokens` "
            "of `jz.make_mesh`, or the stages."
        )
    if config.ungathered is not None and TOKENS in mesh.shape:
        raise NotImplementedError(
            f"`ungathered` cannot be had with the mesh axis `{TOKENS}` yet. Leave out `tokens` of "
            "`jz.make_mesh`, or `ungathered`."
        )
    if config.schedule.deterministic and TOKENS in mesh.shape:
        raise NotImplementedError(
            f"`deterministic` cannot be had with the mesh axis `{TOKENS}`, over which the compiler "
            "adds up in an order of its own. Leave out one of the two."
        )
    if config.offload is not None:
        check_platform(mesh)
    if config.activations is not None and config.activations.host:
        check_platform(mesh, "`activations` with `host=True`")
    if config.schedule.deterministic:
        check_tree(mesh)
    return config
