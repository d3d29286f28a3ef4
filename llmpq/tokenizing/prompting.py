"""How prompts become tokens where their rows do not say: options of a whole job."""

from __future__ import annotations

import hashlib
import json
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from llmpq.rows.tools import TOOL_PARSERS, ToolParser
from llmpq.tokenizing.tokenizer_child import BrokenTemplateError, compile_template
from planner.option_rules import Rule, option
from quant.common.errors import SpecError
from quant.common.json_text import loads

MOST_BYTES = 100_000
"""Of a template, and of arguments, as JSON: the process that renders is given both as an argument
of its command, which may have 131,072 (Linux, `MAX_ARG_STRLEN`)."""


@dataclass(frozen=True)
class Prompting:
    """Options of rows that do not say: what templates are given (a row's own arguments win, name by
    name), and whether the tokenizer adds its special tokens; None: to texts alone.

    `chat_template` is the text of a template in place of the model's own, `tool_parser` the form in
    which the model writes calls of tools, where it is not to be told from that.
    """

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool | None = None
    tool_parser: ToolParser | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those that are set, by name."""
        return {name: value for name, value in vars(self).items() if value not in (None, {})}

    @property
    def identity(self) -> Mapping[str, Any]:
        """All by name, None for what is not set: a digest of the template, the switch as a word."""
        found = dict.fromkeys(vars(self)) | dict(self.settings)
        if self.chat_template is not None:
            found["chat_template"] = hashlib.sha256(self.chat_template.encode()).hexdigest()[:16]
        if self.add_special_tokens is not None:
            found["add_special_tokens"] = str(self.add_special_tokens).lower()
        return found


def _json_object(text: str) -> object:
    try:
        found = loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r:.80} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ArgumentTypeError(
            f"{text!r:.80} is no JSON object; give names and values, such as "
            '{"enable_thinking": false}'
        )
    return found


def _truth(text: str) -> bool:
    known = {"true": True, "false": False}
    if text.lower() not in known:
        raise ArgumentTypeError(f"{text!r:.80} is neither true nor false")
    return known[text.lower()]


@dataclass(frozen=True)
class PromptingOptions:
    """Options of all that tokenizes rows, for those that do not say."""

    chat_template: str | Path | None = option(
        "FILE", "jinja template of messages, in place of the model's own (default: that)"
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        "JSON",
        "what templates are given, as '{\"enable_thinking\": false}'; a row's own wins",
        parse=_json_object,
    )
    add_special_tokens: bool | None = option(
        "true|false",
        "whether the tokenizer adds its own, such as BOS (default: to texts, not to messages)",
        parse=_truth,
    )
    tool_parser: ToolParser | None = option(
        TOOL_PARSERS, "how the model writes calls of tools (default: as its template shows)"
    )

    @property
    def given_prompting(self) -> dict[str, Any]:
        """Those that are set, by name."""
        given = {name: getattr(self, name) for name in PROMPTING_OPTIONS}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def prompting(self) -> Prompting:
        """The same, read and checked.

        Raises `SpecError` for a file that cannot be read, for a template that cannot be compiled,
        naming its line, and for arguments that are no JSON object.
        """
        kwargs, adds = self.chat_template_kwargs or {}, self.add_special_tokens
        _check_kwargs(kwargs)
        if adds not in (None, True, False):
            raise SpecError(f"add_special_tokens is {adds!r:.80}; give true or false")
        file = self.chat_template
        template = None if file is None else _template(Path(file).expanduser())
        if self.tool_parser not in (None, *TOOL_PARSERS):
            known = ", ".join(TOOL_PARSERS)
            raise SpecError(f"tool_parser is {self.tool_parser!r:.80}; it must be one of {known}")
        return Prompting(template, dict(kwargs), adds, self.tool_parser)


PROMPTING_OPTIONS = tuple(field.name for field in fields(PromptingOptions))


def prompting_rule(without: str) -> Rule:
    """The rule that these options are about rows, which the option `without` brings."""
    return Rule(PROMPTING_OPTIONS, "only rows are rendered; leave it out", without=(without,))


def _check_kwargs(kwargs: object) -> None:
    try:
        size = len(json.dumps(kwargs, allow_nan=False)) if isinstance(kwargs, Mapping) else 0
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"chat_template_kwargs cannot be written as JSON: {error}") from error
    if not size or size > MOST_BYTES:
        raise SpecError(
            f"chat_template_kwargs is {kwargs!r:.80}; give an object of at most {MOST_BYTES} bytes "
            'as JSON, such as {"enable_thinking": false}'
        )


def _template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        compile_template(text)
    except OSError as error:
        raise SpecError(f"chat_template {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"chat_template {path} is not UTF-8 (byte {error.start})") from error
    except BrokenTemplateError as error:
        raise SpecError(f"chat_template {path}: {error}; mend it") from error
    size = len(json.dumps(text))
    if not text.strip() or size > MOST_BYTES:
        raise SpecError(f"chat_template {path} has {size} bytes as JSON; give 1 to {MOST_BYTES}")
    return text
