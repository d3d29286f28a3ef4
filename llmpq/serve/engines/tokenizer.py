"""The model's tokenizer for many requests at once, in processes of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmpq.rows.row import Row
from llmpq.serve.engine import GenerationError, PromptError, PromptTooLongError
from llmpq.serve.wire.boundary import log_fault
from llmpq.tokenizing.requests import load_tokenizer
from llmpq.tokenizing.tokenizer_process import Answer, Limits, TokenizerProcess
from quant.common.errors import SpecError
from quant.common.token_text import INCOMPLETE, MOST_BEFORE

_TokensAfter = tuple[Sequence[int], Sequence[int]]
"""Tokens before, and tokens that a text is wanted of."""

MOST_TOGETHER = 256
"""Questions that the process is asked at once."""

MOST_REMEMBERED = 1 << 16
"""Tokens whose own texts are remembered, in about 10 MB."""


class ModelTokenizer:
    """Makes token ids of prompts within `limits`, and text of token ids, in two processes: a
    prompt that takes long delays no answer.

    Raises `CheckpointError` where the tokenizer in `folder` cannot be loaded, and `SpecError` where
    there is none. Its coroutines are called in one event loop.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._encoder = _Asked(_loaded(folder, limits))
        self._decoder = _Asked(_loaded(folder, Limits()))
        self._questions: list[tuple[_TokensAfter, asyncio.Future[str]]] = []
        self._asking: asyncio.Task[None] | None = None
        self._texts: dict[int, str] = {}
        self._with_text: set[int] = set()

    async def encode(self, row: Row) -> tuple[int, ...]:
        """Token ids of a prompt, as `Engine.encode`."""
        if row.token_ids is not None:
            return row.token_ids
        most = self._encoder.most_characters
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

    async def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of token ids, as `Engine.decode`.

        That of a single token is the same after whatever has a text, and is remembered. All that is
        asked while the process is at work goes to it together, when it is free again.
        """
        alone = token_ids[0] if len(token_ids) == 1 else None
        is_within = bool(before) and before[-1] in self._with_text
        if is_within and alone in self._texts:
            return self._texts[alone]
        asked = asyncio.get_running_loop().create_future()
        self._questions.append(((before[-MOST_BEFORE:], token_ids), asked))
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        text: str = await asked
        if alone is not None and len(self._with_text) < MOST_REMEMBERED:
            if text and INCOMPLETE not in text:
                self._with_text.add(alone)
            if is_within:
                self._texts[alone] = text
        return text

    def close(self) -> None:
        """End the processes."""
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

    def __init__(self, process: TokenizerProcess) -> None:
        self._process = process
        self._thread = ThreadPoolExecutor(1, "llmpq-tokenizer")

    @property
    def most_characters(self) -> int | None:
        """Characters of a prompt beyond which it has too many tokens."""
        return self._process.most_characters

    async def ask(self, task: Mapping[str, object]) -> Answer:
        """The answer to a task of the process."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._process.ask, task)

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _loaded(folder: Path, limits: Limits) -> TokenizerProcess:
    process = load_tokenizer(folder, limits)
    if process is None:
        raise SpecError(
            "the model folder has no tokenizer; serving makes text of tokens, so put "
            "tokenizer.json there"
        )
    return process
