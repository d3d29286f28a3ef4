"""Names of the fields of rows and requests: ours, those of other tools that mean the same, those
that are not followed, with what to do instead, and near misses of ours.

Whatever else a row carries is the user's own and comes out with its result. A name of another tool
that is a word too (`options`, `system`) is the user's own unless its value is what that tool takes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from actors.sampling_options import FORM, Sampling
from llmpq.rows.results import plain_value
from llmpq.rows.structured import FORM_FIELDS

PROMPT_FIELDS = ("prompt", "messages")
ADAPTER = "adapter"
"""The name of the adapter that a row is answered with."""

OTHER_PROMPTS = ("inputs", "input", "input_ids", "prompt_token_ids")
"""What TGI, OpenAI, transformers and vLLM call a prompt; beside one of ours they are columns."""

SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(Sampling))

DRAWN = "do_sample"
"""Whether tokens are drawn, at whichever temperature; it goes into `temperature`."""

TEMPLATE_SWITCH = "enable_thinking"
"""An argument of chat templates that is also given by itself."""

PROMPT_OPTIONS = (
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
    "documents",
)
"""How text or messages become tokens."""

CALL_OPTIONS = ("tool_choice", "parallel_tool_calls")
"""Which calls of tools an answer may have."""

ANSWERS = "n"
"""How many answers a row or a request has."""

MOST_ANSWERS = 128
"""The largest `n`, as in OpenAI's interface."""

LOGPROB_FIELDS = ("logprobs", "top_logprobs", "prompt_logprobs")
"""Of which tokens log-probabilities are told, and of how many others beside each."""

OBJECTS = ("sampling", "sampling_params", "generation_config", "generation_kwargs", "extra_body",
           "parameters", "options")  # fmt: skip
"""Objects that hold fields: ours, and those of vLLM, transformers, OpenAI's client, TGI, Ollama."""

STRUCTURED = frozenset(
    (*OBJECTS, "messages", "logit_bias", "chat_template_kwargs", "tools", "documents",
     "response_format", "structured_outputs", "guided_json", "guided_choice")
)  # fmt: skip
"""Fields that a table may hold as JSON text."""

SPELLINGS: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_gen_len": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": ANSWERS,
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    **dict.fromkeys(FORM_FIELDS, FORM),
}
"""Names that OpenAI, transformers, llama.cpp, Ollama and others have for fields of ours."""

_WITHOUT_EFFECT = frozenset((
    "cache_prompt", "cache_salt", "detokenize", "dry_allowed_length", "dry_base",
    "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent", "f16_kv", "flat_logprobs",
    "guided_decoding_backend", "id_slot", "keep_alive", "logits_all",
    "low_vram", "main_gpu", "metadata", "mirostat_eta", "mirostat_tau", "n_keep", "num_batch",
    "num_ctx", "num_gpu", "num_keep", "num_thread", "numa", "output_kind", "pad_token_id",
    "prediction", "priority", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "safety_identifier", "service_tier", "spaces_between_special_tokens", "store",
    "stream", "stream_interval", "stream_options", "use_cache", "use_mlock", "use_mmap", "user",
    "vocab_only", "wait_for_model", "xtc_threshold",
))  # fmt: skip
"""Fields about service, storing, streaming and hardware, and settings of what is not followed: no
value of them changes what is generated.
"""


_IN_WORDS = "ask for it in the prompt, or leave it out"
_NOT_FOLLOWED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "all n answers are returned, none is left out: give n alone": {"best_of": (1,)},
    "text is generated, not embedded or scored: leave it out, or take another program": {
        "task": ("generate",),
    },
    "tokens are chosen one after the other, without beams: leave it out": {
        "beam_width": (1,), "constraints": (), "diversity_penalty": (0,), "dola_layers": (),
        "early_stopping": (False,), "force_words_ids": (), "length_penalty": (1,),
        "num_beam_groups": (1,), "num_beams": (1,), "penalty_alpha": (0,),
        "use_beam_search": (False,),
    },
    "temperature, top_k, top_p and min_p are followed: leave it out": {
        "dynatemp_range": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "guidance_scale": (1,),
        "min_keep": (0,), "mirostat": (0,), "tfs_z": (1,), "token_healing": (), "top_a": (0,),
        "top_h": (), "top_n_sigma": (-1,), "typical": (1,), "typical_p": (1,),
        "watermark": (False,), "watermarking_config": (), "xtc_probability": (0,),
    },
    "repetition_penalty, presence_penalty and frequency_penalty are followed, over the whole "
    "answer: leave it out": {
        "dry_multiplier": (0,), "encoder_no_repeat_ngram_size": (0,),
        "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
        "penalize_newline": (True,), "repeat_last_n": (-1,),
    },
    "give the ids of single tokens in logit_bias, or leave it out": {
        "allowed_token_ids": (), "bad_words": ([],), "bad_words_ids": (),
        "begin_suppress_tokens": (), "custom_logit_processor": (), "forced_bos_token_id": (),
        "forced_eos_token_id": (), "logits_processors": (), "sequence_bias": (),
        "suppress_tokens": (),
    },
    "an answer ends by stop, stop_token_ids and max_new_tokens: give these": {
        "eos_token_id": (), "exponential_decay_length_penalty": (), "max_length": (),
        "max_time": (), "min_length": (0,), "stop_regex": (), "t_max_predict_ms": (0,),
    },
    "give response_format or structured_outputs, or leave it out": {
        "guided_whitespace_pattern": (), "structural_tag": (),
    },
    "give logprobs, or prompt_logprobs": {
        "decoder_input_details": (False,), "n_probs": (0,), "return_logprob": (False,),
        "top_n_tokens": (0,),
    },
    "results have token_ids and finish_reason: leave it out": {"details": (False,)},
    "special tokens are left out of the text: take token_ids": {"skip_special_tokens": (True,)},
    "the text ends before a stop string: leave it out": {
        "include_stop_str_in_output": (False,), "no_stop_trim": (False,),
    },
    "the answer does not repeat the prompt: leave it out, or give prompt_logprobs": {
        "echo": (False,), "return_full_text": (False,),
    },
    "text is only continued: leave it out": {"suffix": ("",)},
    "a prompt is not cut: shorten it, or plan for longer ones (--s)": {
        "truncate": (), "truncate_prompt_tokens": (),
    },
    'write it as a message of role "system" in messages, or give your own column another name': {
        "system": ("",), "system_prompt": ("",),
    },
    "one chat template holds for all rows: give it by --chat_template": {"chat_template": ()},
    "name an adapter of the run in adapter, or leave it out": {"adapter_id": (), "lora_path": ()},
    f"give the template's own argument in chat_template_kwargs, or {_IN_WORDS}": {
        "reasoning_effort": (), "think": (None,), "thinking": (None,), "thinking_budget": (),
        "thinking_token_budget": (),
    },
    "give tools, which templates know": {"function_call": ("none", "auto"), "functions": ([],)},
    "the answer is text: leave it out": {"audio": (), "modalities": (["text"],)},
    _IN_WORDS: {"verbosity": ("medium",)},
    "nothing is looked up: leave it out": {"web_search_options": ()},
}  # fmt: skip
"""What to do in the place of fields that would change the answer and are not followed, with the
values at which they do not; null never does.
"""

_UNFOLLOWED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    name: (remedy, neutral)
    for remedy, fields in _NOT_FOLLOWED.items()
    for name, neutral in fields.items()
}

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "chat_template_kwargs": ({},),
    "documents": ([],),
    **dict.fromkeys(("format", "grammar"), ("",)),
    "logprobs": (False,),
    "n_predict": (-1,),
    "num_predict": (-1, -2),
    "parallel_tool_calls": (True,),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Values of fields that are followed at which they ask for nothing."""

_EMPTY: tuple[Any, ...] = (False, "", [], {})
"""Values at which fields that have no others ask for nothing."""

_FOLLOWED = frozenset((
    *SAMPLING_FIELDS, *SPELLINGS, *PROMPT_OPTIONS, *CALL_OPTIONS, *LOGPROB_FIELDS, DRAWN,
    TEMPLATE_SWITCH, ANSWERS,
))  # fmt: skip


def unfollowed(name: str, value: Any) -> str | None:
    """Why the field `name` cannot be followed at `value`, and what to do; None where it can be."""
    if name not in _UNFOLLOWED or asks_nothing(name, value):
        return None
    remedy, neutral = _UNFOLLOWED[name]
    wanted = json.dumps(neutral[0]) if neutral else "null"
    return f"must be {wanted}, not {value!r:.80}; {remedy}"


def asks_nothing(name: str, value: Any) -> bool:
    """Whether a field with this value is as if it were left out."""
    if value is None or name in _WITHOUT_EFFECT:
        return True
    is_followed = name not in _UNFOLLOWED
    neutral = _NEUTRAL.get(name, ()) if is_followed else _UNFOLLOWED[name][1] or _EMPTY
    return any(_is_same(value, each) for each in neutral)


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether they are equal, where 1.0 is 1 and true is not."""
    alike = type(value) is type(neutral) or {type(value), type(neutral)} == {int, float}
    return alike and bool(value == neutral)


def _holds_fields(value: Any) -> bool:
    """Whether an object is of fields: all names are some or near misses, or one no plain word."""
    if not isinstance(value, Mapping):
        return False
    asked = [name for name in value if name in _FOLLOWED or name in _UNFOLLOWED]
    others = [name for name in value if name not in asked and name not in _WITHOUT_EFFECT]
    near = [name for name in others if isinstance(name, str) and nearest_field(name)]
    return any("_" in name for name in asked) or (len(near) == len(others) and bool(asked or near))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_schema(value: Any) -> bool:
    if isinstance(value, str):
        return value == "json"
    return isinstance(value, Mapping) and "type" in value


def _is_grammar(value: Any) -> bool:
    return "::=" in value if isinstance(value, str) else _is_schema(value)


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, Mapping) and "type" in value)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


_WORDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(OBJECTS[2:], _holds_fields),
    **dict.fromkeys(("system", "system_prompt"), _is_text),
    **dict.fromkeys(("think", "thinking", "watermark"), _is_switch),
    **dict.fromkeys(
        ("adapter_id", "constraints", "details", "ebnf", "max_time", "regex", "truncate",
         "typical"), lambda value: False),
    "documents": _is_list_of_objects,
    "format": _is_schema,
    "grammar": _is_grammar,
    "task": lambda value: value in ("embed", "embedding", "score"),
}  # fmt: skip
"""Names that are words too: beside a prompt, the values at which they are fields. Others than these
are columns; in an object of fields and in a request's body every one is a field.
"""

KNOWN_FIELDS = frozenset(
    ("custom_id", *PROMPT_FIELDS, ADAPTER, "body", *OBJECTS, *_FOLLOWED, *_UNFOLLOWED)
) - frozenset(_WORDS)
"""Fields that have a meaning in a row, and never are its own columns."""


def may_be_field(name: str) -> bool:
    """Whether some value under `name` is a field of a row, or would be meant as one."""
    return name in KNOWN_FIELDS or name in _WORDS or nearest_field(name) is not None


def is_field(name: str, value: Any, row: Mapping[str, Any]) -> bool:
    """Whether what a `row` has under `name` is a field of it, and no column of the user's."""
    if name in KNOWN_FIELDS:
        return True
    if name not in _WORDS or not _WORDS[name](plain_value(value)):
        return False
    messages = plain_value(row.get("messages"))
    if name == "documents":
        return messages is not None
    if name in ("system", "system_prompt") and _is_list_of_objects(messages):
        return all(each.get("role") != "system" for each in messages)
    return True


_READ = ("custom_id", *PROMPT_FIELDS, "body", "sampling", *SAMPLING_FIELDS, "max_tokens",
         "max_completion_tokens", *PROMPT_OPTIONS[:-2])  # fmt: skip
_CLOSE_TO_OTHERS = ("min_tokens",)
"""Fields without near misses but for capitals and dashes: `n_tokens` is people's own."""

_EXACT_LETTERS, _ONE_OFF_LETTERS = 4, 8
_REMEMBERED = 4096


class _Plain(NamedTuple):
    """A field of ours, the letters of its name, and in how many of them a near miss may differ."""

    field: str
    letters: str
    allowed: int


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _plain(field: str) -> _Plain:
    """Short names (`stop`, `seed`) are missed by another spelling alone, as `Top-P`: too many words
    are one letter away. Longer ones may differ in one letter, and from nine letters on in two, so
    that `max_token` is a near miss and `customer_id` and `num_tokens` are not.
    """
    letters = _letters(field)
    length = 0 if field in _CLOSE_TO_OTHERS else len(letters)
    return _Plain(field, letters, (length > _EXACT_LETTERS) + (length > _ONE_OFF_LETTERS))


_PLAIN = tuple(map(_plain, _READ))


@lru_cache(_REMEMBERED)
def nearest_field(name: str) -> str | None:
    """The field that `name` probably means; None for the user's own, such as `prompt_2`."""
    letters = _letters(name)
    if name in KNOWN_FIELDS or name in _WORDS or not letters or letters[-1].isdigit():
        return None
    near = ((_differences(letters, each.letters), each) for each in _PLAIN)
    found = min(((off, each) for off, each in near if off <= each.allowed), default=None)
    return None if found is None else found[1].field


def _differences(one: str, other: str) -> int:
    """Letters that are put in, left out, replaced or swapped between two words.

    It is the optimal string alignment distance. Words of lengths that are further apart than any
    near miss are not compared.
    """
    if abs(len(one) - len(other)) > 2:
        return max(len(one), len(other))
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        before, above, row = row, before, [i]
        for j, against in enumerate(other, start=1):
            best = min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != against))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == against:
                best = min(best, above[j - 2] + 1)
            row.append(best)
    return row[-1]
