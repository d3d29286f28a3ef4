"""The time to go against runs of known length, which are played step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from actors.stage_figures import PhaseWork, QueueDepth, StageStats
from llmpq.run.meter import LEAST_S, RunMeter


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FillByFill:
    """A run whose `slots` prompts are read first, in `read_s`, and then get `steps` tokens one
    by one, in `step_s` each, before the next are read; a second stage takes half of that.
    """

    slots: int
    read_s: float
    step_s: float
    steps: int
    fills: int

    @property
    def seconds(self) -> float:
        return self.fills * (self.read_s + self.steps * self.step_s)

    def states(self, clock: Clock, meter: RunMeter, limit: int) -> Iterator[float]:
        """Play the run; yields the true time to go after each report."""
        reading, decode = PhaseWork(), PhaseWork()
        began_s = clock.now_s
        for fill in range(self.fills):
            for _ in range(8):  # micro-batches
                clock.now_s += self.read_s / 8
                reading = replace(
                    reading,
                    seconds=reading.seconds + self.read_s / 8,
                    requests=reading.requests + self.slots // 8,
                    sampled=reading.sampled + self.slots // 8,
                )
                waiting = (self.fills - fill - 1) * self.slots
                self.report(meter, reading, decode, waiting)
                yield self.seconds - (clock.now_s - began_s)
            for _ in range(self.steps):
                clock.now_s += self.step_s
                decode = replace(
                    decode,
                    seconds=decode.seconds + self.step_s,
                    sampled=decode.sampled + self.slots,
                )
                self.report(meter, reading, decode, waiting)
                yield self.seconds - (clock.now_s - began_s)
            for _ in range(self.slots):
                meter.end(1 + self.steps, limit)

    def report(self, meter: RunMeter, reading: PhaseWork, decode: PhaseWork, waiting: int) -> None:
        queue = QueueDepth(waiting, self.slots, self.slots, 1)
        busy_s = reading.seconds + decode.seconds
        first = StageStats(busy_s, 0, 0, 1, 0, 0, reading, decode, queue)
        half = [replace(work, seconds=work.seconds / 2) for work in (reading, decode)]
        meter.add([first, StageStats(busy_s / 2, 0, 0, 1, 0, 0, *half)])


RUNS = [
    FillByFill(slots=24, read_s=20.0, step_s=0.25, steps=60, fills=3),
    FillByFill(slots=64, read_s=2.0, step_s=1.0, steps=100, fills=10),
    FillByFill(slots=8, read_s=60.0, step_s=0.1, steps=200, fills=1),
]


@pytest.mark.parametrize("run", RUNS, ids=["reads long", "long answers", "one fill"])
def test_the_time_to_go_is_right_from_the_first_time_it_is_told(run: FillByFill) -> None:
    """While the first prompts are read it is measured; a window of tokens/s said 40 times more."""
    clock = Clock()
    limit = run.steps + 1
    prompts = run.slots * run.fills
    meter = RunMeter(prompts, prompts * limit, clock)
    meter.begin()
    told = [
        (true_s, meter.state().time_left, meter.state().elapsed_s)
        for true_s in run.states(clock, meter, limit)
    ]
    known = [(true_s, left) for true_s, left, _ in told if left is not None]
    assert all(left is None for _, left, passed_s in told if passed_s < max(LEAST_S, run.read_s))
    assert len(known) > 0.5 * len(told)
    for true_s, left in known:
        assert left.by == "tokens"
        assert left.seconds == pytest.approx(true_s, rel=0.05, abs=0.01 * run.seconds)


def test_answers_that_end_early_are_expected_of_the_others_once_a_fill_has_ended() -> None:
    clock, run = Clock(), FillByFill(slots=32, read_s=4.0, step_s=0.5, steps=40, fills=6)
    meter = RunMeter(32 * 6, 32 * 6 * 400, clock)
    meter.begin()
    by: list[str] = []
    for true_s in run.states(clock, meter, limit=400):
        left = meter.state().time_left
        if left is not None and left.by == "prompts":
            assert left.seconds == pytest.approx(true_s, rel=0.05, abs=0.01 * run.seconds)
        by += [] if left is None or left.by in by else [left.by]
    assert by == ["tokens", "prompts"]


def test_one_token_each_is_foretold_by_what_was_read() -> None:
    clock = Clock()
    meter = RunMeter(100, 100, clock)
    meter.begin()
    clock.now_s += 20.0
    reading = PhaseWork(requests=25, seconds=18.0, sampled=25)
    meter.add([StageStats(18.0, 0, 0, 1, 0, 0, reading, queue=QueueDepth(75, 0, 25, 0))])
    for _ in range(25):
        meter.end(1, 1)
    left = meter.state().time_left
    assert left is not None
    assert left.seconds == pytest.approx(60.0)


def test_pipelines_that_share_the_prompts_are_as_fast_as_both_together() -> None:
    """One gives 80 tokens a second and the other, of two stages, 40; the first begins anew once."""
    clock = Clock()
    meter = RunMeter(240, 12000, clock)
    meter.begin()
    for turn in range(1, 200):
        clock.now_s += 0.4
        fast = turn - 100 if turn > 100 else turn
        first = decoding(fast * 0.4, 32 * fast, QueueDepth(0, 8, 8, 1))
        second = decoding(turn * 0.4, 16 * turn, QueueDepth(2, 16, 16, 1))
        meter.add([first, second, decoding(turn * 0.2, 16 * turn, None)])
        state = meter.state()
        assert state.queue == QueueDepth(2, 24, 24, 2)
        assert state.tokens == pytest.approx(48 * turn, abs=48), "none counts twice"
        if state.time_left is not None:
            assert state.time_left.seconds == pytest.approx(100 - turn * 0.4, rel=0.05)
    assert state.time_left is not None


def decoding(seconds: float, tokens: int, queue: QueueDepth | None) -> StageStats:
    work = PhaseWork(seconds=seconds, sampled=tokens)
    return StageStats(seconds, 0, 0, 1, 0, 0, decode=work, queue=queue)
