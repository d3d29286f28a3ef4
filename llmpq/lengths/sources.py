"""Where the expected lengths of a run come from: a trained predictor, a file, or the limits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmpq.jobs.file_format import READ_ERRORS, input_format, json_value, numbered_lines, reason
from llmpq.lengths import predictor_child
from llmpq.lengths.folder import check_target, check_tokenizer, tokenizer_digest
from llmpq.lengths.learner import LearningLimits
from llmpq.lengths.predictor import Confused, Known, Prompt
from llmpq.tokenizing.child_process import ChildEndedError, JsonChild
from llmpq.workload.measured_lengths import whole_tokens
from planner.assumed_predictor import predictor_file
from planner.profiles.rows import read_lines
from quant.common.errors import InputError, SpecError

BATCH_S = 60.0
"""Seconds for a batch of prompts: 16 of 256 tokens take DistilBERT 2.8 on a free core, and many
times that at a low priority beside busy stages."""

LOAD_S = 120.0
SAVE_S = 60.0


@dataclass(frozen=True)
class PredictionFigures:
    """What a predictor has done in a run: `right` of `finished` answers were of the bucket that was
    predicted. `predicting_s` and `learning_s` are the processor's seconds, of `elapsed_s` of the
    clock; `learnt`: how often an improved one took over, `kept`: how often that was no better.
    `failure`: why it learns no more.
    """

    prompts: int
    finished: int
    right: int
    predicting_s: float
    learning_s: float
    learnt: int
    kept: int
    failure: str | None
    elapsed_s: float


class PredictorProcess:
    """Predicts with the predictor in `folder`, one task after the other in a thread of its own.

    The job depends on none of it: a process that ends, takes too long or answers nonsense is given
    up, and every prompt from then on is expected to get the longest answer that it may have.
    `failure` tells why, None while it has not been given up. `reads_ids` and `reads_text`:
    what prompts must bring; known when `wait` returns.
    """

    def __init__(
        self,
        folder: Path,
        batch_s: float = BATCH_S,
        learning: LearningLimits | None = None,
        program: Path = Path(predictor_child.__file__),
    ) -> None:
        self.failure: str | None = None
        self.reads_ids = self.reads_text = False
        self._folder = folder
        self._batch_s = batch_s
        self._lines: list[bytes] = []
        settings = {
            "folder": str(folder.resolve()),
            "learning": asdict(learning or LearningLimits()),
        }
        self._child = JsonChild(program, settings, "predicts lengths")
        self.pid = self._child.pid
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llmpq-lengths")
        self._loaded = self._thread.submit(self._next_answer, LOAD_S, "loading")

    def wait(self) -> None:
        """Wait until it is loaded; SpecError where it cannot be."""
        first = self._loaded.result()
        if "error" in first:
            self.close()
            raise SpecError(f"the predictor in {self._folder} cannot be loaded: {first['error']}")
        self.reads_ids, self.reads_text = first["reads_ids"], first["reads_text"]

    def submit(self, prompts: Sequence[Prompt]) -> Future[list[int]]:
        """Begin to predict; the result has the expected tokens of each prompt, always."""
        return self._thread.submit(self._predict, tuple(prompts))

    def finished(self, rows: Sequence[tuple[str, int]]) -> None:
        """Tell how many tokens answers have got that have ended, by `custom_id`."""
        if rows and self.failure is None:
            self._thread.submit(self._send, {"finished": list(rows)})

    def figures(self) -> PredictionFigures | None:
        answer = self._thread.submit(self._asked, {"figures": True}, self._batch_s).result()
        return None if answer is None else PredictionFigures(**answer["figures"])

    def save(self, target: Path) -> None:
        """Write the predictor as it is to the folder `target`; raises `InputError`."""
        task = {"save": str(target.absolute())}
        if self._thread.submit(self._asked, task, SAVE_S, "writing").result() is None:
            raise InputError(f"the predictor is not written to {target}: {self.failure}")

    def close(self) -> None:
        """End the process; what was not answered is expected to be longest."""
        self.failure = self.failure or "it was ended"
        self._child.kill()  # a task that goes on finds its pipes at their ends
        self._thread.shutdown(wait=True, cancel_futures=False)
        self._child.end()

    def _predict(self, prompts: tuple[Prompt, ...]) -> list[int]:
        rows = [
            (
                each.custom_id,
                each.limit,
                each.token_ids if self.reads_ids else (),
                each.text if self.reads_text else "",
            )
            for each in prompts
        ]
        answer = self._asked({"predict": rows}, self._batch_s)
        expected = None if answer is None else self._checked(answer.get("expected"), prompts)
        return Known().expect(prompts) if expected is None else expected

    def _checked(self, expected: Any, prompts: Sequence[Prompt]) -> list[int] | None:
        """The expected tokens, unless they are none."""
        if (
            isinstance(expected, list)
            and len(expected) == len(prompts)
            and all(
                type(tokens) is int and 1 <= tokens <= each.limit
                for tokens, each in zip(expected, prompts, strict=True)
            )
        ):
            return expected
        self._give_up(f"it answered {expected!r:.80}, which are no lengths")
        return None

    def _send(self, task: Mapping[str, Any]) -> None:
        if self.failure is None:
            self._child.send(json.dumps(task).encode() + b"\n")
            self._child.write()

    def _asked(
        self, task: Mapping[str, Any], limit_s: float, of: str = "a batch"
    ) -> dict[str, Any] | None:
        """The answer to a task, None where there is none any more."""
        if self.failure is not None:
            return None
        self._send(task)
        answer = self._next_answer(limit_s, of)
        if "error" in answer:
            self._give_up(str(answer["error"]))
            return None
        return answer

    def _next_answer(self, limit_s: float, of: str) -> dict[str, Any]:
        """The next line that the process writes, or the `error` why there is none."""
        deadline_s = time.monotonic() + limit_s
        try:
            while not self._lines:
                self._lines += self._child.exchange(deadline_s - time.monotonic())
        except TimeoutError:
            return {"error": f"it took more than {limit_s:g} s for {of}"}
        except ChildEndedError as error:
            return {"error": str(error)}
        line = self._lines.pop(0)
        answer = json_value(line)
        return answer if isinstance(answer, dict) else {"error": f"it answered {line[:80]!r}"}

    def _give_up(self, why: str) -> None:
        self.failure = self.failure or why
        self._child.end()


COLUMNS = ("custom_id", "expected_tokens")

_REMEDY = f"give a CSV with the columns {','.join(COLUMNS)}, or JSON lines with these fields"


def read_trace(path: str | Path) -> dict[str, int]:
    """Expected tokens by `custom_id` of the CSV or the JSON lines at `path`.

    SpecError names file and line of what is no whole number of tokens, such as NaN or a negative
    one, and of an id that stands there twice.
    """
    found = Path(path).expanduser()
    rows = _table(found) if found.suffix.lower() == ".csv" else _lines(found)
    tokens: dict[str, int] = {}
    for place, values in rows:
        custom_id, expected = (values.get(name) for name in COLUMNS)
        if not isinstance(custom_id, str) or not custom_id:
            raise SpecError(f"{place}: custom_id is {custom_id!r:.80}; {_REMEDY}")
        if custom_id in tokens:
            raise SpecError(f"{place}: custom_id {custom_id!r:.80} stands there twice; keep one")
        tokens[custom_id] = whole_tokens(expected, COLUMNS[1], place)
    if not tokens:
        raise SpecError(f"predictions {path}: no rows; {_REMEDY}")
    return tokens


def _table(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    def check_columns(found: Sequence[str]) -> None:
        if set(found) != set(COLUMNS):
            raise SpecError(f"{path}:1: the columns are {','.join(found)!r:.200}; {_REMEDY}")

    for line in read_lines(path, check_columns, "predictions"):
        yield line.place, line.fields()


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        for number, line in numbered_lines(path, input_format(path).compression):
            if line is None or line.strip():
                values = json_value(line or b"")
                if not isinstance(values, Mapping):
                    raise SpecError(f"{path}:{number}: no JSON object; {_REMEDY}")
                yield f"{path}:{number}", values
    except READ_ERRORS as error:
        raise InputError(f"cannot read predictions {path}: {reason(error)}") from error


LONGEST = "longest"
TRACE = "trace:"


class Direct:
    """A source that costs nothing, so that it needs no process: it never fails nor learns."""

    failure = None
    reads_text = False

    def __init__(self, predictor: Known | Confused) -> None:
        self._predictor = predictor

    def submit(self, prompts: Sequence[Prompt]) -> Future[list[int]]:
        known: Future[list[int]] = Future()
        known.set_result(self._predictor.expect(prompts))
        return known

    def finished(self, rows: Sequence[tuple[str, int]]) -> None:
        """Nothing is learnt."""

    def figures(self) -> PredictionFigures | None:
        return None

    def save(self, target: Path) -> None:
        raise InputError(f"nothing was learnt that could be written to {target}")

    def close(self) -> None:
        """Nothing is held."""


LengthSource = PredictorProcess | Direct
"""Gives expected lengths while a run goes on; a failure of it ends no run.

`failure` tells why it has been given up, since when the longest answers are expected. `reads_text`:
whether it needs the texts of prompts. `figures`: what it has done, where it keeps account of that.
"""


def learns(named: str | Path | None) -> bool:
    """Whether what is named so is a trained predictor, which learns beside a run."""
    return named is not None and str(named) != LONGEST and not str(named).startswith(TRACE)


def open_source(
    named: str | Path | None, model: Path, vocab_size: int, save_to: str | Path | None = None
) -> LengthSource:
    """The source that is `named` (None: the limits), for the served model in the folder `model`.

    A trained predictor begins to load in its process; whoever opens it calls `wait_loaded` and
    `close`. Raises SpecError where it reads ids of another tokenizer, cannot be read, or reads
    texts which a model without a tokenizer does not have; `InputError` where what it learns could
    not be written to `save_to`.
    """
    found = check_source(named, model, vocab_size, save_to)
    return PredictorProcess(found) if isinstance(found, Path) else found


def check_source(
    named: str | Path | None, model: Path, vocab_size: int, save_to: str | Path | None = None
) -> Direct | Path:
    """The source, or a predictor's folder, not started; raises as `open_source`."""
    if named is None or str(named) == LONGEST:
        return Direct(Known())
    if not learns(named):
        return Direct(Known(read_trace(str(named).removeprefix(TRACE))))
    folder = _folder(named)
    file = predictor_file(folder)
    check_tokenizer(file, folder, tokenizer_digest(model, vocab_size), str(model))
    if save_to is not None:
        check_target(Path(save_to).expanduser(), replace=True)
    return folder


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
