"""`jaxzero train` on a decoder: its scores are those of transformers, on what it was and became."""

from __future__ import annotations

import dataclasses
import io
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers import models as forms

from jaxzero import commands, jobs
from jaxzero.jobs._text import load_rows
from tests.models import tiny_models

from .tiny_job import losses, with_run

pytestmark = pytest.mark.standard_promotion  # optax computes `decay**count` from two types

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789."
TOKENS = 12
# The words repeat, so that a few steps learn them.
TEXTS = {f"{i}.txt": "the.cat.sat.on.the.mat." * (20 + i) for i in range(16)}
HELD_OUT = [name for name in sorted(TEXTS) if zlib.crc32(name.encode()) % 8 == 0]


class Finished(NamedTuple):
    settings: jobs.Train
    outcome: jobs.Outcome
    text: str


def write_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(forms.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.save(str(directory / "tokenizer.json"))


def write_texts(directory: Path) -> Path:
    for name, text in TEXTS.items():
        (directory / name).write_text(text)
    (directory / ".hidden").write_text("no." * 100)
    (directory / "picture.png").write_bytes(b"\x89PNG\xff\xff")
    return directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    llama = tiny_models.save(
        tiny_models.make(*tiny_models.DECODERS["llama"]), tmp_path_factory.mktemp("llama")
    )
    write_tokenizer(llama)
    settings = jobs.Train(
        checkpoint=llama,
        data=jobs.Data(data=write_texts(tmp_path_factory.mktemp("texts")), max_tokens=TOKENS),
        optimization=jobs.Optimization(steps=6, batch_size=16, learning_rate=3e-2, warmup_steps=1),
        run=jobs.Run(name="run", runs=tmp_path_factory.mktemp("runs"), save_every=3),
    )
    output = io.StringIO()
    with jax.numpy_dtype_promotion("standard"):
        outcome = jobs.train(settings, Console(file=output, width=120))
    return Finished(settings, outcome, output.getvalue())


def loss_of_transformers(directory: Path) -> float:
    """The mean loss of a token of the held-out files, in float32."""
    import torch
    import transformers

    ids = [LETTERS.index(x) for name in HELD_OUT for x in TEXTS[name]]
    rows = torch.tensor(ids[: len(ids) // TOKENS * TOKENS]).reshape(-1, TOKENS)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return float(model(input_ids=rows, labels=rows).loss)


@pytest.mark.ci
def test_scores_are_those_of_transformers(finished: Finished):
    settings, outcome, text = finished
    assert settings.checkpoint is not None and HELD_OUT
    # It computes in bfloat16, with a relative error of 2**-8 in each of some operations.
    before, after = (dataclasses.asdict(x)["loss"] for x in (outcome.before, outcome.after))
    assert before == pytest.approx(loss_of_transformers(settings.checkpoint), rel=0.02)
    assert after == pytest.approx(loss_of_transformers(outcome.directory / "export"), rel=0.02)
    assert after < 0.8 * before
    steps = losses(outcome.directory)
    assert len(steps) == 6 and steps[-1] < steps[0]
    assert f"Before training: loss of a token {before:.3f}" in text
    assert "rows/s" in text and "its outputs agree" in text


@pytest.mark.ci
def test_it_goes_on_where_it_was(finished: Finished, console: Console):
    again = jobs.train(with_run(finished.settings, resume=True), console)
    assert (again.before, again.after) == (finished.outcome.before, finished.outcome.after)


@pytest.mark.ci
def test_a_report_of_it(finished: Finished, console: Console):
    commands.report(commands.Report(checkpoint=finished.settings.checkpoint), console)
    assert "parameters" in console.export_text()


def test_rows_are_the_text_of_the_files(tmp_path: Path, console: Console):
    write_tokenizer(tmp_path)
    folder = tmp_path / "texts"
    folder.mkdir()
    write_texts(folder)
    examples = load_rows(folder, tmp_path, TOKENS, console)
    for rows, names in (
        (examples.train, [name for name in sorted(TEXTS) if name not in HELD_OUT]),
        (examples.held_out, HELD_OUT),
    ):
        text = "".join(TEXTS[name] for name in names)
        got = "".join(LETTERS[i] for i in rows.reshape(-1))
        assert rows.dtype == np.int32 and rows.shape[1] == TOKENS
        assert got == text[: len(got)] and len(text) - len(got) < TOKENS


def test_of_one_file_the_end_is_held_out(tmp_path: Path, console: Console):
    write_tokenizer(tmp_path)
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "one.txt").write_text("abcdefgh" * 20)
    examples = load_rows(folder, tmp_path, 8, console)
    assert (len(examples.train), len(examples.held_out)) == (17, 3)
    (folder / "one.txt").write_text("abcdefgh" * 2)
    assert len(load_rows(folder, tmp_path, 8, console).train) == 1
    with pytest.raises(ValueError, match="gives 1 rows of 9 tokens, too few .* or lower `max_t"):
        load_rows(folder, tmp_path, 9, console)
    with pytest.raises(ValueError, match="must be a directory of text files.*is not a directory"):
        load_rows(folder / "one.txt", tmp_path, 9, console)


@pytest.mark.ci
def test_more_tokens_than_the_model_has_positions_for(finished: Finished, console: Console):
    data = dataclasses.replace(finished.settings.data, max_tokens=2**20)
    with pytest.raises(ValueError, match="`max_tokens` must be at most .* positions; got 1048576"):
        jobs.train(dataclasses.replace(finished.settings, data=data), console)
