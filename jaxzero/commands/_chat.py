"""Render a conversation with the chat template of a checkpoint, as transformers does.

A chat template is a Jinja program that comes with the checkpoint. It is rendered in Jinja's
sandbox, where it can change nothing, and sees only the messages and the special tokens.
"""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .._checked_json import read_json
from .._regular_file import read_regular

_MOST_BYTES = 2**22  # long templates have some ten kilobytes
_REMEDY = "Save the tokenizer again with `save_pretrained`."
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def rendered(directory: Path, prompts: Sequence[str], system: str | None) -> list[str]:
    """Render each prompt as a conversation of one message, which the model is to answer.

    Args:
        directory: the checkpoint's folder, with `chat_template.jinja`, or with a `chat_template` in
            `tokenizer_config.json`.
        prompts: for each conversation the message of a user.
        system: a system message in front of each prompt; None: the template's default.

    Returns:
        A text for each prompt. It ends where the model's answer begins.

    Raises:
        ValueError: there is no template, or it fails for these messages.
    """
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            config |= read_json(directory / name, remedy=_REMEDY)
    source = _source(directory, config)
    before = [] if system is None else [{"role": "system", "content": system}]
    shared = {"tools": None, "documents": None, "add_generation_prompt": True}
    shared |= _special_tokens(config)
    try:
        template = _environment().from_string(source)
        return [
            template.render(messages=[*before, {"role": "user", "content": prompt}], **shared)
            for prompt in prompts
        ]
    except Exception as error:  # of any kind: the program is the checkpoint's
        raise ValueError(
            f"The chat template of {str(directory)!r} fails: {type(error).__name__}: {error}. Some "
            "take no `system` message. Without `chat` and `system` plain text is continued."
        ) from error


def _source(directory: Path, config: dict[str, Any]) -> str:
    """Return the chat template of `chat_template.jinja`; without that file, of the config.

    transformers looks for it in the same order.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return read_regular(path, _MOST_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{str(path)!r} is not text in UTF-8: {error}. {_REMEDY}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        # Several templates by name, such as "default" and "tool_use".
        named = {x.get("name"): x.get("template") for x in template if isinstance(x, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"{str(directory)!r} has no chat template: neither `chat_template.jinja` nor a "
            "`chat_template` in `tokenizer_config.json`. Models that were not trained on "
            "conversations have none: leave out `chat` and `system`."
        )
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that a template may name, such as `bos_token`."""
    extra = config.get("extra_special_tokens")
    tokens = {f"{name}_token": config.get(f"{name}_token") for name in _NAMED}
    tokens |= extra if isinstance(extra, dict) else {}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in tokens.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _fail,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the model's words for training; ignored here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """A function that calls `dict`, and hides the class from templates.

    The attributes of a class lead out of the sandbox.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's `namespace` that refuses names which begin with an underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any):
        fields = dict(*args, **kwargs)
        for name in fields:
            _check_name(name)
        super().__init__(fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as `json.dumps` does; Jinja's own `tojson` would escape characters for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _fail(message: str) -> None:
    raise TemplateError(message)
