"""The policy `s3` written from its description, with plain lists: what its scheduler is held
against.

From the paper (section 3): the pool in decreasing order of length, through which one goes once and
admits whoever fits; doubled reservations of those that outgrow theirs. Beyond it: growth where they
are, and the bound on overtakes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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

    def supervise(self) -> None:
        short = [e for e in self.of_state("ready") if e.written + self.part(e) > e.size]
        while short:
            for each in list(short):
                grown = min(2 * each.size, each.most)
                if self.reserved - each.size + grown <= self.n_slots:
                    each.size = grown
                    self.grown += 1
                    short.remove(each)
            if short:
                last = short.pop()
                in_all = self.in_host_memory + last.written
                last.parked = 0 < self.park_from <= last.written and in_all <= self.parked_tokens
                last.state, last.size = "waiting", min(2 * last.size, last.most)
                if last.parked:
                    self.parked += 1
                else:
                    last.written = 0
                    self.recomputed += 1

    def fitting(self) -> SimRequest | None:
        """Who is admitted next."""
        waiting = self.of_state("waiting")
        held = [each for each in waiting if each.overtaken >= self.most_overtakes]
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
            following.state, following.parked = "ready", False
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
