"""Optimizers in files of `torch.save`: which are read as Adam's, and which are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxzero import interop

torch = pytest.importorskip("torch", reason="needs torch: it writes the files")


def trained(kind=torch.optim.Adam, **options):
    """A model and its optimizer, after two steps."""
    model = torch.nn.Linear(4, 5)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    return model, optimizer


def saved(path: Path, **content) -> Path:
    torch.save(content, path)
    return path


def test_several_optimizers_are_refused_and_weights_are_read(tmp_path: Path):
    (q1, first), (q2, second) = trained(), trained()
    models = {"q1": q1.state_dict(), "q2": q2.state_dict()}
    states = first.state_dict(), second.state_dict()
    twins = saved(tmp_path / "twins.pt", **models, q1_opt=states[0], q2_opt=states[1])
    for key in models:
        checkpoint = interop.open_checkpoint(twins, key=key)
        np.testing.assert_array_equal(checkpoint["weight"].read(), models[key]["weight"].numpy())
        for names in (None, ["weight", "bias"]):
            with pytest.raises(ValueError, match=r"2 optimizers, 'q1_opt', 'q2_opt', .*its own"):
                checkpoint.adam(names)
    lightning = saved(tmp_path / "l.ckpt", state_dict=models["q1"], optimizer_states=[*states])
    checkpoint = interop.open_checkpoint(lightning)
    with pytest.raises(ValueError, match=r"'optimizer_states\[0\]', 'optimizer_states\[1\]'"):
        checkpoint.adam()
    keys = saved(tmp_path / "keys.pt", **{"m": models["q1"], "1": states[0]})
    content = torch.load(keys, weights_only=True) | {1: states[1]}  # keys that look alike
    torch.save(content, keys)
    with pytest.raises(ValueError, match="holds 2 optimizers"):
        interop.open_checkpoint(keys).adam()


def test_one_optimizer_is_read_from_a_list_and_from_two_places(tmp_path: Path):
    model, optimizer = trained()
    state = optimizer.state_dict()
    wanted = state["state"][0]["exp_avg"].numpy()
    lightning = saved(tmp_path / "l.ckpt", state_dict=model.state_dict(), optimizer_states=[state])
    twice = saved(tmp_path / "t.pt", model=model.state_dict(), optimizer=state, optim=state)
    for path in (lightning, twice):
        moments = interop.open_checkpoint(path).adam()
        assert moments.step == 2
        np.testing.assert_array_equal(moments.exp_avg["weight"].read(), wanted)


def test_nadam_is_refused_by_its_entry(tmp_path: Path):
    model, optimizer = trained(torch.optim.NAdam)
    path = saved(tmp_path / "n.pt", model=model.state_dict(), optimizer=optimizer.state_dict())
    checkpoint = interop.open_checkpoint(path)
    for names in (None, ["weight", "bias"]):
        with pytest.raises(
            ValueError, match=r"of 'weight' in .* has 'mu_product': it holds exp_avg"
        ):
            checkpoint.adam(names)
    assert checkpoint["weight"].shape == (5, 4)


@pytest.mark.parametrize(
    ("kind", "options", "entry"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, "'momentum_buffer'"),
        (torch.optim.Adagrad, {}, "'sum'"),
        (torch.optim.Adamax, {}, "'exp_inf'"),
        (torch.optim.RMSprop, {}, "'square_avg'"),
    ],
)
def test_other_optimizers_are_refused_without_names_and_with_them(
    kind, options: dict, entry: str, tmp_path: Path
):
    model, optimizer = trained(kind, **options)
    path = saved(tmp_path / "o.pt", model=model.state_dict(), optimizer=optimizer.state_dict())
    checkpoint = interop.open_checkpoint(path)
    message = f"has {entry}: it holds .*no other optimizer is read.* start with a new"
    for names in (None, ["weight", "bias"]):
        with pytest.raises(ValueError, match=message):
            checkpoint.adam(names)
    np.testing.assert_array_equal(checkpoint["weight"].read(), model.state_dict()["weight"].numpy())


def test_an_optimizer_without_state_is_refused(tmp_path: Path):
    model, optimizer = trained(torch.optim.SGD)
    path = saved(tmp_path / "s.pt", model=model.state_dict(), optimizer=optimizer.state_dict())
    with pytest.raises(ValueError, match=r"has no state of any parameter.* no other optimizer"):
        interop.open_checkpoint(path).adam()
