"""Grammars of answers that must have a form: compiled once, followed token by token, and the masks
of tokens that may come next, computed while the model computes.

Needs no torch but for masking logits: the process that tokenizes rows compiles forms first, within
its limits, so that none that cannot be kept comes to a stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from torch import Tensor

MOST_COMPILED = 64
"""Forms whose grammars are kept."""

WHITE_SPACE = r"[ ]?|\n[ \t]{0,20}"
"""Between the signs of JSON: as `json.dumps` writes it, with an indentation or without. Bounded, as
a model that draws its tokens may write blanks without end."""

_LIMITS: Mapping[str, Any] = {
    "max_items_in_row": 1000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""Of a grammar, beside those that the library has: items within which a mask of the most ambiguous
one takes 50 ms (of 2,000, its own limit, 0.4 s), and about 100 MB for patterns."""

_ERROR_CHARACTERS = 300

Words = npt.NDArray[np.int32]
"""Bits of tokens that may come next, `[rows, vocabulary / 32]`."""


def vocabulary_of(tokenizer: Any, ends: Sequence[int] = ()) -> LLTokenizer:
    """The tokens of transformers' `tokenizer` as bytes, and those that end an answer. ValueError
    for a tokenizer whose tokens the library cannot tell.
    """
    from llguidance import hf

    known = sorted(token for token in ends if token < len(tokenizer))
    try:
        return hf.from_tokenizer(tokenizer, eos_token=known or None)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"the model's tokenizer cannot be followed: {error}") from error


def compiled(form: str, vocabulary: LLTokenizer) -> LLMatcher:
    """The grammar of `form`, `Sampling.structured_outputs`, before any token.

    ValueError, which says why, where the library has no grammar of it or no text has that form.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, _grammar(form), log_level=0, limits=LLParserLimits(**_LIMITS))
    _check(matcher)
    begun = matcher.deep_copy()
    allowed = np.frombuffer(begun.compute_bitmask(), dtype=np.uint8)
    _check(begun)  # what nothing can begin is only noticed here, and next what is too large
    (tokens,) = np.unpackbits(allowed, bitorder="little").nonzero()
    if not tokens.size:
        raise ValueError("the tokenizer has no token that it begins with")
    begun.consume_token(int(tokens[0]))
    _check(begun)
    return matcher


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        why = matcher.get_error().removesuffix("<non-verbose/>").strip()
        if why.startswith("NoExtension"):
            why = "no text has this form"
        raise ValueError(why[:_ERROR_CHARACTERS])


_SERIALISED = '{"grammars":'
_ANSWER = "answer"
_BEHIND = json.dumps({"grammar": _SERIALISED}, separators=(",", ":"))[:-2]


def behind_reasoning(form: str, opening: str, closing: str, has_begun: bool) -> str:
    """The form of an answer that reasons before it has `form`: to the end of `closing`, if the
    prompt `has_begun` to, else where it begins with `opening`. Both as Lark writes a token or text.
    """
    own = _grammar(form)
    is_lark = not own.startswith(_SERIALISED)
    grammars = [{"lark_grammar": own}] if is_lark else json.loads(own)["grammars"]
    grammars[0]["name"] = _ANSWER
    start = f"thought @{_ANSWER}" if has_begun else f"{opening} thought @{_ANSWER} | @{_ANSWER}"
    is_token = closing.startswith("<")  # which no text holds
    thought = f"text {closing}" if is_token else "text"
    end = "" if is_token else f"[suffix={closing}]"
    lines = (
        f"start: {start}",
        f"thought: {thought}",
        f"text{end}: /(?s:.*)/",
    )
    whole = [{"lark_grammar": "\n".join(lines)}, *grammars]
    text = _SERIALISED + json.dumps(whole, ensure_ascii=False, separators=(",", ":")) + "}"
    return json.dumps({"grammar": text}, ensure_ascii=False, separators=(",", ":"))


def leaves_room(form: str) -> bool:
    """Whether an answer of `form` may reason first: of none, or one of `behind_reasoning`."""
    return not form or form.startswith(_BEHIND)


def _grammar(form: str) -> str:
    from llguidance import LLMatcher, grammar_from

    ((kind, value),) = json.loads(form).items()
    if kind == "grammar" and value.startswith(_SERIALISED):
        return str(value)
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(
            value, defaults={"whitespace_pattern": WHITE_SPACE}
        )
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":  # as one token of the grammar, which may have many thousands
        texts = " | ".join(map(json.dumps, value))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    return grammar_from(kind, value)


class Answer:
    """An answer that follows a grammar, from its first token or behind those that it has."""

    def __init__(self, matcher: LLMatcher, generated: Sequence[int]) -> None:
        self.matcher = matcher
        self.mask: Callable[[], Words] | None = None  # of its next token, where it is under way
        matcher.consume_tokens(list(generated))

    def give(self, token: int) -> None:
        self.matcher.consume_token(token)
        self.mask = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow: by its end, or as the grammar cannot be followed further."""
        return self.matcher.is_stopped()

    @property
    def is_broken(self) -> bool:
        return self.matcher.is_error()


class Grammars:
    """The grammars of a stage that samples: `begin` an answer, `look_ahead` when its token is
    known, and have its next logits `masked`. `vocabulary` is asked for when the first answer
    begins.
    """

    def __init__(self, vocabulary: Callable[[], LLTokenizer]) -> None:
        self._vocabulary = lru_cache(vocabulary)
        self._compiled = lru_cache(MOST_COMPILED)(lambda form: compiled(form, self._vocabulary()))
        self._ahead: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def begin(self, form: str, generated: Sequence[int]) -> Answer:
        return Answer(self._compiled(form).deep_copy(), generated)

    def look_ahead(self, answers: Sequence[Answer]) -> None:
        """Begin to compute their next masks, in another thread: the next pass goes on meanwhile."""
        if not answers:
            return
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(1, "llmpq-grammars")
        masks: Future[Words] = self._ahead.submit(self._masks, [a.matcher for a in answers])
        for row, answer in enumerate(answers):
            answer.mask = _row_of(masks, row)

    def masked(self, logits: Tensor, answers: Sequence[Answer | None]) -> Tensor:
        """`logits` `[rows, vocabulary]` with minus infinity for what an answer may not go on with;
        rows without a grammar, whose answer is None, stay as they are.
        """
        rows = [row for row, answer in enumerate(answers) if answer is not None]
        if not rows:
            return logits
        asked = [answer for answer in answers if answer is not None]
        self.look_ahead([answer for answer in asked if answer.mask is None])
        words = np.stack([answer.mask() for answer in asked if answer.mask is not None])
        return _without(logits, rows, words)

    def _masks(self, matchers: Sequence[LLMatcher]) -> Words:
        import torch
        from llguidance import LLExecutor
        from llguidance import numpy as masks

        if self._executor is None:
            self._executor = LLExecutor(torch.get_num_threads())
        words: Words = masks.allocate_token_bitmask(len(matchers), self._vocabulary().vocab_size)
        places = [(matcher, row) for row, matcher in enumerate(matchers)]
        masks.fill_next_token_bitmask_par(self._executor, places, words)
        return words


def _row_of(masks: Future[Words], row: int) -> Callable[[], Words]:
    return lambda: masks.result()[row]


def _without(logits: Tensor, rows: Sequence[int], words: Words) -> Tensor:
    """A copy with minus infinity where the bits of `words` are 0; the vocabulary of the logits may
    be larger, by tokens that no tokenizer has.

    The smaller one of a logit and plus or minus infinity, looked up for eight bits at once, takes a
    CPU a quarter of the time of `masked_fill`.
    """
    import torch
    from torch.nn import functional

    from quant.devices import on_device

    kinds = np.where(_BITS, np.inf, -np.inf)
    where, octets, table = on_device(logits.device, np.array(rows), words.view(np.uint8), kinds)
    most = functional.embedding(octets.int(), table.to(logits.dtype)).view(len(rows), -1)
    missing = logits.shape[-1] - most.shape[-1]
    if missing > 0:
        most = functional.pad(most, (0, missing), value=-torch.inf)
    most = most[:, : logits.shape[-1]]
    if len(rows) == len(logits):
        return torch.minimum(logits, most)
    changed = logits.clone()
    changed[where] = torch.minimum(logits[where], most)
    return changed


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
"""The bits of each byte, `[256, 8]`."""
