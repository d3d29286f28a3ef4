"""The phases of generation (LLM-PQ section 2.1), and the scheduling policies with their choices."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import floor
from typing import Literal

from quant.common.errors import SpecError

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


PolicyName = Literal["static", "orca", "s3", "s3-published", "exegpt"]
"""`static`: the plan's micro-batches of either phase; `orca`: whoever came first, for every
iteration anew, both phases in one micro-batch; `s3`: as `orca`, but ranges grow with the answers,
and whoever joins keeps the memory that is foreseen within what there is; `s3-published`: each
request reserves room for the answer that is expected of it, and the longest that fits joins first;
`exegpt`: the plan's schedule for a bound on latency, prompts and decode steps apart.
`actors.schedule.table` has a scheduler for each."""

PlannedPolicy = PolicyName | Literal["auto"]
"""`auto`: that of `COMPARED` whose plan is forecast to be the fastest."""

COMPARED: tuple[PolicyName, ...] = ("static", "orca")

POLICY_NAMES: tuple[PolicyName, ...] = ("static", "orca", "s3", "s3-published", "exegpt")
STATIC: PolicyName = "static"
FORESEEING: PolicyName = "s3"
"""The one that admits by the predicted peak of memory."""
PREDICTING: frozenset[PolicyName] = frozenset({FORESEEING, "s3-published"})
"""Those that go by predicted lengths."""
TOKEN_POLICIES: frozenset[PolicyName] = PREDICTING | {"orca"}
"""Those that mix both phases in a micro-batch; they count KV memory in tokens."""

GROWTH = 16
"""Token slots by which a range of `s3` grows: fewer take more moves, of more, more stay empty."""

BOUNDED: PolicyName = "exegpt"
"""The one that follows a schedule chosen for a bound on latency."""

KV_TOKEN_POLICIES: frozenset[PolicyName] = TOKEN_POLICIES | {BOUNDED}
"""Those whose requests reserve the token slots that they need, rather than those of the longest."""

ScheduleKind = Literal["rra", "waa-c", "waa-m"]
"""Schedules of ExeGPT, section 4.1. `rra`: every stage has both phases in turns; `waa-c`, `waa-m`:
some stages prefill and others decode, divided by computing or by memory."""

SCHEDULE_KINDS: tuple[ScheduleKind, ...] = ("rra", "waa-c", "waa-m")
SCHEDULE_TOLERANCE = 0.1


@dataclass(frozen=True)
class RequestSchedule:
    """The controls of a schedule (ExeGPT section 4.2): `prefill_requests` (B_E) newcomers a turn,
    then `decode_requests` (B_D) in `decode_micro_batches` (B_m) groups make `decode_steps` (N_D)
    steps each; one for `waa`. Turns are kept even (section 5.2) in tokens and groups within
    `tolerance`. SpecError for an unknown kind and numbers out of range.
    """

    kind: ScheduleKind
    prefill_requests: int
    decode_requests: int
    decode_steps: int
    decode_micro_batches: int
    prefill_micro_batch: int
    mean_prompt_tokens: float
    tolerance: float = SCHEDULE_TOLERANCE

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULE_KINDS:
            raise SpecError(
                f"schedule kind is {self.kind!r}; it must be one of {', '.join(SCHEDULE_KINDS)}"
            )
        for name in (
            "prefill_requests",
            "decode_requests",
            "decode_steps",
            "decode_micro_batches",
            "prefill_micro_batch",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise SpecError(f"{name} is {value!r}; it must be a whole number from 1")
        if self.divides and self.decode_steps != 1:
            raise SpecError(f"decode_steps is {self.decode_steps}; with {self.kind} it must be 1")
        if not self.mean_prompt_tokens >= 1 or not 0 < self.tolerance < 1:
            raise SpecError(
                f"mean_prompt_tokens is {self.mean_prompt_tokens} and tolerance {self.tolerance}; "
                "give at least 1, and a share between 0 and 1"
            )

    @property
    def exact_tolerance(self) -> Fraction:
        """The tolerance as it is written: in binary, 1.1 times 50 is more than 55."""
        return _written(self.tolerance)

    @property
    def most_in_flight(self) -> int:
        """The most requests that decode, or will, within the tolerance (ExeGPT section 5.2)."""
        return floor((1 + self.exact_tolerance) * self.decode_requests)

    @property
    def divides(self) -> bool:
        return self.kind != "rra"


@lru_cache(maxsize=64)
def _written(share: float) -> Fraction:
    return Fraction(str(share))


PREFILL_CHUNK_TOKENS = 64
"""Tokens of a part of a prompt that `orca` gives where nobody says otherwise.

In simulations of jobs with real lengths (docs/scheduling.md) they gave 1.2 to 1.3 times the
tokens per second of whole prompts, as stages wait less for long ones, and with prompts all alike
0.94 to 0.99 times; parts of 32 gave more to the former and less to the latter."""

CPU_PREFILL_CHUNK_TOKENS = 128
"""The same for a run whose stages are all CPUs, on a plan that does not say.

There parts of 128 gave 1.05 times the tokens per second of parts of 64, and first tokens came after
0.77 times as long (measured): each iteration reads all weights, which takes as long
as computing some 70 tokens."""


@dataclass(frozen=True)
class PolicyOptions:
    """The policy, the most requests of a micro-batch (None: the plan's), and tokens of a prompt
    that one takes (0: all), for `TOKEN_POLICIES`; `schedule` of `exegpt`. SpecError for what the
    policy does not have.
    """

    name: PolicyName = "static"
    max_batch_size: int | None = None
    prefill_chunk_tokens: int = 0
    schedule: RequestSchedule | None = None

    @property
    def followed_schedule(self) -> RequestSchedule:
        """The schedule of `exegpt`; SpecError where there is none."""
        if self.schedule is None:
            raise SpecError(
                f"policy {self.name} follows a schedule, and the plan has none; make one that has "
                "with llmpq plan --max_request_latency_s"
            )
        return self.schedule

    @property
    def mixed_requests(self) -> int:
        """Most requests of a micro-batch that mixes the phases, where that is known; else 0."""
        return self.max_batch_size or 0

    def __post_init__(self) -> None:
        if self.name not in POLICY_NAMES:
            raise SpecError(f"policy is {self.name!r}; it must be one of {', '.join(POLICY_NAMES)}")
        for option, value, least, unset in (
            ("max_batch_size", self.max_batch_size, 1, None),
            ("prefill_chunk_tokens", self.prefill_chunk_tokens, 0, 0),
        ):
            if value == unset:
                continue
            if type(value) is not int or value < least:
                raise SpecError(f"{option} is {value!r}; it must be a whole number from {least}")
            if self.name not in TOKEN_POLICIES:
                raise SpecError(
                    f"{option} has no effect with policy {self.name}; leave it out, or choose "
                    "policy orca or s3"
                )
        if self.schedule is not None and self.name != BOUNDED:
            raise SpecError(f"schedule has no effect with policy {self.name}; leave it out")


def policy_options(
    name: PolicyName,
    max_batch_size: int | None,
    prefill_chunk_tokens: int | None,
    usual_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
) -> PolicyOptions:
    """The policy with what a user has said of it; None stands for what was not said."""
    if prefill_chunk_tokens is None:
        prefill_chunk_tokens = usual_chunk_tokens if name in TOKEN_POLICIES else 0
    return PolicyOptions(name, max_batch_size, prefill_chunk_tokens)
