"""Traces in real time: requests are submitted to a live generation when they come."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from actors.messages import Request, Sampling
from actors.recovery.live import LiveGeneration
from benchmarks.orca.contestants import Contestant, TurnsGroup
from benchmarks.orca.traces import Arrival, Lengths, Trace
from benchmarks.throughput_cases import VOCABULARY

_SAMPLING = Sampling(ignore_eos=True)
LEAD_S = 0.2
"""Before the first arrival, so that the run has begun by then."""


@dataclass(frozen=True)
class Timed:
    """A request's lengths, when it came, and when each of its tokens was there; seconds."""

    lengths: Lengths
    arrived_s: float
    tokens_s: tuple[float, ...]

    @property
    def first_s(self) -> float:
        """Time to its first token."""
        return self.tokens_s[0] - self.arrived_s

    @property
    def latency_s(self) -> float:
        """Time to its last token."""
        return self.tokens_s[-1] - self.arrived_s

    @property
    def normalized_s(self) -> float:
        """Latency for each generated token (section 6.2)."""
        return self.latency_s / self.lengths.new

    @property
    def gaps_s(self) -> list[float]:
        """Times between two tokens."""
        return [later - earlier for earlier, later in pairwise(self.tokens_s)]


def prompt_ids(lengths: Lengths, number: int, turn: int) -> tuple[int, ...]:
    """Random tokens: no two prompts of any turn share a beginning."""
    draw = np.random.default_rng([turn, number])
    return tuple(draw.integers(3, VOCABULARY, lengths.prompt).tolist())


def requests_of(trace: Trace, turn: int) -> list[Request]:
    """The requests of a trace."""
    return [
        Request(str(i), prompt_ids(a.lengths, i, turn), a.lengths.new, _SAMPLING)
        for i, a in enumerate(trace)
    ]


def play(group: TurnsGroup, contestant: Contestant, trace: Trace, turn: int) -> list[Timed]:
    """Run a trace to its end under a policy."""
    contestant.comes_next()
    requests, live = requests_of(trace, turn), group.live()
    began_s = time.perf_counter() + LEAD_S
    sender = threading.Thread(target=_send, args=(live, trace, requests, began_s), daemon=True)
    sender.start()
    times: defaultdict[int, list[float]] = defaultdict(list)
    for told in live.events():
        now_s = time.perf_counter() - began_s
        for each in told:
            if each.finish_reason == "error":
                raise RuntimeError(f"request {each.custom_id} failed: {each.error}")
            times[int(each.custom_id)] += [now_s] * len(each.token_ids)
    sender.join()
    found = [Timed(a.lengths, a.at_s, tuple(times[i])) for i, a in enumerate(trace)]
    missing = sum(each.lengths.new - len(each.tokens_s) for each in found)
    if missing:
        raise RuntimeError(f"{contestant.label} made {missing} tokens too few")
    return found


def _send(
    live: LiveGeneration, trace: Sequence[Arrival], requests: Sequence[Request], began_s: float
) -> None:
    for arrival, request in zip(trace, requests, strict=True):
        time.sleep(max(0.0, began_s + arrival.at_s - time.perf_counter()))
        live.submit(request)
    live.close()
