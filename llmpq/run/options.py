"""What a user can choose about a run; the same names in Python and on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from actors.messages import TRANSPORTS, Sampling, Transport
from actors.recovery.policy import OnDeviceLoss, Recovery
from llmpq.rows.sampling import (
    GENERATION_CONFIGS,
    GenerationConfigUse,
    SamplingInput,
    merge_sampling,
)
from llmpq.tokenizing.prompting import Prompting
from llmpq.tokenizing.tokenizer_process import ROW_S, Limits
from planner.option_rules import Rule, refuse_ignored, refuse_not_finite, refuse_unknown
from planner.scheduling import (
    BOUNDED,
    CPU_PREFILL_CHUNK_TOKENS,
    POLICY_NAMES,
    PREDICTING,
    PREFILL_CHUNK_TOKENS,
    TOKEN_POLICIES,
    PolicyName,
    PolicyOptions,
    policy_options,
)
from quant.cache.settings import CacheSettings, cache_settings
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from planner.plan.spec import PlanSpec

SAMPLING_OPTIONS = tuple(field.name for field in dataclasses.fields(Sampling))
"""Names that can be given beside those of `RunOptions`, in place of its `sampling`."""

Replan = Literal["auto", "never"]
"""Whether a run that drifts from its plan takes another one."""

REPLANS: tuple[Replan, ...] = ("auto", "never")

CACHE_RULE = Rule(
    ("cache_dir", "cache_limit_gib"),
    "nothing is kept then; give one of them",
    beside="no_cache",
)
PREDICTOR_RULE = Rule(
    ("predictor", "save_predictor"),
    "only s3 goes by expected lengths; choose policy s3, or leave it out",
    beside="policy",
    values=tuple(name for name in POLICY_NAMES if name != PREDICTING),
)
_RULES = (
    CACHE_RULE,
    PREDICTOR_RULE,
    Rule(SAMPLING_OPTIONS, "that settles it; name it there", beside="sampling"),
)


@dataclass(frozen=True)
class RunOptions:
    """Options of running a plan; the command line has the same names (`hang_s` is `--hang_s`).

    `model`: folder or hub id of the weights, where not the plan's own. `sampling`: a `Sampling`
    settles every field; a mapping those that it names, and the others are those of the model's
    generation_config.json, or with `generation_config` "none" greedy. `address`: the Ray cluster
    to join; without one, a Ray that is initialised or in RAY_ADDRESS, else a local one. Each node
    keeps its packed layers in `cache_dir` (its user's cache folder) for the next start,
    `cache_limit_gib` at most (100, or half of the free space), unless `no_cache`. `transport`
    between stages: "gloo", "ray", or "auto", which is gloo where it connects. `trace`: file for
    every micro-batch's times, for Perfetto, beside the simulated batch. When a device is gone for
    `replace_s`, `on_device_loss` is "replan" for what is left, "wait" or "fail"; a stage without
    progress for `hang_s` is started again; a row in flight at `retries` faults is run apart from
    the others. A row whose chat template or tokens take more than `row_s` becomes an error. A run
    that differs from its plan by more than the share `drift`, in tokens per second or lengths, says
    so; with `replan` "auto" it plans again from what was measured, where that saves time. Where a
    plan's schedule is followed, another schedule is put in force while the run goes on, unless
    `replan` is "never", as it is for other plans where nothing is said.
    `policy` schedules requests, in place of the plan's: "static" in its micro-batches of either
    phase, "orca" for every iteration anew, first come, first served (ORCA), with `max_batch_size`
    and `prefill_chunk_tokens` as in `planner.scheduling`, in place of the plan's too; "s3" as
    "orca", but by the lengths that `predictor` expects: a folder of `llmpq lengths train`,
    "longest" (the default), or "trace:FILE" of predictions by `custom_id`; "exegpt" as the plan's
    schedule for a bound on latency says. What a predictor learns beside the run is written to the
    folder `save_predictor`, if one is named. `importance`: file of `llmpq indicator` that weights
    are rounded by, where it is not where the plan says. `chat_template`: file of a template in the
    place of the model's own; `chat_template_kwargs`: what templates are given beside messages, of
    which a row may say otherwise; `add_special_tokens`: whether the tokenizer adds its own to texts
    and messages, without which it does so to texts alone.
    `deterministic`: no row's tokens depend on what is computed with them (`docs/sampling.md`), for
    stages on CPUs, which take longer then.

    Raises `SpecError` for a value out of range.
    """

    model: str | None = None
    sampling: SamplingInput = None
    generation_config: GenerationConfigUse = "model"
    address: str | None = None
    cache_dir: str | Path | None = None
    cache_limit_gib: float | None = None
    no_cache: bool = False
    transport: Transport = "auto"
    trace: str | Path | None = None
    on_device_loss: OnDeviceLoss = Recovery.on_device_loss
    retries: int = Recovery.retries
    hang_s: float = Recovery.hang_s
    replace_s: float = Recovery.replace_s
    row_s: float = ROW_S
    drift: float = 0.2
    replan: Replan | None = None
    policy: PolicyName | None = None
    max_batch_size: int | None = None
    prefill_chunk_tokens: int | None = None
    predictor: str | Path | None = None
    save_predictor: str | Path | None = None
    importance: str | Path | None = None
    chat_template: str | Path | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_special_tokens: bool | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Check every value that can be checked without the plan and its model."""
        refuse_not_finite(self)
        CacheSettings(limit_gib=self.cache_limit_gib)
        Limits(row_s=self.row_s)
        _ = self.recovery, self.prompting
        given = self.max_batch_size, self.prefill_chunk_tokens
        policy_options(self.policy or "orca", *given)  # of a plan it is known later
        if self.save_predictor is not None:
            self._check_learning()
        if not self.drift > 0:
            raise SpecError(
                f"drift is {self.drift!r}; it must be a share above 0, such as 0.2 for 20 %"
            )
        if isinstance(self.sampling, Mapping):
            merge_sampling(Sampling(), self.sampling)
        for name, choices in (
            ("transport", TRANSPORTS),
            ("generation_config", GENERATION_CONFIGS),
            ("replan", REPLANS),
        ):
            is_left_out = name == "replan" and self.replan is None
            if getattr(self, name) not in choices and not is_left_out:
                known = ", ".join(choices)
                raise SpecError(f"{name} is {getattr(self, name)!r}; it must be one of {known}")

    def _check_learning(self) -> None:
        from llmpq.lengths.sources import learns  # the command's help needs no predictors

        if not learns(self.predictor):
            raise SpecError(
                f"save_predictor is {str(self.save_predictor)!r}, but predictor "
                f"{str(self.predictor)!r} learns nothing; give the folder of one that was trained"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RunOptions:
        """Options by name, fields of `Sampling` among them; raises `SpecError` for a name that does
        not exist, and for an option that the others make useless.
        """
        own = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(options, (*own, *SAMPLING_OPTIONS), "option of a run")
        refuse_ignored(options, _RULES)
        given = {name: value for name, value in options.items() if name in own}
        beside = {name: value for name, value in options.items() if name in SAMPLING_OPTIONS}
        return cls(**{**given, "sampling": one_sampling(given.get("sampling"), beside)})

    @property
    def prompting(self) -> Prompting:
        """How prompts become tokens where a row does not say; raises as `Prompting.of`."""
        return Prompting.of(self.chat_template, self.chat_template_kwargs, self.add_special_tokens)

    @property
    def cache(self) -> CacheSettings:
        """Where each node keeps packed layers; raises `SpecError` for an unknown home folder."""
        return cache_settings(self.cache_dir, self.cache_limit_gib, self.no_cache)

    @property
    def recovery(self) -> Recovery:
        """The limits within which the run goes on after faults."""
        return Recovery(
            retries=self.retries,
            hang_s=self.hang_s,
            replace_s=self.replace_s,
            on_device_loss=self.on_device_loss,
        )

    def scheduling(self, plan: PlanSpec) -> PolicyOptions:
        """The scheduling policy of a run of `plan`; `SpecError` for what it does not have."""
        planned = plan.policy
        name = self.policy or planned.name
        most, chunk = self.max_batch_size, self.prefill_chunk_tokens
        if name in TOKEN_POLICIES and planned.name in TOKEN_POLICIES:
            most = planned.max_batch_size if most is None else most
            chunk = planned.prefill_chunk_tokens if chunk is None else chunk
        if name != "s3" and self.predictor is not None:
            raise SpecError(
                f"predictor has no effect with policy {name}; leave it out, or choose policy s3"
            )
        if plan.prefill_plan is not None and name != BOUNDED:
            raise SpecError(
                f"policy {name} needs stages that do both phases, and those of the plan only "
                "decode, as others prefill; leave it out, or plan again"
            )
        usual = CPU_PREFILL_CHUNK_TOKENS if _is_on_cpus(plan) else PREFILL_CHUNK_TOKENS
        policy = policy_options(name, most, chunk, usual)
        if name == BOUNDED:
            policy = replace(policy, schedule=planned.schedule)
            _ = policy.followed_schedule
        return policy

    def reschedules(self, plan: PlanSpec) -> bool:
        """Whether a run of `plan` follows a schedule, and looks for another where it drifts."""
        follows = self.scheduling(plan).name == BOUNDED
        return follows and self.replan != "never"

    def takes_random_order(self, plan: PlanSpec) -> bool:
        """Whether a run of `plan` takes its rows in random order: under a schedule for lengths of
        prompts and answers that are correlated.
        """
        follows = self.scheduling(plan).name == BOUNDED
        return follows and plan.latency is not None and plan.latency.lengths.are_correlated

    @property
    def trace_path(self) -> Path | None:
        """The trace file, if one is to be written."""
        return None if self.trace is None else Path(self.trace)


def one_sampling(sampling: SamplingInput, fields: Mapping[str, Any]) -> SamplingInput:
    """The `sampling` that is given, whole or by its `fields`, of which those that are None are not
    set; raises `SpecError` for an unknown one, and for both.
    """
    refuse_unknown(fields, SAMPLING_OPTIONS, "sampling option")
    refuse_ignored({"sampling": sampling, **fields}, _RULES)
    return {name: value for name, value in fields.items() if value is not None} or sampling


def _is_on_cpus(plan: PlanSpec) -> bool:
    """Whether all stages of `plan` compute on CPUs, and none stands for another device."""
    return not any(stage.emulated or not stage.kind.is_cpu for stage in plan.stages)
