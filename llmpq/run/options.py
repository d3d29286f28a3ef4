"""What a user can choose about a run; the same names in Python and on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from actors.recovery.policy import OnDeviceLoss, Recovery
from actors.sampling_options import FORM, Sampling, checked_form
from actors.transport import TRANSPORTS, Transport
from llmpq.rows.sampling import (
    GENERATION_CONFIGS,
    GenerationConfigUse,
    SamplingInput,
    merge_sampling,
)
from llmpq.tokenizing.prompting import PROMPTING_OPTIONS, PromptingOptions
from llmpq.tokenizing.tokenizer_process import ROW_S, RowLimits
from planner.adapters import named_adapters
from planner.option_rules import (
    ANY,
    Range,
    Rule,
    flag,
    one_of,
    option,
    refuse_ignored,
    refuse_not_finite,
    refuse_outside,
    refuse_unknown,
)
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
from quant.common.errors import SpecError
from quant.common.files import read_json_object
from quant.loading.cache_settings import CacheSettings, cache_settings

if TYPE_CHECKING:
    from planner.plan.spec import PlanSpec

SAMPLING_OPTIONS = tuple(field.name for field in dataclasses.fields(Sampling))
"""Names that can be given beside those of `RunOptions`, in place of its `sampling`."""

Replan = Literal["auto", "never"]
"""Whether a run that drifts from its plan takes another one."""

REPLANS: tuple[Replan, ...] = ("auto", "never")

CACHE_RULE = Rule(
    ("cache_dir", "cache_limit_gib"), "nothing is kept then; give one of them", beside="no_cache"
)
PREDICTOR_RULE = Rule(
    ("predictor", "save_predictor"),
    "only s3 goes by expected lengths; choose policy s3, or leave it out",
    beside="policy",
    values=tuple(name for name in POLICY_NAMES if name not in PREDICTING),
)
FORM_RULE = Rule(("json_schema",), "that is a form already; give one of them", beside=FORM)
_RULES = (
    CACHE_RULE,
    PREDICTOR_RULE,
    FORM_RULE,
    Rule(SAMPLING_OPTIONS, "that settles it; name it there", beside="sampling"),
)


@dataclass(frozen=True)
class RunOptions(PromptingOptions):
    """Options of running a plan; those that `llmpq run` has too are declared with its help.

    `sampling`: a `Sampling` settles every field; a mapping those that it names, and the others are
    those of the model's generation_config.json, or with `generation_config` "none" greedy.
    `json_schema`, a file or the schema itself, becomes its `structured_outputs`.
    `address`: without one, a Ray that is initialised or in RAY_ADDRESS, else a local one. A row in
    flight at `retries` faults is run apart from the others; one whose chat template or tokens take
    more than `row_s` becomes an error. Where a plan's schedule is followed, another schedule is put
    in force while the run goes on, unless `replan` is "never", as it is for other plans where
    nothing is said. `max_batch_size` and `prefill_chunk_tokens` are in place of the plan's.
    `deterministic`: no row's tokens depend on what is computed with them (`docs/sampling.md`).

    Raises `SpecError` for a value out of range.
    """

    model: str | None = option(
        "MODEL", "folder, GGUF file or hub id of the weights (default: the plan's own)"
    )
    sampling: SamplingInput = None
    json_schema: str | Path | Mapping[str, Any] | None = option(
        "FILE", "JSON schema that answers keep to, of rows that ask for no form (default: any text)"
    )
    generation_config: GenerationConfigUse = option(
        GENERATION_CONFIGS,
        "where unset options come from: the model's generation_config.json, or none: greedy",
        "model",
        within=one_of(GENERATION_CONFIGS),
    )
    adapter: str | Path | None = option(
        "FOLDER", "LoRA adapter of PEFT that is merged into the weights while they are loaded"
    )
    adapters: tuple[str, ...] = option(
        "NAME=FOLDER",
        "LoRA adapters that rows choose by name, which the plan counts (default: the plan's)",
        (),
        more={"action": "extend"},
    )
    address: str | None = option(
        "ADDRESS", "Ray cluster to join, auto for the one on this machine (default: a local one)"
    )
    cache_dir: str | Path | None = option(
        "DIR", "folder of packed layers for the next start (default: the user's cache)"
    )
    cache_limit_gib: float | None = option(
        "GIB", "most GiB in that folder (default: 100, at most half the free space)"
    )
    no_cache: bool = flag("quantize anew, keep nothing")
    transport: Transport = option(
        TRANSPORTS,
        "links between stages: gloo, Ray's objects, or auto: NCCL and gloo where they connect",
        "auto",
        within=one_of(TRANSPORTS),
    )
    trace: str | Path | None = option(
        "FILE", "write every micro-batch's times for Perfetto, as JSON"
    )
    trace_to: str | None = option(
        "URL", "send spans of every request to this collector, by OTLP over HTTP"
    )
    on_device_loss: OnDeviceLoss = option(
        ("replan", "wait", "fail"),
        "when a device is gone: plan for what is left, wait for it, or end",
        Recovery.on_device_loss,
        within=ANY,  # with the limits beside it, `Recovery` checks it
    )
    retries: int = option("COUNT", "faults that make a row a suspect", Recovery.retries)
    hang_s: float = option(
        "SECONDS", "without progress before a stage is started again", Recovery.hang_s
    )
    replace_s: float = option("SECONDS", "to wait for a lost device", Recovery.replace_s)
    row_s: float = option("SECONDS", "that chat template and tokenizer may take for one row", ROW_S)
    drift: float = option(
        "SHARE",
        "by which tokens/s and lengths may differ from the plan before the run says so",
        0.2,
        within=Range(lambda share: share > 0, "it must be a share above 0, such as 0.2 for 20 %"),
    )
    replan: Replan | None = option(
        REPLANS,
        "when they differ by more: plan again and switch if that saves time, or only say so "
        "(default: never, but another schedule is looked for where the plan has one)",
        within=one_of(REPLANS),
    )
    policy: PolicyName | None = option(
        POLICY_NAMES,
        "scheduling: in the plan's micro-batches (static), at every iteration anew first come, "
        "first served (orca) or by expected lengths (s3), or by the plan's schedule for a bound on "
        "latency (exegpt) (default: the plan's)",
        within=ANY,  # with the next two, `PolicyOptions` checks it
    )
    max_batch_size: int | None = option(
        "COUNT",
        "most requests in a micro-batch of orca or s3 (default: the plan's, or its decode "
        "micro-batch)",
    )
    prefill_chunk_tokens: int | None = option(
        "TOKENS",
        "tokens of a prompt that a micro-batch of orca or s3 takes at most, 0 is all "
        f"(default: the plan's, or {PREFILL_CHUNK_TOKENS}, on CPUs {CPU_PREFILL_CHUNK_TOKENS})",
    )
    predictor: str | Path | None = option(
        "FOLDER",
        "what s3 expects of lengths: a folder of llmpq lengths, longest, or trace:FILE with "
        "predictions by custom_id (default: longest)",
    )
    save_predictor: str | Path | None = option(
        "FOLDER", "write what the predictor has learnt by the end (default: nothing)"
    )
    importance: str | Path | None = option(
        "FILE", "file of llmpq indicator that weights are rounded by (default: the plan's)"
    )
    deterministic: bool = flag(
        "tokens that do not depend on what is computed beside them, on CPUs, at a lower speed"
    )
    no_shared_heads: bool = flag(
        "compute every prompt whole, also what many begin with (default: once for all)"
    )
    no_cuda_graphs: bool = flag("start the kernels of decode steps on GPUs one by one")

    def __post_init__(self) -> None:
        """Check every value that can be checked without the plan and its model."""
        refuse_not_finite(self)
        object.__setattr__(self, "adapters", named_adapters(self.adapters))
        CacheSettings(limit_gib=self.cache_limit_gib)
        RowLimits(row_s=self.row_s)
        _ = self.recovery, self.prompting
        given = self.max_batch_size, self.prefill_chunk_tokens
        policy_options(self.policy or "orca", *given)  # of a plan it is known later
        if self.save_predictor is not None:
            self._check_learning()
        refuse_outside(self)
        if self.json_schema is not None:
            self._take_schema(self.json_schema)
        if isinstance(self.sampling, Mapping):
            merge_sampling(Sampling(), self.sampling)

    def _take_schema(self, given: str | Path | Mapping[str, Any]) -> None:
        """Make the schema a part of `sampling`, from where runs take it."""
        schema = given
        if isinstance(given, str | Path):
            schema = read_json_object(Path(given).expanduser(), "give a JSON schema", SpecError)
        form, found = checked_form({"json": schema}), self.sampling
        if isinstance(found, Sampling):
            found = replace(found, structured_outputs=form)
        else:
            found = {**(found or {}), FORM: form}
        object.__setattr__(self, "sampling", found)
        object.__setattr__(self, "json_schema", None)

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
        names = [field.name for field in dataclasses.fields(cls)]
        own = sorted(names, key=PROMPTING_OPTIONS.__contains__)  # these come last in messages
        refuse_unknown(options, (*own, *SAMPLING_OPTIONS), "option of a run")
        refuse_ignored(options, _RULES)
        given = {name: value for name, value in options.items() if name in own}
        beside = {name: value for name, value in options.items() if name in SAMPLING_OPTIONS}
        return cls(**{**given, "sampling": one_sampling(given.get("sampling"), beside)})

    @property
    def cache(self) -> CacheSettings:
        return cache_settings(self.cache_dir, self.cache_limit_gib, self.no_cache)

    @property
    def recovery(self) -> Recovery:
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
        if name not in PREDICTING and self.predictor is not None:
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

    def follows_schedule(self, plan: PlanSpec) -> bool:
        return self.scheduling(plan).name == BOUNDED

    def takes_random_order(self, plan: PlanSpec) -> bool:
        """Whether a run takes rows in random order: if its schedule is for correlated lengths."""
        is_correlated = plan.latency is not None and plan.latency.lengths.are_correlated
        return is_correlated and self.follows_schedule(plan)

    @property
    def trace_path(self) -> Path | None:
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
