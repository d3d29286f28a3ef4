"""A discrete-event simulation of RRA, written from the text of the ExeGPT paper.

Section 4.1: "executes input encoding once and then decoding for N_D iterations, repeatedly"; "We
set B_E to match the number of completed queries in the previous N_D decoding iterations". Section
5.2: "dynamically adjust the encoder batch size to ensure that the encoder workload (i.e., sum of
input sequence lengths in a batch) stays within a predetermined threshold of the average workload",
"we monitor its batch size, and if it falls below/above the threshold ..., we increase/decrease the
encoder batch size accordingly".

The paper leaves open what follows. Each micro-batch of decoding alternates by itself, but one whose
iterations are done goes on decoding for another that has at most half of its own to do, so that
they encode together. A batch below the threshold gets at most as many more queries than planned as
have completed. Of the numbers of queries that
the thresholds allow the nearest to the plan is taken. Empty batches do not wait, and share what is
there; a batch that found no query looks again after each iteration. At most two micro-batches for
each worker are in the engine. Queries come in their order, and reserve memory for their longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor

Seconds = Callable[[int, int], float]
"""What a worker, by its index, takes for a micro-batch of so many tokens."""


@dataclass(eq=False)
class Query:
    """A query that comes at `arrival_s`, has `done` tokens of answer from a run before, and
    completes with `outputs` tokens.
    """

    name: str
    arrival_s: float
    prompt: int
    most_tokens: int
    outputs: int
    done: int = 0
    completed: bool = False

    def __post_init__(self) -> None:
        self.text = self.prompt + self.done
        self.again = self.done > 0


@dataclass(eq=False)
class Batch:
    """A decoding batch: its queries, and those of encodings that were not scheduled yet."""

    number: int
    turns: int = 0
    queries: list[Query] = field(default_factory=list)
    encodings: list[list[Query]] = field(default_factory=list)
    in_engine: int = 0
    iterations: int = 0
    completed: int = 0


@dataclass(frozen=True)
class Scheduled:
    """A micro-batch: names, tokens of each, and the memory reserved by then."""

    names: tuple[str, ...]
    tokens: tuple[int, ...]
    at_s: float
    reserved: int


@dataclass(frozen=True)
class Plan:
    """B_E, B_D, N_D, decoding batches, encoder micro-batch, mean input length, threshold."""

    b_e: int
    b_d: int
    n_d: int
    batches: int
    micro: int
    mean_input: Fraction
    threshold: Fraction


class RraSimulation:
    """Workers in a row, each of which computes one micro-batch at a time."""

    def __init__(self, plan: Plan, n_workers: int, memory: int, seconds: Seconds) -> None:
        self.plan, self.memory, self.seconds = plan, memory, seconds
        self.worker_free_s = [0.0] * n_workers
        self.batches = [Batch(number) for number in range(plan.batches)]
        self.ready: list[Batch] = []
        self.queue: list[Query] = []
        self.engine: deque[tuple[Batch, list[Query], float]] = deque()
        self.completed: list[str] = []

    def run(self, queries: Sequence[Query]) -> list[Scheduled]:
        coming = deque(sorted(queries, key=lambda query: query.arrival_s))
        schedule: list[Scheduled] = []
        now_s = 0.0
        while True:
            while coming and coming[0].arrival_s <= now_s:
                self.queue.append(coming.popleft())
            micro = self.next(now_s) if len(self.engine) < 2 * len(self.worker_free_s) else None
            if micro is not None:
                schedule.append(micro)
            elif self.engine and not (
                coming
                and coming[0].arrival_s < self.engine[0][2]
                and len(self.engine) < 2 * len(self.worker_free_s)
            ):
                now_s = max(now_s, self.engine[0][2])
                self.take_back()
            elif coming:
                now_s = coming[0].arrival_s
            else:
                return schedule

    def next(self, now_s: float) -> Scheduled | None:
        for batch in self.batches:
            if not batch.queries and batch not in self.ready:
                if self.queue:
                    self.ready.append(batch)
                else:
                    batch.completed = 0
        while self.ready:
            batch = self.ready[0]
            others = [each.iterations for each in self.batches if each.queries]
            joins = batch.queries and any(0 < left <= self.plan.n_d / 2 for left in others)
            if not batch.encodings and batch.iterations == 0 and not joins:
                self.encode(batch)
            if batch.encodings:
                queries = batch.encodings.pop(0)
                if not batch.encodings:
                    self.ready.pop(0)
                return self.enter(batch, queries, [query.text for query in queries], now_s)
            self.ready.pop(0)
            if batch.queries:
                batch.iterations = max(batch.iterations - 1, 0)
                return self.enter(batch, list(batch.queries), [1] * len(batch.queries), now_s)
        return None

    def encode(self, batch: Batch) -> None:
        """Take queries into a batch; its iterations begin when all are encoded."""
        if not self.queue:
            batch.completed = 0
            return
        count = self.encoder_batch(batch)
        batch.turns += 1
        batch.completed = 0
        taken, self.queue = self.queue[:count], self.queue[count:]
        batch.queries += taken
        parts = ceil(count / self.plan.micro) if count else 0
        while taken:
            size = ceil(len(taken) / parts)
            batch.encodings.append(taken[:size])
            taken, parts = taken[size:], parts - 1
        batch.iterations = self.plan.n_d if batch.queries else 0

    def encoder_batch(self, batch: Batch) -> int:
        """How many queries are encoded for a batch: the nearest to the plan of all that may be."""
        plan, size = self.plan, len(batch.queries)
        wanted = self.planned(batch)
        mean = Fraction(plan.b_d, plan.batches)
        fewest = min(floor(mean), ceil(mean * (1 - plan.threshold)))
        most = max(ceil(mean), floor(mean * (1 + plan.threshold)))
        replays = next((i for i, q in enumerate(self.queue) if not q.again), len(self.queue))
        replays = min(replays, most)
        within = range(max(0, fewest - size), max(0, most - size) + 1)
        replaced = max(wanted + batch.completed, replays)
        if wanted not in within:
            nearest = min(within, key=lambda count: abs(count - wanted))
            wanted = min(nearest, max(replaced, 1 if not size else 0))
        if not size:
            empty = sum(not each.queries for each in self.batches)
            limit = ceil(len(self.queue) / empty)
            wanted = max(1, wanted)
        else:
            limit = most
        limit = min(limit, most - size)
        wanted = min(wanted, limit)
        if wanted <= 0:
            return 0
        least = within.start if wanted >= within.start else min(replays, wanted)
        return self.that_fit(self.nearest_workload(wanted, max(1, least), limit))

    def planned(self, batch: Batch) -> int:
        """B_E divided among the batches: over all turns nobody gets more than its share."""
        first = batch.number * self.plan.b_e % self.plan.batches
        total = first + (batch.turns + 1) * self.plan.b_e
        before = first + batch.turns * self.plan.b_e
        return total // self.plan.batches - before // self.plan.batches

    def nearest_workload(self, wanted: int, least: int, limit: int) -> int:
        """The count nearest to `wanted` with a sum of inputs near that of the mean."""
        work = [sum(q.text for q in self.queue[:n]) for n in range(len(self.queue) + 1)]
        low = wanted * self.plan.mean_input * (1 - self.plan.threshold)
        high = wanted * self.plan.mean_input * (1 + self.plan.threshold)
        limit = min(limit, len(self.queue))
        wanted = min(wanted, limit)
        counts = sorted(range(min(least, wanted), limit + 1), key=lambda n: abs(n - wanted))
        for count in counts:
            if low <= work[count] <= high:
                return count
        if work[wanted] > high:  # none is near enough: the fewest above, or the most below
            return max([n for n in counts if n <= wanted and work[n] <= high], default=min(counts))
        return max(n for n in counts if n >= wanted and work[n] <= high)

    def that_fit(self, count: int) -> int:
        left = self.memory - self.reserved
        while sum(q.most_tokens for q in self.queue[:count]) > left:
            count -= 1
        return count

    @property
    def reserved(self) -> int:
        return sum(q.most_tokens for batch in self.batches for q in batch.queries)

    def enter(
        self, batch: Batch, queries: list[Query], tokens: list[int], now_s: float
    ) -> Scheduled:
        at_s = now_s
        for worker, free_s in enumerate(self.worker_free_s):
            at_s = max(at_s, free_s) + self.seconds(worker, sum(tokens))
            self.worker_free_s[worker] = at_s
        batch.in_engine += 1
        self.engine.append((batch, queries, at_s))
        names = tuple(query.name for query in queries)
        return Scheduled(names, tuple(tokens), now_s, self.reserved)

    def take_back(self) -> None:
        batch, queries, _ = self.engine.popleft()
        batch.in_engine -= 1
        for query in queries:
            query.done += 1
            if query.done == query.outputs:
                query.completed = True
                batch.queries.remove(query)
                batch.completed += 1
                self.completed.append(query.name)
        if not batch.queries:
            batch.iterations = 0
        elif not batch.in_engine and not batch.encodings:
            self.ready.append(batch)
