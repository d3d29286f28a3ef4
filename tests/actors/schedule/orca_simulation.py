"""A discrete-event simulation of Algorithm 1 of the ORCA paper, line by line.

The paper leaves open what happens when `Select` finds nothing: no empty batch is run then, time
goes on to the next arrival or return. Not from the paper are prompts in parts and the bound on the
tokens of a batch; both are off unless asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto


class State(Enum):
    INITIATION = auto()
    RUNNING = auto()
    INCREMENT = auto()


@dataclass
class SimRequest:
    """A request that comes at `arrival_s` and is finished after `outputs` tokens."""

    name: str
    arrival_s: float
    prompt: int
    max_tokens: int
    outputs: int
    state: State = State.INITIATION
    prefilled: int = 0
    sampled: int = 0
    finished: bool = False


@dataclass(frozen=True)
class Scheduled:
    """A batch, when it was scheduled, and the slots reserved and batches scheduled by then."""

    names: tuple[str, ...]
    tokens: tuple[int, ...]
    at_s: float
    n_rsrv: int
    n_scheduled: int


Seconds = Callable[[int, int], float]
"""What a worker, by its index, takes for a batch of so many tokens."""


class OrcaSimulation:
    """The engine: `n_workers` in a row, each of which computes one batch at a time."""

    def __init__(self, n_workers: int, max_bs: int, n_slots: int, seconds: Seconds) -> None:
        self.n_workers, self.max_bs, self.n_slots = n_workers, max_bs, n_slots
        self.seconds = seconds
        self.part_tokens = self.batch_tokens = 10**9
        self.worker_free_s = [0.0] * n_workers
        self.in_engine: deque[tuple[list[SimRequest], float]] = deque()

    def run(self, requests: Sequence[SimRequest]) -> list[Scheduled]:
        """All batches in the order in which they are scheduled."""
        schedule: list[Scheduled] = []
        now_s = 0.0
        n_scheduled = 0  # line 1
        n_rsrv = 0  # line 2
        while True:  # line 3
            pool = [r for r in requests if r.arrival_s <= now_s and not r.finished]
            batch, n_rsrv = self.select(pool, n_rsrv)  # line 4
            if batch:
                tokens = self.enter_engine(batch, now_s)  # line 5
                for req in batch:  # line 6
                    req.state = State.RUNNING  # line 7
                n_scheduled += 1  # line 8
                names = tuple(req.name for req in batch)
                schedule.append(Scheduled(names, tokens, now_s, n_rsrv, n_scheduled))
            elif not self.in_engine and all(r.finished for r in requests):
                return schedule
            else:
                arrivals_s = [r.arrival_s for r in requests if r.arrival_s > now_s]
                if arrivals_s and (not self.in_engine or min(arrivals_s) < self.in_engine[0][1]):
                    now_s = min(arrivals_s)
                    continue
            if n_scheduled == self.n_workers or not batch:  # line 9
                returned, at_s = self.in_engine.popleft()  # line 10
                now_s = max(now_s, at_s)
                for req in returned:  # line 11
                    req.state = State.INCREMENT  # line 12
                    if req.sampled == req.outputs:  # line 13
                        n_rsrv -= req.max_tokens  # line 14
                        req.finished = True
                n_scheduled -= 1  # line 15

    def select(self, pool: list[SimRequest], n_rsrv: int) -> tuple[list[SimRequest], int]:
        """Lines 17 to 28."""
        batch: list[SimRequest] = []  # line 18
        pool = [req for req in pool if req.state is not State.RUNNING]  # line 19
        pool.sort(key=lambda req: req.arrival_s)  # line 20: stable, equal times in their order
        for req in pool:  # line 21
            if len(batch) == self.max_bs:  # line 22
                break
            if req.state is State.INITIATION:  # line 23
                new_n_rsrv = n_rsrv + req.max_tokens  # line 24
                if new_n_rsrv > self.n_slots:  # line 25
                    break
                if batch and sum(map(self.tokens, [*batch, req])) > self.batch_tokens:
                    break
                n_rsrv = new_n_rsrv  # line 26
            elif batch and sum(map(self.tokens, [*batch, req])) > self.batch_tokens:
                break
            batch.append(req)  # line 27
        return batch, n_rsrv  # line 28

    def tokens(self, req: SimRequest) -> int:
        """The tokens of its next iteration: of its prompt, or the one that it has got last."""
        return min(req.prompt - req.prefilled, self.part_tokens) or 1

    def enter_engine(self, batch: list[SimRequest], now_s: float) -> tuple[int, ...]:
        """Run one iteration of the batch on worker after worker; returns each request's tokens."""
        tokens = tuple(map(self.tokens, batch))
        at_s = now_s
        for worker in range(self.n_workers):
            began_s = max(at_s, self.worker_free_s[worker])
            self.worker_free_s[worker] = at_s = began_s + self.seconds(worker, sum(tokens))
        self.in_engine.append((batch, at_s))
        for req, count in zip(batch, tokens, strict=True):
            req.prefilled += count if req.prefilled < req.prompt else 0
            req.sampled += req.prefilled == req.prompt
        return tokens
