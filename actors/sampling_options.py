"""How the next token of a request is chosen, as a job, a row or a model's checkpoint states it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from planner.option_rules import declared, flag, option
from quant.common.errors import FieldError
from quant.common.json_text import loads
from quant.common.text import INCOMPLETE

REPETITION_PENALTIES = (0.01, 100.0)
"""Least and most. Usual are 0.8 to 2; within these limits the logits of every type stay finite."""

ADDITIVE_PENALTY = 2.0
"""Largest size of presence and frequency penalties, of either sign, as in OpenAI's interface."""

LARGEST_BIAS = 100.0
"""Largest size of the bias of a logit, of either sign, as in OpenAI's interface."""

MOST_STOPS = 64
"""OpenAI's interface takes 4. All are searched for after every token, while the batch waits."""

STOP_CHARACTERS = 1000
"""Length of one stop string, which may lie in as many tokens, each time decoded anew."""

MOST_STOP_TOKENS = 1024
"""Token ids that end a request: more than any model has tokens that end something."""

FORM_KINDS = ("json", "regex", "choice", "grammar")
"""What `structured_outputs` may hold: a JSON schema, a regular expression, texts to choose from, a
grammar of Lark or llama.cpp."""

MOST_FORM_BYTES = 1 << 18
"""Of `structured_outputs` as JSON. OpenAI takes schemas with 120,000 characters of names and
values; a list of 10,000 choices has as many bytes."""

FORM = "structured_outputs"
_REMEMBERED_FORMS = 64

_STOP_WANTED = f"at most {MOST_STOPS} texts of 1 to {STOP_CHARACTERS} characters each"
_REPETITION_WANTED = "from {:g} to {:g}; 1 is none".format(*REPETITION_PENALTIES)
_ADDITIVE_WANTED = f"from {-ADDITIVE_PENALTY:g} to {ADDITIVE_PENALTY:g}"
_ID_DIGITS = 18  # of a token id, so that an int64 holds it
_FIRST_FIELDS = frozenset(
    ("temperature", "top_k", "top_p", "seed", "max_new_tokens", "stop", "ignore_eos")
)


@dataclass(frozen=True)
class Sampling:
    """Options for choosing the next token, and for ending a request.

    `temperature=0` is greedy. `top_k=0` (or -1), `top_p=1` and `min_p=0` keep every token. Draws
    are keyed by `seed`, the request's `custom_id` and the position, so they do not depend on how
    requests are batched. `max_new_tokens=None` means the limit that the plan has for such.

    `stop` and `stop_token_ids` end a request beside the end-of-sequence tokens, which `ignore_eos`
    passes over. None of the first `min_tokens` new tokens ends it, as in vLLM: no token that would
    is chosen among them, `ignore_eos` or not, and no stop string counts that ends there.

    `repetition_penalty` (1: none) counts the tokens of the prompt and the generated ones, as in
    transformers; `presence_penalty` and `frequency_penalty` (0: none) count the generated ones, as
    OpenAI defines them; `logit_bias` is added to the logits of its token ids. All four also hold
    where the choice is greedy.

    `structured_outputs` is the form of the answer, one of `FORM_KINDS` with its value; kept as
    JSON, empty for any text. Tokens that it does not allow are not chosen, and it ends an answer
    that is complete, whatever else is asked for (docs/sampling.md).
    """

    temperature: float = option("T", "0 is greedy", 0.0)
    top_k: int = option("K", "keep the K most probable, 0 is off", 0)
    top_p: float = option("P", "keep the tokens that make up this probability", 1.0)
    seed: int = option("SEED", "of the random draws", 0)
    max_new_tokens: int | None = option(
        "TOKENS", "to generate, at most the plan's (default: the plan's)"
    )
    stop: tuple[str, ...] = option("TEXT", "strings that end a generation", ())
    ignore_eos: bool = flag("do not stop at the end-of-sequence token")
    min_p: float = option("P", "keep tokens with this share of the most probable's", 0.0)
    repetition_penalty: float = option("X", "penalty on tokens of prompt and answer, 1 is off", 1.0)
    presence_penalty: float = option("X", "penalty on tokens that are in the answer, -2 to 2", 0.0)
    frequency_penalty: float = option(
        "X", "penalty on each use of a token in the answer, -2 to 2", 0.0
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        hash=False,
        metadata=declared(
            "ID=BIAS", "added to the logits of token ID, -100 to 100", more={"nargs": "+"}
        ),
    )
    stop_token_ids: tuple[int, ...] = option("ID", "tokens that end it", ())
    min_tokens: int = option("TOKENS", "to generate before anything ends it", 0)
    structured_outputs: str = option(
        "JSON", 'form of answers: {"regex": …}, or with json, choice or grammar', ""
    )

    def __post_init__(self) -> None:
        """Check ranges; raises `FieldError`."""
        if self.top_k == -1:  # as vLLM writes that it is off
            object.__setattr__(self, "top_k", 0)
        least, most = REPETITION_PENALTIES
        rules = {
            "temperature": (0.0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 or -1 (off), or more"),
            "min_tokens": (self.min_tokens >= 0, "0 or more"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            "max_new_tokens": (
                self.max_new_tokens is None or self.max_new_tokens >= 1,
                "1 or more",
            ),
            "stop": (
                len(self.stop) <= MOST_STOPS
                and all(0 < len(each) <= STOP_CHARACTERS for each in self.stop),
                _STOP_WANTED,
            ),
            "min_p": (0.0 <= self.min_p <= 1.0, "from 0 (off) to 1"),
            "repetition_penalty": (least <= self.repetition_penalty <= most, _REPETITION_WANTED),
            "presence_penalty": (abs(self.presence_penalty) <= ADDITIVE_PENALTY, _ADDITIVE_WANTED),
            "frequency_penalty": (
                abs(self.frequency_penalty) <= ADDITIVE_PENALTY,
                _ADDITIVE_WANTED,
            ),
        }
        for name, (holds, wanted) in rules.items():
            if not holds:
                raise FieldError(name, f"is {getattr(self, name)!r:.80}; it must be {wanted}")
        if self.stop_token_ids != ():
            object.__setattr__(self, "stop_token_ids", _checked_ids(self.stop_token_ids))
        if self.logit_bias != {}:  # it is empty in most rows, of which there may be millions
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.structured_outputs != "":
            object.__setattr__(self, FORM, checked_form(self.structured_outputs))

    @property
    def penalises(self) -> bool:
        """Whether the choice depends on the tokens that a request has had."""
        additive = self.presence_penalty != 0 or self.frequency_penalty != 0
        return additive or self.repetition_penalty != 1

    @property
    def changes_logits(self) -> bool:
        """Whether logits are biased or penalised before any token is chosen."""
        return bool(self.logit_bias) or self.penalises

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that count for a digest: the first seven always, and those that were added
        later only where they are set, so that jobs of older versions can be resumed.
        """
        return {
            name: value
            for name, value in vars(self).items()
            if name in _FIRST_FIELDS or value != getattr(GREEDY, name)
        }


def stop_begin(text: str, stops: Iterable[str], early: str = "") -> int | None:
    """Where in `text` the first of the `stops` begins that ends after its first `early` tokens."""
    after = len(early.rstrip(INCOMPLETE))
    found = (text.find(each, max(0, after + 1 - len(each))) for each in stops)
    return min((begin for begin in found if begin >= 0), default=None)


def _checked_ids(given: Iterable[Any]) -> tuple[int, ...]:
    """`stop_token_ids`, each once; raises `FieldError`."""
    found = list(given)
    if len(found) > MOST_STOP_TOKENS or not all(type(t) is int and _is_token_id(t) for t in found):
        wanted = f"at most {MOST_STOP_TOKENS} whole numbers of at least 0"
        raise FieldError("stop_token_ids", f"is {given!r:.80}; it must be {wanted}")
    return tuple(sorted({*found}))


def _checked_bias(given: Any) -> dict[int, float]:
    """`logit_bias` by token id, which is text in JSON; raises `FieldError` naming the token."""
    if not isinstance(given, Mapping):
        wanted = f"token ids to numbers from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}"
        raise FieldError("logit_bias", f"is {given!r:.80}; it must map {wanted}")
    found: dict[int, float] = {}
    for key, value in given.items():
        if not _is_token_id(key):
            raise FieldError(
                "logit_bias", f"has {key!r:.80}, which is no token id; give whole numbers from 0 on"
            )
        if type(value) not in (int, float) or not -LARGEST_BIAS <= value <= LARGEST_BIAS:
            limits = f"from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}"
            why = f"of token {key!r:.80} is {value!r:.80}; it must be a number {limits}"
            raise FieldError("logit_bias", why)
        found[int(key)] = float(value)
    return dict(sorted(found.items()))


def checked_form(given: Any) -> str:
    """`structured_outputs`, an object or its JSON, as JSON of one spelling; empty where it asks for
    nothing. Whether the form itself is sound is told by `actors.stage.grammar`.

    Raises `FieldError`.
    """
    return _form_of_text(given) if isinstance(given, str) else _form_of(given)


@lru_cache(_REMEMBERED_FORMS)  # a job's rows may have one form, which each `Sampling` checks
def _form_of_text(text: str) -> str:
    return _form_of(_read(text, "the field")) if text else ""


def _form_of(given: Any) -> str:
    value = {} if given is None else given
    if not isinstance(value, Mapping) or len(value) > 1 or not {*value} <= {*FORM_KINDS}:
        wanted = f"an object with one of {', '.join(FORM_KINDS)}"
        raise FieldError(FORM, f"is {given!r:.80}; it must be {wanted}")
    made = [{kind: _checked_kind(kind, each)} for kind, each in value.items()]
    try:
        text = json.dumps(made[0], ensure_ascii=False, separators=(",", ":")) if made else ""
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise FieldError(FORM, f"cannot be written as JSON: {error}") from error
    if size > MOST_FORM_BYTES:
        raise FieldError(
            FORM,
            f"has {size} bytes as JSON; give at most {MOST_FORM_BYTES}, such as a pattern "
            "in place of a long list",
        )
    return text


def _checked_kind(kind: str, value: Any) -> Any:
    """The schema, pattern, choices or grammar; a schema that is JSON text is read."""
    if kind == "json":
        schema = _read(value, "its schema") if isinstance(value, str) else value
        if isinstance(schema, Mapping):
            return schema
        raise FieldError(FORM, f"has the schema {value!r:.80}; it must be an object")
    if kind == "choice":
        if isinstance(value, list | tuple) and value and all(type(v) is str and v for v in value):
            return list(value)
        raise FieldError(FORM, f"has the choice {value!r:.80}; give texts, none of them empty")
    if isinstance(value, str) and value:
        return value
    raise FieldError(FORM, f"has the {kind} {value!r:.80}; it must be a text, and not empty")


def _read(text: str, what: str) -> Any:
    try:
        return loads(text)
    except ValueError as error:
        raise FieldError(FORM, f"is no JSON ({what}): {error}") from error


def _is_token_id(key: object) -> bool:
    if isinstance(key, str):
        short = key.isascii() and key.isdecimal() and len(key) <= _ID_DIGITS
        return short and str(int(key)) == key
    return type(key) is int and 0 <= key < 10**_ID_DIGITS


GREEDY = Sampling()
"""The sampling where nothing is set."""
