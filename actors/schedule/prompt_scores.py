"""Log-probabilities of the tokens of prompts, which come with the parts of a prompt and are told
when it is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from actors.logprobs import LogprobRows
from actors.messages import MicroBatch, Request, Sampled


class PromptScores:
    """The prompts in slots that are scored, and what is known of each so far. Every micro-batch
    passes `with_scores` on its way to the stages, and `take_in` when it is back.
    """

    def __init__(self) -> None:
        self._computing: dict[int, int] = {}  # tokens that are scored at most, by slot
        self._found: dict[int, list[LogprobRows]] = {}  # by slot

    def with_scores(self, batch: MicroBatch, requests: Mapping[int, Request]) -> MicroBatch:
        """Have the stages score what `batch` has of prompts of `requests`, which are by slot."""
        for each in batch.admitted:
            self._computing.pop(each.slot, None)
            self._found.pop(each.slot, None)
            if requests[each.slot].scores_prompt:
                self._computing[each.slot] = len(requests[each.slot].prompt_ids) - 1
        if not self._computing:
            return batch
        ends = [self._computing.get(slot, 0) for slot in batch.slots.tolist()]
        scored = np.clip(np.array(ends, dtype=np.int64) - batch.starts, 0, batch.counts)
        for slot in batch.slots[batch.sampled_rows].tolist():  # whose prompts are whole
            self._computing.pop(slot, None)
        return replace(batch, scored=scored) if scored.any() else batch

    def take_in(self, batch: MicroBatch, sampled: Sampled) -> None:
        """Keep the scores of the prompts of `batch` until they are taken."""
        if batch.scored is None or sampled.logprobs is None:
            return
        first = len(sampled.token_ids)
        rows = zip(batch.slots.tolist(), batch.starts.tolist(), batch.scored.tolist(), strict=True)
        for slot, start, count in rows:
            if count:
                found = sampled.logprobs.between(first, first + count, start + 1)
                self._found.setdefault(slot, []).append(found)
            first += count

    def take(self, slot: int) -> LogprobRows | None:
        """The scores of the prompt in a slot, once; None where none were asked for."""
        return LogprobRows.joined(self._found.pop(slot, []))
