"""`jaxzero convert` and `jaxzero inspect`, in every form."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxzero import cli, interop

DEEPSPEED = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"


def one_line(text: str) -> str:
    """What the console has wrapped."""
    return " ".join(text.split())


def test_to_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture):
    target = tmp_path / "out"
    command = ["convert", str(DEEPSPEED / "zero3"), str(target), "--dtype", "bfloat16", "--check"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "10 tensors of DeepSpeed ZeRO-3 written to" in printed
    assert "every value is that of the source, rounded to bfloat16." in printed
    assert "every bit" not in printed and "optimizer state was not copied" in printed
    written = load_file(target / "model.safetensors")
    source = interop.open_checkpoint(DEEPSPEED / "zero3")
    assert written.keys() == source.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(array, source[name].read().astype(ml_dtypes.bfloat16))
    assert cli.main(command) == 2
    assert "exists. Name a target that does not" in one_line(capsys.readouterr().err)
    command[2] = str(tmp_path / "out.safetensors")
    assert cli.main(command) == 2 and not Path(command[2]).exists()
    assert "would be a directory" in one_line(capsys.readouterr().err)


def test_what_load_adam_cannot_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture):
    torch = pytest.importorskip("torch", reason="needs torch: it writes the files")
    model = torch.nn.Linear(3, 3)
    model(torch.ones(3)).sum().backward()
    kinds = {"Adam": {}, "NAdam": {}, "SGD": {"momentum": 0.9}}
    made = {
        kind: getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
        for kind, options in kinds.items()
    }
    for optimizer in made.values():
        optimizer.step()
    states = {kind: optimizer.state_dict() for kind, optimizer in made.items()}
    for wanted, held in {
        "`interop.load_adam` reads it.": {"optimizer": states["Adam"]},
        "has 'mu_product'": {"optimizer": states["NAdam"]},
        "has 'momentum_buffer'": {"optimizer": states["SGD"]},
        "holds 2 optimizers": {"first": states["Adam"], "second": {**states["Adam"]}},
    }.items():
        torch.save({"model": model.state_dict(), **held}, tmp_path / "run.pt")
        target = tmp_path / str(len(list(tmp_path.iterdir())))
        assert cli.main(["convert", str(tmp_path / "run.pt"), str(target)]) == 0
        printed = one_line(capsys.readouterr().out)
        assert "The optimizer state was not copied: " in printed and wanted in printed
        assert ("`interop.load_adam` reads it" in printed) == ("load_adam" in wanted)


def test_values_that_the_dtype_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture):
    values = np.array([1.0, 1e5, np.inf, np.nan, 1e-9]).astype(ml_dtypes.bfloat16)
    save_file({"w": values}, tmp_path / "source.safetensors")
    command = ["convert", str(tmp_path / "source.safetensors"), str(tmp_path / "out"), "--dtype"]
    assert cli.main([*command, "float16"]) == 2 and not (tmp_path / "out").exists()
    printed = one_line(capsys.readouterr().err)
    assert "Tensor 'w' in" in printed
    assert "holds 99840.0 (bfloat16), which float16 cannot hold: its range is -65504.0" in printed
    assert cli.main([*command, "float32", "--check"]) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")["w"]
    np.testing.assert_array_equal(written, values.astype(np.float32))


def test_a_checkpoint_of_jaxzero_is_told(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "jaxzero.json").write_text("{}")
    for source in (tmp_path, tmp_path / "3"):
        assert cli.main(["convert", str(source), str(tmp_path / "out")]) == 2
        printed = one_line(capsys.readouterr().err)
        assert "is a checkpoint of jaxzero" in printed and "the folder `export`" in printed
    assert not (tmp_path / "out").exists()


def test_through_every_form(tmp_path: Path, capsys: pytest.CaptureFixture):
    torch = pytest.importorskip("torch", reason="needs torch: it writes two of the forms")
    source = str(DEEPSPEED / "zero1_bf16")
    for options in (["w.ckpt"], ["dcp", "--form", "dcp"], ["s", "--max-shard-gb", "3e-7"]):
        target = str(tmp_path / options[0])
        assert cli.main(["convert", source, target, *options[1:], "--check"]) == 0
        source = target
    first, last = interop.open_checkpoint(DEEPSPEED / "zero1_bf16"), interop.open_checkpoint(source)
    assert len(list(Path(source).glob("*.safetensors"))) > 2
    interop.check_copy(first, source)
    assert last["frozen.weight"].dtype == ml_dtypes.bfloat16
    loaded = torch.load(tmp_path / "w.ckpt", weights_only=True)
    np.testing.assert_array_equal(loaded["up.weight"].numpy(), first["up.weight"].read())
    assert loaded["frozen.weight"].dtype == torch.bfloat16
    printed = capsys.readouterr().out
    assert "torch DCP" in printed and printed.count("and every bit is the same.") == 3


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert cli.main(["inspect", str(DEEPSPEED / "zero2")]) == 0
    printed = capsys.readouterr().out
    assert "9 tensors, 238 elements, 952 B" in printed
    assert "head.weight is embed.weight" in printed
    assert "Adam after 3 steps, moments of 7 parameters" in printed
    (row,) = (line for line in printed.splitlines() if line.startswith("up.weight"))
    assert row.split() == ["up.weight", "[9,", "6]", "float32", "54"]

    layers = {f"h.{i}.w": np.ones((2, 3), np.float16) for i in range(12)}

    save_file(layers, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": None}))
    assert cli.main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "family gpt2" in printed and "no optimizer state" in printed
    (row,) = (line for line in printed.splitlines() if line.startswith("h."))
    assert row.split() == ["h.*.w", "x12", "[2,", "3]", "float16", "72"]
    assert cli.main(["inspect", str(tmp_path), "--every"]) == 0
    assert "h.11.w" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "nothing")]) == 2
    assert "is neither a file nor a directory" in one_line(capsys.readouterr().err)
