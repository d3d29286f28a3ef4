"""Measuring inputs: every row is counted, few are tokenized, the longest always is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmpq.jobs.inputs import JobInput
from llmpq.rows.row import Row
from llmpq.tokenizing.prompting import Prompting
from llmpq.workload import measuring
from llmpq.workload.measuring import InputMeasure, MeasuredRows
from quant.common.errors import InputError, SpecError
from tests.llmpq.fake_jobs import write_prompts
from tests.llmpq.small_tokenizers import write_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model")


CHAT = '{"messages": [{"role": "user", "content": "a b"}]}'


def measured(source: Path, model: Path | str, **options: Any) -> MeasuredRows:
    return InputMeasure(JobInput.find([source]), str(model), 100, **options).measure()


def test_rows_of_all_kinds(tmp_path: Path, model: Path) -> None:
    source = write_prompts(
        tmp_path / "in.jsonl",
        {"prompt": "hello world x", "max_new_tokens": 7},
        "no JSON",
        {"prompt": [1, 2, 3, 4, 5]},
        {"prompt": []},
        {"prompt": "", "max_tokens": 9},
    )
    rows = measured(source, model)
    assert rows.prompts.tolist() == [3, 5]
    assert rows.limits.tolist() == [7, 100]
    assert rows.places.tolist() == [1, 3]
    assert rows.exact.all()


def test_of_many_rows_few_are_tokenized_and_the_longest_always(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "MOST_EVEN_ROWS", 50)
    monkeypatch.setattr(measuring, "MOST_LONGEST_ROWS", 5)
    draw = random.Random(3)
    lengths = [draw.randint(1, 40) for _ in range(2000)]
    lengths[777] = 300
    source = write_prompts(tmp_path / "in.jsonl", *({"prompt": "a " * n} for n in lengths))
    rows = measured(source, model)
    assert len(rows) == 2000
    assert 50 <= rows.exact.sum() <= 55
    assert rows.exact[777]
    assert rows.prompts[777] == 300
    assert rows.prompts[rows.exact].tolist() == np.array(lengths)[rows.exact].tolist()
    assert rows.prompts.mean() == pytest.approx(sum(lengths) / 2000, rel=0.02)


def test_bytes_bound_what_is_tokenized(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "MOST_BYTES", 400)
    source = write_prompts(tmp_path / "in.jsonl", *({"prompt": "a " * 20} for _ in range(200)))
    rows = measured(source, model)
    assert 10 <= rows.exact.sum() <= 20
    assert (rows.prompts == 20).all()


def test_token_ids_and_given_lengths_need_no_tokenizer(tmp_path: Path) -> None:
    ids = write_prompts(tmp_path / "ids.jsonl", {"prompt": [1, 2]}, {"prompt": [1]})
    assert measured(ids, tmp_path).prompts.tolist() == [2, 1]
    texts = write_prompts(tmp_path / "texts.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert measured(texts, tmp_path, prompt_length=64).prompts.tolist() == [64, 64]
    with pytest.raises(SpecError, match="has no tokenizer to measure the prompts; give --s"):
        measured(texts, tmp_path)


def test_inputs_without_a_usable_row(tmp_path: Path, model: Path) -> None:
    for lines, message in {
        (" ",): "no prompts; give one JSON object per line",
        ("{", '{"prompt": 3}'): "no row can be used; llmpq run would write only errors",
        ('{"prompt": ""}',): "no prompt could be tokenized; give --s; the first: the prompt has no",
        (CHAT,): r"the first: the prompt cannot be tokenized: chat template: .*\(--chat_template\)",
        ('{"prompt": []}',): "no prompt has tokens",
    }.items():
        with pytest.raises(InputError, match=message):
            measured(write_prompts(tmp_path / "in.jsonl", *lines), model)


def test_templates_are_given_what_job_and_row_say(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", "{{ messages[0].content }} {{ 'x ' * times }}")
    source = write_prompts(tmp_path / "in.jsonl", CHAT, CHAT)
    rows = [
        Row("a", messages=({"content": "a"},)),
        Row(
            "b", messages=({"content": "b"},), prompt_options={"chat_template_kwargs": {"times": 7}}
        ),
    ]
    given = iter([*rows, *rows])  # an input is read twice
    found = JobInput((source,), ("in.jsonl",), lambda content, place: next(given))
    job = Prompting(chat_template_kwargs={"times": 2})
    measured = InputMeasure(found, str(model), 100, prompting=job).measure()
    assert measured.prompts.tolist() == [3, 8]


def test_heads_of_even_rows_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads of 70 and 100 tokens, of whole blocks 64 and 96; every fifth row has none."""
    monkeypatch.setattr(measuring, "MOST_EVEN_ROWS", 100)
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(9999) for _ in range(count)]

    heads = [ids(70), ids(100)]
    rows = [(heads[i % 2] if i % 5 else []) + ids(20) for i in range(400)]
    source = write_prompts(tmp_path / "in.jsonl", *({"prompt": row} for row in rows))
    found = measured(source, tmp_path)
    assert found.prompts.tolist() == list(map(len, rows))
    assert found.head_tokens == 64 + 96
    even = found.even
    assert (found.shared[~even] == 0).all()
    kinds = np.array([64 if i % 2 == 0 else 96 for i in range(400)]) * (np.arange(400) % 5 > 0)
    assert found.shared[even].sum() == kinds[even].sum()
    monkeypatch.setattr(measuring, "MOST_HEAD_TOKENS", 100)
    assert measured(source, tmp_path).head_tokens <= 100
