"""The command `llmpq` itself: its table, its names, its version, and that it starts at once."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from functools import partial
from importlib.metadata import version
from pkgutil import resolve_name

import pytest

from llmpq.cli.main import GROUPS, SUBCOMMANDS, main
from tests.llmpq.commands import exit_code
from tests.paths import ROOT

OLD = {name: each for name, each in SUBCOMMANDS.items() if each.old_name is not None}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_it_lists_its_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    for title, group in GROUPS.items():
        after = lines[lines.index(f"{title}:") + 1 :]
        assert [line.split()[0] for line in after[: len(group)]] == list(group)
    assert max(map(len, lines)) <= 80


def test_every_command_of_the_issue_is_there() -> None:
    named = "plan run serve profile indicator quantize eval convert devices models jobs"
    assert set(named.split()) <= set(SUBCOMMANDS)


def test_the_page_about_commands_lists_them_all() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `llmpq ")]
    listed = {name.strip(" `"): old.strip(" `") for name, _, old in rows}
    assert listed == {f"llmpq {name}": each.old_name or "" for name, each in SUBCOMMANDS.items()}


@pytest.mark.parametrize("name", OLD)
def test_old_names_are_the_same_programs(name: str) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts[OLD[name].old_name] == f"llmpq.cli.{OLD[name].entry}"
    assert scripts["llmpq"] == "llmpq.cli.main:main"


@pytest.mark.parametrize("name", OLD)
def test_each_name_calls_itself_by_that_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Help, errors and versions of both names differ in nothing but the name."""
    old = OLD[name].old_name or ""
    for arguments in (["--help"], ["--no_such_option"], ["--version"]):
        code = exit_code(main, [name, *arguments])
        new_text = "".join(capsys.readouterr())
        assert exit_code(partial(OLD[name].main, prog=old), arguments) == code
        old_text = "".join(capsys.readouterr())
        assert f"llmpq {name}" in new_text
        assert " ".join(old_text.split()) == " ".join(new_text.split()).replace(
            f"llmpq {name}", old
        ).replace(f"of {old}", f"of llmpq {name}")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("plann", "unknown command 'plann'; nearest: plan"),
        ("algo", "unknown command 'algo'; nearest: plan"),
        ("dist", "unknown command 'dist'; nearest: run"),
        ("evaluate", "unknown command 'evaluate'; nearest: eval"),
        ("qunatize", "unknown command 'qunatize'; nearest: quantize"),
        ("--verison", "unknown option '--verison'"),
        ("xyzzy\x1b[2J", "unknown command 'xyzzy\\x1b[2J'; llmpq --help lists the commands"),
    ],
)
def test_an_unknown_command_names_the_nearest(
    word: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "\x1b" not in error


@pytest.mark.parametrize("command", [[], ["plan"], ["run"]])
def test_the_version(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, [*command, "--version"]) == 0
    assert capsys.readouterr().out == f"{' '.join(['llmpq', *command])} {version('llmpq')}\n"


def test_help_of_a_command_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, ["help", "convert"]) == 0
    assert capsys.readouterr().out.startswith("usage: llmpq convert SOURCE TARGET")


def test_python_m_llmpq() -> None:
    command = [sys.executable, "-m", "llmpq", "plann"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "llmpq: error: unknown command 'plann'; nearest: plan\n"


def test_what_help_needs_to_be_imported() -> None:
    """The table needs no library; the help of a command no torch, no Ray and no solver."""
    heavy = ("torch", "ray", "transformers", "scipy", "highspy", "pulp")
    every = (*heavy, "numpy", "pydantic", "rich", "yaml")
    code = (
        "import sys\n"
        "from llmpq.cli.main import SUBCOMMANDS, help_text\n"
        "help_text()\n"
        f"table = [m for m in {every!r} if m in sys.modules]\n"
        f"for name in {[*OLD]!r}: SUBCOMMANDS[name].parser(name).format_help()\n"
        f"print(table, [m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def test_entry_points_of_the_table_exist() -> None:
    for each in SUBCOMMANDS.values():
        assert callable(resolve_name(f"llmpq.cli.{each.entry}"))
        assert callable(resolve_name(f"llmpq.cli.{each.parser_entry}"))
