"""Chat templates are rendered as by transformers; wrong ones are refused with their reason."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers import models as forms

pytest.importorskip("jinja2", reason="needs jinja2 (the extra `torch`)")

from jaxzero.commands._chat import rendered

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
TEMPLATES = {
    "loop": PLAIN + "{% if add_generation_prompt %}<assistant>{% endif %}",
    "blocks and whitespace": """{{- bos_token }}
    {%- set ns = namespace(seen=false) %}
    {% for message in messages %}
        {% if message['role'] == 'system' %}
            {% set ns.seen = true %}
            {% continue %}
        {% endif %}
        {% generation %}
        {{ message | tojson }}
        {% endgeneration %}
        {% if loop.last %}{% break %}{% endif %}
    {% endfor %}
    {% if ns.seen %}system {{ dict(a=1)['a'] }} {{ tools is none }}{% endif %}
""",
    "macro": "{% macro f(x) %}[{{ x.upper() }}]{% endmacro %}{{ f(messages[-1]['content']) }}",
}


def save(directory: Path, **config: object) -> Path:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **config}
    config |= {"eos_token": {"content": "</s>", "__type": "AddedToken"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(forms.BPE({"a": 0, "<s>": 1, "</s>": 2}, []))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("form", ["file", "key", "list"])
def test_templates_give_the_text_of_transformers(tmp_path: Path, name: str, form: str):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    template = TEMPLATES[name]
    if form == "file":
        save(tmp_path, chat_template="not this one")
        (tmp_path / "chat_template.jinja").write_text(template)
    elif form == "key":
        save(tmp_path, chat_template=template)
    else:
        listed = [{"name": "default", "template": template}, {"name": "rag", "template": "x"}]
        save(tmp_path, chat_template=listed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for system in (None, "Be <brief> & kind."):
        before = [] if system is None else [{"role": "system", "content": system}]
        prompts = [" Say é \n", "a"]
        wanted = [
            tokenizer.apply_chat_template(
                [*before, {"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for prompt in prompts
        ]
        assert rendered(tmp_path, prompts, system) == wanted


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template: neither `chat_template.jinja` nor"),
        ("{{ raise_exception('no system role') }}", "TemplateError: no system role"),
        ("{% for x in %}", "fails: TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "fails: SecurityError"),
        ("{{ dict.__init__.__globals__ }}", "fails: SecurityError"),
        ("{% set n = namespace(_x=1) %}", "fails: SecurityError: a namespace cannot hold '_x'"),
        ("{{ messages.append(1) }}", "fails: SecurityError"),
        ("{{ 1 // 0 }}", "fails: ZeroDivisionError"),
    ],
)
def test_templates_that_are_refused(tmp_path: Path, template: str | None, message: str):
    save(tmp_path, **({} if template is None else {"chat_template": template}))
    with pytest.raises(ValueError, match=message):
        rendered(tmp_path, ["a"], None)


def test_without_jinja2_it_is_said_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "jaxzero.commands._chat", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"need the package 'jinja2'.*\[torch\]"):
        importlib.import_module("jaxzero.commands._sample")._in_template(tmp_path, ["Hello"], None)
