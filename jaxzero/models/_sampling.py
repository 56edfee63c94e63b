"""Choose the next token from its logits: greedily, or at random from the most probable ones.

    p = softmax(logits / temperature), restricted to the top k, then to the top p of what is left

The top p are the most probable tokens until their probabilities sum to p (nucleus sampling,
https://arxiv.org/abs/1904.09751). Temperature, top k and top p are applied in the order of
transformers.

Dimensions: b batch, v vocabulary.
"""

import dataclasses
import math
import numbers
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key

from .._checked_json import (
    ANYTHING,
    FLAG,
    JsonKeys,
    Kind,
    integer,
    list_of,
    number,
    optional,
    read_json,
)
from .._warnings import warn
from ._config_json import make_config, read_config

_REMEDY = "Correct the file, or copy or download the checkpoint again."
_ID, _IDS = integer(-1), list_of(integer(-1))  # in old files -1 stands for none
# One stop token or a list of them; read as a tuple.
_STOPS = Kind(
    "a token id or a list of them",
    lambda value: _ID.accepts(value) or _IDS.accepts(value),
    lambda value: tuple(value) if isinstance(value, list) else (value,),
)
# Keys that change the text and are not computed here: the value with which each has no effect.
_NEUTRAL: dict[str, Any] = {
    "bad_words_ids": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "min_p": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "repetition_penalty": 1,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "typical_p": 1,
}
_KINDS: dict[str, Kind] = {
    "do_sample": optional(FLAG),
    "temperature": optional(number(0)),
    "top_k": optional(integer(0)),
    "top_p": optional(number(0)),
    "eos_token_id": optional(_STOPS),
    "pad_token_id": optional(_ID),
    **dict.fromkeys(_NEUTRAL, ANYTHING),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings by which tokens are chosen, and the tokens that end a row.

    Args:
        temperature: divides the logits; 0 for the most probable token.
        top_k: number of tokens that are chosen from; None for all.
        top_p: sum of the probabilities of the tokens that are chosen from, in (0, 1].
        stop_tokens: ids of the tokens that end a row.
        pad_token: id that follows the end of a row.

    Raises:
        ValueError: a field has another type, or is out of its range; the message names it.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    pad_token: int = 0

    def __post_init__(self):
        if not (is_a(numbers.Real, self.temperature) and 0 <= self.temperature < math.inf):
            raise ValueError(
                f"`temperature` must be a number of at least 0; got {self.temperature!r}. 0 takes "
                "the most probable token, 1 samples from the model's own probabilities."
            )
        if self.top_k is not None and not (is_a(numbers.Integral, self.top_k) and self.top_k >= 1):
            raise ValueError(
                f"`top_k` must be an integer of at least 1; got {self.top_k!r}. Leave it None to "
                "choose from all."
            )
        if not (is_a(numbers.Real, self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(
                f"`top_p` must be a number in (0, 1]; got {self.top_p!r}. 1 chooses from all "
                "tokens."
            )
        if not isinstance(self.stop_tokens, tuple | list) or not all(map(_is_id, self.stop_tokens)):
            raise ValueError(
                "`stop_tokens` must be a tuple of token ids, integers of at least 0; got "
                f"{self.stop_tokens!r}. A tokenizer's `eos_token_id` is one."
            )
        if not _is_id(self.pad_token):
            raise ValueError(
                f"`pad_token` must be a token id, an integer of at least 0; got {self.pad_token!r}."
            )

    @classmethod
    def from_json(cls, directory: Path | str, **changes: Any) -> "Sampling":
        """Read `generation_config.json` as transformers does, stop tokens and padding included.

        Without `do_sample` in the file the temperature is 0. Without the file the stop tokens are
        those of `config.json`.

        Args:
            directory: as `save_pretrained` writes it.
            **changes: fields to set differently, e.g. `temperature=0.7`.

        Raises:
            ValueError: a value of the file or in `changes` has another type or range than it may
                have, or there is neither file. The message names the file if that is to blame.

        Warns:
            UserWarning: the file asks for something that is not computed here, such as a penalty
                for repetition.
        """
        cls(**changes)  # their errors do not name the file
        fields, path = sampling_fields(Path(directory))
        return make_config(cls, fields | changes, path)


def is_a(kind: type, value: Any) -> bool:
    """Return whether a value is a number of the class `kind`, and not a bool."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return is_a(numbers.Integral, value) and 0 <= value <= jnp.iinfo(jnp.int32).max


def choose(
    logits_bv: Float[Array, "b v"], sampling: Sampling, keys_b: Key[Array, "b"] | None
) -> Int32[Array, "b"]:
    """Return the next token of each row; -1 where its logits hold NaN.

    Args:
        logits_bv: logits of the next token.
        sampling: how it is chosen.
        keys_b: a random key for each row; None for temperature 0.
    """
    logits_bv = logits_bv.astype(jnp.float32)
    if sampling.temperature == 0 or keys_b is None:
        chosen_b = jnp.argmax(logits_bv, axis=-1)
    else:
        chosen_b = jax.vmap(jax.random.categorical)(keys_b, restricted(logits_bv, sampling))
    is_number = ~jnp.isnan(logits_bv).any(axis=-1)
    return jnp.where(is_number, chosen_b.astype(jnp.int32), jnp.int32(-1))


def restricted(logits_bv: Float[Array, "b v"], sampling: Sampling) -> Float[Array, "b v"]:
    """Divide logits by the temperature, and set those outside of the top k or top p to -inf.

    Tokens as probable as the least probable one of the top k or top p are kept with it. Each row is
    shifted by a constant, so that its largest logit is 0; this does not change probabilities.
    """
    # The largest logit becomes 0, so that dividing by a small temperature overflows to -inf only;
    # and the divisor is not subnormal, which devices may take for 0.
    smallest = float(jnp.finfo(logits_bv.dtype).tiny)
    shifted_bv = logits_bv - logits_bv.max(axis=-1, keepdims=True)
    scaled_bv = shifted_bv / max(sampling.temperature, smallest)
    if sampling.top_k is not None and sampling.top_k < logits_bv.shape[-1]:
        least_b1 = jax.lax.top_k(logits_bv, sampling.top_k)[0][:, -1:]
        scaled_bv = jnp.where(logits_bv < least_b1, -jnp.inf, scaled_bv)
    if sampling.top_p < 1:
        ordered_bv = -jnp.sort(-scaled_bv, axis=-1)
        shares_bv = jax.nn.softmax(ordered_bv)
        before_bv = jnp.cumsum(shares_bv, axis=-1) - shares_bv
        kept_bv = (before_bv < sampling.top_p).at[:, 0].set(True)  # one token at least
        least_b1 = jnp.where(kept_bv, ordered_bv, jnp.inf).min(axis=-1, keepdims=True)
        scaled_bv = jnp.where(scaled_bv < least_b1, -jnp.inf, scaled_bv)
    return scaled_bv


def sampling_fields(directory: Path) -> tuple[dict[str, Any], Path]:
    """Return the fields of `Sampling` that a directory describes, and the file that has them.

    Raises:
        ValueError: see `Sampling.from_json`.
    """
    path = directory / "generation_config.json"
    if path.exists():
        content = read_json(path, remedy=_REMEDY)
    else:
        content, path = read_config(directory)
        content = {key: content[key] for key in ("eos_token_id", "pad_token_id") if key in content}
    keys = JsonKeys(content, _KINDS, where=repr(str(path)), remedy=_REMEDY, missing=_REMEDY)
    others = [
        key for key, neutral in _NEUTRAL.items() if keys.get(key) not in (None, neutral, [], {})
    ]
    if others:
        warn(
            f"{str(path)!r} sets {', '.join(f'`{key}`' for key in others)}, which jaxzero does not "
            "compute: the text will differ from that of transformers."
        )
    stops = tuple(token for token in keys.get("eos_token_id") or () if token >= 0)
    pads = [token for token in (keys.get("pad_token_id"), *stops, 0) if token not in (None, -1)]
    fields: dict[str, Any] = {"stop_tokens": stops, "pad_token": pads[0]}
    if keys.get("do_sample"):
        top_k = keys.get("top_k", 50)  # the default of transformers; 0 is none
        fields["top_k"] = top_k or None
        for key in ("temperature", "top_p"):
            value = keys.get(key)
            fields[key] = 1.0 if value is None else value
    return fields, path
