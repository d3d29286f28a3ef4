"""The schedulers that ExeGPT is compared with, each at its best size within a bound."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.reproduction.latency_bounds.fixed_batches import BatchTimeline
from benchmarks.reproduction.latency_bounds.iteration_level import (
    ORCA,
    VLLM,
    IterationLevel,
    iteration_timeline,
    sizes_up_to,
)
from benchmarks.reproduction.latency_bounds.setting import Chosen, Scheduler, Setting


@dataclass(frozen=True, eq=False)
class FixedBatches:
    """Batches of a fixed size, whose output of `bounded_output` tokens is to be within a bound."""

    batches: Sequence[BatchTimeline]
    bounded_output: int

    def best(self, bound_s: float) -> Chosen | None:
        """The size of most requests a second within the bound; None where there is none."""
        kept = [x for x in self.batches if x.latency_of(self.bounded_output) <= bound_s]
        if not kept:
            return None
        best = max(kept, key=lambda each: each.requests_per_s)
        latency_s = best.latency_of(self.bounded_output)
        return Chosen(best.batch.label, best.requests_per_s, latency_s)


@dataclass(frozen=True, eq=False)
class IterationLevelSizes:
    """An iteration-level policy with groups of every size; each is simulated once."""

    setting: Setting
    policy: str
    host_s: float = 0.0
    _known: dict[int, Chosen] = field(default_factory=dict)

    def best(self, bound_s: float) -> Chosen | None:
        """The most requests in a group within the bound: more of them never serve fewer."""
        sizes = list(sizes_up_to(self.setting.most_in_group))
        within = bisect_right(sizes, bound_s, key=lambda size: self.of(size).latency_s)
        return self.of(sizes[within - 1]) if within else None

    def of(self, requests: int) -> Chosen:
        """What a group of so many requests does."""
        if requests not in self._known:
            setting, policy = self.setting, IterationLevel(self.policy, requests, self.host_s)
            found = iteration_timeline(setting.pipeline.times, setting.lengths, policy)
            latency_s = found.latency_of(setting.bounded_output)
            self._known[requests] = Chosen(str(requests), found.requests_per_s, latency_s)
        return self._known[requests]


def rivals_of(setting: Setting) -> dict[str, Scheduler]:
    """All rivals by name. Batches that nobody leaves early are bounded at the longest output, as
    section 7.1 has it.
    """
    longest = setting.lengths.outputs.longest
    return {
        "FT": FixedBatches(setting.batches, longest),
        "DSI": FixedBatches(setting.hybrid_batches, longest),
        "ORCA": IterationLevelSizes(setting, ORCA),
        "vLLM": IterationLevelSizes(setting, VLLM),
    }
