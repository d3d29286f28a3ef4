"""What the engine is asked for by the body of a request, or why it cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any, NamedTuple

from actors.messages import Request
from actors.sampling_options import Sampling
from llmpq.rows.answers import TextPiece
from llmpq.rows.row import BadRow, Row, row_from_mapping
from llmpq.rows.sampling import merge_sampling
from llmpq.rows.tools import CHOICE, TOOLS, forced_sampling
from llmpq.serve.access import ApiError, bad_request
from llmpq.serve.bodies import ChatBody, CompletionBody
from llmpq.serve.choices import NOTHING_TOLD, PromptTold
from llmpq.serve.engine import Engine, EngineLimits, FormError, PromptError, PromptTooLongError
from llmpq.tokenizing.reasoning import PROMPT_END_TOKENS, Markers, ReasoningStream, divided
from llmpq.tokenizing.requests import beyond_vocabulary
from llmpq.tokenizing.tool_calls import CallReading, CallStream, calls_apart, calls_reason
from quant.common.errors import FieldError

TOO_LONG = "context_length_exceeded"


class AnswerStreams(NamedTuple):
    """What divides an answer that comes in pieces: where it may reason, and where it may call."""

    reasoning: ReasoningStream | None
    calls: CallStream | None


@dataclass(frozen=True)
class Asked:
    """The generations of one HTTP request, in the order of their choices' indices.

    `prompt_tokens` counts each prompt once, however many answers it gets. `prompt_end` is the last
    text of a chat's prompt for a model that reasons between `markers`, None of any other and of an
    answer that must call a tool. `calls`: how calls of tools are read, if any. `told` is what each
    choice tells of its prompt.
    """

    generations: tuple[Request, ...]
    told: tuple[PromptTold, ...]
    prompt_tokens: int
    markers: Markers | None = None
    prompt_end: str = ""
    calls: CallReading | None = None

    def whole(self, answer: TextPiece) -> TextPiece:
        """A whole `answer` with its reasoning and calls apart, where there may be any."""
        if self.markers is not None:
            has_form = bool(self.generations[0].sampling.structured_outputs)
            reasoning, content = divided(answer.text, self.markers, self.prompt_end, has_form)
            answer = replace(answer, text=content, reasoning=reasoning)
        if self.calls is None:
            return answer
        content, calls = calls_apart(answer.text, self.calls, self._id(answer.index))
        reason = calls_reason(answer.finish_reason, bool(calls))
        return replace(answer, text=content, calls=calls, finish_reason=reason)

    def _id(self, index: int) -> str:
        return self.generations[index].custom_id

    def divide(self, piece: TextPiece, streams: dict[int, AnswerStreams]) -> TextPiece:
        """The next `piece` of an answer, divided as a whole one; `streams` are kept by index."""
        if piece.index not in streams:
            markers, calls = self.markers, self.calls
            streams[piece.index] = AnswerStreams(
                None if markers is None else ReasoningStream(markers, self.prompt_end),
                None if calls is None else CallStream(calls, self._id(piece.index)),
            )
        reasoning, calling = streams[piece.index]
        is_last = piece.finish_reason is not None
        if reasoning is not None:
            thought, content = reasoning.add(piece.text)
            if is_last:
                thought, content = map(add, (thought, content), reasoning.finish())
            piece = replace(piece, text=content, reasoning=thought)
        return piece if calling is None else _with_calls(piece, calling)


def _with_calls(piece: TextPiece, stream: CallStream) -> TextPiece:
    content, calls = stream.add(piece.text)
    if piece.finish_reason is not None:
        rest, more = stream.finish()
        content, calls = content + rest, calls + more
    reason = calls_reason(piece.finish_reason, stream.calls > 0)
    return replace(piece, text=content, calls=calls, finish_reason=reason)


def generations_of(body: CompletionBody | ChatBody) -> int:
    return body.answers * (len(body.prompt) if isinstance(body, CompletionBody) else 1)


async def asked(body: CompletionBody | ChatBody, engine: Engine, name: str) -> Asked:
    """The generations that `body` asks for, with ids of `name`; 400 names the field at fault."""
    options = body.prompt_options
    sampling = _sampling(body.sampling, options, engine)
    form = sampling.structured_outputs
    field = TOOLS if CHOICE in options else body.form_field
    if form:
        await _kept_form(field, form, None, engine)
    where = "prompt" if isinstance(body, CompletionBody) else "messages"
    generations: list[Request] = []
    all_told: list[PromptTold] = []
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
        markers, end = await _reasoning(body, ids, engine)
        if form and markers is not None:
            kept = await _kept_form(field, form, markers.begun_by(end), engine)
            sampling = replace(sampling, structured_outputs=kept)
        told = await _told(body, row, ids, engine)
        for copy in range(body.answers):
            if copy and isinstance(body, ChatBody):
                told = NOTHING_TOLD  # as it stands beside the choices
            number = len(generations)
            all_told.append(told)
            made = f"{name}-{number}"
            drawn = made if body.seed is None else str(number)
            generations.append(
                Request(
                    made,
                    ids,
                    max(1, most),
                    sampling,
                    draw_id=drawn,
                    top_logprobs=body.alternatives,
                    adapter=body.model if body.model in engine.adapters else "",
                    prompt_logprobs=told.most_logprobs,
                )
            )
    calls = engine.call_reading(options) if isinstance(body, ChatBody) else None
    return Asked(tuple(generations), tuple(all_told), prompt_tokens, markers, end, calls)


async def _told(
    body: CompletionBody | ChatBody, row: Row, ids: tuple[int, ...], engine: Engine
) -> PromptTold:
    """What is told of the prompt of `row`, which has these `ids`."""
    if isinstance(body, ChatBody) or not body.echo:
        return PromptTold(logprobs=body.prompt_logprobs)
    text = await engine.decode(ids) if row.text is None else row.text
    return PromptTold(text, body.logprobs, body.prompt_logprobs, body.max_tokens == 0)


async def _reasoning(
    body: CompletionBody | ChatBody, prompt_ids: Sequence[int], engine: Engine
) -> tuple[Markers | None, str]:
    """The markers of an answer that may reason, and the end of its prompt, where one may stand."""
    if not isinstance(body, ChatBody) or CHOICE in body.prompt_options or engine.markers is None:
        return None, ""
    return engine.markers, await engine.decode(prompt_ids[-PROMPT_END_TOKENS:])


def _sampling(given: Mapping[str, Any], options: Mapping[str, Any], engine: Engine) -> Sampling:
    try:
        sampling = merge_sampling(engine.sampling, forced_sampling(given, options))
    except FieldError as error:
        raise bad_request(str(error), error.name) from error
    problem = beyond_vocabulary(sampling, engine.limits.vocab_size)
    if problem is not None:
        raise bad_request(str(problem), problem.name)
    return sampling


async def _kept_form(field: str, form: str, has_begun: bool | None, engine: Engine) -> str:
    try:
        return await engine.kept_form(form, has_begun)
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
