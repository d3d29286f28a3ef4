"""The commands that install what is missing into the environment that was looked at."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from llmpq.doctor.facts import Driver

_INDEX = "https://download.pytorch.org/whl/{}"

BUILDS = {"cpu": "cpu", "cuda126": "cu126", "cuda13": None}
"""The index of torch's wheels for each extra that brings torch; None for that of all packages."""

NEWEST_FOR_126 = (9, 0)
"""Greatest compute capability that the wheels of CUDA 12.6 have code for."""

LEAST_FOR_13 = (7, 5)
"""Least compute capability that CUDA 13 compiles for."""


def wanted_build(driver: Driver) -> str:
    """The extra with the build of torch for this machine's GPUs and driver, or for its CPU.

    Where GPUs are so unlike that no build serves all, that for the newer ones.
    """
    known = [each.capability for each in driver.gpus if each.capability is not None]
    if not driver.gpus:
        return "cpu"
    if known and max(known) > NEWEST_FOR_126:
        return "cuda13"
    old = bool(known) and min(known) < LEAST_FOR_13
    return "cuda126" if old or (driver.cuda is not None and driver.cuda[0] < 13) else "cuda13"


@dataclass(frozen=True)
class Installer:
    """`python` of the environment, which has pip or is filled by uv."""

    python: str
    has_pip: bool = True

    def extra(self, name: str, again: bool = False) -> str:
        """The command for an extra of llmpq; with torch anew where that is broken."""
        index = BUILDS.get(name)
        words = [f"llmpq[{name}]"]
        if index is not None and self.has_pip:
            words = ["--extra-index-url", _INDEX.format(index), *words]
        elif index is not None:
            words = ["--torch-backend", index, *words]
        line = self._line("install", *words)
        if not again:
            return line
        sure = ("--yes",) if self.has_pip else ()
        return f"{self._line('uninstall', *sure, 'torch')} && {line}"

    def package(self, name: str) -> str:
        return self._line("install", name)

    def _line(self, verb: str, *words: str) -> str:
        if self.has_pip:
            return shlex.join([self.python, "-m", "pip", verb, *words])
        return shlex.join(["uv", "pip", verb, "--python", self.python, *words])
