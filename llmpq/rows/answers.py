"""OpenAI's answers as JSON objects: whole ones, the chunks of a stream, the lines of a batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmpq.rows.results import CALLS, PROMPT_LOGPROBS, REASONING
from quant.common.text import INCOMPLETE

Json = Mapping[str, object]

BAD_LINE = "invalid_line"
"""Code of a line of a batch that cannot be run."""


@dataclass(frozen=True)
class TokenText:
    """A token with its log-probability and others', best first; `offset`: characters before it.
    Nothing is known of the first one of a prompt.
    """

    text: str
    offset: int
    logprob: float | None
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ToolCall:
    """Call `index` of an answer; `arguments` are an object as JSON text."""

    index: int
    id: str
    name: str
    arguments: str

    @property
    def content(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class TextPiece:
    """Next part of choice `index`: a text, perhaps empty in the last one, which says why it ends.

    `reasoning`: what stands before it and is no part of the answer, where that is told apart;
    `new_tokens`: tokens generated since the piece before, end tokens included. `tokens`: those that
    the text is of, where log-probabilities are wanted. `shared_tokens`: in a piece of each choice,
    how many tokens of the prompt were not computed for it. `calls` stand behind the text.
    `prompt_logprobs`, in the first piece where they are asked for: those of the prompt.
    """

    index: int
    text: str
    new_tokens: int
    tokens: tuple[TokenText, ...] = ()
    finish_reason: str | None = None
    reasoning: str | None = None
    shared_tokens: int = 0
    calls: tuple[ToolCall, ...] = ()
    prompt_logprobs: Sequence[Json | None] | None = None


def joined(parts: Sequence[TextPiece]) -> TextPiece:
    return replace(
        parts[-1],
        text="".join(piece.text for piece in parts),
        new_tokens=sum(piece.new_tokens for piece in parts),
        tokens=tuple(token for piece in parts for token in piece.tokens),
        shared_tokens=sum(piece.shared_tokens for piece in parts),
        prompt_logprobs=parts[0].prompt_logprobs,
    )


def usage_content(prompt_tokens: int, new_tokens: int, shared_tokens: int = 0) -> Json:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
    details = {"prompt_tokens_details": {"cached_tokens": shared_tokens}} if shared_tokens else {}
    return usage | details


@dataclass(frozen=True)
class Head:
    id: str
    created_s: int
    model: str

    def content(self, kind: str, choices: Sequence[Json]) -> dict[str, object]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": list(choices),
        }


class CompletionForm:
    prefix = "cmpl"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs

    def whole(self, answer: TextPiece) -> Json:
        choice = self._choice(answer.index, answer.text, answer.tokens, answer.finish_reason)
        found = answer.prompt_logprobs
        return choice if found is None else {**choice, PROMPT_LOGPROBS: found}

    def of_prompt(self, found: Sequence[Json | None] | None) -> dict[str, object]:
        """What a whole answer has of its prompt beside the choices, each of which has its own."""
        return {}

    def opening(self, index: int) -> None:
        return None  # no chunk

    def part(self, piece: TextPiece) -> Json:
        return self._choice(piece.index, piece.text, piece.tokens, None)

    def closing(self, piece: TextPiece) -> Json:
        return self._choice(piece.index, "", None, piece.finish_reason)

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenText] | None, reason: str | None
    ) -> Json:
        logprobs = None
        if self._has_logprobs and tokens is not None:
            logprobs = self.logprobs(tokens)
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    @staticmethod
    def logprobs(tokens: Sequence[TokenText]) -> Json:
        return {
            "text_offset": [token.offset for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "tokens": [token.text for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens],
        }


def _by_text(token: TokenText) -> Json | None:
    """Log-probabilities of the most probable tokens and, if it is none of them, of the chosen one.

    Of tokens with the same text, such as parts of characters, the most probable one counts.
    """
    if token.logprob is None:
        return None
    found: dict[str, object] = {}
    for text, logprob in (*token.top, (token.text, token.logprob)):
        found.setdefault(text, logprob)
    return found


class ChatForm:
    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs

    def whole(self, answer: TextPiece) -> Json:
        text = None if answer.calls and not answer.text else answer.text
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        calls = {CALLS: [call.content for call in answer.calls]} if answer.calls else {}
        return {
            "index": answer.index,
            "message": message | _reasoning(answer) | calls,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": answer.finish_reason,
        }

    def of_prompt(self, found: Sequence[Json | None] | None) -> dict[str, object]:
        """What a whole answer has of its prompt beside the choices."""
        return {} if found is None else {PROMPT_LOGPROBS: found}

    def opening(self, index: int) -> Json:
        return self._delta(index, {"role": "assistant", "content": ""})

    def part(self, piece: TextPiece) -> Json:
        reasoning = _reasoning(piece) if piece.reasoning else {}
        calls = [{"index": call.index, **call.content} for call in piece.calls]
        called = {CALLS: calls} if calls else {}
        content = {"content": piece.text} if piece.text or not (reasoning or called) else {}
        delta = reasoning | content | called
        return self._delta(piece.index, delta, self._logprobs(piece.tokens))

    def closing(self, piece: TextPiece) -> Json:
        return self._delta(piece.index, {}, None, piece.finish_reason)

    def _delta(
        self, index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None
    ) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenText]) -> Json | None:
        return self.logprobs(tokens) if self._has_logprobs else None

    @staticmethod
    def logprobs(tokens: Sequence[TokenText]) -> Json:
        content = [
            {
                **_with_bytes(token.text, token.logprob),
                "top_logprobs": [_with_bytes(text, logprob) for text, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _reasoning(piece: TextPiece) -> dict[str, object]:
    return {} if piece.reasoning is None else {REASONING: piece.reasoning}


def _with_bytes(text: str, logprob: float | None) -> dict[str, object]:
    """A token; its bytes are not known where they are no whole characters."""
    known = None if INCOMPLETE in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": known}


Form = CompletionForm | ChatForm
"""Choices of one kind of answer: `whole` makes one of all its text; of a stream `opening` makes
the first chunk, before any text, `part` one with text, and `closing` the last, with the reason.
"""


def models_content(names: Sequence[str], created_s: int) -> Json:
    return {"object": "list", "data": [model_content(name, created_s) for name in names]}


def model_content(name: str, created_s: int) -> Json:
    return {"id": name, "object": "model", "created": created_s, "owned_by": "llmpq"}


def line_response(status: int, body: Json, name: str) -> Json:
    """What a line of a batch's answers says of its request, which `name` stands for."""
    return {"status_code": int(status), "request_id": f"req-{name}", "body": body}


def answer_line(
    custom_id: str | None, response: Json | None, error: Json | None, name: str
) -> dict[str, object]:
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}


def written_line(line: Json) -> str:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
