"""The options of planning, under the same names in Python, on the command line and in plans."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from planner.adapters import named_adapters
from planner.lengths import Lengths
from planner.model.tensor_parallel import DEGREES
from planner.optimiser.names import (
    BASELINE_METHODS,
    BATCH_OBJECTIVES,
    DEFAULT_SOLVER,
    METHOD_NAMES,
    SOLVER_NAMES,
    Objective,
)
from planner.option_rules import (
    ABOVE_0_S,
    ANY,
    AT_LEAST_0,
    AT_LEAST_1,
    SHARE_BELOW_1,
    Range,
    among,
    flag,
    option,
    refuse_ignored,
    refuse_outside,
    refuse_unknown,
)
from planner.planning_rules import BOUNDS, PLAN_RULES
from planner.scheduling import (
    COMPARED,
    POLICY_NAMES,
    PREDICTING,
    PREFILL_CHUNK_TOKENS,
    SCHEDULE_KINDS,
    STATIC,
    TOKEN_POLICIES,
    PlannedPolicy,
    PolicyName,
    PolicyOptions,
    ScheduleKind,
    policy_options,
)
from quant.checkpoint.formats.readers import FORMATS
from quant.common.errors import SpecError
from quant.scheme import (
    BITWIDTHS,
    DTYPE_BYTES,
    FULL_BITS,
    HEAD_BITWIDTHS,
    KV_BITWIDTHS,
    NEAR_FULL_BITS,
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


FINITE_0 = Range(lambda value: value >= 0, "it must be a finite number of at least 0")
FINITE_ABOVE_0 = Range(lambda value: value > 0, "it must be a finite number above 0")
QUANTILES = Range(lambda share: 0 < share < 1, "it must be a share between 0 and 1, such as 0.99")
DTYPES = Range((AUTO, *DTYPE_BYTES).__contains__, f"it must be auto or one of {list(DTYPE_BYTES)}")
AUTO_OR_COUNT = Range(
    lambda value: value == AUTO or (isinstance(value, int) and value >= 1),
    "it must be auto or a whole number of at least 1",
)
AUTO_OR_DEGREE = Range((AUTO, *DEGREES).__contains__, f"it must be auto or one of {list(DEGREES)}")


@dataclass(frozen=True)
class PlanOptions:
    """The options of one plan; those that `llmpq plan` has too are declared with its help.

    - `quality`: `high` and `balanced`, the default, have no layer of fewer than 8 bit unless memory
      forces it: `high` has the least summed sensitivity of the plans at most a tenth slower than
      the fastest of such bits, `balanced` gives up speed where that pays by far
      (`planner.search.qualities`).
    - `bits`: none is all that are known: those whose times `profiles` have of every device that
      they have any of, and those that layers are stored with; without profiles every bitwidth.
      `format` leaves out what it lacks, and `vllm` has embedding and LM head in 16 bit.
    - `max_omega`, `max_latency_s` (of the prediction, whatever the objective) or `max_ppl_delta`:
      the other side is minimised within that bound. A rise of perplexity becomes a `max_omega`
      by the points measured in the omega file.
    - `max_request_latency_s`: inf is any latency.
    - `importance`: where neither it nor `omega_file` names one, stages measure on a sample text
      when they load.
    - `search_time_limit`: seconds for all searches that a plan needs, of which those over device
      orders, micro-batch sizes and numbers in flight have `PLAN_TIME`.
    - `rounding`: `gptq` is calibrated before a first run. No figure of the plan depends on it.
    - `kv_bits`: 16 stores the compute type, 8 stores codes with a scale for each token and head.
    - `predictor`: the held-out rows of its folder say how often it is right; `oracle` always is.
    """

    theta: float | None = option(
        "SECONDS", "what a unit of sensitivity is worth, in place of --quality", within=FINITE_0
    )
    quality: Quality | None = option(
        QUALITIES,
        "high: the least perplexity expected at nine tenths of the speed; balanced; fast: the most "
        "tokens per second (default: balanced)",
    )
    in_flight: int | str = option(
        "COUNT",
        "prompts of a job that are in flight at once: auto, or a number",
        AUTO,
        within=AUTO_OR_COUNT,
    )
    bits: tuple[int, ...] = option(
        BITWIDTHS,
        f"bitwidths to choose from (default: all that are known: {' '.join(map(str, BITWIDTHS))})",
        (),
        within=among(BITWIDTHS),
    )
    format: str | None = option(
        FORMATS,
        "plan with the bits of this format of llmpq quantize, or of llmpq export vllm",
    )
    dtype: str = option((AUTO, *DTYPE_BYTES), "type to compute in", AUTO, within=DTYPES)
    objective: Objective = option(
        BATCH_OBJECTIVES,
        "what ranks plans; paper is LLM-PQ's eq. 4",
        "pipeline",
        within=ANY,  # plans of a job have an objective that nobody gives
    )
    method: str = option(
        METHOD_NAMES,
        "how to solve; uniform and pipeedge are baselines of the paper",
        "auto",
        within=ANY,  # `planner.optimiser.solve` refuses others
    )
    solver: str = option(SOLVER_NAMES, "of integer programmes", DEFAULT_SOLVER, within=ANY)
    group: int = option("LAYERS", "decide so many layers together", 1, within=AT_LEAST_1)
    all_orders: bool = flag("try every distinct device order")
    head: str = option(HEADS, "stage of the LM head", AUTO)
    keep_all_devices: bool = flag("do not try to leave out devices that do not help")
    max_omega: float | None = option(
        "SUM",
        "largest allowed sum of sensitivities, in the unit of --omega_file; theta is found",
        within=AT_LEAST_0,
    )
    max_latency_s: float | None = option(
        "SECONDS",
        "largest allowed predicted seconds of the whole batch or job, not of a request; theta is "
        "found",
        within=ABOVE_0_S,
    )
    max_ppl_delta: float | None = option(
        "X",
        "largest allowed rise of perplexity above 16 bit, by the points that llmpq indicator "
        "--perplexity put into the omega file; theta is found",
        within=FINITE_ABOVE_0,
    )
    omega_file: str | Path | None = option("FILE", "JSON of sensitivities, made by llmpq indicator")
    importance: str | Path | None = option(
        "FILE",
        "what weights are rounded by, made by llmpq indicator (default: that of --omega_file, else "
        "it is measured when the model is loaded)",
    )
    profiles: str | Path | None = option(
        "FILE",
        "CSV of measured layer times of llmpq profile, with measured links and loading beside it",
    )
    profile_use: str = option(
        PROFILE_USES,
        "fit the latency model on the profiles, or take their times as measured where the workload "
        "was measured",
        "fit",
    )
    shared_tokens: int | None = option(
        "TOKENS",
        "tokens of the head that all prompts share, such as an instruction, which is computed once "
        "(default: as measured of --input, else 0)",
        within=AT_LEAST_0,
    )
    prefill_micro_batch: int | None = option(
        "COUNT", "fix the prefill micro-batch size", within=AT_LEAST_1
    )
    decode_micro_batch: int | None = option(
        "COUNT", "fix the decode micro-batch size", within=AT_LEAST_1
    )
    ilp_time_limit: float = option("SECONDS", "for each integer programme", 60.0, within=ABOVE_0_S)
    search_time_limit: float = option(
        "SECONDS",
        "for planning, after most of which the best plan so far is taken and its gap stated",
        20.0,
        within=ABOVE_0_S,
    )
    relative_gap: float = option(
        "SHARE",
        f"accepted distance from the optimum (default: 0.0001; of a job at least {JOB_GAP:g})",
        1e-4,
        within=SHARE_BELOW_1,
    )
    rounding: str = option(PLAN_ROUNDINGS, "how weights are rounded", ROUNDINGS[0])
    kv_bits: int | str = option(
        KV_CHOICES, "bits of keys and values; auto: 16 if that fits, else 8", FULL_BITS
    )
    head_bits: tuple[int, ...] = option(
        HEAD_BITWIDTHS,
        "bitwidths to choose from for embedding and LM head, by what they lose, as of layers "
        f"(default: {FULL_BITS}, or less where layers would have less than {NEAR_FULL_BITS})",
        (),
        within=among(HEAD_BITWIDTHS),
    )
    memory_margin: float = option(
        "SHARE", "share of each GPU's memory that is left free", MEMORY_MARGIN, within=SHARE_BELOW_1
    )
    strict_profiles: bool = flag(
        "refuse to plan where a layer's time does not come from the profiles"
    )
    no_measuring: bool = flag(
        "plan for this machine's CPU by typical figures, where there are no profiles; else its "
        "kernels are measured once, which takes seconds (also: LLMPQ_NO_MEASURING=1)"
    )
    policy: PlannedPolicy = option(
        (AUTO, *POLICY_NAMES),
        "scheduling to plan for: micro-batches of one phase (static), or at every iteration anew "
        "first come, first served (orca) or by predicted lengths (s3); auto plans for static and "
        "orca and takes the better forecast (default: auto of a job of unlike lengths on one "
        "pipeline, else static); exegpt is that of --max_request_latency_s",
        STATIC,
        within=ANY,  # with the next two, `PolicyOptions` checks it
    )
    max_batch_size: int | None = option(
        "COUNT", "most requests in a micro-batch of orca or s3 (default: best by simulation)"
    )
    prefill_chunk_tokens: int | None = option(
        "TOKENS",
        "tokens of a prompt that a micro-batch of orca and s3 takes at most, 0 is all "
        f"(default: {PREFILL_CHUNK_TOKENS})",
    )
    tensor_parallel: int | str = option(
        "DEGREE",
        "devices of a node that share every layer of a stage: 1, 2, 4, 8, or auto, which chooses "
        "for each stage of GPUs (default: auto under a bound on the latency of requests, else 1)",
        1,
        within=AUTO_OR_DEGREE,
    )
    predictor: str | Path | None = option(
        "FOLDER",
        "predictor of output lengths by which requests of s3 reserve memory: a folder of llmpq "
        "lengths train, oracle, or longest: all of what they may get (default: longest)",
    )
    adapters: tuple[str, ...] = option(
        "NAME=FOLDER",
        "LoRA adapters of PEFT that rows choose by name, held by every stage beside the model",
        (),
        more={"action": "extend"},
    )
    max_request_latency_s: float | Literal["inf"] | None = option(
        "SECONDS",
        "largest allowed seconds from when the prefill of a request begins to its last token "
        "(inf: any); the schedule of the most requests per second is found, for lengths of "
        "--lengths, --input, --prompts, or the two below",
        within=Range(lambda bound: float(bound) > 0, "it must be more than 0 seconds, or inf"),
    )
    quantile: float = option(
        "SHARE", "share of the requests that keep the bound", QUANTILE, within=QUANTILES
    )
    schedule: str = option(
        SCHEDULES,
        "rra: all stages prefill and decode in turns; waa-c, waa-m: some stages prefill and others "
        "decode, divided by computing or by memory (default: auto, the best of them)",
        AUTO,
    )

    def __post_init__(self) -> None:
        for name in ("bits", "head_bits"):
            given = getattr(self, name) or ()
            object.__setattr__(self, name, tuple(sorted({int(bits) for bits in given})))
        object.__setattr__(self, "adapters", named_adapters(self.adapters))
        if self.max_request_latency_s is not None:
            stored = _stored_bound(self.max_request_latency_s)
            object.__setattr__(self, "max_request_latency_s", stored)
        refuse_outside(self)
        self._check_together()

    def _check_together(self) -> None:
        if self.importance is not None and self.rounding != WEIGHTED and self.kv_bits == FULL_BITS:
            raise SpecError(
                f"importance has no effect with rounding {self.rounding}; leave it out, or choose "
                f"rounding {WEIGHTED}"
            )
        given = [name for name in BOUNDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise SpecError(f"{' and '.join(given)}: give one of them, the other is minimised")
        if self.predictor is not None and self.policy not in PREDICTING:
            raise SpecError(
                f"predictor has no effect with policy {self.policy}; leave it out, or choose "
                "policy s3"
            )
        _ = self.scheduling

    @property
    def scheduling(self) -> PolicyOptions:
        name = COMPARED[-1] if self.policy == "auto" else self.policy
        return policy_options(name, self.max_batch_size, self.prefill_chunk_tokens)

    def under(self, policy: PolicyName) -> PlanOptions:
        """The options with another policy, less what it does not have."""
        mixes = policy in TOKEN_POLICIES
        return dataclasses.replace(
            self,
            policy=policy,
            max_batch_size=self.max_batch_size if mixes else None,
            prefill_chunk_tokens=self.prefill_chunk_tokens if mixes else None,
        )

    def of_job(self, lengths: Lengths, given: Collection[str]) -> PlanOptions:
        """The options of a job, where so many were `given`: of unlike lengths policies are compared
        unless one was chosen, or what only `static` has: its micro-batches, or a baseline's method.
        """
        decided = {"policy", "prefill_micro_batch", "decode_micro_batch"}.intersection(given)
        if decided or lengths.are_alike or self.method in BASELINE_METHODS:
            return self
        return dataclasses.replace(self, policy="auto")

    @property
    def without_heads(self) -> PlanOptions:
        return dataclasses.replace(self, shared_tokens=0)

    @property
    def bounds_requests(self) -> bool:
        return self.max_request_latency_s is not None

    @property
    def request_bound_s(self) -> float:
        return math.inf if self.max_request_latency_s is None else float(self.max_request_latency_s)

    @property
    def schedule_kinds(self) -> tuple[ScheduleKind, ...]:
        return tuple(kind for kind in SCHEDULE_KINDS if self.schedule in (AUTO, kind))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> PlanOptions:
        """Options by name; SpecError for an unknown name, and one that others make useless. Under a
        bound on the latency of requests groups are tried unless a degree is named.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(options, known, "planning option")
        refuse_ignored(options, PLAN_RULES)
        if options.get("max_request_latency_s") is not None:
            options = {"tensor_parallel": AUTO, **options}
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
