"""How prompts become tokens: arguments of templates, tools, other templates, BOS; by rows and jobs,
against transformers' own rendering.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from llmpq.rows.row import Row
from llmpq.tokenizing.prompting import Prompting, PromptingOptions
from llmpq.tokenizing.requests import load_tokenizer
from llmpq.tokenizing.tokenizer_process import RowLimits, Tokenized, TokenizerProcess
from quant.common.errors import SpecError
from tests.llmpq.small_tokenizers import write_byte_tokenizer

BOS, TURN = "<|begin|>", "<|turn|>"
TEMPLATE = """{{- bos_token }}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for each in documents or [] %}{{- each.text }}{%- endfor %}
{%- for m in messages %}
{%- if m.tool_calls %}
{{- m.role }}{%- for call in m.tool_calls %}{{- call.function.arguments | tojson }}{%- endfor %}
{%- else %}{{- '<|turn|>' + m.role + ':' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant:' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}
{%- endif %}{{- mood }}"""
HI = [{"role": "user", "content": "hi"}]
BEGUN = [*HI, {"role": "assistant", "content": "Yes, and"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "m"
    return write_byte_tokenizer(path, (BOS, TURN), ("<think>", "</think>"), BOS, TEMPLATE)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def started(folder: Path, prompting: Prompting | None = None) -> TokenizerProcess:
    tokenizer = load_tokenizer(folder, RowLimits(), prompting)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[TokenizerProcess]:
    with closing(started(folder)) as tokenizer:
        yield tokenizer


@pytest.fixture(scope="module")
def of_job(folder: Path) -> Iterator[TokenizerProcess]:
    """Its job has arguments of its own, and wants special tokens everywhere."""
    job = PromptingOptions(None, {"enable_thinking": False, "mood": "calm"}, True).prompting
    with closing(started(folder, job)) as tokenizer:
        yield tokenizer


def asked(
    tokenizer: TokenizerProcess, messages: Any = None, text: Any = None, **own: Any
) -> Tokenized:
    row = Row("a", text, messages=messages, prompt_options=own)
    return tokenizer.ask(row.tokenizing)


def rendered(reference: Any, messages: Any, **options: Any) -> tuple[int, ...]:
    options = {"add_generation_prompt": True, **options}
    return tuple(reference.apply_chat_template(messages, return_dict=True, **options)["input_ids"])


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        ({"tools": [TOOL]}, {"tools": [TOOL]}),
        ({"documents": [{"text": "of a file"}]}, {"documents": [{"text": "of a file"}]}),
        ({"chat_template_kwargs": {"tools": [TOOL], "mood": "x"}}, {"tools": [TOOL], "mood": "x"}),
    ],
)
def test_rows_of_their_own(
    own: Mapping[str, Any], expected: Any, plain: TokenizerProcess, reference: Any
) -> None:
    assert asked(plain, BEGUN, **own).ids == rendered(reference, BEGUN, **expected)


def test_a_row_wins_over_its_job_name_by_name(of_job: TokenizerProcess, reference: Any) -> None:
    job = {"enable_thinking": False, "mood": "calm"}
    assert asked(of_job, HI).ids == rendered(reference, HI, **job)
    own = asked(of_job, HI, chat_template_kwargs={"enable_thinking": True})
    assert own.ids == rendered(reference, HI, enable_thinking=True, mood="calm")


@pytest.mark.parametrize(
    ("own", "cause"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize is no variable of templates"),
        ({"chat_template_kwargs": {"conversation": []}}, "conversation is no variable"),
        ({"chat_template_kwargs": {"messages": []}}, "messages is no variable"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"tools": "look"}, "chat template"),
    ],
)
def test_arguments_that_no_template_is_given(
    own: Mapping[str, Any], cause: str, plain: TokenizerProcess
) -> None:
    answer = asked(plain, BEGUN, **own)
    assert cause in f"{answer.of}: {answer.error}"


def test_calls_of_tools_in_every_form_of_clients(plain: TokenizerProcess, reference: Any) -> None:
    def called(arguments: Any, **more: Any) -> tuple[int, ...] | None:
        function = {"name": "look", "arguments": arguments}
        call = {"id": "1", "type": "function", "function": function}
        return asked(plain, [*HI, {"role": "assistant", "tool_calls": [call], **more}]).ids

    def expected(arguments: Any) -> tuple[int, ...]:
        call = {"function": {"arguments": arguments}}
        return rendered(reference, [*HI, {"role": "assistant", "tool_calls": [call]}])

    town = {"town": "Ulm é", "at": [1, None]}
    for given in (town, '{"town": "Ulm \\u00e9", "at": [1, null]}'):
        assert called(given, content=None, function_call=None) == expected(town)
    for nothing in (None, "", " ", "{}", {}):
        assert called(nothing) == expected({})
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    assert asked(plain, [*HI, old]).ids == expected({})


def test_another_template_in_place_of_one_that_is_broken(tmp_path: Path) -> None:
    added = ("<think>", "</think>")
    folder = write_byte_tokenizer(tmp_path / "m", (BOS,), added, template="{% if %}")
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!{# [THINK][/THINK] #}", encoding="utf-8")
    with closing(started(folder, PromptingOptions(file).prompting)) as tokenizer:
        assert tokenizer.markers == ("[THINK]", "[/THINK]")  # its own before the vocabulary's
        assert asked(tokenizer, HI).ids == asked(tokenizer, text="hi!").ids
        refused = asked(tokenizer, HI, tools=[TOOL])
        assert refused.error == "it has no place for tools; put them into a message"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{% for m in messages %}\n{{ m", r"own\.jinja: unexpected .*\(line 2 of it\); mend it"),
        (b"\xff", r"own\.jinja is not UTF-8 \(byte 0\)"),
        (b" ", r"own\.jinja has 3 bytes as JSON; give 1 to"),
        (b"a" * 100_001, r"has 100003 bytes as JSON; give 1 to 100000"),
        (None, r"own\.jinja cannot be read: No such file"),
    ],
)
def test_template_files_that_cannot_be_used(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError, match=message):
        _ = PromptingOptions(file).prompting


@pytest.mark.parametrize(
    "kwargs", [[1], "x", {"a": {1}}, {"a": float("nan")}, {"a": "x" * 100_000}]
)
def test_arguments_that_are_no_object_of_json(kwargs: Any) -> None:
    with pytest.raises(SpecError, match="chat_template_kwargs"):
        _ = PromptingOptions(None, kwargs).prompting


def test_a_rendered_prompt_gets_no_second_bos(plain: TokenizerProcess, reference: Any) -> None:
    messages = rendered(reference, HI)
    text = reference.decode(messages)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked(plain, HI).ids == messages
        assert asked(plain, HI, add_special_tokens=True).ids == messages
        assert asked(plain, text="hi").ids == tuple(reference("hi")["input_ids"])
        assert asked(plain, text=text, add_special_tokens=False).ids == messages
    with pytest.warns(UserWarning, match=r"begin with <\|begin\|> already"):
        assert asked(plain, text=text).ids == messages
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert asked(plain, text=text, add_special_tokens=True).ids == messages
    assert asked(plain, text=BOS + text).ids == (0, *messages)


def test_several_tokens_before_a_text_are_no_second_time_there(tmp_path: Path) -> None:
    """As GLM's `[gMASK]<sop>`, of which no setting says that texts begin with them."""
    other = write_byte_tokenizer(tmp_path / "m", (BOS, TURN))
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    begin = [{"SpecialToken": {"id": name, "type_id": 0}} for name in (BOS, TURN)]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [*begin, *({"Sequence": {"id": name, "type_id": 0}} for name in "AB")],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]}
            for number, name in enumerate((BOS, TURN))
        },
    }
    path.write_text(json.dumps(content))
    with closing(started(other)) as tokenizer:
        ids = asked(tokenizer, text="hi").ids or ()
        assert ids[:2] == (0, 1)
        with pytest.warns(UserWarning, match=r"begin with <\|begin\|><\|turn\|> already"):
            assert asked(tokenizer, text=f"{BOS}{TURN}hi").ids == ids
        assert asked(tokenizer, text=f"{BOS}hi").ids == (0, 1, 0, *ids[2:])


def test_special_tokens_by_job_and_row(of_job: TokenizerProcess, plain: TokenizerProcess) -> None:
    without = asked(plain, text="hi", add_special_tokens=False).ids
    assert asked(of_job, text="hi", add_special_tokens=False).ids == without
    assert asked(of_job, text="hi").ids == (0, *(without or ()))


def test_markers_of_reasoning_that_are_special_stay_in_texts(tmp_path: Path) -> None:
    markers = ("[THINK]", "[/THINK]")
    folder = write_byte_tokenizer(tmp_path / "m", (BOS, *markers))
    with closing(started(folder)) as tokenizer:
        assert tokenizer.markers == markers
        ids = asked(tokenizer, text=f"{BOS}{BOS}[THINK]a é{BOS}[/THINK]b").ids
        assert (ids or ())[:2] == (0, 0)  # it adds none, so that none is one too many
        assert tokenizer.ask({"ids": ids, "before": []}).text == "[THINK]a é[/THINK]b"


def test_markers_that_are_ordinary_tokens(plain: TokenizerProcess) -> None:
    assert plain.markers == ("<think>", "</think>")
    ids = asked(plain, text="<think>a é<|turn|></think>b").ids
    assert plain.ask({"ids": ids, "before": []}).text == "<think>a é</think>b"
