"""Fields of other tools: followed where they mean the same, else an error row or a column."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from actors.messages import Sampling
from llmpq.jobs.store import JobIdentity
from llmpq.rows.row import BadRow, Row, row_from_line, row_from_mapping
from llmpq.rows.sampling import merge_sampling
from quant.common.errors import FieldError

CHAT = [{"role": "user", "content": "hi"}]

# As the tools themselves write all of their settings: none of these asks for anything.
VLLM: dict[str, Any] = {
    "n": 1, "best_of": None, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "seed": None, "stop": [], "stop_token_ids": [], "bad_words": [],
    "include_stop_str_in_output": False, "ignore_eos": False, "max_tokens": 16, "min_tokens": 0,
    "logprobs": None, "prompt_logprobs": None, "flat_logprobs": False, "detokenize": True,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "output_kind": 0,
    "truncate_prompt_tokens": None, "structured_outputs": None, "logit_bias": None,
    "allowed_token_ids": None,
}  # fmt: skip
TGI: dict[str, Any] = {
    "adapter_id": None, "best_of": 1, "decoder_input_details": False, "details": False,
    "do_sample": False, "frequency_penalty": None, "grammar": None, "max_new_tokens": 20,
    "repetition_penalty": 1.03, "return_full_text": False, "seed": None, "stop": ["x"],
    "temperature": 0.5, "top_k": 10, "top_n_tokens": None, "top_p": 0.95, "truncate": None,
    "typical_p": None, "watermark": False,
}  # fmt: skip
OLLAMA: dict[str, Any] = {
    "num_keep": 5, "seed": 42, "num_predict": 100, "top_k": 20, "top_p": 0.9, "min_p": 0.0,
    "typical_p": 1.0, "repeat_last_n": -1, "temperature": 0.8, "repeat_penalty": 1.2,
    "presence_penalty": 1.5, "frequency_penalty": 1.0, "penalize_newline": True,
    "stop": ["\n", "user:"], "numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1,
    "main_gpu": 0, "use_mmap": True, "num_thread": 8, "mirostat": 0, "mirostat_tau": 0.8,
    "tfs_z": 1.0,
}  # fmt: skip


def row_of(**content: Any) -> Row | BadRow:
    return row_from_mapping({"prompt": "p", **content}, "f:1")


def sampling_of(base: Sampling | None = None, **content: Any) -> Sampling:
    row = row_of(**content)
    assert isinstance(row, Row), row
    assert row.columns == {}
    return merge_sampling(base or Sampling(), row.sampling)


def error_of(**content: Any) -> str:
    row = row_from_mapping(content, "f:1")
    assert isinstance(row, BadRow), row
    return row.error


TAKEN: list[tuple[dict[str, Any], Sampling]] = [
    ({"sampling_params": VLLM}, Sampling(1.0, max_new_tokens=16)),
    (
        {"parameters": TGI},
        Sampling(0.0, 10, 0.95, max_new_tokens=20, stop=("x",), repetition_penalty=1.03),
    ),
    (
        {"options": OLLAMA},
        Sampling(0.8, 20, 0.9, 42, 100, ("\n", "user:"), False, 0.0, 1.2, 1.5, 1.0),
    ),
    ({"sampling_params": {"max_new_tokens": 4, "top_k": -1}}, Sampling(max_new_tokens=4)),
    ({"extra_body": {"top_k": 7, "min_tokens": 2}}, Sampling(top_k=7, min_tokens=2)),
    ({"generation_config": {"do_sample": True, "num_beams": 1}}, Sampling(1.0)),
    ({"stop_token_ids": [90, 3, 90]}, Sampling(stop_token_ids=(3, 90))),
    ({"min_new_tokens": 4.0, "top_k": 0}, Sampling(min_tokens=4)),
    ({"max_gen_len": 3}, Sampling(max_new_tokens=3)),
    ({"max_output_tokens": 3, "max_tokens": 3}, Sampling(max_new_tokens=3)),
    ({"n_predict": -1, "num_predict": -2}, Sampling()),
    ({"stop_sequences": ["a"]}, Sampling(stop=("a",))),
    ({"stop_strings": "a", "random_seed": 5}, Sampling(stop=("a",), seed=5)),
    ({"do_sample": False, "temperature": 0.7}, Sampling()),
    ({"do_sample": True, "temperature": 0.7}, Sampling(0.7)),
    ({"guided_json": None, "num_beams": 1.0, "bad_words": [], "echo": False}, Sampling()),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "sampling"), TAKEN)
def test_fields_that_mean_the_same_are_followed(fields: dict[str, Any], sampling: Sampling) -> None:
    assert sampling_of(**fields) == sampling
    body = {"model": "m", "prompt": "p", **fields}
    line = row_from_line(json.dumps({"custom_id": "a", "body": body}).encode(), "f:1")
    assert isinstance(line, Row)
    assert merge_sampling(Sampling(), line.sampling) == sampling


def test_tokens_are_drawn_at_the_temperature_that_holds() -> None:
    assert sampling_of(Sampling(0.6), do_sample=True) == Sampling(0.6)
    assert sampling_of(Sampling(0.6), do_sample=False) == Sampling()
    assert "temperature is 0; give one above 0" in error_of(
        prompt="p", do_sample=True, temperature=0
    )


def test_every_setting_of_generation_config_is_known() -> None:
    """As transformers writes it out with all its defaults."""
    written = {k: v for k, v in GenerationConfig().to_dict().items() if v is not None}
    for name in ("transformers_version", "_from_model_config"):
        written.pop(name, None)
    assert isinstance(row_of(generation_config=written), Row)


REFUSED: list[tuple[str, Any, str]] = [
    ("structural_tag", {"structures": []}, "give response_format"),
    ("guided_whitespace_pattern", " *", "give response_format"),
    ("bad_words", ["R"], "logit_bias"),
    ("allowed_token_ids", [5], "logit_bias"),
    ("logits_processors", ["x"], "logit_bias"),
    ("truncate_prompt_tokens", 3, "shorten it"),
    ("no_repeat_ngram_size", 2, "repetition_penalty"),
    ("repeat_last_n", 64, "over the whole answer"),
    ("skip_special_tokens", False, "take token_ids"),
    ("include_stop_str_in_output", True, "ends before a stop string"),
    ("typical_p", 0.5, "top_p"),
    ("tfs_z", 0.5, "top_p"),
    ("mirostat", 2, "top_p"),
    ("return_logprob", True, "give logprobs, or prompt_logprobs"),
    ("n_probs", 3, "give logprobs"),
    ("echo", True, "give prompt_logprobs"),
    ("length_penalty", 2.0, "without beams"),
    ("num_beams", 4, "without beams"),
    ("use_beam_search", True, "without beams"),
    ("early_stopping", True, "without beams"),
    ("best_of", 2, "give n alone"),
    ("task", "embed", "not embedded"),
    ("max_length", 30, "max_new_tokens"),
    ("eos_token_id", 5, "stop_token_ids"),
    ("return_full_text", True, "does not repeat the prompt"),
    ("watermark", True, "leave it out"),
    ("system", "Be brief.", 'role "system"'),
    ("system_prompt", "Be brief.", 'role "system"'),
    ("think", False, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("name", "value", "remedy"), REFUSED)
def test_what_is_not_followed_is_an_error_with_a_remedy(name: str, value: Any, remedy: str) -> None:
    for fields, shown in (
        ({name: value}, name),
        ({"sampling_params": {name: value}}, f"sampling_params.{name}"),
        ({"body": {"prompt": "p", name: value}}, name),
    ):
        error = error_of(**({"prompt": "p"} | fields if "body" not in fields else fields))
        assert error.startswith(f"{shown} must be ")
        assert remedy in error


@pytest.mark.parametrize("value", [0, 129, "x", 1.5, True])
@pytest.mark.parametrize("name", ["n", "num_return_sequences"])
def test_rows_have_up_to_128_answers(name: str, value: Any) -> None:
    assert error_of(**{"prompt": "p", name: value}).startswith(f"{name} is {value!r}; it must be")
    found = row_of(sampling_params={name: 128.0})
    assert isinstance(found, Row)
    assert found.answers == 128
    once = row_of(**{name: 1})
    assert isinstance(once, Row)
    assert once.content == Row("", "p").content  # as of older versions
    assert found.content != once.content


OWN: dict[str, Any] = {
    "options": ["red", "green"],
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    "generation_config": "of the teacher",
    "system": 5,
    "system_prompt": "",
    "details": {"page": 3},
    "documents": [{"title": "t"}],
    "format": "markdown",
    "grammar": "past tense",
    "think": "first",
    "thinking": "The user wants …",
    "watermark": "©",
    "constraints": ["at most 100 words"],
    "priority": 3,
    "model": "of the data set",
    "user": "u-1",
    "num_ctx": 4096,
}


def test_words_that_are_no_such_field_are_columns() -> None:
    row = row_of(**OWN)
    assert isinstance(row, Row), row
    assert row.columns == OWN
    assert row.sampling == row.prompt_options == {}


@pytest.mark.parametrize(
    ("options", "is_column"),
    [
        ({"A": "red", "B": "green"}, True),
        ({"temperature": 20, "unit": "C"}, True),
        ({"num_ctx": 4096}, True),
        ({}, True),
        (np.array(["red", "green"]), True),
        ({"temperature": 0.5}, False),
        ({"temperature": 0.5, "num_ctx": 4096}, False),
    ],
)
def test_an_object_is_options_where_all_its_names_are(options: Any, is_column: bool) -> None:
    for name in ("options", "parameters"):
        row = row_of(**{name: options})
        assert isinstance(row, Row), row
        assert (name in row.columns) == is_column
        assert bool(row.sampling) != is_column


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_predict": 2, "colour": 1}, "unknown field 'options.colour'; known: "),
        ({"num_predict": 2, "temprature": 1}, "'options.temprature'; is temperature meant?"),
        ({"temprature": 1}, "is temperature meant?; give a column options of your own another"),
        ({"num_predict": 2.5}, "options.num_predict is 2.5; it must be a whole number"),
        ({"num_predict": 2, "top_k": "x"}, "options.top_k is 'x'; it must be a whole number"),
    ],
)
def test_options_with_a_mistake_are_no_column(options: Any, told: str) -> None:
    assert told in error_of(prompt="p", options=options)


def test_a_system_text_beside_a_system_message_is_a_column() -> None:
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    row = row_from_mapping({"messages": chat, "system": "Be brief."}, "f:1")
    assert isinstance(row, Row)
    assert row.columns == {"system": "Be brief."}
    assert "another name" in error_of(messages=CHAT, system="Be brief.")


def test_one_field_under_two_names_is_given_once() -> None:
    error = error_of(prompt="p", max_tokens=5, options={"num_predict": 6})
    assert "given twice, as 5 (max_tokens) and as 6 (options.num_predict)" in error
    assert sampling_of(max_tokens=5, options={"num_predict": 5.0}).max_new_tokens == 5


TOOLS = [{"type": "function", "function": {"name": "f"}}]
OFF = {"enable_thinking": False}
PROMPT_OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"chat_template_kwargs": OFF}, {"chat_template_kwargs": OFF}),
    (OFF, {"chat_template_kwargs": OFF}),
    ({**OFF, "chat_template_kwargs": {"x": [1]}}, {"chat_template_kwargs": {**OFF, "x": [1]}}),
    ({"tools": TOOLS, "tool_choice": "auto"}, {"tools": TOOLS}),
    ({"tools": TOOLS, "tool_choice": "none"}, {}),
    ({"chat_template_kwargs": {"tools": TOOLS}}, {"tools": TOOLS}),
    ({"documents": [{"text": "t"}]}, {"documents": [{"text": "t"}]}),
    ({"documents": ["t"], "tools": [], "chat_template_kwargs": {}}, {}),
    ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ({"add_special_tokens": True}, {"add_special_tokens": True}),
    (
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "options"), PROMPT_OPTIONS)
def test_how_messages_become_tokens(fields: dict[str, Any], options: dict[str, Any]) -> None:
    row = row_from_mapping({"messages": CHAT, **fields}, "f:1")
    assert isinstance(row, Row), row
    assert row.prompt_options == options
    assert row.sampling == {}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"chat_template_kwargs": 5}, "chat_template_kwargs is 5; it must be an object"),
        ({"chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs.tools is 5; it must be a l"),
        ({"chat_template_kwargs": {"x": "\ud800"}}, "half a surrogate"),
        ({**OFF, "chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking is given tw"),
        ({"enable_thinking": "no"}, "it must be true or false"),
        ({"add_special_tokens": 1}, "add_special_tokens is 1; it must be true or false"),
        ({"tools": {"name": "f"}}, "it must be a list of objects"),
        ({"tools": TOOLS, "tool_choice": "any"}, 'it must be "none", "auto", "required" or a func'),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "it must be"),
        ({"functions": TOOLS}, "give tools"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "are both true",
        ),
    ],
)  # fmt: skip
def test_prompt_options_that_cannot_be(fields: dict[str, Any], told: str) -> None:
    assert told in error_of(messages=CHAT, **fields)


def test_a_text_has_no_template() -> None:
    for fields in (
        {"tools": TOOLS},
        {"chat_template_kwargs": OFF},
        OFF,
        {"add_generation_prompt": True},
        {"tool_choice": "required"},
    ):
        assert "is for messages" in error_of(prompt="p", **fields)
    row = row_of(
        add_special_tokens=False, tools=[], tool_choice="auto", chat_template_kwargs={},
        continue_final_message=False, add_generation_prompt=False,
    )  # fmt: skip
    assert isinstance(row, Row)
    assert row.prompt_options == {"add_special_tokens": False}
    ids = row_of(prompt=[5], add_special_tokens=False)
    assert isinstance(ids, Row)
    assert ids.prompt_options == {}


@pytest.mark.parametrize("name", ["inputs", "input", "input_ids", "prompt_token_ids"])
def test_prompts_of_other_tools_are_told(name: str) -> None:
    said = f"found neither; is {name} the prompt? name it so"
    assert error_of(**{name: [1, 2], "parameters": {"max_new_tokens": 3}}) == (
        f"a row needs exactly one of prompt and messages, {said}"
    )
    line = row_from_mapping({"body": {"model": "m", name: "hello"}}, "1")
    assert isinstance(line, BadRow)
    assert line.error.endswith(said)
    row = row_of(prompt="a", **{name: "hello"})
    assert isinstance(row, Row)
    assert row.columns == {name: "hello"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": 3.5}, "max_tokens is 3.5; it must be a whole number"),
        ({"max_completion_tokens": 0}, "max_completion_tokens is 0; it must be 1 or more"),
        ({"sampling": {"max_tokens": "3"}}, "sampling.max_tokens is '3'; it must be a whole"),
        ({"seed": float("inf")}, "seed is inf; it must be a whole number"),
        ({"top_k": 1e20}, "top_k is 100000000000000000000; it must be a whole number of at most"),
        ({"stop_token_ids": [4.5]}, "stop_token_ids is "),
        ({"stop_token_ids": 4}, "stop_token_ids is 4; it must be a list"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1; it must be 0 or more"),
        ({"ignore_eos": 1.0}, "ignore_eos is 1.0; it must be true or false"),
    ],
)
def test_a_message_names_the_field_as_it_was_given(fields: dict[str, Any], told: str) -> None:
    assert error_of(prompt="p", **fields).startswith(told)
    name = next(iter(fields))
    if name in vars(Sampling()):
        with pytest.raises(FieldError) as caught:
            merge_sampling(Sampling(), fields)
        assert caught.value.name == name


def test_rows_of_jobs_of_before_keep_their_fingerprints() -> None:
    """The digests are those of the version before these fields."""
    job = JobIdentity("m", "m", Sampling(max_new_tokens=8))
    own = {"max_tokens": 5, "temperature": 1, "stop": "x", "n": 1}
    nested = {"tools": [], "sampling": {"top_k": 3, "min_p": 0.5}}
    rows: dict[str, dict[str, Any]] = {
        "m-868133b32b461d0abed0": {"prompt": "p"},
        "m-cdd6dc548f1476e735bd": {"prompt": "p", **own},
        "m-82c6fbfac4942a1aaec7": {"messages": CHAT, **nested},
    }
    for digest, content in rows.items():
        row = row_from_mapping({"custom_id": "a", **content}, "f:1")
        assert job.fingerprint(row) == digest
