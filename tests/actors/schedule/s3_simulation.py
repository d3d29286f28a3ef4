"""The policies `s3-published` and `s3` written from their description, with plain lists: what their
schedulers are held against.

From the paper (section 3): the pool in decreasing order of length, through which one goes once and
admits whoever fits; doubled reservations of those that outgrow theirs. Beyond it: growth where they
are, preempted ones before all others, and the bound on overtakes. `s3` differs in what is reserved,
and in who fits.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(eq=False)
class SimRequest:
    """A request of `prompt` tokens that reserves `size` token slots, `most` in the end."""

    name: str
    arrival: int
    prompt: int
    most: int
    size: int
    generated: int
    written: int = 0
    text: int = 0  # tokens that are prefilled
    state: str = "waiting"
    overtaken: int = 0
    parked: bool = False
    preempted: bool = False
    gone: bool = False  # cancelled while under way

    @property
    def next_count(self) -> int:
        return max(self.text - self.written, 1)


@dataclass
class S3Simulation:
    """All that waits or runs, in the order of arrival."""

    n_slots: int
    max_batch_size: int
    most_overtakes: int
    chunk: int = 0
    cap: int = 0
    park_from: int = 0
    parked_tokens: int = 0
    requests: list[SimRequest] = field(default_factory=list)
    arrivals: int = 0
    grown: int = 0
    parked: int = 0
    recomputed: int = 0

    def of_state(self, *states: str) -> list[SimRequest]:
        return [each for each in self.requests if each.state in states]

    @property
    def reserved(self) -> int:
        return sum(each.size for each in self.of_state("ready", "running"))

    @property
    def in_host_memory(self) -> int:
        return sum(each.written for each in self.of_state("waiting") if each.parked)

    def add(self, name: str, prompt: int, new: int, generated: int, expected: int | None) -> None:
        likely = new if expected is None else min(expected, new)
        size = prompt + max(likely, generated + 1)
        self.requests.append(SimRequest(name, self.arrivals, prompt, prompt + new, size, generated))
        self.arrivals += 1

    def cancel(self, name: str) -> None:
        for each in [each for each in self.requests if each.name == name]:
            if each.state == "running":
                each.gone = True
            else:
                self.requests.remove(each)

    def part(self, each: SimRequest) -> int:
        largest = self.chunk or self.cap
        return min(each.next_count, largest) if largest else each.next_count

    def larger(self, each: SimRequest) -> int:
        return min(2 * each.size, each.most)

    def coming_back(self, each: SimRequest) -> int:
        return self.larger(each)

    def supervise(self) -> None:
        short = [e for e in self.of_state("ready") if e.written + self.part(e) > e.size]
        larger = {each.arrival: self.larger(each) for each in short}
        while short:
            for each in list(short):
                grown = larger[each.arrival]
                if self.reserved - each.size + grown <= self.n_slots:
                    each.size = grown
                    self.grown += 1
                    short.remove(each)
            if short:
                last = short.pop()
                in_all = self.in_host_memory + last.written
                last.parked = 0 < self.park_from <= last.written and in_all <= self.parked_tokens
                last.state, last.size = "waiting", self.coming_back(last)
                last.preempted = True
                if last.parked:
                    self.parked += 1
                else:
                    last.written = 0
                    self.recomputed += 1

    def fitting(self) -> SimRequest | None:
        """Who is admitted next."""
        waiting = self.of_state("waiting")
        held = [e for e in waiting if e.preempted or e.overtaken >= self.most_overtakes]
        for each in held[:1] or sorted(waiting, key=lambda e: (-e.size, e.arrival)):
            if self.reserved + each.size <= self.n_slots:
                return each
        return None

    def next_batch(self) -> list[tuple[str, int, int]] | None:
        """Name, tokens and token slots of each request of the next micro-batch."""
        self.supervise()
        ready = self.of_state("ready")[: self.max_batch_size]
        tokens, chosen = 0, []
        for each in ready:
            tokens += self.part(each)
            if not self.cap or not chosen or tokens <= self.cap:
                chosen.append(each)
        rows = len(ready)
        while rows < self.max_batch_size and (following := self.fitting()) is not None:
            following.text = following.prompt + following.generated
            if self.cap and tokens and tokens + self.part(following) > self.cap:
                break
            for each in self.of_state("waiting"):
                each.overtaken += each.arrival < following.arrival
            self.joins(following)
            following.state, following.parked, following.preempted = "ready", False, False
            tokens += self.part(following)
            chosen.append(following)
            rows += 1
        batch = [(each.name, self.part(each), each.size) for each in chosen]
        for each in chosen:
            each.written += self.part(each)
            each.state = "running"
        return batch or None

    def complete(self, names: list[str], ended: set[str]) -> None:
        for each in [each for each in self.requests if each.name in names]:
            each.state = "ready"
            each.generated += each.written >= each.text
            if each.gone or each.name in ended:
                self.requests.remove(each)
                self.ends(each, each.gone)

    def joins(self, each: SimRequest) -> None: ...

    def ends(self, each: SimRequest, is_cancelled: bool) -> None: ...


@dataclass
class PeakSimulation(S3Simulation):
    """The policy `s3`: ranges grow a little, the first that fits joins, or the longest of those
    that may end last; whether one fits is found by going on token by token until its end.
    """

    grows_by: int = 32
    slots: int = 0
    expected_in_all: Counter[int] = field(default_factory=Counter)  # by half octaves
    was_less: Counter[int] = field(default_factory=Counter)
    is_settled: bool = False
    expected: dict[int, int] = field(default_factory=dict)  # by arrival

    def add(self, name: str, prompt: int, new: int, generated: int, expected: int | None) -> None:
        super().add(name, prompt, new, generated, expected)
        last = self.requests[-1]
        last.size = min(prompt + generated + self.grows_by, last.most)
        self.expected[last.arrival] = new if expected is None else min(max(expected, 1), new)
        self.is_settled = False

    def larger(self, each: SimRequest) -> int:
        in_flight = len(self.of_state("ready", "running"))
        share = (self.n_slots - self.reserved) // (2 * in_flight)
        return min(each.size + max(self.grows_by, share), each.most)

    def coming_back(self, each: SimRequest) -> int:
        self.is_settled = False
        return min(each.prompt + each.generated + self.grows_by, each.most)

    def kind(self, each: SimRequest) -> int:
        """The half octave of what is expected: the first power of the root of 2 that is above it,
        by its square.
        """
        kind = 0
        while 2**kind <= self.expected[each.arrival] ** 2:
            kind += 1
        return kind

    def to_come(self, each: SimRequest) -> int:
        """Tokens by which its context is foreseen to grow."""
        share, kind = Fraction(1), self.kind(each)
        if self.expected_in_all[kind]:
            share -= Fraction(self.was_less[kind], self.expected_in_all[kind])
        answer = max(1, math.ceil(self.expected[each.arrival] * share))
        if answer <= each.generated:
            answer = each.generated + max(self.grows_by, each.generated // 4)
        return min(answer, each.most - each.prompt) - 1 - each.generated

    def stays_within(self, newcomer: SimRequest) -> bool:
        running = self.of_state("ready", "running")
        held = {id(e): self.to_come(e) for e in (*running, newcomer)}
        for step in range(held[id(newcomer)] + 1):
            tokens = 0
            for each in (*running, newcomer):
                if held[id(each)] >= step:
                    empty = min(self.grows_by // 2, held[id(each)])
                    tokens += each.prompt + each.generated + step + empty
            if tokens > self.n_slots:
                return not running
        return True

    def fitting(self) -> SimRequest | None:
        waiting = self.of_state("waiting")
        held = [e for e in waiting if e.preempted or e.overtaken >= self.most_overtakes]
        looked_at = [] if self.is_settled else held[:1] or waiting
        fit = [e for e in looked_at if self.reserved + e.size <= self.n_slots]
        fit = [e for e in fit if self.stays_within(e)]
        if not fit:
            self.is_settled = True
            return None
        least = self.iterations([*self.of_state("ready", "running"), *looked_at])
        last = [e for e in fit if self.at_most(e) >= least]
        return max(last, key=lambda e: (self.at_most(e), -e.arrival)) if last else fit[0]

    def at_most(self, each: SimRequest) -> int:
        """As `to_come`, if what was learnt makes it no shorter."""
        return max(self.expected[each.arrival] - 1 - each.generated, self.to_come(each))

    def iterations(self, requests: list[SimRequest]) -> int:
        """How many it takes to end them, if memory and micro-batches are full throughout."""
        held = steps = 0
        for each in requests:
            left = self.to_come(each)
            empty = min(self.grows_by // 2, left)
            held += left * (each.prompt + each.generated + empty + left // 2)
            steps += left
        return max(held // self.n_slots, steps // self.slots)

    def joins(self, each: SimRequest) -> None:
        if not each.preempted:
            self.expected_in_all[self.kind(each)] += self.expected[each.arrival]

    def cancel(self, name: str) -> None:
        super().cancel(name)
        self.is_settled = False

    def ends(self, each: SimRequest, is_cancelled: bool) -> None:
        self.is_settled = False
        if not is_cancelled:
            self.was_less[self.kind(each)] += self.expected[each.arrival] - each.generated
