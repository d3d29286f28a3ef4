"""Rows to requests: token ids within what the plan has room for, or an error row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from actors.messages import Request, Sampling
from llmpq.rows import BadRow, Row, merge_sampling
from planner.workload import Workload
from quant.errors import CheckpointError


@dataclass(frozen=True)
class RequestMaker:
    """Turns rows into requests of at most `workload.prompt_length` tokens.

    `tokenizer` may be None when every prompt is a list of token ids; results then carry no text.
    """

    workload: Workload
    vocab_size: int
    sampling: Sampling
    tokenizer: Any

    def request(self, row: Row) -> Request | BadRow:
        """The request of `row`, or why it cannot run as planned."""
        sampling = merge_sampling(self.sampling, row.sampling)
        room = self.workload.new_tokens
        wanted = sampling.max_new_tokens or room
        if wanted > room:
            return BadRow(
                row.custom_id, f"max_new_tokens is {wanted}, the plan has room for {room}"
            )
        try:
            prompt_ids = self._prompt_ids(row)
        except (ValueError, TypeError, LookupError, ArithmeticError, TemplateError) as error:
            return BadRow(row.custom_id, f"the prompt cannot be tokenized: {error}")
        problem = self._problem(prompt_ids)
        if problem:
            return BadRow(row.custom_id, problem)
        beyond = beyond_vocabulary(sampling, self.vocab_size)
        if beyond:
            return BadRow(row.custom_id, beyond)
        if sampling.stop and self.tokenizer is None:
            return BadRow(row.custom_id, "stop strings need a tokenizer, which the model has not")
        return Request(row.custom_id, prompt_ids, wanted, sampling)

    def _prompt_ids(self, row: Row) -> tuple[int, ...]:
        if row.token_ids is not None:
            return row.token_ids
        if self.tokenizer is None:
            raise ValueError(
                "the model folder has no tokenizer; give the prompt as a list of token ids"
            )
        if row.messages is None:
            return tuple(self.tokenizer(row.text)["input_ids"])
        encoded = self.tokenizer.apply_chat_template(
            list(row.messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return tuple(encoded["input_ids"])

    def _problem(self, prompt_ids: tuple[int, ...]) -> str | None:
        limit = self.workload.prompt_length
        if not prompt_ids:
            return "the prompt has no tokens"
        if len(prompt_ids) > limit:
            return (
                f"the prompt has {len(prompt_ids)} tokens, the plan has room for {limit}; "
                "plan with a larger prompt length (--s)"
            )
        if max(prompt_ids) >= self.vocab_size:
            return f"token id {max(prompt_ids)} is beyond the vocabulary of {self.vocab_size}"
        return None

    def text(self, token_ids: tuple[int, ...], stop: tuple[str, ...]) -> str | None:
        """The generated text without special tokens, cut before the first stop string."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        ends = [found for found in (text.find(s) for s in stop) if found >= 0]
        return text[: min(ends)] if ends else text


def beyond_vocabulary(sampling: Sampling, vocab_size: int) -> str | None:
    """What is wrong with token ids of `logit_bias`, if there is such."""
    largest = max(sampling.logit_bias, default=0)
    if largest < vocab_size:
        return None
    return (
        f"logit_bias has token id {largest}, the model's vocabulary ends at {vocab_size - 1}; take "
        "the ids of this model's own tokenizer"
    )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`, or None when the folder has none; raises `CheckpointError` if
    broken.
    """
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((folder / name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError, LookupError, AttributeError, TypeError) as error:
        raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
