"""The options of planning, under the same names in Python, on the command line and in plans."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from planner.model.tensor_parallel import DEGREES
from planner.optimiser.names import BASELINE_METHODS, DEFAULT_SOLVER, Objective
from planner.option_rules import refuse_ignored, refuse_not_finite, refuse_unknown
from planner.planning_rules import BOUNDS, PLAN_RULES
from planner.scheduling import (
    PREDICTING,
    SCHEDULE_KINDS,
    STATIC,
    PolicyName,
    PolicyOptions,
    ScheduleKind,
    policy_options,
)
from quant.common.errors import SpecError
from quant.scheme import (
    BITWIDTHS,
    DTYPE_BYTES,
    FULL_BITS,
    KV_BITWIDTHS,
    PLAN_ROUNDINGS,
    ROUNDINGS,
    WEIGHTED,
)

Quality = Literal["high", "balanced", "fast"]
QUALITIES: tuple[Quality, ...] = ("high", "balanced", "fast")
HEADS = ("auto", "first", "last")
AUTO = "auto"
KV_CHOICES = (*KV_BITWIDTHS, AUTO)
PROFILE_USES = ("fit", "measured")
UNBOUNDED: Literal["inf"] = "inf"
"""The bound on the latency of requests that any latency keeps, as files write it."""

QUANTILE = 0.99
SCHEDULES = (AUTO, *SCHEDULE_KINDS)
JOB_GAP = 1e-3
"""Relative gap to which plans of a job are told apart, unless more is allowed: ten times that of
one batch, since so many more are compared, and a tenth of what the job's model leaves out."""

MEMORY_MARGIN = 0.02
"""Drivers, and other processes' contexts, take more or less of equal GPUs: P100 and V100 reported
0.991 and 0.992 of their nominal memory, A100 0.985 to 0.989."""

PLAN_TIME = 0.85
"""Share of `search_time_limit` in which a plan is searched for; baselines and the plans beside it
have what is left."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of one plan.

    - `quality`: `fast` is the plan of most tokens per second. The others have no layer of fewer
      than 8 bit unless memory forces it: `high` has the least summed sensitivity of those at most a
      tenth slower than the fastest of such bits, `balanced`, the default, gives up speed where that
      pays by far (`planner.search.qualities`).
    - `theta`: seconds that a unit of sensitivity is worth, in place of `quality`.
    - `in_flight`: requests of a job that are in flight at once; `auto` decides.
    - `bits`: bitwidths to choose from.
    - `dtype`: compute and 16-bit storage type; `auto` picks one per device.
    - `objective`, `method`, `solver`: how plans are ranked and found (`planner.optimiser`).
    - `group`: number of layers decided together.
    - `all_orders`: try every distinct device order, also those that part equal devices of a node.
    - `head`: the stage of the LM head; `auto` takes the better one.
    - `tensor_parallel`: devices of a node that share every layer of a stage: 1, 2, 4, 8 for all
      stages, or `auto`, which chooses for each.
    - `keep_all_devices`: do not try to leave out devices.
    - `max_omega` (summed sensitivity) or `max_latency_s` (of the prediction, whatever the
      objective): the other one is minimised within that bound, and `theta` is found.
    - `max_ppl_delta`: most increase of perplexity over 16 bit; it becomes a `max_omega` by the
      points measured in the omega file.
    - `max_request_latency_s`: the most seconds from the prefill of a request to its last token that
      a share `quantile` of all requests may take (inf: any); the schedule and the plan of the most
      requests per second within it are found. `schedule`: `rra`, `waa-c` or `waa-m`, or `auto`,
      which takes the best one.
    - `omega_file`: measured sensitivities (JSON).
    - `importance`: file of `llmpq indicator` that weights are rounded by (that of `omega_file`,
      or else stages measure on random ids when they load).
    - `profiles`: CSV of measured layer times. `profile_use` says whether they are fitted (`fit`) or
      taken as measured where the workload was measured (`measured`); with `strict_profiles` a plan
      is refused where a time is not from the profiles.
    - `prefill_micro_batch`, `decode_micro_batch`: fix a size instead of searching it.
    - `ilp_time_limit`: seconds for each solve. `search_time_limit`: seconds for all searches that a
      plan needs, of which those over device orders, micro-batch sizes and numbers in flight have
      `PLAN_TIME`: then the best plan so far is taken.
    - `relative_gap`: the accepted distance from the optimum.
    - `rounding`: how stages round weights while they load (`quant.rounding`), or `gptq`: they are
      calibrated before a first run. No figure of the plan depends on it.
    - `kv_bits`: bits of keys and values: 16 stores the compute type, 8 stores codes with a scale
      for each token and head; `auto` is 16 if that fits, else 8.
    - `policy`: how the runtime schedules requests, `static`, `orca` or `s3`
      (`planner.scheduling`), with `max_batch_size` (None: what is best by simulation) and
      `prefill_chunk_tokens` (None: the default).
    - `predictor`: by which requests reserve memory under `s3`: the folder of a predictor, as
      `llmpq lengths train` makes it, whose held-out rows say how often it is right; `oracle`, which
      always is; or `longest`, which expects the most that a request may get, as is assumed where
      none is named.
    - `memory_margin`: the share of each GPU's memory that is left free.
    """

    theta: float | None = None
    quality: Quality | None = None
    in_flight: int | str = AUTO
    bits: tuple[int, ...] = BITWIDTHS
    dtype: str = "auto"
    objective: Objective = "pipeline"
    method: str = "auto"
    solver: str = DEFAULT_SOLVER
    group: int = 1
    all_orders: bool = False
    head: str = "auto"
    keep_all_devices: bool = False
    max_omega: float | None = None
    max_latency_s: float | None = None
    max_ppl_delta: float | None = None
    omega_file: str | Path | None = None
    importance: str | Path | None = None
    profiles: str | Path | None = None
    profile_use: str = "fit"
    prefill_micro_batch: int | None = None
    decode_micro_batch: int | None = None
    ilp_time_limit: float = 60.0
    search_time_limit: float = 20.0
    relative_gap: float = 1e-4
    rounding: str = ROUNDINGS[0]
    kv_bits: int | str = FULL_BITS
    memory_margin: float = MEMORY_MARGIN
    strict_profiles: bool = False
    policy: PolicyName = STATIC
    max_batch_size: int | None = None
    prefill_chunk_tokens: int | None = None
    tensor_parallel: int | str = 1
    predictor: str | Path | None = None
    max_request_latency_s: float | Literal["inf"] | None = None
    quantile: float = QUANTILE
    schedule: str = AUTO

    def __post_init__(self) -> None:
        """Normalise `bits` and the bound of requests, and check ranges; raises `SpecError` naming
        the option.
        """
        bits = tuple(sorted({int(b) for b in self.bits}))
        object.__setattr__(self, "bits", bits)
        if self.max_request_latency_s is not None:
            stored = _stored_bound(self.max_request_latency_s)
            object.__setattr__(self, "max_request_latency_s", stored)
        refuse_not_finite(self)
        for name, (holds, wanted) in self._rules().items():
            if not holds:
                raise SpecError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")
        self._check_together()

    def _rules(self) -> dict[str, tuple[bool, str]]:
        """Whether each option is in its range, and the range in words."""
        bits, sizes = self.bits, (self.prefill_micro_batch, self.decode_micro_batch)
        return {
            "bits": (bool(bits) and set(bits) <= set(BITWIDTHS), f"among {list(BITWIDTHS)}"),
            "dtype": (self.dtype in ("auto", *DTYPE_BYTES), f"auto or one of {list(DTYPE_BYTES)}"),
            "theta": (
                self.theta is None or self.theta >= 0,
                "a finite number of at least 0",
            ),
            "quality": (self.quality in (None, *QUALITIES), f"one of {list(QUALITIES)}"),
            "in_flight": (
                self.in_flight == AUTO or (isinstance(self.in_flight, int) and self.in_flight >= 1),
                "auto or a whole number of at least 1",
            ),
            "head": (self.head in HEADS, f"one of {list(HEADS)}"),
            "max_omega": (self.max_omega is None or self.max_omega >= 0, "at least 0"),
            "max_latency_s": (
                self.max_latency_s is None or self.max_latency_s > 0,
                "more than 0 seconds",
            ),
            "max_ppl_delta": (
                self.max_ppl_delta is None or self.max_ppl_delta > 0,
                "a finite number above 0",
            ),
            "max_request_latency_s": (self.request_bound_s > 0, "more than 0 seconds, or inf"),
            "quantile": (0 < self.quantile < 1, "a share between 0 and 1, such as 0.99"),
            "schedule": (self.schedule in SCHEDULES, f"one of {list(SCHEDULES)}"),
            "tensor_parallel": (
                self.tensor_parallel in (AUTO, *DEGREES),
                f"auto or one of {list(DEGREES)}",
            ),
            "group": (self.group >= 1, "at least 1"),
            "ilp_time_limit": (self.ilp_time_limit > 0, "more than 0 seconds"),
            "search_time_limit": (self.search_time_limit > 0, "more than 0 seconds"),
            "relative_gap": (0 <= self.relative_gap < 1, "at least 0 and below 1"),
            "rounding": (self.rounding in PLAN_ROUNDINGS, f"one of {list(PLAN_ROUNDINGS)}"),
            "kv_bits": (self.kv_bits in KV_CHOICES, f"one of {list(KV_CHOICES)}"),
            "memory_margin": (0 <= self.memory_margin < 1, "at least 0 and below 1"),
            "profile_use": (self.profile_use in PROFILE_USES, f"one of {list(PROFILE_USES)}"),
            "prefill_micro_batch": (sizes[0] is None or sizes[0] >= 1, "at least 1"),
            "decode_micro_batch": (sizes[1] is None or sizes[1] >= 1, "at least 1"),
        }

    def _check_together(self) -> None:
        """Raise `SpecError` for options that do not go together."""
        if self.importance is not None and not self.uses_importance:
            raise SpecError(
                f"importance has no effect with rounding {self.rounding}; leave it out, or choose "
                f"rounding {WEIGHTED}"
            )
        given = [name for name in BOUNDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise SpecError(f"{' and '.join(given)}: give one of them, the other is minimised")
        if self.predictor is not None and self.policy != PREDICTING:
            raise SpecError(
                f"predictor has no effect with policy {self.policy}; leave it out, or choose "
                f"policy {PREDICTING}"
            )
        _ = self.scheduling

    @property
    def uses_importance(self) -> bool:
        """Whether weights or keys may be rounded by importance."""
        return self.rounding == WEIGHTED or self.kv_bits != FULL_BITS

    @property
    def scheduling(self) -> PolicyOptions:
        """The scheduling policy; `SpecError` for what it does not have."""
        return policy_options(self.policy, self.max_batch_size, self.prefill_chunk_tokens)

    @property
    def bounds_requests(self) -> bool:
        """Whether a schedule is wanted that is made for the latency of requests."""
        return self.max_request_latency_s is not None

    @property
    def request_bound_s(self) -> float:
        """The bound on the latency of requests; infinite where there is none."""
        return math.inf if self.max_request_latency_s is None else float(self.max_request_latency_s)

    @property
    def schedule_kinds(self) -> tuple[ScheduleKind, ...]:
        """The kinds of schedule to choose from."""
        return tuple(kind for kind in SCHEDULE_KINDS if self.schedule in (AUTO, kind))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> PlanOptions:
        """Options by name; raises `SpecError` for a name that does not exist, and for an option
        that the others make useless.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(options, known, "planning option")
        refuse_ignored(options, PLAN_RULES)
        return cls(**options)


def _stored_bound(value: float | str) -> float | Literal["inf"]:
    """The bound on the latency of requests as files hold it; JSON knows no infinite number."""
    try:
        seconds = float(value)
    except ValueError:
        raise SpecError(f"max_request_latency_s is {value!r}; give seconds, or inf") from None
    return UNBOUNDED if seconds == math.inf else seconds


def kv_bits_of(options: PlanOptions) -> int:
    """Bits of keys and values; `auto` counts as 16, which is tried first."""
    return FULL_BITS if options.kv_bits == AUTO else int(options.kv_bits)


def quality_of(options: PlanOptions) -> Quality | None:
    """The quality that is wanted; None where theta, a bound or a baseline's method decides."""
    bounded = any(getattr(options, name) is not None for name in BOUNDS)
    if options.theta is not None or bounded or options.method in BASELINE_METHODS:
        return None
    return options.quality or "balanced"
