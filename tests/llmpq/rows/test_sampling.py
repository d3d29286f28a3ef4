"""Sampling defaults: options that are set hold, else those of generation_config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from actors.messages import Sampling
from llmpq import Plan
from llmpq.rows.sampling import (
    GenerationConfigUse,
    JobSampling,
    SamplingInput,
    job_sampling,
)
from llmpq.run.checkpoint import end_note
from planner.workload import Workload
from quant.common.errors import CheckpointError, SpecError

WORKLOAD = Workload(4, 100, 50)


def settle(
    folder: Path, config: Any, given: SamplingInput = None, use: GenerationConfigUse = "model"
) -> JobSampling:
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "generation_config.json").write_text(text)
    return job_sampling(given, use, folder, WORKLOAD)


@pytest.mark.parametrize(
    ("given", "limit"),
    [(None, 20), ({"top_k": 3}, 20), (Sampling(), 20), ({"max_new_tokens": 9}, 9)],
)
def test_the_planned_limit_holds_where_none_is_given(
    given: SamplingInput, limit: int, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 12}')
    found = job_sampling(given, "model", tmp_path, WORKLOAD, default_new_tokens=20)
    assert found.sampling.max_new_tokens == limit
    note = "rows without max_new_tokens may generate 20 tokens, as planned"
    assert (found.limit_note or "").startswith(note) == (limit == 20)
    assert found.left_out == {"max_new_tokens": "12 (the plan's 20 holds)"}
    same = job_sampling(given, "model", tmp_path, WORKLOAD, default_new_tokens=50)
    assert same.limit_note is None


@pytest.mark.parametrize(
    ("config", "sampling"),
    [
        ({"eos_token_id": 2}, Sampling()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95},
            Sampling(temperature=0.6, top_p=0.95),
        ),
        (
            {"do_sample": True, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
            Sampling(temperature=1.0, top_k=20, min_p=0.05, repetition_penalty=1.05),
        ),
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1},
            Sampling(top_p=0.8),
        ),
        ({"temperature": 0.9, "top_p": 0.6}, Sampling(top_p=0.6)),
        ({"do_sample": True, "temperature": None, "top_k": None}, Sampling(temperature=1.0)),
        ({"stop_strings": ["###"]}, Sampling(stop=("###",))),
        ({"max_new_tokens": 7}, Sampling()),
    ],
)
def test_fields_that_are_taken(config: dict[str, Any], sampling: Sampling, tmp_path: Path) -> None:
    assert settle(tmp_path, config).sampling == sampling
    assert settle(tmp_path, config, use="none") == JobSampling(Sampling())


def test_a_file_that_transformers_wrote(tmp_path: Path) -> None:
    GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1
    ).save_pretrained(tmp_path)
    found = job_sampling(None, "model", tmp_path, WORKLOAD)
    assert found.sampling == Sampling(0.6, 20, 0.9, repetition_penalty=1.1)
    assert found.warning is None


QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}


def test_what_is_set_wins_field_by_field(tmp_path: Path) -> None:
    found = settle(tmp_path, QWEN, {"temperature": 0.0, "min_p": 0.1, "max_new_tokens": 9})
    assert found.sampling == Sampling(
        top_p=0.8, repetition_penalty=1.05, min_p=0.1, max_new_tokens=9
    )
    assert list(found.taken) == ["top_p", "repetition_penalty"]
    assert settle(tmp_path, QWEN, Sampling(seed=4)) == JobSampling(Sampling(seed=4))


def test_one_line_tells_what_was_taken(tmp_path: Path) -> None:
    assert settle(tmp_path, QWEN).note == (
        "sampling defaults of the model's generation_config.json: temperature 0.7, top_p 0.8, "
        "repetition_penalty 1.05; --generation_config none for greedy"
    )
    greedy = settle(tmp_path, {"repetition_penalty": 1.2}).note
    assert greedy is not None
    assert greedy.endswith("repetition_penalty 1.2; --generation_config none to do without")
    assert settle(tmp_path, {"top_p": 1.0, "do_sample": False}).note is None
    assert settle(tmp_path, QWEN, use="none").note is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size 3"),
        ({"bad_words_ids": [[5], [6, 7]]}, "bad_words_ids [[5], [6, 7]]"),
        ({"num_beams": 4, "forced_bos_token_id": 250}, "forced_bos_token_id 250, num_beams 4"),
        ({"suppress_tokens": list(range(99))}, "suppress_tokens [0, 1, 2, 3, "),
        ({"min_new_tokens": 5}, "min_new_tokens 5"),
        ({"typical_p": 0.9}, "typical_p 0.9"),
        ({"max_new_tokens": 7}, "max_new_tokens 7 (the plan's 50 holds)"),
        ({"max_length": 149}, "max_length 149 (the plan's 150 holds)"),
        ({"temperature": 0.9}, "temperature 0.9 without do_sample"),
        ({"guidance_scale": "\x1b[2J"}, 'guidance_scale "\\u001b[2J"'),
    ],
)
def test_what_is_not_followed_is_named(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    warning = settle(tmp_path, config).warning
    assert warning is not None
    assert named in warning
    assert settle(tmp_path, config, use="none").warning is None


def test_neutral_values_are_not_named(tmp_path: Path) -> None:
    """Such as transformers 4 wrote out for every model."""
    neutral = GenerationConfig._get_default_generation_params()
    neutral |= {"max_length": 4096, "max_new_tokens": None, "guidance_scale": 1, "pad_token_id": 0}
    found = settle(tmp_path, neutral)
    assert found.warning is None
    assert found.sampling == Sampling(top_k=50)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "is no JSON object"),
        ({"do_sample": True, "temperature": -1}, "temperature is -1"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"repetition_penalty": "high"}, "repetition_penalty is 'high'"),
        ({"min_p": 7}, "min_p is 7"),
    ],
)
def test_a_file_that_cannot_be_followed(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as caught:
        settle(tmp_path, config)
    assert message in str(caught.value)
    assert settle(tmp_path, config, use="none").sampling == Sampling()


def test_values_out_of_range_that_are_set(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="frequency_penalty"):
        settle(tmp_path, {}, {"frequency_penalty": 3.0})
    with pytest.raises(SpecError, match="unknown sampling field 'temprature'"):
        settle(tmp_path, {}, {"temprature": 1.0})
    with pytest.raises(SpecError, match="model or none"):
        settle(tmp_path, {}, use="vllm")  # type: ignore[arg-type]


def test_where_answers_end_is_told_or_warned_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    with pytest.warns(UserWarning, match="no file of the model in .* names a token that ends"):
        assert end_note(Sampling(), tmp_path) is None
    assert end_note(Sampling(ignore_eos=True), tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 7}))
    assert end_note(Sampling(), tmp_path) == "answers end at <|im_end|> (tokenizer_config.json)"


def test_from_python(tiny: tuple[Path, Any], plan: Plan, tmp_path: Path) -> None:
    """What is told before anything is started."""
    folder = shutil.copytree(tiny[0], tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(QWEN | {"num_beams": 2}))
    with pytest.warns(UserWarning, match="num_beams 2"):
        mine = plan.run([[3]], {"temperature": 0.2}, model=str(folder))
    assert mine.sampling == Sampling(0.2, top_p=0.8, repetition_penalty=1.05)
    greedy = plan.run([[3]], model=str(folder), generation_config="none")
    assert greedy.sampling == Sampling()
    with pytest.raises(SpecError, match="vocabulary ends at 198"):
        plan.run([[3]], Sampling(logit_bias={199: 1.0}))
