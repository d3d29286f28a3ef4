"""Whether a run follows its plan: by tokens per second, the lengths of rows, and stages' speeds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from actors.messages import Request
from actors.stage_figures import NO_LATENCIES, LatencyCounts, StageStats
from llmpq.run.meter import RunState
from llmpq.run.summary import SlowStage, planned_latency, settled_tokens_per_s, slow_stages
from planner.lengths import MOST_SAMPLED, MOST_UNSEEN, LengthDistribution, Lengths, RequestLengths
from planner.plan.spec import PlanSpec
from planner.workload import Workload

LATEST_ROWS = 256
"""Rows whose lengths are compared with those of a schedule, which soon follows others: where they
deviate by as much as their mean, the mean of so many has an error of 6 %, far below a drift."""

RATE, PROMPTS, OUTPUTS = "tokens/s", "tokens a prompt", "tokens an output"


@dataclass(frozen=True)
class Deviation:
    """A figure of the run that differs from the plan's."""

    what: str
    measured: float
    planned: float

    def __str__(self) -> str:
        """The figure, measured and planned, and the share between them."""
        share = self.measured / self.planned - 1
        return f"{self.measured:.4g} {self.what}, planned {self.planned:.4g} ({share:+.0%})"


@dataclass(frozen=True)
class Drift:
    """What differs between a run and its plan: figures and stages.

    `tokens_per_s` and `outputs` are measured; None where too little is known. Another plan can only
    be made from other lengths or speeds (`is_explained`). `late`: the latency that was bounded,
    where it is above the bound, over the planned one; another schedule can leave as much.
    """

    deviations: tuple[Deviation, ...]
    slow: tuple[SlowStage, ...]
    tokens_per_s: float | None
    outputs: OutputLengths | None
    late: float = 1.0

    @property
    def margin(self) -> float | None:
        """The share of the bound to leave so that requests as late as these keep it, if any are."""
        return 1 - 1 / self.late if self.late > 1 else None

    @property
    def is_explained(self) -> bool:
        """Whether lengths or speeds of stages differ, not only the tokens per second."""
        return bool(self.slow) or self.has_other_lengths

    @property
    def has_other_lengths(self) -> bool:
        return any(each.what in (PROMPTS, OUTPUTS) for each in self.deviations)

    def without(self, said: Collection[str]) -> Drift:
        """The drift without the figures that were `said` before; slow stages are said elsewhere."""
        left = tuple(each for each in self.deviations if each.what not in said)
        return replace(self, deviations=left)

    def text(self, looks_for: str, may_replan: bool = True) -> str:
        """One line: the numbers, and what can be done, or what the run `looks_for` by itself (""
        for nothing); the plan of a fleet is not made again while it runs.
        """
        numbers = "; ".join(map(str, self.deviations))
        follows = looks_for == "schedule" and self.margin is not None
        if not self.is_explained and not follows:
            remedy = (
                "lengths and stages are as planned: look whether prompts come, results are taken "
                "and hops go as fast as the stages need it"
            )
        elif looks_for:
            remedy = f"another {looks_for} is looked for"
        else:
            other = "run with --replan auto, or " if may_replan else ""
            remedy = f"{other}plan again with --lengths and --profiles of what was measured"
        return f"the run does not follow its plan: {numbers}; {remedy}"


class DriftWatch:
    """Compares a run of `plan` with it; a figure drifts where it is the share `drift` away.

    Only tokens per second that are lower than planned count: a plan's are of a whole job, whose
    ends are slower. Lengths count once a turn of all slots has ended.
    """

    def __init__(self, plan: PlanSpec, record: LengthRecord, drift: float) -> None:
        self._plan, self._record, self._drift = plan, record, drift
        self._planned_rate = settled_tokens_per_s(plan)
        self._window = RateWindow(plan.workload.global_batch)
        self._latest = MOST_KEPT
        if plan.latency is not None:
            self._latest = max(LATEST_ROWS, 2 * plan.workload.global_batch)
        self._latencies_before: LatencyCounts | None = None
        self._latencies = NO_LATENCIES
        self._ended_before = record.ended
        self._stages: Sequence[StageStats] = ()

    def see(self, state: RunState, in_flight: int) -> None:
        self._stages = state.stages
        if self._latencies_before is None:
            self._latencies_before = state.latencies
        self._latencies = state.latencies.since(self._latencies_before)
        self._window.add(state.elapsed_s, state.tokens, state.prompts, in_flight)

    def disturb(self) -> None:
        """Leave out what was measured so far, as a fault took time."""
        self._window.clear()

    def found(self, running: Sequence[int]) -> Drift | None:
        """What drifts, where rows in flight have `running` tokens; None where nothing does."""
        rate = self._window.tokens_per_s
        outputs = self._record.outputs(running, self._latest) if self._is_enough() else None
        late, planned = self._late, planned_latency(self._plan)
        deviations = (
            *(
                each
                for each in (*self._rate(rate), *self._lengths(outputs))
                if abs(each.measured / each.planned - 1) > self._drift
            ),
            *(() if late is None else (late,)),
        )
        slow = slow_stages(self._plan, self._stages, self._drift)
        if not deviations and not slow:
            return None
        share = 1.0 if late is None or planned is None else late.measured / planned.planned_s
        return Drift(deviations, slow, rate, outputs, share)

    def _is_enough(self) -> bool:
        ended = self._record.ended - self._ended_before
        return ended >= max(LEAST_ROWS, self._plan.workload.global_batch)

    def _rate(self, rate: float | None) -> Sequence[Deviation]:
        if rate is None or self._planned_rate is None or rate >= self._planned_rate:
            return ()
        return (Deviation(RATE, rate, self._planned_rate),)

    def _lengths(self, outputs: OutputLengths | None) -> Sequence[Deviation]:
        planned = self._planned_means()
        prompts = self._record.prompts(self._latest)
        if planned is None or outputs is None or not prompts:
            return ()
        return (
            Deviation(PROMPTS, sum(prompts) / len(prompts), planned[0]),
            Deviation(OUTPUTS, outputs.mean, planned[1]),
        )

    def _planned_means(self) -> tuple[float, float] | None:
        if self._plan.latency is not None:
            lengths = self._plan.latency.lengths
            return lengths.prompts.mean, lengths.outputs.mean
        if self._plan.job is not None:
            planned = self._plan.job.job.lengths
            return planned.mean_prompt, planned.mean_output
        return None

    @property
    def _late(self) -> Deviation | None:
        """The latency that was bounded, where it is above the bound."""
        planned = planned_latency(self._plan)
        if planned is None or planned.bound_s is None:
            return None
        if self._latencies.requests * (1 - planned.quantile) < 1:
            return None
        measured_s = self._latencies.quantile_s(planned.quantile) or 0.0
        what = f"s for {100 * planned.quantile:g} % of requests"
        late = Deviation(what, measured_s, planned.bound_s)
        return late if measured_s > planned.bound_s else None

    def measured(self, outputs: OutputLengths) -> RequestLengths:
        """The lengths of the latest rows."""
        prompts = LengthDistribution.of_sample(self._record.prompts(self._latest))
        planned = self._plan.workload.heads.within(prompts.longest)
        return RequestLengths(prompts, outputs.distribution, heads=planned)


LEAST_ROWS = 64
"""Rows that must end within a window: their tokens per second vary by a few per cent."""

LEAST_S = 10.0
"""Seconds of a window: stages are asked about once a second."""


@dataclass(frozen=True)
class _Mark:
    at_s: float
    tokens: int
    ended: int


class RateWindow:
    """Measures tokens per second over the latest turn of `slots` rows, or `LEAST_ROWS`.

    The first turn fills the slots and does not count; nor does time in which there were fewer
    requests than slots, as at the end of a job or where prompts come slowly. The thread that looks
    at the stages adds to it while the run asks for the rate.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._marks: deque[_Mark] = deque()
        self._settled_at: int | None = None
        self._lock = threading.Lock()

    def add(self, at_s: float, tokens: int, ended: int, in_flight: int) -> None:
        with self._lock:
            if self._settled_at is None:
                self._settled_at = ended + self._slots
            if in_flight < self._slots or ended < self._settled_at:
                self._marks.clear()
                return
            self._marks.append(_Mark(at_s, tokens, ended))
            while len(self._marks) > 2 and self._is_enough(self._marks[1]):
                self._marks.popleft()

    def clear(self) -> None:
        """Begin again, as after a fault: with slots that are filled anew."""
        with self._lock:
            self._marks.clear()
            self._settled_at = None

    @property
    def tokens_per_s(self) -> float | None:
        """The measured rate; None while too few rows have ended."""
        with self._lock:
            if not self._marks or not self._is_enough(self._marks[0]):
                return None
            first, last = self._marks[0], self._marks[-1]
        return (last.tokens - first.tokens) / (last.at_s - first.at_s)

    def _is_enough(self, first: _Mark) -> bool:
        last = self._marks[-1]
        rows = last.ended - first.ended
        return rows >= max(self._slots, LEAST_ROWS) and last.at_s - first.at_s >= LEAST_S


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MOST_KEPT = 8192
"""Rows that are kept at most, the latest ones: lengths may change within a file."""


def length_weights(ended: Sequence[int] | IntArray, running: Sequence[int]) -> FloatArray | None:
    """The share of all rows [ended] that each row of `ended` tokens stands for; None while more
    than `MOST_UNSEEN` of them are longer than any that ended.

    Rows that end first are the short ones, so their mean is too small. `running` has the tokens so
    far of rows in flight, which are longer than that: each of them counts for the rows that ended
    with more (the estimator of Kaplan and Meier, 1958). Rows beyond the longest that ended count as
    long as that one.
    """
    if len(ended) == 0:
        return None
    ended = np.asarray(ended, dtype=np.int64)
    lengths, counts = np.unique(ended, return_counts=True)
    known = np.sort(np.concatenate([ended, np.asarray(running, dtype=np.int64)]))
    at_risk = len(known) - np.searchsorted(known, lengths)  # rows that got as many tokens
    survival = np.cumprod(1 - counts / at_risk)
    if survival[-1] > MOST_UNSEEN:
        return None
    mass = -np.diff(survival, prepend=1.0)
    mass[-1] += survival[-1]
    weights: FloatArray = (mass / counts)[np.searchsorted(lengths, ended)]
    return weights


class LengthRecord:
    """Prompt and output tokens of a run's latest rows without errors; `ended`: all rows so far."""

    def __init__(self) -> None:
        self.ended = 0
        self._prompts: deque[int] = deque(maxlen=MOST_KEPT)
        self._pairs: deque[tuple[int, int]] = deque(maxlen=MOST_KEPT)

    def begin(self, request: Request) -> None:
        self._prompts.append(len(request.prompt_ids))

    def end(self, request: Request, tokens: int) -> None:
        """Note a row that ended with so many new tokens."""
        self.ended += 1
        self._pairs.append((len(request.prompt_ids), max(1, tokens)))

    def forget(self) -> None:
        """Leave out the lengths so far, as rows of another kind follow; `ended` counts on."""
        self._prompts.clear()
        self._pairs.clear()

    def prompts(self, latest: int = MOST_KEPT) -> Sequence[int]:
        """Tokens of the prompts of the latest rows that began: long prompts do not end later."""
        return list(self._prompts)[-latest:]

    @property
    def mean_prompt(self) -> float:
        return float(np.mean(self._prompts)) if self._prompts else 0.0

    def outputs(self, running: Sequence[int], latest: int = MOST_KEPT) -> OutputLengths | None:
        """Output lengths of the latest rows beside `running` ones; None if too few are known."""
        # Every second, of thousands of rows: an array of a flat sequence is made in a tenth of the
        # time of one of pairs.
        flat = np.fromiter(chain.from_iterable(tuple(self._pairs)[-latest:]), np.int64)
        pairs = flat.reshape(-1, 2)
        weights = length_weights(pairs[:, 1], running)
        return None if weights is None else OutputLengths(pairs, weights)


class OutputLengths:
    """Rows that ended, (prompt, output) tokens each, and the share that each stands for."""

    def __init__(self, pairs: Sequence[tuple[int, int]] | IntArray, weights: FloatArray) -> None:
        self._pairs = np.asarray(pairs, dtype=np.int64)
        self._weights = weights

    @property
    def mean(self) -> float:
        return float(self._weights @ self._pairs[:, 1])

    @property
    def distribution(self) -> LengthDistribution:
        lengths, places = np.unique(self._pairs[:, 1], return_inverse=True)
        shares = np.bincount(places, weights=self._weights)
        kept = shares > 0
        shares = shares[kept] / shares[kept].sum()
        return LengthDistribution(tuple(lengths[kept].tolist()), tuple(shares.tolist()))

    @property
    def longest(self) -> int:
        return int(self._pairs[:, 1].max())

    @property
    def mean_so_far(self) -> float:
        """Mean tokens that a row in flight has, and lacks; long rows are met more often."""
        outputs = self._pairs[:, 1]
        return float(self._weights @ outputs**2) / (2 * self.mean)

    def lengths(self, room: Workload) -> Lengths:
        """A sample for planning, in no particular order; slots must still have `room`."""
        order = np.argsort(self._pairs[:, 1], kind="stable")
        shares = np.cumsum(self._weights[order])
        at = (np.arange(MOST_SAMPLED - 1) + 0.5) / (MOST_SAMPLED - 1)
        chosen = self._pairs[order][np.minimum(np.searchsorted(shares, at), len(order) - 1)]
        pairs = np.minimum(
            np.vstack([chosen, (room.prompt_length, room.new_tokens)]),
            (room.prompt_length, room.new_tokens),
        )
        pairs[:, 1] = np.minimum(pairs[:, 1], room.total_length - pairs[:, 0])
        rows = np.random.default_rng(0).permutation(pairs).tolist()
        return Lengths.of(
            ((prompt, output) for prompt, output in rows),
            "finished rows",
            room.new_tokens,
            room.slot_tokens,
        )
