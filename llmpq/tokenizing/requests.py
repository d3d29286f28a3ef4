"""Making requests of token ids that the plan has room for out of rows, and texts of new tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from actors.messages import Request, Sampling
from actors.sampling_options import FORM, stop_begin
from llmpq.rows.results import RowError
from llmpq.rows.row import BadRow, Row
from llmpq.rows.sampling import merge_sampling
from llmpq.rows.tools import CHOICE, TOOLS
from llmpq.tokenizing.prompting import Prompting
from llmpq.tokenizing.reasoning import PROMPT_END_TOKENS, Markers
from llmpq.tokenizing.tokenizer_process import RowLimits, Tokenized, TokenizerProcess
from planner.workload import MAX_TOKENS, Workload
from quant.checkpoint.model_reference import local_model
from quant.common.errors import CheckpointError, FieldError
from quant.common.text import MOST_BEFORE

AHEAD_ROWS = 64
"""Rows that the tokenizer has in hand while the first of them is waited for."""

AHEAD_BYTES = 1 << 20
"""Bytes of these rows, unless a single one is longer."""

DOCUMENTS = RowLimits(row_s=3600.0, row_bytes=64 << 30)
"""Limits of texts to measure or calibrate on, each of which may be very long."""

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class _Begun(NamedTuple):
    """A request without its token ids, which are on their way."""

    request: Request
    task: int
    may_reason: bool


@dataclass(frozen=True)
class RequestMaker:
    """Turns rows into requests that `workload` has room for, or `long_rows` where it has not.

    `tokenizer` may be None when every prompt is a list of token ids; results then carry no text.
    `adapters`: names that rows may choose; None: any.
    """

    workload: Workload
    vocab_size: int
    sampling: Sampling
    tokenizer: TokenizerProcess | None
    long_rows: Workload | None = None
    adapters: Collection[str] | None = ()

    def is_long(self, request: Request) -> bool:
        """Whether only `long_rows` has room for `request`."""
        return not self.workload.has_room(len(request.prompt_ids), request.max_new_tokens)

    def requests(self, rows: Iterable[Row | BadRow]) -> Iterator[Request | BadRow]:
        """Requests of rows, in their order; some are tokenized ahead of the one asked for."""
        begun: deque[_Begun | Request | BadRow] = deque()
        for row in rows:
            begun.append(self._begin(row))
            while begun and (not isinstance(begun[0], _Begun) or self._is_far_ahead(len(begun))):
                yield self._end(begun.popleft())
        yield from map(self._end, begun)

    def _is_far_ahead(self, rows: int) -> bool:
        behind = self.tokenizer.behind_bytes if self.tokenizer else 0
        return behind > AHEAD_BYTES or rows >= AHEAD_ROWS

    def _begin(self, row: Row | BadRow) -> _Begun | Request | BadRow:
        if isinstance(row, BadRow):
            return row
        sampling = merge_sampling(self.sampling, row.sampling)
        try:
            self._check_sampling(sampling, TOOLS if CHOICE in row.prompt_options else FORM)
            request = Request(
                row.custom_id,
                (),
                sampling.max_new_tokens or self.workload.new_tokens,
                sampling,
                top_logprobs=row.logprobs,
                adapter=self._adapter(row),
                prompt_logprobs=row.prompt_logprobs,
            )
            if row.token_ids is None:
                may_reason = row.messages is not None and CHOICE not in row.prompt_options
                return _Begun(request, self._submitted(row), may_reason)
            return self._made(request, row.token_ids)
        except RowError as error:
            return BadRow(row.custom_id, str(error))

    def _adapter(self, row: Row) -> str:
        name = row.adapter or ""
        if name and self.adapters is not None and name not in self.adapters:
            there = f"those of the run are {', '.join(sorted(self.adapters))}; name one of them"
            none = "the run has none; give --adapters, or leave it out"
            raise RowError(f"adapter is {name!r:.80}; {there if self.adapters else none}")
        return name

    def _check_sampling(self, sampling: Sampling, form_field: str) -> None:
        room = max(each.new_tokens for each in self._workloads)
        wanted = sampling.max_new_tokens or self.workload.new_tokens
        if wanted > room:
            raise RowError(f"max_new_tokens is {wanted}, the plan has room for {room}")
        if sampling.min_tokens > wanted:
            raise RowError(
                f"min_tokens is {sampling.min_tokens}, but at most {wanted} tokens may be generated"
                "; lower it, or give a larger max_new_tokens"
            )
        if sampling.stop and self.tokenizer is None:
            raise RowError("stop strings need a tokenizer, which the model has not")
        self.check_form(sampling.structured_outputs, form_field)
        beyond = beyond_vocabulary(sampling, self.vocab_size)
        if beyond is not None:
            raise RowError(str(beyond))

    def check_form(self, form: str, field: str = FORM) -> None:
        """Raise `RowError` where no answer can have `form`, `Sampling.structured_outputs`, which
        was asked for by `field`.
        """
        if not form:
            return
        if self.tokenizer is None:
            raise RowError(f"{field} needs a tokenizer, which the model has not")
        why = self.tokenizer.kept_form(form).error
        if why is not None:
            raise RowError(f"{field} {form!r:.80} cannot be kept: {why}")

    def _behind_reasoning(self, sampling: Sampling, ids: Sequence[int]) -> Sampling:
        """`sampling` of a chat, whose form binds once the model has reasoned."""
        form, markers = sampling.structured_outputs, self.markers
        if not form or markers is None or self.tokenizer is None:
            return sampling
        has_begun = markers.begun_by(self.prompt_end(ids))
        if has_begun is None:
            return sampling
        kept = self.tokenizer.kept_form(form, has_begun)
        if kept.text is None:
            raise RowError(f"{FORM} {form!r:.80} cannot be kept behind reasoning: {kept.error}")
        return replace(sampling, structured_outputs=kept.text)

    def prompt_end(self, ids: Sequence[int]) -> str:
        """The last text of a prompt, where a marker of reasoning may stand."""
        assert self.tokenizer is not None
        task = {"ids": ids[-PROMPT_END_TOKENS:], "before": ()}
        return self.tokenizer.ask(task).text or ""

    def _submitted(self, row: Row) -> int:
        if self.tokenizer is None:
            raise RowError(
                "the model folder has no tokenizer; give the prompt as a list of token ids"
            )
        most = self.tokenizer.most_characters
        if row.text is not None and most is not None and len(row.text) > most:
            raise self._too_long(len(row.text), most)
        try:
            return self.tokenizer.submit(row.tokenizing)
        except (ValueError, TypeError, RecursionError) as error:  # messages that are no JSON
            raise RowError(f"the prompt cannot be tokenized: {error}") from error

    def _end(self, begun: _Begun | Request | BadRow) -> Request | BadRow:
        if not isinstance(begun, _Begun):
            return begun
        assert self.tokenizer is not None
        answer = self.tokenizer.answer(begun.task)
        try:
            if answer.error is not None:
                raise RowError(f"the prompt cannot be tokenized: {answer.of}: {answer.error}")
            if answer.characters is not None:
                raise self._too_long(answer.characters, self.tokenizer.most_characters or 0)
            if answer.tokens is not None:
                raise self._too_many(answer.tokens)
            ids, request = answer.ids or (), begun.request
            if begun.may_reason:
                sampling = self._behind_reasoning(request.sampling, ids)
                request = replace(request, sampling=sampling)
            return self._made(request, ids)
        except RowError as error:
            return BadRow(begun.request.custom_id, str(error))

    def _made(self, request: Request, prompt_ids: tuple[int, ...]) -> Request:
        wanted = request.max_new_tokens
        if not prompt_ids:
            raise RowError("the prompt has no tokens")
        if len(prompt_ids) > self._longest_prompt:
            raise self._too_many(len(prompt_ids))
        if not any(each.has_room(len(prompt_ids), wanted) for each in self._workloads):
            rooms = " or ".join(map(_room, self._workloads))
            raise RowError(
                f"the prompt has {len(prompt_ids)} tokens and max_new_tokens is {wanted}, the "
                f"plan has room for {rooms}; plan for this input (--input) or with larger lengths "
                "(--s, --n)"
            )
        if max(prompt_ids) >= self.vocab_size:
            raise RowError(
                f"token id {max(prompt_ids)} is beyond the vocabulary of {self.vocab_size}"
            )
        return replace(request, prompt_ids=prompt_ids)

    def _too_many(self, tokens: int) -> RowError:
        return RowError(
            f"the prompt has {tokens} tokens, the plan has room for {self._longest_prompt}; "
            "plan with a larger prompt length (--s)"
        )

    def _too_long(self, characters: int, most: int) -> RowError:
        return RowError(
            f"the prompt has {characters} characters, the plan has room for "
            f"{self._longest_prompt} tokens, which are at most {most} characters; plan with "
            "a larger prompt length (--s)"
        )

    @property
    def _workloads(self) -> tuple[Workload, ...]:
        return (self.workload,) if self.long_rows is None else (self.workload, self.long_rows)

    @property
    def _longest_prompt(self) -> int:
        return max(each.prompt_length for each in self._workloads)

    @property
    def markers(self) -> Markers | None:
        return None if self.tokenizer is None else self.tokenizer.markers

    def texts(self, generated: Sequence[tuple[Request, tuple[int, ...]]]) -> list[Tokenized]:
        """Texts of `generated`, requests and their new tokens, as they follow the prompts' texts.

        Special tokens are left out, and a text ends before its first stop string or stop token. A
        text is None where there is no tokenizer.
        """
        if self.tokenizer is None:
            return [Tokenized() for _ in generated]
        tasks = [self.tokenizer.submit(_text_of(*each)) for each in generated]
        answers = map(self.tokenizer.answer, tasks)
        return [self._cut(answer, *each) for answer, each in zip(answers, generated, strict=True)]

    def _cut(self, answer: Tokenized, request: Request, token_ids: tuple[int, ...]) -> Tokenized:
        """`answer` up to the stop string that ends it, which is none within `min_tokens`."""
        assert self.tokenizer is not None
        text, sampling = answer.text, request.sampling
        if text is None or not sampling.stop:
            return answer
        early = token_ids[: sampling.min_tokens]
        before = self.tokenizer.ask(_text_of(request, early)).text if early else None
        return Tokenized(text=text[: stop_begin(text, sampling.stop, before or "")])


def _room(workload: Workload) -> str:
    together = "" if workload.slot_tokens is None else f", together {workload.slot_tokens}"
    return f"{workload.prompt_length} and {workload.new_tokens}{together}"


def _text_of(request: Request, token_ids: tuple[int, ...]) -> dict[str, Any]:
    """The task of making the text of new `token_ids`, without the stop token that ends them."""
    ends = bool(token_ids) and token_ids[-1] in request.sampling.stop_token_ids
    before = request.prompt_ids[-MOST_BEFORE:]
    return {"ids": token_ids[:-1] if ends else token_ids, "before": before}


def not_finite(request: Request, why: str) -> str:
    """`why` an answer ended whose tokens had no meaning, or that its grammar was too complex."""
    if not request.sampling.structured_outputs:
        return why
    return f"{FORM} takes too long to follow here: make it simpler; or else {why}"


def beyond_vocabulary(sampling: Sampling, vocab_size: int) -> FieldError | None:
    """An error that names a token id of `sampling` beyond the vocabulary, None without one."""
    for name in ("logit_bias", "stop_token_ids"):
        largest = max(getattr(sampling, name), default=0)
        if largest >= vocab_size:
            return FieldError(
                name,
                f"has token id {largest}, the model's vocabulary ends at {vocab_size - 1}; take "
                "the ids of this model's own tokenizer",
            )
    return None


def requests_of_any_length(
    rows: Iterable[Row], tokenizer: TokenizerProcess | None
) -> Iterator[Request | BadRow]:
    """Requests of `rows`, in their order, whatever their length and without their sampling."""
    room = Workload(1, MAX_TOKENS, MAX_TOKENS)
    maker = RequestMaker(room, MAX_TOKENS, Sampling(), tokenizer, adapters=None)
    return maker.requests(replace(row, sampling={}) for row in rows)


def start_tokenizer(
    folder: Path, limits: RowLimits, prompting: Prompting | None
) -> TokenizerProcess | None:
    """The tokenizer of `folder`, still loading (`wait` raises); None where there is none."""
    if not any((folder / name).is_file() for name in _FILES):
        return None
    return TokenizerProcess(folder, limits, prompting=prompting)


@contextmanager
def tokenizer_checked(model: str, prompting: Prompting | None = None) -> Iterator[None]:
    """Load a local model's tokenizer beside the body; raises `CheckpointError` at its end."""
    try:
        folder = local_model(model, "give a folder or a hub id")
        tokenizer = None if folder is None else start_tokenizer(folder, DOCUMENTS, prompting)
    except (CheckpointError, OSError, RuntimeError, ValueError):  # a name that is no path
        tokenizer = None
    if tokenizer is None:
        yield
        return
    with closing(tokenizer):
        yield
        tokenizer.wait()


def load_tokenizer(
    folder: Path, limits: RowLimits = DOCUMENTS, prompting: Prompting | None = None
) -> TokenizerProcess | None:
    """The tokenizer of the model in `folder`, loaded; raises `CheckpointError` if it cannot be."""
    tokenizer = start_tokenizer(folder, limits, prompting)
    if tokenizer is not None:
        tokenizer.wait()
    return tokenizer


@contextmanager
def opened_tokenizer(
    folder: Path, prompting: Prompting | None = None
) -> Iterator[TokenizerProcess | None]:
    """Yield what `load_tokenizer` returns within the limits of a row, and end it afterwards."""
    tokenizer = load_tokenizer(folder, RowLimits(), prompting)
    with nullcontext() if tokenizer is None else closing(tokenizer):
        yield tokenizer
