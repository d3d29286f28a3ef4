"""Gives each request of a run the length that is expected of it, ahead of its turn."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from actors.messages import Finished, Request
from llmpq.lengths.predictor import Prompt
from llmpq.lengths.sources import LengthSource, PredictionFigures
from llmpq.rows.row import BadRow
from quant.common.errors import InputError

TOGETHER = 16
"""Prompts that are predicted together."""

AHEAD = 7
"""Batches of them that are on their way while the first is waited for."""

GATHERING_S = 0.2
"""Seconds after which a batch is begun that is not full: rows may take long to be tokenized."""

WAIT_S = 2.0
"""Seconds that a single request waits for its prediction."""

NO_PREDICTOR = "s3 without a predictor (--predictor): room is reserved for the longest answers"


class ExpectedLengths:
    """Asks `source` for the lengths of requests; `texts` makes texts of their token ids.

    `say` is told once where the source is given up and `what` goes on, and what it has done in the
    end.
    """

    def __init__(
        self,
        source: LengthSource,
        texts: Callable[[Sequence[tuple[int, ...]]], list[str]],
        say: Callable[[str], None],
        what: str = "the run",
    ) -> None:
        self.source = source
        self.say = say
        self._texts, self._what = texts, what
        self._has_said = False

    @property
    def reads_text(self) -> bool:
        return self.source.reads_text and self.source.failure is None

    def attach(self, items: Iterable[Request | BadRow]) -> Iterator[Request | BadRow]:
        """The `items` in their order, requests with `expected_tokens`."""
        ahead: deque[tuple[list[Request | BadRow], Future[list[int]]]] = deque()
        gathered: list[Request | BadRow] = []
        since_s = time.monotonic()
        for item in items:
            gathered.append(item)
            if len(gathered) < TOGETHER and time.monotonic() - since_s < GATHERING_S:
                continue
            ahead.append((gathered, self._begun(gathered)))
            while ahead and (len(ahead) > AHEAD or ahead[0][1].done()):
                yield from self._ended(*ahead.popleft())
            gathered, since_s = [], time.monotonic()
        if gathered:
            ahead.append((gathered, self._begun(gathered)))
        while ahead:
            yield from self._ended(*ahead.popleft())

    async def expect(self, prompt: Prompt) -> int:
        """New tokens expected of a single request; its limit where predicting takes too long."""
        asked = asyncio.wrap_future(self.source.submit([prompt]))
        try:
            expected = (await asyncio.wait_for(asyncio.shield(asked), WAIT_S))[0]
        except TimeoutError:
            expected = prompt.limit
        self._look()
        return expected

    def end(self, target: str | Path | None) -> None:
        """Say what the source has done, and have it write what it learnt to `target`."""
        figures = self.source.figures()
        self._look()
        if figures is not None:
            self.say(figures_text(figures))
        if target is None:
            return
        try:
            self.source.save(Path(target).expanduser())
            self.say(f"the predictor as it is now was written to {target}")
        except InputError as error:  # the results are there
            self.say(str(error))

    def note(self, finished: Sequence[Finished]) -> None:
        ended = [
            (each.custom_id, len(each.token_ids))
            for each in finished
            if each.finish_reason != "error" and each.token_ids
        ]
        self.source.finished(ended)
        self._look()

    def _begun(self, items: Sequence[Request | BadRow]) -> Future[list[int]]:
        requests = [item for item in items if isinstance(item, Request)]
        texts = [""] * len(requests)
        if self.reads_text:
            texts = self._texts([request.prompt_ids for request in requests])
        prompts = [
            Prompt(request.custom_id, request.max_new_tokens, request.prompt_ids, text)
            for request, text in zip(requests, texts, strict=True)
        ]
        return self.source.submit(prompts)

    def _ended(
        self, items: Sequence[Request | BadRow], asked: Future[list[int]]
    ) -> Iterator[Request | BadRow]:
        expected = iter(asked.result())
        self._look()
        for item in items:
            if isinstance(item, Request):
                yield replace(item, expected_tokens=next(expected))
            else:
                yield item

    def _look(self) -> None:
        failure = self.source.failure
        if failure is not None and not self._has_said:
            self._has_said = True
            self.say(
                f"the predictor of lengths is given up: {failure}; {self._what} goes on, and "
                "reserves for the longest answers"
            )


def figures_text(figures: PredictionFigures) -> str:
    busy_s = figures.predicting_s + figures.learning_s
    share = busy_s / figures.elapsed_s if figures.elapsed_s else 0.0
    right = f"{figures.right} of {figures.finished} answers had the length that was predicted"
    learnt = ""
    if figures.learnt:
        times = "once" if figures.learnt == 1 else f"{figures.learnt} times"
        learnt = f"; the predictor was improved {times}"
    if figures.failure is not None:
        learnt += f"; it could not learn ({figures.failure})"
    return f"{right}{learnt}; it took {busy_s:.1f} s of a processor ({share:.1%} of the time)"
