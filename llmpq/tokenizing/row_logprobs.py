"""Columns of log-probabilities of a row's answer and prompt, with the texts that the tokenizer's
process makes of their tokens; as over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from actors.logprobs import LogprobRows
from actors.messages import Finished, Request
from llmpq.rows.answers import ChatForm, CompletionForm, TokenText
from llmpq.rows.results import LOGPROBS, PROMPT_LOGPROBS, RowError
from llmpq.tokenizing.answer_text import (
    AnswerText,
    FinishReason,
    TokenEvent,
    completed,
    prompt_content,
)
from llmpq.tokenizing.tokenizer_process import TokenizerProcess
from quant.common.text import INCOMPLETE, MOST_BEFORE

MOST_REMEMBERED = 1 << 16
"""Tokens whose own texts are remembered, in about 10 MB."""

_AT_ONCE = 256
"""Texts that the process is asked for in one task, which has a second or so at least."""


class TokenTexts:
    """The texts of tokens, which are asked for once where they do not depend on others: behind one
    with a text of whole characters. Without a `tokenizer` a token has vLLM's `token_id:…`.
    """

    def __init__(self, tokenizer: TokenizerProcess | None) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}
        self._within: dict[int, str] = {}

    async def decode(self, token_ids: Sequence[int], before: Sequence[int]) -> str:
        """The text of `token_ids` behind those before; it waits for nothing."""
        if len(token_ids) == 1 and before and self._has_text(before[-1]):
            found = self._within.get(token_ids[0])
            if found is not None:
                return found
        (text,) = self._asked([(before, token_ids)])
        if len(token_ids) == 1 and before and self._has_text(before[-1]):
            self._within[token_ids[0]] = text
        return text

    async def each(self, token_ids: Sequence[int], before: Sequence[int]) -> list[str]:
        return [await self.decode([token], before) for token in token_ids]

    def learn(self, places: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Ask for the texts of tokens that are not known yet, all at once: those before a place,
        and those that stand or may stand there.
        """
        if len(self._alone) + len(self._within) > 2 * MOST_REMEMBERED:
            self._alone, self._within = {}, {}
        found = [(tuple(before[-MOST_BEFORE:]), ids) for before, ids in places if before]
        new = {before[-1]: None for before, _ in found if before[-1] not in self._alone}
        texts = self._asked([((), (token,)) for token in new])
        self._alone |= zip(new, texts, strict=True)
        unknown = {
            token: before
            for before, ids in found
            if self._has_text(before[-1])
            for token in ids
            if token not in self._within
        }
        texts = self._asked([(before, (token,)) for token, before in unknown.items()])
        self._within |= zip(unknown, texts, strict=True)

    def _has_text(self, token: int) -> bool:
        if token not in self._alone:
            (self._alone[token],) = self._asked([((), (token,))])
        text = self._alone[token]
        return bool(text) and INCOMPLETE not in text

    def _asked(self, lists: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[str]:
        """The texts of tokens after others; raises `RowError` where they have none."""
        if self._tokenizer is None:
            return ["".join(f"token_id:{token}" for token in ids) for _, ids in lists]
        texts: list[str] = []
        for first in range(0, len(lists), _AT_ONCE):
            asked = [(list(before), list(ids)) for before, ids in lists[first : first + _AT_ONCE]]
            answer = self._tokenizer.ask({"lists": asked})
            if answer.texts is None:
                why = f"{answer.of}: {answer.error}"
                raise RowError(f"tokens of its log-probabilities have no text: {why}")
            texts += answer.texts
        return texts


def logprob_columns(
    texts: TokenTexts, request: Request, finished: Finished, is_chat: bool
) -> dict[str, Any]:
    """The columns that `request` asks for, whose answer has `finished` well."""
    columns: dict[str, Any] = {}
    ids = request.prompt_ids
    if request.top_logprobs is not None:
        known = [*ids[-MOST_BEFORE:], *finished.token_ids]
        first = len(known) - len(finished.token_ids)
        told = enumerate(zip(finished.token_ids, finished.logprobs, strict=True), start=first)
        texts.learn(
            (known[max(0, at - MOST_BEFORE) : at], (token, *(other for other, _ in one.top)))
            for at, (token, one) in told
        )
        form = ChatForm if is_chat else CompletionForm
        columns[LOGPROBS] = form.logprobs(_answer_tokens(texts, request, finished))
    if request.prompt_logprobs is not None:
        texts.learn(_places(ids, finished.prompt_logprobs))
        content = prompt_content(texts.each, ids, finished.prompt_logprobs, request.prompt_logprobs)
        columns[PROMPT_LOGPROBS] = completed(content)
    return columns


def _places(
    ids: Sequence[int], found: LogprobRows | None
) -> Iterable[tuple[Sequence[int], Sequence[int]]]:
    if found is not None:
        for place, others in zip(found.rows.tolist(), found.top_ids.tolist(), strict=True):
            known = [other for other in others if other >= 0]
            yield ids[max(0, place - MOST_BEFORE) : place], (ids[place], *known)


def _answer_tokens(
    texts: TokenTexts, request: Request, finished: Finished
) -> tuple[TokenText, ...]:
    """The tokens that the answer's text is of."""
    answer = AnswerText(texts.decode, texts.each, request)
    tokens: list[TokenText] = []
    last = len(finished.token_ids) - 1
    reason: FinishReason = "stop" if finished.finish_reason == "stop" else "length"
    for number, (token, one) in enumerate(zip(finished.token_ids, finished.logprobs, strict=True)):
        event = TokenEvent(token, reason if number == last else None, one)
        piece = completed(answer.add(event))
        tokens += () if piece is None else piece.tokens
        if piece is not None and piece.finish_reason is not None:
            break
    return tuple(tokens)
