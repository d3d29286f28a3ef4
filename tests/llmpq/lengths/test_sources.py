"""The process of a predictor: what it answers, and what becomes of a run when it does not."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmpq.lengths.boosting import WEIGHTS_FILE, train_boosting
from llmpq.lengths.folder import load_predictor
from llmpq.lengths.learner import LEAST_COUNTED, LearningLimits
from llmpq.lengths.predictor import Prompt
from llmpq.lengths.predictor_child import NICENESS
from llmpq.lengths.sources import PredictorProcess
from planner.assumed_predictor import predictor_file
from quant.common.errors import InputError, SpecError
from tests.llmpq.lengths.learnable import (
    BUCKETS,
    by_prompt_length,
    expected_by_hand,
    learnable,
    prompts_of,
    saved,
    tokens_of,
)
from tests.llmpq.lengths.test_learner import wait_for
from tests.llmpq.processes import alive, wait_until_gone

PROMPTS = [Prompt(f"p{n}", 12 + n, tuple(range(n % 14))) for n in range(40)]
LONGEST = [each.limit for each in PROMPTS]


def started(folder: Path, **limits: Any) -> PredictorProcess:
    process = PredictorProcess(folder, **limits)
    process.wait()
    return process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The predictor by prompt length."""
    return saved(tmp_path_factory.mktemp("lengths") / "p")


@pytest.fixture
def process(folder: Path) -> Iterator[PredictorProcess]:
    """Its process."""
    with closing(started(folder)) as process:
        yield process


def test_it_answers_as_the_predictor_does_and_counts_errors(
    process: PredictorProcess,
) -> None:
    """Also a prompt that is longer than the pipe."""
    assert (process.reads_ids, process.reads_text) == (True, False)
    batches = [PROMPTS[at : at + 7] for at in range(0, len(PROMPTS), 7)]
    answers = [process.submit(batch) for batch in batches]
    found = [tokens for answer in answers for tokens in answer.result()]
    assert found == [expected_by_hand(each) for each in PROMPTS]
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, os.nice(0) + NICENESS)
    figures = process.figures()
    assert figures is not None
    assert (figures.prompts, figures.finished) == (len(PROMPTS), 0)
    long = Prompt("long", 99, tuple(random.Random(0).choices(range(10**6), k=200_000)))
    assert process.submit([long]).result() == [40]

    expected = found
    ends = [(each.custom_id, tokens) for each, tokens in zip(PROMPTS, expected, strict=True)]
    process.finished([*ends[:30], ("nobody", 3)])
    process.finished([(PROMPTS[30].custom_id, 1), (PROMPTS[0].custom_id, 1)])
    figures = process.figures()
    assert figures is not None
    wrong = expected[30] > BUCKETS[0]
    assert (figures.finished, figures.right) == (31, 31 - wrong)


def test_a_process_that_is_killed_is_replaced_by_the_longest(process: PredictorProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    assert process.submit(PROMPTS).result() == LONGEST
    assert process.failure == "its process ended (exit code -9)"
    assert process.submit(PROMPTS[:3]).result() == LONGEST[:3]
    assert process.figures() is None
    process.finished([("p1", 3)])


def test_a_process_that_stalls_is_given_up(folder: Path) -> None:
    """The prompts are more than its pipe holds."""
    with closing(started(folder, batch_s=0.3)) as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert process.submit(PROMPTS * 500).result() == LONGEST * 500
        assert process.failure == "it took more than 0.3 s for a batch"
        wait_until_gone({process.pid})


def test_a_predictor_that_gives_nan_is_given_up(tmp_path: Path) -> None:
    folder = saved(tmp_path / "p", by_prompt_length(value=float("nan")))
    with closing(started(folder)) as process:
        assert process.submit(PROMPTS).result() == LONGEST
        assert process.failure == "ValueError: its probabilities are not finite (NaN)"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"expected": [0, 1, 2]}', "it answered [0, 1, 2], which are no lengths"),
        ('{"expected": [1, 2]}', "which are no lengths"),
        ('{"expected": [1, 2, 999]}', "which are no lengths"),
        ('{"expected": [1, 2, NaN]}', "which are no lengths"),
        ('{"expected": [1, 2, 2.5]}', "which are no lengths"),
        ('{"expected": null}', "which are no lengths"),
        ("[1, 2, 3]", "it answered b'[1, 2, 3]'"),
        ("what?", "it answered b'what?'"),
    ],
)
def test_nonsense_is_no_prediction(tmp_path: Path, line: str, why: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        'print(\'{"reads_ids": true, "reads_text": true}\', flush=True)\n'
        "sys.stdin.readline()\n"
        f"print({line!r}, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with closing(PredictorProcess(tmp_path, program=program)) as process:
        process.wait()
        assert process.submit(PROMPTS[:3]).result() == LONGEST[:3]
        assert process.failure is not None
        assert why in process.failure


def test_a_predictor_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "p")
    (folder / WEIGHTS_FILE).write_bytes(b"half")
    process = PredictorProcess(folder)
    with pytest.raises(SpecError, match=r"cannot be loaded: .*model\.safetensors cannot be read"):
        process.wait()
    silent = tmp_path / "silent.py"
    silent.write_text("raise SystemExit(3)")
    with pytest.raises(SpecError, match=r"its process ended \(exit code 3\)"):
        PredictorProcess(folder, program=silent).wait()


def test_nothing_is_left_of_a_closed_one(tmp_path: Path) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text(
        'import time\nprint(\'{"reads_ids": true, "reads_text": true}\', flush=True)\n'
        "time.sleep(600)\n"
    )
    process = PredictorProcess(tmp_path, program=silent)
    process.wait()
    asked = process.submit(PROMPTS)
    process.close()
    assert asked.result() == LONGEST
    assert not alive({process.pid})


def trainings(process: PredictorProcess) -> int:
    figures = process.figures()
    assert figures is not None, process.failure
    assert figures.failure is None
    return figures.learnt + figures.kept


def test_it_learns_beside_the_run_and_writes_what_it_has_learnt(tmp_path: Path) -> None:
    """Answers that are not as they were: predictions go on, and become right again."""
    pytest.importorskip("sklearn")
    rows = learnable(90)
    model = train_boosting(prompts_of(rows), tokens_of(rows), BUCKETS, "any")
    learning = LearningLimits(share=1e6, least_mistakes=16)
    folder = saved(tmp_path / "p", model)
    shares: list[float] = []
    before = 0
    with closing(started(folder, learning=learning)) as process:
        for part in range(40):
            turned = learnable(40, seed=1 + part, turned=True)
            expected = process.submit(prompts_of(turned)).result()
            buckets = np.searchsorted(BUCKETS, expected)
            shares.append(float((buckets == np.searchsorted(BUCKETS, tokens_of(turned))).mean()))
            process.finished([(row.prompt.custom_id, row.tokens) for row in turned])
            if shares[-1] > 0.75:
                break
            if 40 * (1 - shares[-1]) >= learning.least_mistakes:
                before += 1
                wait_for(lambda: trainings(process) >= before)  # noqa: B023
        figures = process.figures()
        assert process.failure is None
        assert figures is not None
        process.save(tmp_path / "learnt")
        (tmp_path / "x").write_text("")
        with pytest.raises(InputError, match="something else is there"):
            process.save(tmp_path / "x")
    assert shares[0] < 0.6
    assert shares[-1] > 0.75
    assert figures.learnt >= 1
    assert figures.learning_s > 0
    file = predictor_file(tmp_path / "learnt")
    assert file.trained_rows > model.trained_rows
    counted = sum(map(sum, file.confusion))
    assert counted == figures.finished >= LEAST_COUNTED
    again = load_predictor(tmp_path / "learnt")
    others = learnable(40, seed=99, turned=True)
    found = again.probabilities(again.encode(prompts_of(others))).argmax(axis=1)
    assert (found == np.searchsorted(BUCKETS, tokens_of(others))).mean() > 0.5
