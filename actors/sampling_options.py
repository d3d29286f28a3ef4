"""How the next token of a request is chosen, as a job, a row or a model's checkpoint states it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.option_rules import declared, flag, option
from quant.common.errors import FieldError
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


def _is_token_id(key: object) -> bool:
    if isinstance(key, str):
        short = key.isascii() and key.isdecimal() and len(key) <= _ID_DIGITS
        return short and str(int(key)) == key
    return type(key) is int and 0 <= key < 10**_ID_DIGITS


GREEDY = Sampling()
"""The sampling where nothing is set."""
