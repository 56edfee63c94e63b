"""`jaxzero sample`: continue texts with a decoder, and print them while they are written.

A token may be a part of a character, and its text can depend on the tokens before it. So all tokens
so far are decoded each time, and the new part of the text is printed once its last character is
complete.
"""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Bool, Int
from rich.console import Console
from tokenizers import Tokenizer

from .. import models
from .._first_use import extra_for
from .._warnings import warn
from ..interop import LoadedDecoder, load_decoder
from ..jobs import choose_devices, open_tokenizer
from ._settings import Sample

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_TOKENS_AT_A_TIME = 8  # so many are computed before they are printed


def encode(
    tokenizer: Tokenizer, prompts: Sequence[str], *, has_special_tokens: bool = False
) -> tuple[Int[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
    """Return the token ids of prompts, padded on the left, and a mask that is false for padding.

    Args:
        tokenizer: from `open_tokenizer`.
        prompts: the texts.
        has_special_tokens: whether the texts already hold the tokens that begin a text, as those
            from a chat template do; otherwise the tokenizer adds its own.

    Raises:
        ValueError: a prompt has no token.
    """
    rows = [tokenizer.encode(x, add_special_tokens=not has_special_tokens).ids for x in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            raise ValueError(f"`prompt` {prompt!r} has no tokens. Give at least one word.")
    longest = max(map(len, rows))
    ids = np.array([[0] * (longest - len(row)) + row for row in rows], np.int32)
    return ids, np.arange(longest)[None] >= longest - np.array([len(row) for row in rows])[:, None]


class Continuation:
    """The text that follows one prompt, decoded while its tokens are computed."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer, self._prompt = tokenizer, list(prompt)
        self._printed = len(tokenizer.decode(self._prompt))

    def news(self, tokens: Sequence[int], *, is_done: bool) -> str:
        """Return the part of the text that earlier calls have not returned.

        Args:
            tokens: all tokens after the prompt so far.
            is_done: whether no more tokens follow, so that an incomplete character is returned too.
        """
        text = self._tokenizer.decode([*self._prompt, *tokens])
        if not is_done:
            text = text.rstrip(_INCOMPLETE)
        news = text[self._printed :]
        self._printed = max(self._printed, len(text))  # the text can get shorter by a later token
        return news


def sample(settings: Sample, console: Console) -> None:
    """Print each prompt with its continuation, and how many tokens were written per second.

    Rows are computed together. The text of the first prompt is printed while it is written, and the
    texts of other prompts after it.

    Raises:
        ValueError: the directory holds no decoder or no tokenizer; a prompt is empty, or longer
            than the model's positions; a setting is out of its range, or has no effect.
        ImportError: `chat` or `system` is set, and the package jinja2 is not installed.

    Warns:
        UserWarning: texts may become longer than those that a model with rotary positions was
            trained on.
    """
    # Before anything that starts a JAX backend: the number of fake devices is fixed then.
    devices = None if settings.devices is None else choose_devices(settings.devices)
    sampling = _sampling(settings)
    is_chat = settings.chat or settings.system is not None
    tokenizer = open_tokenizer(settings.directory)
    prompts = settings.prompt
    if is_chat:
        prompts = _in_template(settings.directory, prompts, settings.system)
    ids, mask = encode(tokenizer, prompts, has_special_tokens=is_chat)
    loaded = _load(settings)
    _check_ids(ids, loaded.config.vocabulary_size)
    params = _read(loaded, devices)
    begin, proceed = _compiled(loaded, params, ids, mask, settings, sampling)

    start = time.perf_counter()
    generation = jax.block_until_ready(begin(params, ids, mask))
    prefilled = time.perf_counter()
    rows = [row[seen].tolist() for row, seen in zip(ids, mask, strict=True)]
    texts = [Continuation(tokenizer, row) for row in rows]
    shown = [f"{prompt}\n\n" for prompt in settings.prompt] if is_chat else settings.prompt
    printer = _Printer(shown, texts, sampling, console)
    while not printer.show(generation):
        generation = proceed(params, generation)
    seconds = time.perf_counter() - prefilled
    num_new = int(np.sum(generation.lengths)) - len(ids)  # the prefill computed the first of each
    speed = f"{num_new / seconds:.1f} tokens/s" if num_new else "no time measured"
    console.print(
        f"\n{num_new + len(ids)} new tokens of {len(ids)} texts: {speed}, after "
        f"{prefilled - start:.2f} s for the prompts.",
        highlight=False,
        soft_wrap=True,
    )


def _sampling(settings: Sample) -> models.Sampling:
    """Return how tokens are chosen: as `generation_config.json` says, unless options are given."""
    options = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p")}
    given = {name: value for name, value in options.items() if value is not None}
    sampling = models.Sampling.from_json(settings.directory, **given)
    idle = [f"`{name}`" for name in given if name != "temperature"]
    if sampling.temperature == 0 and idle:
        raise ValueError(
            f"{' and '.join(idle)} without effect: the temperature is 0, which takes the most "
            "probable token each time. Add --temperature 1, or another one."
        )
    return sampling


def _in_template(directory: Path, prompts: Sequence[str], system: str | None) -> list[str]:
    with extra_for("`chat` and `system` need", "torch"):
        from ._chat import rendered
    return rendered(directory, prompts, system)


def _load(settings: Sample) -> LoadedDecoder:
    """Open the checkpoint as a decoder that computes in the dtype of its weights."""
    loaded = load_decoder(settings.directory, dtype=settings.dtype)
    dtype = jax.tree.leaves(loaded.params)[0].dtype.name
    if dtype == loaded.config.compute_dtype:
        return loaded
    return load_decoder(settings.directory, dtype=settings.dtype, compute_dtype=dtype)


def _read(loaded: LoadedDecoder, devices: list[Any] | None) -> Any:
    """Read the weights; return the tree of arrays, split over `devices` if they are given."""
    if devices is None:
        return jax.tree.map(lambda tensor: jnp.asarray(tensor.read()), loaded.params)
    mesh = Mesh(np.array(devices), ("model",))
    size = len(devices)
    try:
        specs = models.tensor_parallel_specs(loaded.graph, loaded.params, size=size, axis="model")
    except ValueError as error:
        raise ValueError(f"`devices` is {size}: {error}") from error
    return jax.tree.map(
        lambda tensor, spec: jax.make_array_from_callback(
            tensor.shape, NamedSharding(mesh, spec), tensor.__getitem__
        ),
        loaded.params,
        specs,
    )


def _check_ids(ids: np.ndarray, vocabulary_size: int) -> None:
    if ids.max() >= vocabulary_size:
        raise ValueError(
            f"The tokenizer gives a token {ids.max()}, the model's vocabulary has "
            f"{vocabulary_size} tokens. Take the tokenizer that was saved with the model."
        )


def _check_length(config: models.DecoderConfig, longest: int, max_new_tokens: int) -> None:
    """Raise `ValueError` if texts may have more tokens than the model has positions.

    Warn if they may have more tokens than the model was trained on.
    """
    num_columns = longest + max_new_tokens - 1
    sizes = f"The longest `prompt` has {longest} tokens and `max_new_tokens` is {max_new_tokens}"
    try:
        jax.eval_shape(lambda: models.make_cache(config, 1, num_columns))
    except ValueError as error:
        raise ValueError(f"{sizes}: {error}") from error
    if num_columns > config.max_length:
        warn(
            f"{sizes}, but the model is made for {config.max_length} tokens "
            "(`max_position_embeddings`): what it writes after them may make no sense. Lower "
            "--max-new-tokens."
        )


def _compiled(
    loaded: LoadedDecoder,
    params: Any,
    ids: np.ndarray,
    mask: np.ndarray,
    settings: Sample,
    sampling: models.Sampling,
) -> tuple[Any, Any]:
    """Compile and return two programs, one to begin texts and one to continue them.

    The first one runs the prompts and makes the first token of each row. The second makes up to
    `_TOKENS_AT_A_TIME` more tokens of each row.
    """
    num_columns = ids.shape[1] + settings.max_new_tokens - 1
    _check_length(loaded.config, ids.shape[1], settings.max_new_tokens)

    @jax.jit
    def begin(params, ids, mask):
        return models.start_generation(
            nnx.merge(loaded.graph, params).decode,
            models.make_cache(loaded.config, len(ids), num_columns),
            ids,
            mask,
            max_new_tokens=settings.max_new_tokens,
            sampling=sampling,
            key=jax.random.key(settings.seed),
        )

    began = begin.lower(params, ids, mask).compile()
    shardings = began.output_shardings

    @functools.partial(jax.jit, donate_argnums=1, out_shardings=shardings)
    def proceed(params, generation):
        decode = nnx.merge(loaded.graph, params).decode
        return models.continue_generation(
            decode, generation, sampling=sampling, num_tokens=_TOKENS_AT_A_TIME
        )

    shapes = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(begin, params, ids, mask),
        shardings,
    )
    return began, proceed.lower(params, shapes).compile()


class _Printer:
    """Prints the texts of all prompts one below the other, as far as they have been written."""

    def __init__(
        self,
        prompts: Sequence[str],
        texts: list[Continuation],
        sampling: models.Sampling,
        console: Console,
    ):
        self._prompts, self._texts, self._console = prompts, texts, console
        self._stops = sampling.stop_tokens
        self._row = 0  # the row that is being printed
        self._print(prompts[0])

    def show(self, generation: models.Generation) -> bool:
        """Print the text that is new in `generation`; return True once all texts are printed."""
        tokens, lengths, is_done, num = jax.device_get(
            (generation.tokens, generation.lengths, generation.is_done, generation.num_columns)
        )
        while True:
            row = tokens[self._row, : lengths[self._row]].tolist()
            if -1 in row:
                raise ValueError(
                    "The logits are not finite: the weights of the checkpoint, or its dtype, are "
                    "not those that the model computes with. Try --dtype float32."
                )
            ends = bool(is_done[self._row]) or num == tokens.shape[1]
            shown = [token for token in row if token not in self._stops]
            self._print(self._texts[self._row].news(shown, is_done=ends))
            if not ends:
                return False
            self._row += 1
            if self._row == len(self._texts):
                self._print("\n")
                return True
            self._print(f"\n\n{self._prompts[self._row]}")

    def _print(self, text: str) -> None:
        """Print a text; control characters are escaped, so that the terminal does not obey them."""
        text = "".join(x if x.isprintable() or x in "\n\t" else repr(x)[1:-1] for x in text)
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()
