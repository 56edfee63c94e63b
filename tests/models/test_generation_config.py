"""`generation_config.json` as `Sampling`, with what transformers takes for granted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxzero.models import Sampling


def read(folder: Path, content: dict[str, Any] | None, **changes: Any) -> Sampling:
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": [5, 6]}')
    if content is not None:
        (folder / "generation_config.json").write_text(json.dumps(content))
    return Sampling.from_json(folder, **changes)


@pytest.mark.parametrize(
    ("content", "want"),
    [
        (None, Sampling(stop_tokens=(5, 6), pad_token=5)),
        ({}, Sampling()),
        ({"do_sample": True}, Sampling(temperature=1.0, top_k=50)),
        ({"do_sample": True, "top_k": 0, "temperature": None}, Sampling(temperature=1.0)),
        ({"temperature": 0.6, "top_p": 0.9}, Sampling()),  # without do_sample, as in transformers
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "eos_token_id": 7,
                "pad_token_id": 8,
                "bos_token_id": 1,
                "repetition_penalty": 1.0,
                "transformers_version": "5.0",
            },
            Sampling(temperature=0.6, top_k=20, top_p=0.95, stop_tokens=(7,), pad_token=8),
        ),
        ({"eos_token_id": [3, 4], "pad_token_id": -1}, Sampling(stop_tokens=(3, 4), pad_token=3)),
    ],
)
def test_fields(tmp_path: Path, content: dict[str, Any] | None, want: Sampling):
    assert read(tmp_path, content) == want


def test_changes_replace_what_the_file_says(tmp_path: Path):
    got = read(tmp_path, {"do_sample": True, "temperature": 0.6}, temperature=0.0, pad_token=9)
    assert got == Sampling(top_k=50, pad_token=9)


def test_a_wrong_change_is_not_said_to_be_of_the_file(tmp_path: Path):
    with pytest.raises(ValueError, match="`temperature` must be a number") as raised:
        read(tmp_path, {"do_sample": True}, temperature=float("nan"))
    assert "config.json" not in str(raised.value)


def test_what_is_not_computed_is_said(tmp_path: Path):
    with pytest.warns(UserWarning, match="sets `no_repeat_ngram_size`, `repetition_penalty`, whi"):
        read(tmp_path, {"repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "min_p": 0.0})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"do_sample": True, "temperature": "0.6"}, "`temperature` .* must be a finite number"),
        ({"eos_token_id": "</s>"}, "`eos_token_id` .* must be a token id or a list of them"),
        (
            {"do_sample": True, "top_p": 1.5},
            r"`top_p` must be a number in \(0, 1\]; got 1.5.*config.json",
        ),
    ],
)
def test_wrong_values(tmp_path: Path, content: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)
