"""The length that is expected of each request to the server, as it comes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from llmpq.lengths.predictor import Prompt
from llmpq.lengths.sources import LengthSource, open_source, wait_loaded
from llmpq.run.options import RunOptions
from llmpq.serve.engine import GenerationError, GenerationRequest
from llmpq.serve.engines.tokenizer import ModelTokenizer
from quant.common.errors import InputError

WAIT_S = 2.0
"""Seconds that a request waits for its prediction; after that the longest answer is expected."""

_LOG = logging.getLogger(__name__)


class OnlineLengths:
    """Asks a source of lengths for single requests; its failure fails none of them.

    Raises what `open_source` and `wait_loaded` raise. `close` ends the source, and writes what it
    has learnt where the options say so.
    """

    def __init__(
        self, options: RunOptions, model: Path, vocab_size: int, tokenizer: ModelTokenizer
    ) -> None:
        self._save_to = options.save_predictor
        self._tokenizer = tokenizer
        self._has_said = False
        self._source: LengthSource = open_source(
            options.predictor, model, vocab_size, self._save_to
        )
        wait_loaded(self._source, has_tokenizer=True)
        if options.predictor is None:
            _LOG.warning(
                "s3 without a predictor (--predictor): room is reserved for the longest answers"
            )

    async def expect(self, request: GenerationRequest) -> int:
        """The new tokens that are expected of a request."""
        text = ""
        if self._source.reads_text and self._source.failure is None:
            try:
                text = await self._tokenizer.decode(request.prompt_ids)
            except GenerationError:
                return request.max_new_tokens
        prompt = Prompt(request.id, request.max_new_tokens, request.prompt_ids, text)
        asked = asyncio.wrap_future(self._source.submit([prompt]))
        try:
            expected = (await asyncio.wait_for(asyncio.shield(asked), WAIT_S))[0]
        except TimeoutError:
            expected = request.max_new_tokens
        self._look()
        return expected

    def note(self, custom_id: str, tokens: int) -> None:
        """Tell the source of an answer that has ended."""
        self._source.finished([(custom_id, tokens)])

    def close(self) -> None:
        """End the source."""
        if self._save_to is not None:
            try:
                self._source.save(Path(self._save_to).expanduser())
            except InputError as error:
                _LOG.warning("%s", error)
        self._source.close()

    def _look(self) -> None:
        """Say once that the source has been given up."""
        failure = self._source.failure
        if failure is not None and not self._has_said:
            self._has_said = True
            _LOG.warning(
                "the predictor of lengths is given up: %s; the server goes on, and reserves for "
                "the longest answers",
                failure,
            )
