"""What shapes do not tell is asked: the order of flattened images, and that of rotary pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxzero.interop import match
from jaxzero.interop._tensors.lazy import ArrayTensor

torch = pytest.importorskip("torch")
nn = torch.nn


def tensors_of(model: torch.nn.Module, *, sort: bool = False) -> dict[str, ArrayTensor]:
    held = {name: ArrayTensor(x.numpy(), name) for name, x in model.state_dict().items()}
    held = {name: x for name, x in held.items() if x.ndim}
    return {name: held[name] for name in sorted(held)} if sort else held


def tree_of(model: torch.nn.Module, *, first: bool = False) -> dict:
    """The shapes of the same model in Flax, or with `first` in Equinox: channels first."""
    tree: dict = {}
    for name, x in model.state_dict().items():
        shape, (*path, last) = tuple(x.shape), name.split(".")
        if not shape:
            continue
        if last == "weight" and not first:
            last = "kernel" if len(shape) > 1 else "scale"
            shape = (*shape[2:], *shape[1::-1]) if len(shape) > 1 else shape
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        last = {"running_mean": "mean", "running_var": "var"}.get(last, last)
        at[last] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


def asked_of(model: torch.nn.Module, *, sort: bool = False, first: bool = False) -> dict[str, str]:
    """Path of each parameter that is asked about -> the reason."""
    found = match(tree_of(model, first=first), tensors_of(model, sort=sort))
    assert not found.undecided and not found.unused, str(found)
    asked = {path: why for rule, why in found.assumed.items() for path in rule.ours}
    return {path: why for path, why in asked.items() if "flattened image" in why}


class Named(nn.Module):
    def __init__(self, **layers: nn.Module):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def vgg() -> nn.Module:
    sizes = [(3, 8), (8, 8), (8, 12), (12, 12), (12, 16)]
    features = [x for a, b in sizes for x in (nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU())]
    head = [nn.Linear(16 * 9, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 32), nn.ReLU()]
    return Named(
        features=nn.Sequential(*features), classifier=nn.Sequential(*head, nn.Linear(32, 10))
    )


READ = {  # name -> the model, and the layers that read a flattened image
    "lenet": (
        lambda: Named(
            conv1=nn.Conv2d(3, 8, 3), conv2=nn.Conv2d(8, 16, 3), fc1=nn.Linear(256, 32),
            fc2=nn.Linear(32, 10),
        ),
        {"fc1.kernel": 16},
    ),
    "1d": (lambda: Named(conv=nn.Conv1d(3, 8, 3), fc=nn.Linear(40, 5)), {"fc.kernel": 8}),
    "3d": (lambda: Named(conv=nn.Conv3d(3, 8, 3), fc=nn.Linear(216, 5)), {"fc.kernel": 8}),
    "sequential": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(), nn.Flatten(),
            nn.Linear(54, 20), nn.ReLU(), nn.Linear(20, 3),
        ),
        {"5.kernel": 6},
    ),
    "vgg": (vgg, {"classifier.0.kernel": 16}),
    "depthwise": (
        lambda: Named(
            conv=nn.Conv2d(3, 8, 3), depthwise=nn.Conv2d(8, 8, 3, groups=8), fc=nn.Linear(32, 5)
        ),
        {"fc.kernel": 8},
    ),
    "grouped": (
        lambda: Named(conv=nn.Conv2d(4, 8, 3, groups=2), fc=nn.Linear(32, 5)),
        {"fc.kernel": 8},
    ),
    "transposed": (
        lambda: Named(deconv=nn.ConvTranspose2d(4, 6, 3), fc=nn.Linear(54, 5)),
        {"fc.kernel": 6},
    ),
    "two heads": (
        lambda: Named(
            conv=nn.Conv2d(3, 8, 3), actor=nn.Linear(72, 4), critic=nn.Linear(72, 1)
        ),
        {"actor.kernel": 8, "critic.kernel": 8},
    ),
    "dueling": (
        lambda: Named(
            conv=nn.Conv2d(3, 8, 3), fc_value=nn.Linear(72, 16), value=nn.Linear(16, 1),
            fc_advantage=nn.Linear(72, 16), advantage=nn.Linear(16, 4),
        ),
        {"fc_value.kernel": 8, "fc_advantage.kernel": 8},
    ),
    "normalised": (
        lambda: Named(
            conv=nn.Conv2d(3, 8, 3), bn=nn.BatchNorm2d(8), norm=nn.BatchNorm1d(72),
            fc=nn.Linear(72, 5),
        ),
        {"norm.scale": 8, "norm.bias": 8, "norm.mean": 8, "norm.var": 8, "fc.kernel": 8},
    ),
    "square": (
        lambda: Named(conv=nn.Conv2d(3, 16, 3), fc1=nn.Linear(64, 64), fc2=nn.Linear(64, 10)),
        {"fc1.kernel": 16, "fc2.kernel": None},
    ),
    "beside other inputs": (
        lambda: Named(conv=nn.Conv2d(3, 8, 3), fc=nn.Linear(72 + 5, 4)),
        {"fc.kernel": None},
    ),
    "one channel": (
        lambda: Named(
            conv=nn.Conv2d(3, 8, 3), value=nn.Conv2d(8, 1, 1), fc=nn.Linear(16, 4)
        ),
        {"fc.kernel": None},
    ),
    "latent": (
        lambda: Named(
            encoder=nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)), mean=nn.Linear(64, 5),
            var=nn.Linear(64, 5), decoder_input=nn.Linear(5, 64),
            decoder=nn.Sequential(nn.ConvTranspose2d(16, 16, 3), nn.Conv2d(16, 3, 3)),
        ),
        {"mean.kernel": 16, "var.kernel": 16, "decoder_input.kernel": 16, "decoder_input.bias": 16},
    ),
    "generator": (
        lambda: Named(
            fc=nn.Linear(5, 72), bn=nn.BatchNorm1d(72), deconv=nn.ConvTranspose2d(8, 8, 3),
            out=nn.Conv2d(8, 3, 3)
        ),
        {"fc.kernel": 8, "fc.bias": 8, "bn.scale": 8, "bn.bias": 8, "bn.mean": 8, "bn.var": 8},
    ),
}  # fmt: skip
