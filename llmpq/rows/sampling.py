"""Sampling: a row's own fields, and a job's, from settings and `generation_config.json`.

Which values count is vLLM's rule: those that stand in the file, not transformers' own (top-k 50).
Whether tokens are drawn at all is transformers': only with `do_sample` true.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from actors.sampling_options import FORM, GREEDY, Sampling
from llmpq.rows.fields import DRAWN, SAMPLING_FIELDS, nearest_field, unfollowed
from llmpq.rows.request_fields import Given
from llmpq.rows.results import RowError, is_writable, plain_value, whole_number
from llmpq.rows.structured import form_of
from quant.checkpoint.stored_config import GENERATION_CONFIG_FILE
from quant.common.errors import CheckpointError, FieldError, SpecError

if TYPE_CHECKING:
    from planner.workload import Workload

GenerationConfigUse = Literal["model", "none"]
"""Source of the sampling that is not set: the model's generation_config.json, or none."""

GENERATION_CONFIGS: tuple[GenerationConfigUse, ...] = ("model", "none")

SamplingInput = Sampling | Mapping[str, Any] | None
"""A `Sampling` settles every field, a mapping those that it names, None nothing."""

_FOLLOWED = ("top_k", "top_p", "min_p", "repetition_penalty")
_OF_ROWS = {"min_new_tokens": 0, "num_return_sequences": 1}
"""Fields that hold for rows that name them, and are not taken from the file, as in vLLM; with what
asks for nothing.
"""

_OTHERWISE = frozenset(("eos_token_id", "max_length"))
"""Fields of the file that are followed or told otherwise than a row's."""

_LONGEST = 40  # characters of a value, in messages
_LARGEST = 2**53  # whole numbers up to here are exact in every format
_NUMBERS = frozenset(
    ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
)
_WHOLE_NUMBERS = frozenset(("top_k", "seed", "max_new_tokens", "min_tokens"))
_SWITCHES = frozenset(("ignore_eos", DRAWN))
_OF_SAMPLING = frozenset((*SAMPLING_FIELDS, DRAWN))


@dataclass(frozen=True)
class JobSampling:
    """`sampling` of a job's rows where they have none of their own.

    `taken`: the fields of it from the model's generation config; `left_out`: those of the config
    that are not followed. `planned_limit`: its `max_new_tokens` where they are the plan's default,
    other than the most that the plan has room for.
    """

    sampling: Sampling
    taken: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    planned_limit: int | None = None

    @property
    def limit_note(self) -> str | None:
        """One line that tells which limit holds for rows that have none."""
        if self.planned_limit is None:
            return None
        return (
            f"rows without max_new_tokens may generate {self.planned_limit} tokens, as planned; "
            "--max_new_tokens for another limit"
        )

    @property
    def note(self) -> str | None:
        if not self.taken:
            return None
        values = ", ".join(f"{name} {_shown(value)}" for name, value in self.taken.items())
        without = "for greedy" if self.sampling.temperature > 0 else "to do without"
        return (
            f"sampling defaults of the model's {GENERATION_CONFIG_FILE}: {values}; "
            f"--generation_config none {without}"
        )

    @property
    def warning(self) -> str | None:
        if not self.left_out:
            return None
        named = ", ".join(f"{name} {value}" for name, value in self.left_out.items())
        return (
            f"the model's {GENERATION_CONFIG_FILE} has {named}: llmpq does not follow these, and "
            "its tokens may differ from those of transformers"
        )


def job_sampling(
    given: SamplingInput,
    use: GenerationConfigUse,
    folder: Path,
    workload: Workload,
    default_new_tokens: int | None = None,
) -> JobSampling:
    """The sampling that is `given`, completed by what the model in `folder` recommends.

    `workload`: the planned lengths of requests, `default_new_tokens` the limit planned for rows
    that have none. Raises `SpecError` for values out of range, `CheckpointError` for a config that
    is malformed or has such values.
    """
    from actors.stage.model_config import read_generation_config  # slow for a help text

    if use not in GENERATION_CONFIGS:
        raise SpecError(f"generation_config is {use!r}; it must be model or none")
    config = read_generation_config(folder) if use == "model" else {}
    try:
        recommended = merge_sampling(GREEDY, _recommended(config))
    except SpecError as error:
        raise CheckpointError(
            f"{folder / GENERATION_CONFIG_FILE}: {error}; fix it or pass --generation_config none"
        ) from error
    left_out = _left_out(config, workload, default_new_tokens or workload.new_tokens)
    if isinstance(given, Sampling):
        sampling, taken = given, {}
    else:
        sampling = merge_sampling(recommended, given or {})
        taken = {
            name: value
            for name, value in vars(recommended).items()
            if name not in (given or {}) and value != getattr(GREEDY, name)
        }
    limit = None
    if default_new_tokens is not None and sampling.max_new_tokens is None:
        sampling = replace(sampling, max_new_tokens=default_new_tokens)
        limit = default_new_tokens if default_new_tokens != workload.new_tokens else None
    return JobSampling(sampling, taken, left_out, limit)


def _recommended(config: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = {name: config[name] for name in _FOLLOWED if name in config}
    if config.get("do_sample") is True:
        fields["temperature"] = config.get("temperature", 1.0)  # as transformers and vLLM
    if config.get("stop_strings"):
        fields["stop"] = config["stop_strings"]
    return fields


def _left_out(config: Mapping[str, Any], workload: Workload, limit: int) -> Mapping[str, str]:
    """What `config` has that is not followed, where rows without a limit have this `limit`."""
    left_out = {
        name: _shown(value)
        for name, value in sorted(config.items())
        if value and name not in _OTHERWISE and _changes(name, value)
    }
    if "temperature" in config and "do_sample" not in config:
        left_out["temperature"] = f"{_shown(config['temperature'])} without do_sample"
    planned = {"max_new_tokens": limit, "max_length": workload.total_length}
    for name, most in planned.items():
        value = config.get(name)
        if type(value) is int and value < most:
            left_out[name] = f"{value} (the plan's {most} holds)"
    return left_out


def _changes(name: str, value: Any) -> bool:
    return bool(unfollowed(name, value)) or _OF_ROWS.get(name, value) != value


def _shown(value: Any) -> str:
    """A value as JSON, which leaves no control characters, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def sampling_overrides(found: Mapping[str, Given]) -> Mapping[str, Any]:
    """The row's own sampling; whole numbers are such, and other values as they were given."""
    if not found:
        return {}
    unknown = sorted(found.keys() - _OF_SAMPLING)
    if unknown:
        nearest = nearest_field(unknown[0])
        hint = f"is {nearest} meant?" if nearest else f"known: {', '.join(SAMPLING_FIELDS)}"
        name = found[unknown[0]].name
        own = f"; give a column {name.partition('.')[0]} of your own another name"
        raise RowError(f"unknown field {name!r:.80}; {hint}{own if '.' in name else ''}")
    overrides = {name: _whole(name, each.value) for name, each in found.items()}
    try:
        merge_sampling(GREEDY, overrides)
    except FieldError as error:
        raise FieldError(found[error.name].name, error.why) from error
    return overrides


def merge_sampling(base: Sampling, overrides: Mapping[str, Any]) -> Sampling:
    """`base` with a row's own fields; `do_sample` false is greedy whatever the temperature, true
    draws at that of `base`, or 1 where that is greedy.

    Raises `FieldError` for a value out of range or of a wrong type.
    """
    if not overrides:
        return base
    changes = {name: _typed(name, value) for name, value in overrides.items()}
    is_drawn = changes.pop(DRAWN, None)
    if is_drawn is False:
        changes["temperature"] = 0.0
    elif is_drawn and not changes.setdefault("temperature", base.temperature or 1.0):
        raise FieldError(DRAWN, "is true, but temperature is 0; give one above 0, or leave it out")
    return replace(base, **changes)


def _whole(name: str, value: Any) -> Any:
    """`value` with whole numbers as such where a field has them."""
    if name == "stop_token_ids" and isinstance(value, list | tuple):
        return [whole_number(plain_value(each)) for each in value]
    return whole_number(value) if name in _WHOLE_NUMBERS else value


def _typed(name: str, given: Any) -> Any:
    """`given` as the type of `Sampling.name`, or `FieldError`; bias and ids are checked there."""
    value = _whole(name, plain_value(given))
    if name not in _OF_SAMPLING:
        raise SpecError(f"unknown sampling field {name!r}; known: {', '.join(SAMPLING_FIELDS)}")
    if name == "logit_bias":
        is_object = isinstance(value, Mapping)
        return {key: plain_value(each) for key, each in value.items()} if is_object else value
    if name == "stop_token_ids":
        if isinstance(value, list | tuple):
            return tuple(value)
        raise FieldError(name, f"is {value!r:.80}; it must be a list of token ids")
    if name == FORM:
        return form_of(name, name, value)
    if name == "stop":
        texts = (value,) if isinstance(value, str) else value
        is_list = isinstance(texts, list | tuple)
        if is_list and all(isinstance(each, str) and is_writable(each) for each in texts):
            return tuple(texts)
        raise FieldError(name, "must be a string or a list of strings")
    return _number(name, value)


def _number(name: str, value: Any) -> int | float:
    wants_bool, wants_float = name in _SWITCHES, name in _NUMBERS
    accepted = {bool} if wants_bool else {int, float} if wants_float else {int}
    fits = type(value) in accepted
    if not fits or abs(value) > _LARGEST:
        kind = "true or false" if wants_bool else "a number" if wants_float else "a whole number"
        limit = f" of at most {_LARGEST}" if fits else ""
        raise FieldError(name, f"is {value!r:.80}; it must be {kind}{limit}")
    return float(value) if wants_float else value
