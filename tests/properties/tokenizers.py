"""Chat templates and tokenizer files, spoiled, in the process that they run in."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from llmpq.tokenizing.tokenizer_process import RowLimits, Tokenized, TokenizerProcess
from tests.llmpq.small_tokenizers import TEMPLATE, WORDS, write_tokenizer
from tests.properties.mutation import mutate_bytes, mutate_json

ROW_S = 0.3
_LIMITS = RowLimits(ROW_S, row_bytes=1 << 29, most_tokens=64)
_HELLO = 1 + WORDS.index("hello")
_LONGEST = 1200  # characters of an error: a path, and what the child cuts
_CONFIG = b"C"  # first byte of a seed that is a tokenizer_config.json

_CHATML = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{{ '[ ' + m['role'] + ' ]' + m['content'] | trim + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[ assistant ]' }}{% endif %}"
)
_RICH = """{%- set ns = namespace(n=0) -%}{%- macro say(m) -%}[ {{ m.role }} ] {{ m.content }} a
{%- endmacro -%}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{% generation %}{{ say(m) }}{% endgeneration %}{% set ns.n = ns.n + 1 %}{% endfor %}
{{ messages | map(attribute='role') | list | tojson }}{{ strftime_now('%Y') | length }}
{% if ns.n > 9 %}{{ raise_exception('too many') }}{% endif %}"""
_ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
    "{{ lipsum(n=10**7) }}", "{{ 9**9**9 }}",
)  # fmt: skip
"""Rare: each costs the time limit and a new process."""

_PIECES = (
    "{% for i in range(10**9) %}{% endfor %}", "{{ 'a' * 10**12 }}",
    "{{ 'a' * 10**6 }}", "{{ [0] * 10**9 }}",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "{{ 'abc' | dictsort }}",
    "{{ messages | tojson(indent=10**9) }}", "{{ '%1000000000d' % 1 }}",
    "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ self._TemplateReference__context }}", "{% include 'x' %}", "{% import 'x' as y %}",
    "{{ messages[7].role.x }}", "{{ 1 // 0 }}", "{{ raise_exception('no') }}", "{% break %}",
    "{{ '{0.__class__}'.format(1) }}", "{{ messages.append(1) }}", "{{ 'a' | center(10**9) }}",
    "{{ range(10**6) | list | length }}", "{% set messages = 5 %}", "{{ namespace(a=1) }}",
    "{% raw %}", "{#", "{{", "%}", "(" * 300, "{{ [" + "[" * 100, "{% if 1 %}" * 30, "\ud7ff\u2028",
    "{% generation %}", "{{ messages | groupby('role') }}", "{{ 'x' | indent(10**9) }}",
)  # fmt: skip


@cache
def _home() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tokenizers-")


@cache
def _process() -> TokenizerProcess:
    folder = write_tokenizer(Path(_home().name) / "seed", TEMPLATE)
    program = Path(__file__).with_name("tokenizer_child.py")
    return TokenizerProcess(folder, _LIMITS, program)


def close() -> None:
    """End the process."""
    _process().close()


def template_seeds() -> tuple[bytes, ...]:
    """Plain, ChatML's, and one with all that jinja and transformers have."""
    return tuple(text.encode() for text in (TEMPLATE, _CHATML, _RICH))


def mutate_template(data: bytes, rng: random.Random) -> bytes:
    """Pieces put in that do harm, other bytes, or pieces of its own exchanged."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    text = data.decode(errors="replace")
    for _ in range(rng.choice((1, 1, 2))):
        between = [0, *(found.end() for found in re.finditer("[%}]}", text)), len(text)]
        at, start, end = rng.choice(between), *sorted(rng.choices(between, k=2))
        match rng.randrange(4):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:at] + text[start:end] + text[at:]
            case _:
                pieces = _ENDLESS if rng.random() < 0.004 else _PIECES
                text = text[:at] + rng.choice(pieces) + text[at:]
    return text.encode()


def template(data: bytes, folder: Path) -> bool:
    """Whether it shows what the user says."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    answer = _process().ask({"template": text})
    _check(answer)
    return _HELLO in (answer.ids or ())


@cache
def file_seeds() -> tuple[bytes, ...]:
    """A tokenizer.json, and a configuration with a template, which begins with a letter."""
    folder = Path(_home().name) / "seed"
    write_tokenizer(folder, TEMPLATE)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": _CHATML, "model_max_length": 64, "add_bos_token": False,
               "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}}}  # fmt: skip
    return (
        b"T" + (folder / "tokenizer.json").read_bytes(),
        _CONFIG + json.dumps(config).encode(),
    )


def mutate_file(data: bytes, rng: random.Random) -> bytes:
    """Its JSON, spoiled."""
    return data[:1] + mutate_json(data[1:], rng)


def file(data: bytes, folder: Path) -> bool:
    """Whether it loads."""
    target = write_tokenizer(folder / "model", TEMPLATE)
    is_config = data[:1] == _CONFIG
    name = "tokenizer_config.json" if is_config else "tokenizer.json"
    if is_config:
        (target / "chat_template.jinja").unlink()
    (target / name).write_bytes(data[1:])
    answer = _process().ask({"load": str(target)})
    _check(answer)
    return answer.text is not None


def _check(answer: Tokenized) -> None:
    if answer.error is not None:
        assert answer.error
        assert len(answer.error) < _LONGEST
        answer.error.encode()
        return
    assert answer.ids is None or all(type(token) is int for token in answer.ids)
