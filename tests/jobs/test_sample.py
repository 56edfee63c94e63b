"""`jaxzero sample` writes the text of transformers, piece by piece."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as forms

from jaxzero import cli
from jaxzero.commands._sample import Continuation, _read
from jaxzero.interop import load_decoder
from tests.models import tiny_models

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789."
PROMPTS = ("hello", "ab", "x")


class Written(NamedTuple):
    model: Any  # of transformers
    directory: Path
    tokenizer: Tokenizer
    stop: int  # a token that the first text comes to


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A random Llama of letters."""
    tokenizer = Tokenizer(forms.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.decoder = decoders.Fuse()
    model = tiny_models.make(*tiny_models.DECODERS["llama"])
    directory = tiny_models.save(model, tmp_path_factory.mktemp("llama"))
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = np.array([tokenizer.encode(PROMPTS[0]).ids])
    stop = int(tiny_models.greedy(model, ids, np.ones_like(ids), 11)[0, -1])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    return Written(model, directory, tokenizer, stop)


def run(capsys: pytest.CaptureFixture[str], directory: Path, *arguments: str) -> tuple[int, Any]:
    status = cli.main(["sample", str(directory), *arguments])
    return status, capsys.readouterr()


def prompts(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--prompt", text)]


def test_greedy_text_is_that_of_transformers(llama: Written, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # texts are not broken into lines
    texts, num_new = [], 0
    for prompt in PROMPTS:
        ids = np.array([llama.tokenizer.encode(prompt).ids])
        stop = {"eos_token_id": llama.stop}
        new = tiny_models.greedy(llama.model, ids, np.ones_like(ids), 21, **stop)[0]
        num_new += len(new)
        shown = [token for token in new if token != llama.stop]
        texts.append(prompt + llama.tokenizer.decode(shown))
    status, printed = run(capsys, llama.directory, *prompts(*PROMPTS), "--max-new-tokens", "21")
    assert status == 0, printed.err
    written, end = printed.out.split("\n\n" + str(num_new))
    assert written == "\n\n".join(texts)
    assert re.fullmatch(
        r" new tokens of 3 texts: [\d.]+ tokens/s, after [\d.]+ s for the prompts.\n", end
    )


def test_random_text_is_that_of_its_seed(llama: Written, capsys):
    texts = []
    for seed in ("0", "0", "1"):
        options = ("--temperature", "1.5", "--top-k", "30", "--top-p", "0.9", "--seed", seed)
        status, printed = run(
            capsys, llama.directory, *prompts("ab"), "--max-new-tokens", "9", *options
        )
        assert status == 0
        texts.append(printed.out.split("\n")[0])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`prompt` must be given: the text to continue."),
        (prompts(""), "`prompt` '' has no tokens"),
        ([*prompts("a"), "--top-p", "1.5"], "`top_p` must be a number in (0, 1]; got 1.5"),
        (
            [*prompts("a"), "--top-k", "5"],
            "`top_k` without effect: the temperature is 0, which tak",
        ),
        (
            [*prompts("a"), "--temperature", "0", "--top-k", "5", "--top-p", "0.9"],
            "`top_k` and `top_p` without effect: the temperature is 0",
        ),
        ([*prompts("a"), "--max-new-tokens", "0"], "`max_new_tokens` must be at least 1; got 0"),
    ],
)
def test_mistakes(llama: Written, capsys, arguments: list[str], message: str):
    try:
        status, printed = run(capsys, llama.directory, *arguments)
        err = printed.err
    except SystemExit as exit:  # tyro's, for errors of the dataclass itself
        status, err = exit.code, capsys.readouterr().err
    assert status == 2
    assert message in " ".join(err.replace("│", " ").split())


@pytest.mark.ci
def test_options_replace_those_of_the_file(llama: Written, capsys, tmp_path: Path):
    """With `do_sample` the file has a temperature."""
    for path in llama.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "top_p": 1.5}')
    options = ("--max-new-tokens", "3", "--top-k", "5")
    status, printed = run(capsys, tmp_path, *prompts("a"), *options, "--top-p", "0.9")
    assert status == 0, printed.err
    status, printed = run(capsys, tmp_path, *prompts("a"), *options)
    assert status == 2 and "The values are those of" in printed.err


@pytest.mark.parametrize(("num_new", "warns"), [("28", False), ("29", True)])
def test_more_tokens_than_a_rotary_model_is_made_for(
    llama: Written, capsys, num_new: str, warns: bool
):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        status, printed = run(
            capsys, llama.directory, *prompts("hello"), "--max-new-tokens", num_new
        )
    assert status == 0, printed.err
    found = [str(each.message) for each in caught if "made for 32 tokens" in str(each.message)]
    assert len(found) == warns


def test_files_that_are_missing_or_too_short(llama: Written, capsys, tmp_path: Path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((llama.directory / name).read_bytes())
    status, printed = run(capsys, tmp_path, *prompts("a"))
    assert status == 2 and "There is no `tokenizer.json`" in printed.err
    gpt2 = tiny_models.make(*tiny_models.DECODERS["gpt2"])
    tiny_models.save(gpt2, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((llama.directory / "tokenizer.json").read_bytes())
    status, printed = run(capsys, tmp_path, *prompts("abc"), "--max-new-tokens", "31")
    assert status == 2
    assert "The longest `prompt` has 3 tokens and `max_new_tokens` is 31: `num_col" in printed.err


@pytest.mark.parametrize(
    ("devices", "more"),
    [("1", ()), ("2", ()), ("2", ("--temperature", "0.1", "--seed", "3"))],
)
@pytest.mark.one_in(3)
def test_several_devices_write_the_same(llama: Written, capsys, devices: str, more: tuple):
    options = (*prompts("hello"), "--max-new-tokens", "19", *more)
    _, printed = run(capsys, llama.directory, *options)
    status, split = run(capsys, llama.directory, *options, "--devices", devices)
    assert status == 0, split.err
    assert split.out.split("\n")[0] == printed.out.split("\n")[0]


def test_no_device_reads_all_weights(llama: Written):
    loaded = load_decoder(llama.directory)
    params = _read(loaded, jax.devices()[:2])
    for x, tensor in zip(jax.tree.leaves(params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(x, tensor.read())
    query = params["layers"][0]["attention"]["query"]["kernel"]
    assert query.sharding.shard_shape(query.shape) == (32, 16)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("3", "`devices` is 3: num_heads is 4, which does not divide by `size`=3 devices"),
        ("0", "`devices` must be at least 1; got 0"),
        ("99", "`devices` asks for 99, JAX sees 8"),
    ],
)
def test_numbers_of_devices_that_do_not_fit(llama: Written, capsys, devices: str, message: str):
    try:
        status, printed = run(capsys, llama.directory, *prompts("a"), "--devices", devices)
        err = printed.err
    except SystemExit as exit:
        status, err = exit.code, capsys.readouterr().err
    assert status == 2
    assert message in " ".join(err.replace("│", " ").split())


def test_a_character_is_printed_when_it_is_complete():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(forms.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode("né!").ids
    assert len(ids) == 4
    text = Continuation(tokenizer, tokenizer.encode("ü ").ids)
    news = [text.news(ids[:i], is_done=False) for i in range(1, 5)]
    assert news == ["n", "", "é", "!"]
    assert text.news([*ids, ids[1]], is_done=True) == "\N{REPLACEMENT CHARACTER}"
