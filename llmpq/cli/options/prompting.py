"""Options of how prompts become tokens, of all commands that tokenize rows."""

from __future__ import annotations

import argparse
import json

from llmpq.cli.parser import OptionGroup
from llmpq.keywords import PromptingKeywords
from llmpq.tokenizing.prompting import Prompting
from planner.option_rules import Rule

PROMPTING_OPTIONS = tuple(PromptingKeywords.__annotations__)


def prompting_rule(without: str) -> Rule:
    """The rule that these options are about rows, which the option `without` brings."""
    return Rule(PROMPTING_OPTIONS, "only rows are rendered; leave it out", without=(without,))


def add_prompting(group: OptionGroup) -> None:
    """Add what holds for rows that do not say."""
    add = group.option
    add(
        "--chat_template",
        metavar="FILE",
        help="jinja template of messages, in place of the model's own (default: that)",
    )
    add(
        "--chat_template_kwargs",
        type=_json_object,
        metavar="JSON",
        help="what templates are given, as '{\"enable_thinking\": false}'; a row's own wins",
    )
    add(
        "--add_special_tokens",
        type=_truth,
        metavar="true|false",
        help="whether the tokenizer adds its own, such as BOS (default: to texts, not to messages)",
    )


def given_prompting(options: argparse.Namespace) -> PromptingKeywords:
    """Those of these options that were given, by name."""
    given: PromptingKeywords = {}
    for name in PROMPTING_OPTIONS:
        if name in options:
            given[name] = getattr(options, name)  # type: ignore[literal-required]
    return given


def asked_prompting(options: argparse.Namespace) -> Prompting:
    """The same, read and checked; raises as `Prompting.of`."""
    return Prompting.of(**given_prompting(options))


def prompting_words(options: argparse.Namespace) -> list[str]:
    """The words of a command that gives the same options."""
    words = []
    for name, value in given_prompting(options).items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words


def _json_object(text: str) -> object:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is no JSON object; give names and values, such as "
            '{"enable_thinking": false}'
        )
    return found


def _truth(text: str) -> bool:
    known = {"true": True, "false": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is neither true nor false")
    return known[text.lower()]
