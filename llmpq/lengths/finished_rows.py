"""Prompts with the lengths of their answers, to train on and to judge by.

Lengths stand in the rows themselves (`output_tokens`), or in results that are joined with the
prompts by `custom_id`: outputs of `llmpq run` and files of answers of OpenAI's batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from actors.messages import Request
from llmpq.jobs.inputs import Content, JobInput, row_of
from llmpq.lengths.predictor import Prompt
from llmpq.rows.row import BadRow, Row
from llmpq.tokenizing.prompting import Prompting
from llmpq.tokenizing.requests import opened_tokenizer, requests_of_any_length
from llmpq.tokenizing.tokenizer_process import TokenizerProcess
from llmpq.workload.measured_lengths import MOST_FINISHED, read_measured, whole_tokens
from planner.workload import MAX_TOKENS
from quant.common.errors import InputError, SpecError
from quant.common.json_text import loads

FIELD = "output_tokens"
_TEXTS_AT_ONCE = 64


FinishedRow = tuple[Row, int]
"""A prompt, and how many tokens its answer had."""


@dataclass(frozen=True)
class LearntRow:
    """The same, as a predictor sees it."""

    prompt: Prompt
    tokens: int


def read_finished(
    inputs: Sequence[str | Path], results: Sequence[str | Path] = ()
) -> list[FinishedRow]:
    """The rows of `inputs` with the lengths that `results` have, or that stand in them.

    Rows that cannot run, have no result or failed are left out; of more than `MOST_FINISHED`, the
    later ones. SpecError names file and line of a length that is none; raises `InputError`.
    """
    if results:
        lengths: dict[str, int] = {}
        for path in results:
            lengths |= result_lengths(path)
        found = _joined(JobInput.find(inputs), lengths)
    else:
        found = _with_lengths(inputs)
    rows = list(islice(found, MOST_FINISHED))
    if not rows:
        where = ", ".join(map(str, inputs))
        told = f"no row of {where} has a result" if results else f"{where} has no rows"
        raise InputError(
            f"{told}; give the prompts and, with --lengths, finished results of the same custom_id"
        )
    return rows


def result_lengths(path: str | Path) -> Mapping[str, int]:
    """Tokens of answers by `custom_id`, of an output of `llmpq run` or of OpenAI's batches."""
    outputs = read_measured(path).outputs
    if outputs is None:
        raise InputError(
            f"lengths {path}: it has no custom_id; give the output of llmpq run, or of a batch"
        )
    return outputs


def as_prompts(
    rows: Sequence[FinishedRow], model: Path | None, prompting: Prompting | None = None
) -> list[LearntRow]:
    """What a predictor sees of `rows`: of a run of the model in the folder `model` the ids, and the
    text of these ids, as it has nothing else. Without a model the text, and no ids. `prompting` is
    for rows that do not say.

    Rows that its tokenizer cannot read are left out. Raises `CheckpointError`; SpecError where
    prompts are no texts and there is no model, and where no row is left.
    """
    if model is None:
        return [_as_text(row, tokens) for row, tokens in rows]
    with opened_tokenizer(model, prompting) as tokenizer:
        learnt = _tokenized(rows, tokenizer)
    if not learnt:
        raise SpecError(f"the tokenizer of {model} can read none of {len(rows)} prompts")
    return learnt


def texts_of(tokenizer: TokenizerProcess | None, ids: Sequence[tuple[int, ...]]) -> list[str]:
    """Texts of prompts' ids, empty where there is no tokenizer, or one cannot be made."""
    if tokenizer is None:
        return [""] * len(ids)
    found: list[str] = []
    for begin in range(0, len(ids), _TEXTS_AT_ONCE):
        lists = [((), each) for each in ids[begin : begin + _TEXTS_AT_ONCE]]
        texts = tokenizer.ask({"lists": lists}).texts
        if texts is None:  # one of them harms it
            tasks = ({"ids": each, "before": before} for before, each in lists)
            texts = tuple(tokenizer.ask(task).text or "" for task in tasks)
        found += texts
    return found


def _with_lengths(inputs: Sequence[str | Path]) -> Iterator[FinishedRow]:
    """Rows that bring their lengths, each the field `output_tokens`."""
    lengths: list[int] = []

    def taken(content: Content, place: str) -> Row | BadRow:
        content, tokens = _without_length(content, place)
        lengths.append(tokens)
        return row_of(content, place)

    source = replace(JobInput.find(inputs), row_of=taken)
    for row, place in source.rows():
        tokens = lengths.pop()
        if isinstance(row, BadRow):
            raise SpecError(f"{source.place_name(place)}: {row.error}")
        yield row, tokens


def _without_length(content: Content, place: str) -> tuple[Content, int]:
    """The row without its field `output_tokens`, and this."""
    if isinstance(content, str):
        raise SpecError(f"{place}: {content}")
    values: Mapping[str, Any] | None = None
    try:
        values = loads(content) if isinstance(content, bytes) else content
    except ValueError as error:
        raise SpecError(f"{place}: not JSON: {error}") from error
    if not isinstance(values, Mapping) or FIELD not in values:
        raise SpecError(
            f"{place}: no {FIELD}; give the tokens of each answer there, or with --lengths the "
            "results of llmpq run"
        )
    kept = {name: value for name, value in values.items() if name != FIELD}
    return kept, whole_tokens(values[FIELD], FIELD, place)


def _joined(source: JobInput, lengths: Mapping[str, int]) -> Iterator[FinishedRow]:
    for row, _ in source.rows():
        if isinstance(row, Row) and row.custom_id in lengths:
            yield row, lengths[row.custom_id]


def _as_text(row: Row, tokens: int) -> LearntRow:
    if row.text is None:
        kind = "token ids" if row.messages is None else "messages"
        raise SpecError(
            f"row {row.custom_id!r:.80} has {kind}; name the model whose tokenizer reads them: "
            "--model"
        )
    return LearntRow(Prompt(row.custom_id, MAX_TOKENS, text=row.text), tokens)


def _tokenized(rows: Sequence[FinishedRow], tokenizer: TokenizerProcess | None) -> list[LearntRow]:
    made = requests_of_any_length((row for row, _ in rows), tokenizer)
    found = [
        (row.custom_id, tokens, request.prompt_ids)
        for (row, tokens), request in zip(rows, made, strict=True)
        if isinstance(request, Request)
    ]
    texts = texts_of(tokenizer, [ids for *_, ids in found])
    return [
        LearntRow(Prompt(custom_id, MAX_TOKENS, ids, text), tokens)
        for (custom_id, tokens, ids), text in zip(found, texts, strict=True)
    ]
