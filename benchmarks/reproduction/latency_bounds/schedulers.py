"""The schedulers that ExeGPT is compared with, simulated: batches of a fixed size, and
iterations as of ORCA and vLLM (sections 2 and 7.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.latency_bound.timeline import StageSeconds
from planner.lengths import LengthDistribution, RequestLengths

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


IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

LENGTH_STEP = 32
"""Tokens to which contexts and prompts are rounded, so that few passes have to be timed."""
WARM_UP = 0.2
"""The share of passes that is left out at the beginning."""
STEPS = 2.0
"""Decode steps that are simulated, in multiples of the longest output,"""
MOST_REQUESTS, MOST_STEPS = 200, 1000
"""and more of them, until so many requests have ended, or so many steps."""
ORCA, VLLM = "orca", "vllm"
PROMPT_TOKENS = 2560
"""Tokens of a pass of prompts of vLLM 0.1 (`max_num_batched_tokens`)."""


@dataclass(frozen=True)
class IterationLevel:
    """A policy by name, the most requests of a group, and seconds of the host beside each pass."""

    name: str
    requests: int
    host_s: float = 0.0

    def most_prompts(self, lengths: RequestLengths) -> int:
        """Most prompts of a pass."""
        return 1 if self.name == ORCA else max(1, PROMPT_TOKENS // int(lengths.prompts.mean))


@dataclass(frozen=True, eq=False)
class Passes:
    """Passes of all groups, round by round: requests that decode, their mean context, newcomers
    and their mean prompt; each [rounds, groups].
    """

    decodes: IntArray
    context_tokens: FloatArray
    newcomers: IntArray
    prompt_tokens: FloatArray

    @classmethod
    def of(cls, rounds: Sequence[_Round]) -> Passes:
        """The passes of successive rounds."""
        decodes, context, newcomers, prompts = (
            np.array(each) for each in zip(*rounds, strict=True)
        )
        return cls(decodes, context, newcomers, prompts)


_Round = tuple[IntArray, FloatArray, IntArray, FloatArray]


@dataclass(frozen=True, eq=False)
class IterationTimeline:
    """What became of a simulation: by round and group [rounds, groups] when a pass began and was
    back, whether requests began in it, and whether those before got a token.
    """

    policy: IterationLevel
    requests_per_s: float
    began_s: FloatArray
    back_s: FloatArray
    admits: BoolArray
    decodes: BoolArray

    def latency_of(self, output_tokens: int) -> float:
        """Mean seconds from when a request's prefill begins until it has so many tokens."""
        found: list[float] = []
        columns = zip(self.began_s.T, self.back_s.T, self.admits.T, self.decodes.T, strict=True)
        for began_s, back_s, admits, decodes in columns:
            steps, first = np.flatnonzero(decodes), np.flatnonzero(admits)
            last = np.searchsorted(steps, first, side="right") + output_tokens - 2
            within = last < len(steps)
            ends = steps[last[within]] if output_tokens > 1 else first[within]
            found += (back_s[ends] - began_s[first[within]]).tolist()
        return float(np.mean(found)) if found else float("inf")


def iteration_timeline(
    times: StageSeconds, lengths: RequestLengths, policy: IterationLevel, seed: int = 0
) -> IterationTimeline:
    """Simulate one group a stage, long enough for the longest output and for some requests."""
    generator = np.random.default_rng([seed, policy.requests])
    rounds = _enough_rounds(times.stages, lengths, policy)
    passes = Passes.of(list(_rounds(times.stages, lengths, policy, generator, rounds)))
    seconds, hops = pass_seconds(times, passes)
    began_s, back_s = _clocked(seconds, hops, policy.host_s)
    warm = int(WARM_UP * rounds)
    tokens = float((passes.decodes + passes.newcomers)[warm:].sum())
    rate = tokens / lengths.outputs.mean / float(back_s[-1].max() - back_s[warm - 1].max())
    admits, decodes = passes.newcomers[warm:] > 0, passes.decodes[warm:] > 0
    return IterationTimeline(policy, rate, began_s[warm:], back_s[warm:], admits, decodes)


def _enough_rounds(groups: int, lengths: RequestLengths, policy: IterationLevel) -> int:
    ended = policy.requests / lengths.outputs.mean  # of a group in a step
    steps = STEPS * lengths.outputs.longest + min(MOST_REQUESTS / (groups * ended), MOST_STEPS)
    return int(steps * (1 if policy.name == ORCA else 1 + ended / policy.most_prompts(lengths)))


def _rounds(
    groups: int,
    lengths: RequestLengths,
    policy: IterationLevel,
    generator: np.random.Generator,
    rounds: int,
) -> Iterator[_Round]:
    """Yield what all groups do in each round. They begin amid the steady state: of a request that
    is met, any token may be the next.
    """
    shape = groups, policy.requests
    most = policy.most_prompts(lengths)
    met = _longer_met(lengths.outputs).drawn(shape[0] * shape[1], generator).reshape(shape)
    done = (generator.random(shape) * met).astype(np.int64)
    left = met - done
    if policy.name == ORCA:  # no more of them can be met than requests that begin one a pass
        left[:, math.ceil(lengths.outputs.mean) :] = 0
    tokens = done + lengths.prompts.drawn(done.size, generator).reshape(shape)
    for _ in range(rounds):
        free = left == 0
        chosen = free & (free.cumsum(axis=1) <= most)
        newcomers = chosen.sum(axis=1)
        decoding = ~free
        if policy.name == VLLM:
            decoding &= (newcomers == 0)[:, None]
        decodes = decoding.sum(axis=1)
        context = (tokens * decoding).sum(axis=1) / np.maximum(decodes, 1)
        tokens[chosen] = lengths.prompts.drawn(int(newcomers.sum()), generator)
        left[chosen] = lengths.outputs.drawn(int(newcomers.sum()), generator)
        prompts = (tokens * chosen).sum(axis=1) / np.maximum(newcomers, 1)
        made = decoding | chosen
        left -= made
        tokens += made
        yield decodes, context, newcomers, prompts


def pass_seconds(times: StageSeconds, passes: Passes) -> tuple[FloatArray, FloatArray]:
    """Seconds of computing and of hops of every pass [rounds, groups, N].

    In a pass of both phases weights are read and kernels started once: the least decode step is
    taken off (as in `planner.plan.modelled_times`).
    """
    decode_s, decode_hop_s = _by_kind(
        passes.decodes, passes.context_tokens, times.decode_s, lambda n, _: times.decode_hop_s(n)
    )
    prefill_s, prefill_hop_s = _by_kind(
        passes.newcomers, passes.prompt_tokens, times.prefill_s, times.prefill_hop_s
    )
    both = (passes.decodes > 0) & (passes.newcomers > 0)
    shared_s = both[..., None] * times.decode_s(1, 1)
    seconds = np.maximum(prefill_s + decode_s - shared_s, np.maximum(prefill_s, decode_s))
    return seconds, prefill_hop_s + decode_hop_s


_Seconds = Callable[[float, float], FloatArray]


def _by_kind(
    requests: IntArray, tokens: FloatArray, compute: _Seconds, hop: _Seconds
) -> tuple[FloatArray, FloatArray]:
    """Seconds and hops [rounds, groups, N] of one phase, each kind of pass timed once."""
    near = np.maximum(1, LENGTH_STEP * np.round(tokens / LENGTH_STEP)).astype(np.int64)
    kinds, place = np.unique(
        np.stack([requests.ravel(), near.ravel()]), axis=1, return_inverse=True
    )
    nothing = 0.0 * compute(1, 1)
    found = [
        np.array([seconds(*pair) if pair[0] else nothing for pair in kinds.T.tolist()])
        for seconds in (compute, hop)
    ]
    shape = *requests.shape, len(nothing)
    return found[0][place].reshape(shape), found[1][place].reshape(shape)


def _clocked(seconds: FloatArray, hops: FloatArray, host_s: float) -> tuple[FloatArray, FloatArray]:
    """When passes begin and are back [rounds, groups]: stages and links serve first come, first
    served, and a group's next pass waits for the one before, and for the host.
    """
    rounds, groups, stages = seconds.shape
    stage_free_s, link_free_s, ready_s = [0.0] * stages, [0.0] * stages, [0.0] * groups
    began_s, back_s = np.zeros((rounds, groups)), np.zeros((rounds, groups))
    pairs = zip(seconds.tolist(), hops.tolist(), strict=True)
    for number, (of_round, hops_of_round) in enumerate(pairs):
        for group, (computes, sends) in enumerate(zip(of_round, hops_of_round, strict=True)):
            at_s = max(ready_s[group], stage_free_s[0])
            began_s[number, group] = at_s
            for j in range(stages):
                at_s = stage_free_s[j] = max(at_s, stage_free_s[j]) + computes[j]
                at_s = link_free_s[j] = max(at_s, link_free_s[j]) + sends[j]
            back_s[number, group] = at_s
            ready_s[group] = at_s + host_s
    return began_s, back_s


def mean_held_tokens(lengths: RequestLengths) -> float:
    """Mean tokens of a request over the time that it runs: prompt, and half of its output, where
    long outputs are met more often.
    """
    outputs = np.array(lengths.outputs.lengths, dtype=np.float64)
    squares = float(np.dot(lengths.outputs.probabilities, outputs * (outputs + 1) / 2))
    return lengths.prompts.mean + squares / lengths.outputs.mean


def sizes_up_to(most: int) -> Iterator[int]:
    """Numbers of requests to try: all small ones, then a twelfth more each time, and the most."""
    size = 1
    while size < most:
        yield size
        size += max(1, size // 12)
    if most >= 1:
        yield most


def _longer_met(outputs: LengthDistribution) -> LengthDistribution:
    """Output lengths of the requests that are met at a moment."""
    weights = np.array(outputs.lengths) * np.array(outputs.probabilities)
    return LengthDistribution(outputs.lengths, tuple((weights / weights.sum()).tolist()))
