"""The model's tokenizer for many requests at once, in processes of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from actors.sampling_options import FORM
from llmpq.rows.row import Row
from llmpq.serve.access import log_fault
from llmpq.serve.engine import FormError, GenerationError, PromptError, PromptTooLongError
from llmpq.tokenizing.prompting import Prompting
from llmpq.tokenizing.requests import load_tokenizer
from llmpq.tokenizing.tokenizer_process import RowLimits, Tokenized
from llmpq.tokenizing.tool_calls import CallReading, call_reading
from quant.common.errors import SpecError
from quant.common.text import INCOMPLETE, MOST_BEFORE

_TokensAfter = tuple[Sequence[int], Sequence[int]]
"""Tokens before, and tokens that a text is wanted of."""

MOST_TOGETHER = 256
"""Questions that the process is asked at once."""

MOST_REMEMBERED = 1 << 16
"""Tokens whose own texts are remembered, in about 10 MB."""


class ModelTokenizer:
    """Makes token ids of prompts within `limits`, and text of token ids, in two processes: a
    prompt that takes long delays no answer. `markers` are those of the model's reasoning.

    Raises `CheckpointError` where the tokenizer in `folder` cannot be loaded, and `SpecError` where
    there is none. Its coroutines are called in one event loop.
    """

    def __init__(self, folder: Path, limits: RowLimits, prompting: Prompting | None = None) -> None:
        self._encoder = _Asked(folder, limits, prompting)
        self.markers = self._encoder.process.markers
        self._tool_parser = self._encoder.process.tool_parser
        self._of_job = (prompting or Prompting()).settings
        self._decoder = _Asked(folder, RowLimits(), prompting)
        self._questions: list[tuple[_TokensAfter, asyncio.Future[str]]] = []
        self._asking: asyncio.Task[None] | None = None
        self._texts: dict[tuple[int, bool], str] = {}  # at the beginning, or within a text

    async def encode(self, row: Row) -> tuple[int, ...]:
        if row.token_ids is not None:
            return row.token_ids
        most = self._encoder.process.most_characters
        if row.text is not None and most is not None and len(row.text) > most:
            raise PromptTooLongError(f"{len(row.text)} characters")
        answer = await self._encoder.ask(row.tokenizing)
        if answer.error is not None:
            raise PromptError(f"{answer.of}: {answer.error}")
        if answer.characters is not None:
            raise PromptTooLongError(f"{answer.characters} characters")
        if answer.tokens is not None:
            raise PromptTooLongError(f"{answer.tokens} tokens")
        return answer.ids or ()

    def call_reading(self, options: Mapping[str, Any]) -> CallReading | None:
        return call_reading(options, self._tool_parser, self._of_job)

    def check_form(self, form: str) -> None:
        """Raise `SpecError` for the `form` of requests that ask for none where none can have it."""
        why = self._encoder.process.kept_form(form).error if form else None
        if why is not None:
            raise SpecError(f"{FORM} {form!r:.80} cannot be kept: {why}")

    async def kept_form(self, form: str, has_begun: bool | None = None) -> str:
        kept = await self._encoder.kept_form(form, has_begun)
        if kept.text is None:
            raise FormError(kept.error)
        return kept.text

    async def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of token ids, as `Engine.decode`; of single tokens it is remembered."""
        is_within = bool(before) and len(token_ids) == 1 and await self._has_text(before[-1])
        if len(token_ids) != 1 or is_within != bool(before):
            return await self._asked(token_ids, before)
        key = token_ids[0], is_within
        text = self._texts.get(key)
        if text is None:
            text = await self._asked(token_ids, before)
            if len(self._texts) < MOST_REMEMBERED:
                self._texts[key] = text
        return text

    async def _has_text(self, token_id: int) -> bool:
        """Whether a token has a text of whole characters."""
        text = self._texts.get((token_id, True)) or await self.decode((token_id,))
        return bool(text) and INCOMPLETE not in text

    async def _asked(self, token_ids: Sequence[int], before: Sequence[int]) -> str:
        """The text from the process; what is asked while it works goes to it together, later."""
        asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._questions.append(((before[-MOST_BEFORE:], token_ids), asked))
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        return await asked

    def close(self) -> None:
        self._encoder.close()
        self._decoder.close()

    async def _ask(self) -> None:
        """Ask the process until no question is left."""
        try:
            while self._questions:
                together = self._questions[:MOST_TOGETHER]
                del self._questions[:MOST_TOGETHER]
                texts = await self._decoded([tokens for tokens, _ in together])
                for (_, asked), text in zip(together, texts, strict=True):
                    if asked.done():  # whoever asked has gone
                        continue
                    if text is None:
                        asked.set_exception(GenerationError(_NO_TEXT))
                    else:
                        asked.set_result(text)
        finally:
            self._asking = None

    async def _decoded(self, lists: Sequence[_TokensAfter]) -> Sequence[str | None]:
        """The texts of `lists`; one that harms the process takes none of the others with it."""
        try:
            answer = await self._decoder.ask({"lists": lists})
            if answer.texts is not None:
                return answer.texts
            tasks = [{"ids": token_ids, "before": before} for before, token_ids in lists]
            return [(await self._decoder.ask(task)).text for task in tasks]
        except Exception as error:  # nobody else tells those who asked
            log_fault("tokenizer", error)
            return [None] * len(lists)


_NO_TEXT = "the tokens of the answer could not be made into text"


class _Asked:
    """A tokenizer process, asked by one thread in the order in which it is called."""

    def __init__(self, folder: Path, limits: RowLimits, prompting: Prompting | None) -> None:
        process = load_tokenizer(folder, limits, prompting)
        if process is None:
            raise SpecError(
                "the model folder has no tokenizer; serving makes text of tokens, so put "
                "tokenizer.json there"
            )
        self.process = process
        self._thread = ThreadPoolExecutor(1, "llmpq-tokenizer")

    async def ask(self, task: Mapping[str, object]) -> Tokenized:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.process.ask, task)

    async def kept_form(self, form: str, has_begun: bool | None) -> Tokenized:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.process.kept_form, form, has_begun)

    def close(self) -> None:
        self.process.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
