"""Processes below one that a test has started, from /proc."""

from __future__ import annotations

import time
from pathlib import Path

LIMIT_S = 120.0
AGENTS = {"DashboardAgent", "RuntimeEnvAgent"}
"""Ray's agents; where GCS is gone too they try to reach it for a minute, and then end."""


def children_of(root: int) -> set[int]:
    """Process ids below `root`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found - {root}
        found |= more


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def name_of(pid: int) -> str:
    """What a process calls itself, without the method it runs; nothing where it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
    return Path(words.partition(" ")[0]).name.removeprefix("ray::").partition(".")[0]


def wait_until_gone(pids: set[int]) -> None:
    assert pids
    deadline = time.monotonic() + LIMIT_S
    while alive(pids):
        assert time.monotonic() < deadline, [name_of(pid) for pid in pids]
        time.sleep(0.05)


class NewActors:
    """Counts Ray's actors that are not dead and were not there when it was made: those that others
    left may still be dying. From the control store; `ray.util.state` would need the dashboard.
    """

    def __init__(self) -> None:
        self._others = frozenset[str]()
        self._others = frozenset(self._alive())

    def _alive(self) -> list[str]:
        import ray

        actors = ray._private.state.actors().items()
        return [
            key for key, actor in actors if actor["State"] != "DEAD" and key not in self._others
        ]

    def become(self, count: int) -> bool:
        """Whether there are so many, at the latest after some seconds: the store is told late."""
        deadline = time.monotonic() + 120
        while len(self._alive()) != count and time.monotonic() < deadline:
            time.sleep(0.05)
        return len(self._alive()) == count
