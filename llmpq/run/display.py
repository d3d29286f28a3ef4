"""How a run shows itself in a terminal or a log: how far it is, and at its end as a table."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from actors.stage_figures import NOTHING_SHARED, SharedPrompts, StageStats
from llmpq.report.formatting import per_second, plain, plural, seconds, size
from llmpq.report.layout import Fitting, Notes, broken_name, new_table
from llmpq.rows.results import Result
from llmpq.run.meter import RunState
from llmpq.run.monitor import LoadingState
from llmpq.run.summary import RunSummary, mean_s, slow_stages, work_of
from planner.plan.simulate import planned_s
from planner.plan.spec import PlanSpec, StagePlan
from planner.scheduling import Phase


class RunProgress:
    """Counts `total` results and shows what stages do, and which are slower than in `plan`."""

    def __init__(
        self,
        console: Console,
        total: int,
        clock: Callable[[], float] = time.monotonic,
        plan: PlanSpec | None = None,
    ) -> None:
        self._console = console
        self._total = total
        self._plan = plan
        self._named: set[int] = set()
        self._done = self._tokens = 0
        self._clock = clock
        self._began_s = clock()
        self._times = LogTimes(clock)
        self._state: RunState | None = None
        self._loading: LoadingState | None = LoadingState(None, 0, 0)
        self._lock = threading.Lock()  # results and states come from two threads
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("starting stages", total=total, tokens=0)
        self._live = Live(console=console, get_renderable=self._render)

    def __enter__(self) -> RunProgress:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._print(f"loading stages for {self._total} prompts")
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._log(last=True)

    def count(self, result: Result) -> None:
        self._generating()
        self._done += 1
        self._tokens += len(result.token_ids)
        self._log()

    def show(self, state: RunState) -> None:
        """Show the run's state; can be called from any thread."""
        self._state = state
        self._generating()
        self._name_slow_stages(state)
        self._log()

    def _generating(self) -> None:
        """Note that stages are loaded, of whose work a log is told soon again."""
        if self._loading is not None:
            self._loading = None
            self._times.begin()

    def show_loading(self, loading: LoadingState) -> None:
        """Show how far stages are with loading; can be called from any thread."""
        self._loading = loading
        self._log()

    def change_plan(self, plan: PlanSpec) -> None:
        self._plan = plan
        self._named.clear()

    def note(self, line: str) -> None:
        self._print(line)

    def _name_slow_stages(self, state: RunState) -> None:
        if self._plan is None:
            return
        for slow in slow_stages(self._plan, state.stages):
            if slow.stage not in self._named:
                self._named.add(slow.stage)
                self._print(str(slow))

    def _render(self) -> Group:
        """Draw the bar, which is updated only here: results may come by the ten thousand."""
        state = self._state
        tokens = max(self._tokens, 0 if state is None else state.tokens)
        what = "generating" if self._loading is None else str(self._loading)
        self._bar.update(self._task, completed=self._done, tokens=tokens, description=what)
        lines = [] if state is None else list(state_lines(state))
        return Group(self._bar, *(Text(line) for line in lines))

    def _log(self, last: bool = False) -> None:
        """Print a line, unless there is a terminal or the last one was printed just now."""
        with self._lock:
            if self._console.is_terminal or not (self._times.is_due() or last):
                return
        if self._loading is not None and not last:
            self._print(f"{self._loading}, {duration(self._clock() - self._began_s)}")
            return
        parts = [f"{self._done} of {self._total} prompts"]
        if self._state is None or last:
            parts += [f"{self._tokens} tokens", f"{self._clock() - self._began_s:.0f} s"]
        else:
            parts += state_lines(self._state)
        self._print(", ".join(parts))

    def _print(self, line: str) -> None:
        """Print one line however long, and never as markup: device names come from users."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def state_lines(state: RunState) -> Iterator[str]:
    """The state in up to three lines: tokens and time left, busy shares, queue."""
    limit = "" if state.max_tokens is None else f" of at most {state.max_tokens}"
    yield (f"{state.tokens}{limit} tokens, {state.tokens_per_s:.1f} tokens/s, {_time_left(state)}")
    if state.busy_share:
        yield f"busy {_shares(state.busy_share)} (in all {_shares(state.whole_busy_share)})"
    if state.queue is not None:
        yield (
            f"{state.queue.waiting} requests queued, {state.queue.in_slots} in "
            f"{state.queue.slots} slots, {state.queue.micro_batches} micro-batches under way"
        )


def _time_left(state: RunState) -> str:
    if state.time_left is None:
        is_known = state.total_prompts is not None and state.max_tokens is not None
        return f"time to go: {'measuring' if is_known else 'not known'}"
    return f"{duration(state.time_left.seconds)} to go (by {state.time_left.by})"


def _shares(shares: Sequence[float]) -> str:
    return "/".join(f"{share:.0%}" for share in shares)


FIRST_S = (5.0, 20.0)
"""Seconds after the beginning of the first lines, by which one sees that it works."""

EVERY_S = 60.0


class LogTimes:
    """Says when a line is due, `FIRST_S` after it was made and then every `EVERY_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self._began_s = self._clock()
        self._next_s = FIRST_S[0]

    @property
    def passed_s(self) -> float:
        return self._clock() - self._began_s

    def is_due(self) -> bool:
        """Whether a line is to be written now; it counts as written then."""
        passed_s = self.passed_s
        if passed_s < self._next_s:
            return False
        self._next_s = next((due_s for due_s in FIRST_S if due_s > passed_s), passed_s + EVERY_S)
        return True


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def about(seconds: float) -> str:
    """Seconds in the words of an estimate: about 40 s, about 3 min, about 2.5 h."""
    if seconds < 10:
        return "a few seconds"
    if seconds < 90:
        return f"about {round(seconds / 10) * 10} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {round(seconds / 1800) / 2:g} h"


def summary_table(plan: PlanSpec, summary: RunSummary) -> RenderableType:
    """A run's throughput, busy shares, times beside planned ones, and slow stages."""
    notes = Notes(
        [
            _in_all(summary),
            *([] if summary.latency is None else [plain(f"latency: {summary.latency}")]),
            *_shared(summary),
            *_supervised(summary),
            *map(str, slow_stages(plan, summary.stages)),
        ]
    )
    if not summary.stages:
        return notes
    tables = partial(_stages, plan, summary, _WIDE), partial(_stages, plan, summary, _NARROW)
    return Group(Fitting("stages", tables), notes)


_WIDE = (
    "stage", "device", "busy", "share", "micro-batches", "prefill", "planned", "decode step",
    "planned", "weights", "KV cache",
)  # fmt: skip
_NARROW = (
    "#", "device", "busy", "micro-\nbatches", "prefill,\nplanned", "decode,\nplanned",
    "weights,\nKV cache",
)  # fmt: skip
"""Has two lines for a stage: measured above planned, weights above keys and values."""


def _stages(plan: PlanSpec, summary: RunSummary, heads: Sequence[str]) -> Table:
    table = new_table(heads, (1,))
    stages_s = summary.seconds if summary.stages_s is None else summary.stages_s
    for stage, stats in zip(plan.stages, summary.stages, strict=False):
        busy = _seconds(stats.busy_s), f"{stats.busy_s / stages_s:.0%}" if stages_s else ""
        prefill = _measured_and_planned(plan, stats, stage, "prefill")
        decode = _measured_and_planned(plan, stats, stage, "decode")
        held = plain(size(stats.weight_bytes)), plain(size(stats.kv_cache_bytes))
        first, batches = str(stage.index), str(stats.micro_batches)
        if heads is _WIDE:
            table.add_row(first, stage.label, *busy, batches, *prefill, *decode, *held)
        else:
            cells = map("\n".join, (prefill, decode, held))
            table.add_row(first, broken_name(stage.label), "\n".join(busy), batches, *cells)
    return table


def _in_all(summary: RunSummary) -> str:
    answered = summary.prompts - summary.errors
    rate = f", {answered / summary.seconds:.3g} prompts/s" if summary.seconds else ""
    planned = summary.planned_tokens_per_s
    beside = "" if planned is None else f", planned {per_second(planned)}"
    return (
        f"{plural(summary.prompts, 'prompt')} ({summary.errors} with errors), "
        f"{plural(summary.generated_tokens, 'token')} in {summary.seconds:.2f} s: "
        f"{per_second(summary.tokens_per_s)} tokens/s{beside}"
        f"{rate} (loading {summary.load_s:.1f} s)"
    )


def _shared(summary: RunSummary) -> list[str]:
    """A line about what prompts share, where they do."""
    queues = [stats.queue for stats in summary.stages if stats.queue is not None]
    counts = reduce(SharedPrompts.after, (queue.shared for queue in queues), NOTHING_SHARED)
    if not counts.rows:
        return []
    heads = "a head" if counts.heads == 1 else f"{counts.heads} heads"
    return [
        f"{heads} of {counts.head_tokens:,} tokens computed once for {counts.rows:,} rows: "
        f"{counts.saved_tokens:,} of {counts.prompt_tokens:,} prompt tokens not computed"
    ]


def _supervised(summary: RunSummary) -> list[str]:
    """A line about requests that outgrew their reservations, where there were any."""
    queues = [stats.queue for stats in summary.stages if stats.queue is not None]
    return [
        f"{counts.doublings} reservations were too short: {counts.grown} grew, {counts.parked} "
        f"requests were parked in host memory ({counts.parked_tokens} tokens), "
        f"{counts.recomputed} computed again ({counts.recomputed_tokens} tokens)"
        for counts in (queue.supervision for queue in queues)
        if counts.doublings
    ]


def _measured_and_planned(
    plan: PlanSpec, stats: StageStats, stage: StagePlan, phase: Phase
) -> tuple[str, str]:
    """Times of a micro-batch: the mean of full ones, or of all (~) where none was full, and the
    planned time, left out where the run does not follow it.
    """
    (measured_s, is_full), planned = mean_s(work_of(stats, phase)), planned_s(plan, stage, phase)
    text = "" if measured_s is None else f"{'' if is_full else '~'}{_seconds(measured_s)}"
    return text, _seconds(planned) if planned else ""


def _seconds(value: float) -> str:
    return plain(seconds(value))
