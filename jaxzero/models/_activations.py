"""The names that `config.json` has for activation functions."""

from .._checked_json import JsonKeys, shown
from ._config_json import CHOOSE_ANOTHER

# Their name: the key of `ACTIVATIONS`, which has the functions.
_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def read_activation(keys: JsonKeys, key: str, model: str, *, default: str | None = None) -> str:
    """The activation function that a key names, by the name that our configs have for it.

    Args:
        keys: the file.
        key: the key.
        model: "decoder" or "encoder", for messages.
        default: their name of the function where the file is silent; None if `keys` has one.

    Raises:
        ValueError: it is another function, or no text.
    """
    given = keys[key] if default is None else keys.get(key, default)
    if given not in _NAMES:
        raise keys.error(
            key,
            f"is {shown(given)}; the {model} computes {', '.join(_NAMES)}",
            remedy=CHOOSE_ANOTHER,
        )
    return _NAMES[given]
