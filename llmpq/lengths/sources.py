"""Where the expected lengths of a run come from: a trained predictor, a file, or the limits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from llmpq.lengths.folder import check_target, check_tokenizer, tokenizer_digest
from llmpq.lengths.predictor import Known, LengthPredictor, Longest, Prompt
from llmpq.lengths.predictor_process import (
    PredictionFigures,
    PredictorLimits,
    PredictorProcess,
)
from llmpq.lengths.trace_file import read_trace
from planner.prediction import predictor_file
from quant.common.errors import InputError, SpecError

LONGEST = "longest"
TRACE = "trace:"


class LengthSource(Protocol):
    """Gives expected lengths while a run goes on; a failure of it ends no run.

    `failure` tells why it has been given up, since when the longest answers are expected.
    `reads_text`: whether it needs the texts of prompts.
    """

    @property
    def failure(self) -> str | None:
        """Why it has been given up."""

    @property
    def reads_text(self) -> bool:
        """Whether it reads texts."""

    def submit(self, prompts: Sequence[Prompt]) -> Future[list[int]]:
        """Begin to predict the new tokens of each prompt [prompts]."""

    def finished(self, rows: Sequence[tuple[str, int]]) -> None:
        """Tell the tokens of answers that have ended, by `custom_id`."""

    def figures(self) -> PredictionFigures | None:
        """What it has done, where it keeps account of that."""

    def save(self, target: Path) -> None:
        """Write what it has learnt; raises `InputError`."""

    def close(self) -> None:
        """End it."""


class Direct:
    """A source that costs nothing, so that it needs no process: it never fails nor learns."""

    failure = None
    reads_text = False

    def __init__(self, predictor: LengthPredictor) -> None:
        self._predictor = predictor

    def submit(self, prompts: Sequence[Prompt]) -> Future[list[int]]:
        """The lengths, which are there at once."""
        known: Future[list[int]] = Future()
        known.set_result(self._predictor.expect(prompts))
        return known

    def finished(self, rows: Sequence[tuple[str, int]]) -> None:
        """Learn nothing."""

    def figures(self) -> PredictionFigures | None:
        """None: it keeps no account."""
        return None

    def save(self, target: Path) -> None:
        """Refuse, as there is nothing to write."""
        raise InputError(f"nothing was learnt that could be written to {target}")

    def close(self) -> None:
        """Do nothing."""


def learns(named: str | Path | None) -> bool:
    """Whether what is named so is a trained predictor, which learns beside a run."""
    return named is not None and str(named) != LONGEST and not str(named).startswith(TRACE)


def open_source(
    named: str | Path | None,
    model: Path,
    vocab_size: int,
    save_to: str | Path | None = None,
    limits: PredictorLimits | None = None,
) -> LengthSource:
    """The source that is `named` (None: the limits), for the served model in the folder `model`.

    A trained predictor begins to load in its process; whoever opens it calls `wait_loaded` and
    `close`. Raises SpecError where it reads ids of another tokenizer, cannot be read, or reads
    texts which a model without a tokenizer does not have; `InputError` where what it learns could
    not be written to `save_to`.
    """
    if named is None or str(named) == LONGEST:
        return Direct(Longest())
    if not learns(named):
        return Direct(Known(read_trace(str(named).removeprefix(TRACE))))
    check_source(named, model, vocab_size, save_to)
    return PredictorProcess(_folder(named), limits)


def check_source(
    named: str | Path | None, model: Path, vocab_size: int, save_to: str | Path | None = None
) -> None:
    """Raise what `open_source` raises, without starting anything."""
    if named is None or str(named) == LONGEST:
        return
    if not learns(named):
        read_trace(str(named).removeprefix(TRACE))
        return
    folder = _folder(named)
    file = predictor_file(folder)
    check_tokenizer(file, folder, tokenizer_digest(model, vocab_size), str(model))
    if save_to is not None:
        check_target(Path(save_to).expanduser(), replace=True)


def wait_loaded(source: LengthSource, has_tokenizer: bool) -> None:
    """Wait until `source` predicts; SpecError where it cannot, after it has been ended."""
    if isinstance(source, PredictorProcess):
        source.wait()
    if source.reads_text and not has_tokenizer:
        source.close()
        raise SpecError(
            "the predictor reads texts, and the model has no tokenizer to make them of token ids; "
            "train one on token ids: llmpq lengths train --model"
        )


def _folder(named: str | Path) -> Path:
    try:
        folder = Path(named).expanduser()
        found = folder.is_dir()
    except (OSError, RuntimeError) as error:
        raise SpecError(f"predictor {str(named)!r:.200}: {error}") from error
    if not found:
        raise SpecError(
            f"predictor {str(named)!r:.200} is no folder; give one of llmpq lengths train, "
            f"{LONGEST}, or {TRACE}FILE"
        )
    return folder
