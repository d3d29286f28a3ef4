"""Completion scripts: a shell that reads one offers commands, options, values and files."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from llmpq.cli.main import SHELLS, SUBCOMMANDS, completion_main, completion_script
from llmpq.cli.run_options import run_parser
from tests.llmpq.commands import exit_code

pytest.importorskip("shtab")
_ASK = """
source {script}
COMP_WORDS=({words} {begun})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMP_LINE="${{COMP_WORDS[*]}}"
COMP_POINT=${{#COMP_LINE}}
$(complete -p llmpq | sed 's/.*-F \\([^ ]*\\).*/\\1/') llmpq {begun} ''
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "llmpq"
    path.write_text(completion_script("bash"))
    return path


def offered(script: Path, words: str, begun: str, folder: Path | None = None) -> set[str]:
    """What bash offers for the word that is `begun` behind `words`."""
    ask = _ASK.format(script=shlex.quote(str(script)), words=words, begun=begun or "''")
    command = ["bash", "--norc", "-c", ask]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion_main([shell]) == 0
    script = capsys.readouterr().out
    assert "kv_bits" in script
    assert "llmpq" in script
    if shell in ("bash", "zsh", "fish") and shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(completion_main, ["cmd"]) == 2
    assert "unknown value 'cmd'; choose from bash, zsh, fish, tcsh" in capsys.readouterr().err


def test_bash_completes_commands_options_values_and_files(
    bash_script: Path, tmp_path: Path
) -> None:
    assert set(SUBCOMMANDS) <= offered(bash_script, "llmpq", "")
    assert offered(bash_script, "llmpq", "pl") == {"plan"}
    names = {name for each in run_parser()._actions for name in each.option_strings}
    assert offered(bash_script, "llmpq run", "--") == {n for n in names if n.startswith("--")}
    assert offered(bash_script, "llmpq plan --kv_bits", "") >= {"8", "16", "auto"}
    assert offered(bash_script, "llmpq lengths", "tr") == {"train"}
    (tmp_path / "plan.json").touch()
    assert offered(bash_script, "llmpq run --plan", "pl", tmp_path) == {"plan.json"}
