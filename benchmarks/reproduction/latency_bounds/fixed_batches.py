"""Batches of a fixed size, one after the other, as FasterTransformer and DeepSpeed run them.

ExeGPT section 2: a batch decodes until its longest output is there; requests that have ended are
computed on. Prompts run in one number of micro-batches and decode steps in another (DeepSpeed's
hybrid scheduling; FasterTransformer has one of each for a stage). KV memory is allocated for the
longest prompt and output. A request's latency is from when its batch begins to its last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.latency_bound.stage_times import StageSeconds
from planner.length_distribution import RequestLengths

FloatArray = npt.NDArray[np.float64]

CONTEXTS = 9
"""Context lengths at which decode rounds are timed; between them they are linear."""


@dataclass(frozen=True)
class FixedBatch:
    """Requests of a batch, and the micro-batches of either phase that they run in."""

    requests: int
    prefill_micro_batches: int
    decode_micro_batches: int

    @property
    def label(self) -> str:
        """The three numbers."""
        parts = self.prefill_micro_batches, self.decode_micro_batches
        return f"{self.requests} in {parts[0]} and {parts[1]}"


@dataclass(frozen=True, eq=False)
class BatchTimeline:
    """Seconds of a batch of `batch` until each number of tokens: `seconds_to` [longest output]."""

    batch: FixedBatch
    lengths: RequestLengths
    seconds_to: FloatArray

    def latency_of(self, output_tokens: int) -> float:
        """Seconds until a request has so many tokens."""
        return float(self.seconds_to[output_tokens - 1])

    @property
    def worst_latency_s(self) -> float:
        """Seconds of a batch with the longest output there is."""
        return self.latency_of(self.lengths.outputs.longest)

    @property
    def mean_s(self) -> float:
        """Mean seconds of a batch, which is as long as its longest output."""
        outputs = self.lengths.outputs
        reached = np.cumsum(outputs.probabilities) ** self.batch.requests
        longest = np.diff(reached, prepend=0.0) / reached[-1]
        seconds = self.seconds_to[np.array(outputs.lengths) - 1]
        return float(np.dot(longest, seconds))

    @property
    def requests_per_s(self) -> float:
        """Requests a second where one batch follows the other."""
        return self.batch.requests / self.mean_s


def batch_timeline(
    times: StageSeconds, lengths: RequestLengths, batch: FixedBatch
) -> BatchTimeline:
    """The timeline of batches of requests with these lengths."""
    longest, prompt = lengths.outputs.longest, lengths.prompts.mean
    steps = np.arange(1, longest)
    timed = np.unique(np.linspace(1, max(1, longest - 1), CONTEXTS).round())
    rounds = [decode_round_s(times, batch, prompt + step) for step in timed.tolist()]
    decoding = np.cumsum(np.interp(steps, timed, rounds))
    seconds = prefill_s(times, batch, prompt) + np.concatenate([[0.0], decoding])
    return BatchTimeline(batch, lengths, seconds)


def prefill_s(times: StageSeconds, batch: FixedBatch, prompt_tokens: float) -> float:
    """Seconds until all requests of a batch have their first token."""
    count = batch.prefill_micro_batches
    stage_s = times.prefill_s(batch.requests / count, prompt_tokens)
    hop_s = times.prefill_hop_s(batch.requests / count, prompt_tokens)
    return float((count - 1) * max(stage_s.max(), hop_s.max()) + stage_s.sum() + hop_s.sum())


def decode_round_s(times: StageSeconds, batch: FixedBatch, context_tokens: float) -> float:
    """Seconds in which every request gets one token more: the slowest stage or link is busy all
    the time, or every micro-batch waits for its own token to come round.
    """
    count = batch.decode_micro_batches
    stage_s = times.decode_s(batch.requests / count, context_tokens)
    hop_s = times.decode_hop_s(batch.requests / count)
    return float(max(count * max(stage_s.max(), hop_s.max()), stage_s.sum() + hop_s.sum()))
