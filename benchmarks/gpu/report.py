"""The report: one JSON file that grows part by part, and the page that is made of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Table, cells_of
from benchmarks.lab import header

VERSION = 1
_GIB = 2**30
_DRY_RUN = (
    "**A dry run: no GPU was used.** Every part ran its code on this CPU at a small size, CUDA "
    "kernels by their CPU twins and graphs by plain calls. No figure here says anything about a "
    "GPU."
)


@dataclass(frozen=True)
class PartResult:
    """The result of a part; `status` is done, failed, timed out or not run.

    `error` says why it is not done; `findings` is what it wrote, complete or not.
    """

    name: str
    title: str
    status: str
    seconds: float = 0.0
    error: str = ""
    log_tail: str = ""
    findings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Results of parts on one machine, in the order in which they are shown."""

    machine: dict[str, Any]
    dry_run: bool
    results: tuple[PartResult, ...] = ()

    def with_result(self, result: PartResult, order: Iterable[str]) -> Report:
        """With `result` in the place of an earlier one of the same part."""
        by_name = {each.name: each for each in self.results} | {result.name: result}
        kept = tuple(by_name[name] for name in order if name in by_name)
        return replace(self, results=kept)

    @property
    def exit_code(self) -> int:
        """1 where a part failed or timed out, or none ran at all."""
        statuses = {result.status for result in self.results}
        return 0 if "done" in statuses and statuses <= {"done", "not run"} else 1

    def save(self, folder: Path) -> None:
        """Write `gpu_report.json` and `gpu_report.md`, each whole."""
        content = json.dumps({"version": VERSION} | asdict(self), indent=1)
        for name, text in (("gpu_report.json", content), ("gpu_report.md", self.page())):
            new = folder / f"{name}.new"
            new.write_text(text + "\n", encoding="utf-8")
            new.replace(folder / name)

    @classmethod
    def begun(cls, folder: Path, machine: dict[str, Any], dry_run: bool) -> Report:
        """The report in `folder` if it is of this machine and code, else an empty one."""
        empty = cls(machine, dry_run)
        try:
            content = json.loads((folder / "gpu_report.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return empty
        same = (content.get("version"), content.get("machine"), content.get("dry_run"))
        if same != (VERSION, machine, dry_run):
            return empty
        return replace(empty, results=tuple(PartResult(**each) for each in content["results"]))

    def page(self) -> str:
        """The whole report as Markdown."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"# GPU report: {self.machine.get('gpu') or 'no GPU'}"
        yield ""
        if self.dry_run:
            yield _DRY_RUN
            yield ""
        yield _machine_line(self.machine)
        yield ""
        yield header("part | | seconds |")
        for each in self.results:
            yield f"| {each.name} | {each.status} | {each.seconds:.0f} | {_cell(each.error)} |"
        for each in self.results:
            yield from _section(each)


def _machine_line(machine: dict[str, Any]) -> str:
    gpu = "No GPU"
    if machine.get("gpu"):
        gpu = (
            f"{machine['gpu']}, compute capability {machine['capability']}, "
            f"{machine['memory_bytes'] / _GIB:.1f} GiB, {machine['multiprocessors']} "
            f"multiprocessors, {machine['l2_bytes'] / 2**20:.0f} MiB of L2, "
            f"driver {machine['driver']}"
        )
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{gpu}; {machine['processor']}; Python {machine['python']}, CUDA {machine['cuda']}; "
        f"{packages}; code {machine['code']}."
    )


def _section(result: PartResult) -> Iterator[str]:
    yield ""
    yield f"## {result.title}"
    if result.status != "done":
        yield ""
        yield f"*{result.name}: {result.status}: {result.error}*"
    found = result.findings
    for values in found.get("tables", []):
        yield ""
        yield from _table(Table(**values))
    if found.get("notes"):
        yield ""
        yield from (f"- {note}" for note in found["notes"])
    if result.log_tail:
        yield ""
        yield "<details><summary>End of its log</summary>"
        yield ""
        yield from (f"    {line}" for line in result.log_tail.splitlines())
        yield ""
        yield "</details>"


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield f"{table.title}:"
        yield ""
    yield header(table.columns)
    for row in table.rows:
        yield f"| {' | '.join(_cell(cell) for cell in cells_of(table, row))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
