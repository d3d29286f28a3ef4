"""What the engine is asked for by the body of a request, or why it cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import add
from typing import Any

from actors.messages import Request
from actors.sampling_options import Sampling
from llmpq.rows.answers import TextPiece
from llmpq.rows.row import BadRow, Row, row_from_mapping
from llmpq.rows.sampling import merge_sampling
from llmpq.serve.access import ApiError, bad_request
from llmpq.serve.bodies import ChatBody, CompletionBody
from llmpq.serve.engine import Engine, EngineLimits, FormError, PromptError, PromptTooLongError
from llmpq.tokenizing.reasoning import PROMPT_END_TOKENS, Markers, ReasoningStream, divided
from llmpq.tokenizing.requests import beyond_vocabulary
from quant.common.errors import FieldError

TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Asked:
    """The generations of one HTTP request, in the order of their choices' indices.

    `prompt_tokens` counts each prompt once, however many answers it gets. `prompt_end` is the last
    text of a chat's prompt for a model that reasons between `markers`, None of any other and of an
    answer whose form leaves no room for reasoning.
    """

    generations: tuple[Request, ...]
    prompt_tokens: int
    markers: Markers | None = None
    prompt_end: str = ""

    def whole(self, answer: TextPiece) -> TextPiece:
        """A whole `answer` with its reasoning apart, where there may be any."""
        if self.markers is None:
            return answer
        reasoning, content = divided(answer.text, self.markers, self.prompt_end)
        return replace(answer, text=content, reasoning=reasoning)

    def divide(self, piece: TextPiece, streams: dict[int, ReasoningStream]) -> TextPiece:
        """The next `piece` of an answer with its reasoning apart; `streams` are kept by index."""
        if self.markers is None:
            return piece
        stream = streams.get(piece.index)
        if stream is None:
            stream = streams[piece.index] = ReasoningStream(self.markers, self.prompt_end)
        reasoning, content = stream.add(piece.text)
        if piece.finish_reason is not None:
            reasoning, content = map(add, (reasoning, content), stream.finish())
        return replace(piece, text=content, reasoning=reasoning)


def generations_of(body: CompletionBody | ChatBody) -> int:
    return body.answers * (len(body.prompt) if isinstance(body, CompletionBody) else 1)


async def asked(body: CompletionBody | ChatBody, engine: Engine, name: str) -> Asked:
    """The generations that `body` asks for, with ids of `name`; 400 names the field at fault."""
    sampling = _sampling(body.sampling, engine)
    if sampling.structured_outputs:
        await _check_form(body, sampling.structured_outputs, engine)
    where = "prompt" if isinstance(body, CompletionBody) else "messages"
    generations: list[Request] = []
    prompt_tokens = 0
    for row in _rows(body, where):
        ids = await _encoded(row, engine, where)
        most = _new_tokens(body, len(ids), engine.limits)
        if sampling.min_tokens > most:
            raise bad_request(
                f"min_tokens is {sampling.min_tokens}, but at most {most} tokens may be generated",
                "min_tokens",
            )
        prompt_tokens += len(ids)
        for _ in range(body.answers):
            number = len(generations)
            made = f"{name}-{number}"
            drawn = made if body.seed is None else str(number)
            generations.append(
                Request(
                    made,
                    ids,
                    most,
                    sampling,
                    draw_id=drawn,
                    top_logprobs=body.alternatives,
                    adapter=body.model if body.model in engine.adapters else "",
                )
            )
    is_free = isinstance(body, ChatBody) and not sampling.structured_outputs
    markers, end = engine.markers if is_free else None, ""
    if markers is not None:
        end = await engine.decode(generations[0].prompt_ids[-PROMPT_END_TOKENS:])
    return Asked(tuple(generations), prompt_tokens, markers, end)


def _sampling(given: Mapping[str, Any], engine: Engine) -> Sampling:
    try:
        sampling = merge_sampling(engine.sampling, given)
    except FieldError as error:
        raise bad_request(str(error), error.name) from error
    problem = beyond_vocabulary(sampling, engine.limits.vocab_size)
    if problem is not None:
        raise bad_request(str(problem), problem.name)
    return sampling


async def _check_form(body: CompletionBody | ChatBody, form: str, engine: Engine) -> None:
    field = body.form_field
    try:
        await engine.check_form(form)
    except FormError as error:
        raise bad_request(f"{field} cannot be kept: {error}", field) from error


def _rows(body: CompletionBody | ChatBody, where: str) -> list[Row]:
    prompts = body.prompt if isinstance(body, CompletionBody) else (body.messages,)
    rows = []
    for number, prompt in enumerate(prompts):
        row = row_from_mapping({where: prompt}, where)
        if isinstance(row, BadRow):
            raise bad_request(row.error, where if len(prompts) == 1 else f"{where}[{number}]")
        options = {} if row.token_ids is not None else body.prompt_options
        rows.append(replace(row, prompt_options=options))
    return rows


async def _encoded(row: Row, engine: Engine, where: str) -> tuple[int, ...]:
    limits = engine.limits
    try:
        ids = await engine.encode(row)
    except PromptTooLongError as error:
        raise _too_long(str(error), limits, where) from error
    except PromptError as error:
        raise bad_request(f"{where} cannot be tokenized: {error}", where) from error
    if not ids:
        raise bad_request(f"{where} has no tokens; give at least one", where)
    if len(ids) > limits.prompt_tokens or limits.room(len(ids)) < 1:
        raise _too_long(f"{len(ids)} tokens", limits, where)
    if max(ids) >= limits.vocab_size:
        raise bad_request(
            f"{where} has token id {max(ids)}, the model's vocabulary ends at "
            f"{limits.vocab_size - 1}",
            where,
        )
    return ids


def _too_long(size: str, limits: EngineLimits, where: str) -> ApiError:
    most = min(limits.prompt_tokens, limits.slot_tokens - 1)
    return bad_request(
        f"{where} has {size}, this model is served with room for {most} tokens; shorten it",
        where,
        TOO_LONG,
    )


def _new_tokens(body: CompletionBody | ChatBody, prompt: int, limits: EngineLimits) -> int:
    field, wanted = body.new_tokens
    room = limits.room(prompt)
    if wanted is None:
        return min(limits.default_new_tokens, room)
    if wanted > room:
        raise bad_request(
            f"{field} is {wanted}; this model is served with room for {limits.new_tokens} new "
            f"tokens, and {limits.slot_tokens} together with the prompt, which has {prompt}: ask "
            f"for at most {room}",
            field,
            TOO_LONG,
        )
    return wanted
