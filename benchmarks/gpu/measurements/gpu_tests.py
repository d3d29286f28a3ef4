"""The tests marked `gpu`, each test function in a process of its own."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.findings import Findings, NotRunError, Place

_TESTS = Path(__file__).resolve().parents[3] / "tests"
_MARK = "pytest.mark.gpu"


def run(findings: Findings, place: Place, _: str) -> None:
    """Run them; in a dry run whole files instead, whose other tests are of the CPU twins."""
    if importlib.util.find_spec("pytest") is None:
        raise NotRunError("pytest is missing")
    marked = list(marked_tests(_TESTS))
    if place.dry_run:
        marked = list(dict.fromkeys(name.partition("::")[0] for name in marked))
        findings.note("a dry run takes whole files: tests that need a GPU are skipped in them")
    table = findings.table(
        "", test="{}", passed="{}", failed="{}", skipped="{}", seconds="{:.1f}", first_error="{}"
    )
    for number, name in enumerate(marked):
        outcome = run_tests(name, place.folder / f"tests-{number}.xml")
        findings.row(table, name, *outcome)
        passed, failed, *_others = outcome
        if failed or not passed:
            findings.complain(f"{name}: {failed} failed, {passed} passed")


def marked_tests(folder: Path) -> Iterator[str]:
    """`file::function` of every marked test function below `folder`, as pytest takes them.

    Read from the sources: importing other tests would ask for libraries that these do not need.
    """
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if _MARK not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(each) == _MARK for each in node.decorator_list
            ):
                yield f"{path.relative_to(folder.parent)}::{node.name}"


def run_tests(name: str, report: Path) -> tuple[int, int, int, float, str]:
    """Tests that passed, failed and were skipped, seconds, and the first line of an error."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*command, name], cwd=_TESTS.parent, check=False)
    if not report.exists():
        return 0, 1, 0, 0.0, "pytest wrote no report: its process died"
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    problems = [*suite.iter("failure"), *suite.iter("error")]
    message = (problems[0].get("message") or "").partition("\n")[0] if problems else ""
    seconds = float(suite.get("time", 0))
    return total - failed - skipped, failed, skipped, seconds, message
