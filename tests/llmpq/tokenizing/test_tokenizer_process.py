"""The process that tokenizes: damaged files, processes that die, and none left behind."""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmpq.cli import plan as plan_cli
from llmpq.tokenizing.requests import load_tokenizer, tokenizer_checked
from llmpq.tokenizing.tokenizer_process import RowLimits, TokenizerProcess
from quant.common.errors import CheckpointError, SpecError
from tests.llmpq.processes import alive, wait_until_gone
from tests.llmpq.small_tokenizers import WORDS, write_tokenizer
from tests.paths import DEMO_MODEL, ROOT

DEEP = "[" * 10**5 + "]" * 10**5


def empty_vocabulary(content: dict[str, Any]) -> dict[str, Any]:
    return content | {"model": content["model"] | {"vocab": {}}}


def changed(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        content = change(json.loads((folder / name).read_text()))
        (folder / name).write_text(json.dumps(content))

    return apply


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "an empty vocabulary": (changed("tokenizer.json", empty_vocabulary), "tokenizer.json: "),
    "no content": (written("tokenizer.json", ""), "tokenizer.json: "),
    "a list": (written("tokenizer.json", "[]"), "tokenizer.json: "),
    "nothing in it": (written("tokenizer.json", "{}"), "tokenizer.json: "),
    "half a file": (
        lambda folder: os.truncate(folder / "tokenizer.json", 300), "tokenizer.json: "),
    "a nested file": (written("tokenizer.json", DEEP), "tokenizer.json: "),
    "a regular expression that is none": (
        lambda folder: (folder / "tokenizer.json").write_text(
            (folder / "tokenizer.json").read_text().replace(
                '"type": "Whitespace"',
                '"type":"Split","pattern":{"Regex":"("},"behavior":"Isolated","invert":false')),
        "tokenizer.json: "),
    "a configuration that is a list": (
        written("tokenizer_config.json", "[]"), "tokenizer_config.json: "),
    "a nested configuration": (
        written("tokenizer_config.json", DEEP), "tokenizer_config.json: "),
    "a nested field": (
        written("tokenizer_config.json", f'{{"a": {DEEP}}}'), "tokenizer_config.json: "),
    "tokens of a wrong type": (
        written("tokenizer_config.json", '{"unk_token": 5, "tokenizer_class": {}}'), "model: "),
    "a template that does not compile": (
        written("chat_template.jinja", "{% for m in %}"), "chat_template.jinja: Expected"),
    "a template of no end": (
        written("chat_template.jinja", "{% if a %}"), "chat_template.jinja: Unexpected end"),
    "a template that ends twice": (
        written("chat_template.jinja", "{% if a %}{% endif %}{% endif %}"),
        "chat_template.jinja: Encountered unknown tag 'endif'"),
    "a nested template": (
        written("chat_template.jinja", "{{ " + "(" * 10**5 + ")" * 10**5 + " }}"),
        "chat_template.jinja: RecursionError"),
    "a template that is no text": (
        changed("tokenizer_config.json", lambda c: c | {"chat_template": 5}), "model: "),
    "a template in the configuration": (
        changed("tokenizer_config.json", lambda c: c | {"chat_template": "{{"}),
        "tokenizer_config.json: "),
}  # fmt: skip


@pytest.fixture
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers are processes of their own, no forks."""
    monkeypatch.setattr("llmpq.tokenizing.child_process.subprocess", subprocess)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model")


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    """A process that loads one folder after the other."""
    program = ROOT / "tests" / "properties" / "tokenizer_child.py"
    folder = write_tokenizer(tmp_path_factory.mktemp("loader") / "model")
    with closing(TokenizerProcess(folder, RowLimits(), program)) as process:
        yield process


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_with_file(name: str, folder: Path, loader: TokenizerProcess) -> None:
    damage, file = DAMAGE[name]
    damage(folder)
    answer = loader.ask({"load": str(folder)})
    assert answer.of == "load"
    assert str(answer.error).startswith(str(folder))
    assert file in str(answer.error)


@pytest.mark.parametrize("below", ["", "a_folder_of_a_long_name/" * 8])
def test_code_of_the_model_is_no_matter_of_an_option(folder: Path, below: str) -> None:
    shutil.copytree(folder, folder.parent / below / "coded")
    folder = folder.parent / below / "coded"
    settings = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "nobody", **settings}))
    with pytest.raises(CheckpointError, match="code of its own, which llmpq does not run"):
        load_tokenizer(folder)


def test_loading_that_takes_too_long_or_dies(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    monkeypatch.setattr("llmpq.tokenizing.tokenizer_process._LOAD_S", 0.1)
    for source, cause in (
        ("import signal; signal.setitimer(0, 0.01); signal.pause()", "took more than 0.1 s"),
        ("import os; os.abort()", "SIGABRT"),
        ("raise SystemExit(5)", "exit code 5"),
    ):
        program.write_text(source)
        with pytest.raises(CheckpointError, match=cause):
            TokenizerProcess(folder, RowLimits(), program).wait()


def test_a_process_that_cannot_end_itself_is_ended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmpq.tokenizing.tokenizer_process._GRACE_S", 0.0)
    program = tmp_path / "program.py"
    first = '{"most_characters": null, "warnings": []}'
    program.write_text(f"import signal\nprint({first!r}, flush=True)\nsignal.pause()")
    tokenizer = TokenizerProcess(folder, RowLimits(row_s=0.1), program)
    failed: list[str] = []
    tokenizer.on_failure = lambda cause, lost_s: failed.append(cause)
    assert tokenizer.ask({"text": "a"}).error == "took more than 0.1 s (--row_s)"
    assert failed == ["took more than 0.1 s (--row_s)"]
    tokenizer.close()


@pytest.mark.usefixtures("as_users_have_it")
def test_a_process_ended_from_outside_is_no_fault_of_the_row(folder: Path) -> None:
    tokenizer = TokenizerProcess(folder, RowLimits())
    tokenizer.wait()
    os.kill(tokenizer.pid, signal.SIGKILL)
    tasks = [tokenizer.submit({"text": word}) for word in WORDS[:3]]
    assert [tokenizer.answer(task).ids for task in tasks] == [(1,), (2,), (3,)]


def test_a_row_that_kills_the_process_again_is_to_blame(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        """print('{"most_characters": null, "warnings": []}', flush=True)\n"""
        "for line in sys.stdin:\n"
        "    if 'kill' in line: os.kill(os.getpid(), 9)\n"
        """    print('{"ids": [1]}', flush=True)\n"""
    )
    tokenizer = TokenizerProcess(folder, RowLimits(), program)
    tasks = [tokenizer.submit({"text": text}) for text in ("a", "kill", "b")]
    answers = [tokenizer.answer(task) for task in tasks]
    assert [answer.ids for answer in answers] == [(1,), None, (1,)]
    assert "SIGKILL" in str(answers[1].error)


def test_a_new_process_has_the_time_to_load_whatever_a_row_has(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_ms: list[float] = []

    class Poll:
        """Notes how long is waited at most, and waits as long as it takes."""

        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, limit_ms: float) -> list[tuple[int, int]]:
            asked_ms.append(limit_ms)
            return self._poll.poll()

    pretend = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    monkeypatch.setattr("llmpq.tokenizing.child_process.select", pretend)
    monkeypatch.setattr("llmpq.tokenizing.tokenizer_process._GRACE_S", 0.0)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        """print('{"most_characters": null, "warnings": []}', flush=True)\n"""
        "for line in sys.stdin:\n"
        "    if 'kill' in line: os.abort()\n"
        """    print('{"ids": [1]}', flush=True)\n"""
    )
    tokenizer = TokenizerProcess(folder, RowLimits(row_s=0.1), program)
    tasks = [tokenizer.submit({"text": text}) for text in ("kill", "a")]
    assert tokenizer.answer(tasks[1]).ids == (1,)
    assert "SIGABRT" in str(tokenizer.answer(tasks[0]).error)
    tokenizer.close()
    limits_ms = [limit_ms for limit_ms, _ in groupby(asked_ms)]
    assert limits_ms[:3] == [120_000, 100, 120_000], "the last answer may come with the first line"


def test_large_tasks_and_answers_both_ways(folder: Path) -> None:
    """More than pipes hold, before any answer is taken."""
    tokenizer = TokenizerProcess(folder, RowLimits())
    tasks = [tokenizer.submit({"text": "hello " * 100_000}) for _ in range(4)]
    assert [len(tokenizer.answer(task).ids or ()) for task in tasks] == [100_000] * 4


@pytest.mark.usefixtures("as_users_have_it")
def test_no_process_is_left(folder: Path) -> None:
    tokenizer = TokenizerProcess(folder, RowLimits())
    closed = {tokenizer.pid}
    tokenizer.close()
    assert not alive(closed)
    dropped = TokenizerProcess(folder, RowLimits())
    pids = {dropped.pid}
    del dropped
    gc.collect()
    wait_until_gone(pids)


def test_the_process_ends_with_who_started_it(folder: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path;"
        "from llmpq.tokenizing.tokenizer_process import *;"
        f"t = TokenizerProcess(Path({str(folder)!r}), RowLimits()); t.wait();"
        "print(t.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wait_until_gone({int(done.stdout)})


@pytest.mark.usefixtures("as_users_have_it")
def test_neither_secrets_nor_torch_are_in_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    tokenizer = TokenizerProcess(folder, RowLimits())
    tokenizer.wait()
    assert b"hf_secretsecret" not in Path(f"/proc/{tokenizer.pid}/environ").read_bytes()
    assert "libtorch" not in Path(f"/proc/{tokenizer.pid}/maps").read_text()


@pytest.mark.parametrize("row_s", [0.0, -1.0, 86_401.0, 1e300, float("inf"), float("nan")])
def test_seconds_that_are_none(row_s: float) -> None:
    with pytest.raises(SpecError, match="row_s is"):
        RowLimits(row_s)


def test_planning_tells_a_damaged_tokenizer_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = DEMO_MODEL / "config.json"
    (folder / "config.json").write_bytes(config.read_bytes())
    arguments = ["--model", str(folder), "--device_names", "T4", "--device_numbers", "1",
                 "--s", "64", "--n", "16", "--global_bz", "4"]  # fmt: skip
    assert plan_cli.main(arguments) == 0
    (folder / "tokenizer.json").write_text("{}")
    assert plan_cli.main(arguments) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"the tokenizer in {folder} cannot be loaded: {folder}/tokenizer.json" in error
    assert "take the model's own files again" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("model", ["opt-125m", "~nosuchuser/x", "m" * 300, "a\0b"])
def test_names_that_are_no_folders_are_not_looked_into(model: str) -> None:
    with tokenizer_checked(model):
        pass
