"""The options of recipes."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from planner.option_rules import REQUIRED, Range, argument, flag, option, refuse_outside

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_FOLDER = re.compile(r"/[A-Za-z0-9._/-]*")
_SLURM_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
_WORD = re.compile(r"[A-Za-z0-9._/@:-]+")


def _like(pattern: re.Pattern[str], wanted: str) -> Range:
    return Range(lambda value: pattern.fullmatch(value) is not None, wanted)


_A_FOLDER = _like(_FOLDER, "give a path that begins with / and has no spaces")
_A_WORD = _like(_WORD, "give letters, digits and . _ / @ : - alone")


def gpu_label(text: str) -> tuple[str, str]:
    """A type of GPU and what the machines call it."""
    kind, separator, label = text.partition("=")
    if not (kind and separator and _WORD.fullmatch(label)):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form TYPE=LABEL")
    return kind, label


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What all recipes take."""

    cluster: str = argument("CLUSTER", "the cluster file", REQUIRED)
    output: str | None = option(
        "FILE", "file to write (default: standard output)", names=("-o", "--output")
    )
    name: str | None = option(
        "NAME",
        "of the job, in small letters, digits and dashes (default: llmpq and the cluster's name)",
        within=_like(_NAME, "give 1 to 40 small letters, digits and dashes"),
    )
    tls: str | None = option(
        "FOLDER",
        "folder of each machine with ca.crt, tls.crt and tls.key: Ray then encrypts",
        within=_A_FOLDER,
    )

    def __post_init__(self) -> None:
        refuse_outside(self)


@dataclass(frozen=True, kw_only=True)
class ShellOptions(RecipeOptions):
    bin: str | None = option(
        "FOLDER", "where llmpq and ray are on each machine (default: by PATH)", within=_A_FOLDER
    )


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(ShellOptions):
    time: str = option(
        "TIME",
        "limit of each part of the job, after which it is queued again",
        "24:00:00",
        within=_like(
            _SLURM_TIME, "give Slurm's form: minutes, hours:minutes:seconds or days-hours"
        ),
    )
    partition: str | None = option("NAME", "partition to ask for", within=_A_WORD)
    by_name: bool = flag("ask for the machines that the cluster file names, and for no others")
    gpu_label: list[tuple[str, str]] | None = option(
        "TYPE=LABEL",
        "what Slurm calls a GPU of the cluster file (default: t4, v100 and so on)",
        parse=gpu_label,
    )


@dataclass(frozen=True, kw_only=True)
class SshOptions(ShellOptions):
    ray_up: bool = flag("write the file of `ray up` in place of a script")
    user: str = option(
        "NAME",
        "user on the machines, for `ray up`; else ssh's own settings say",
        "ray",
        within=_A_WORD,
    )
    port: int = option(
        "PORT", "of Ray's head", 6379, within=Range(lambda port: 1 <= port < 2**16, "1 to 65535")
    )


@dataclass(frozen=True, kw_only=True)
class KubeRayOptions(RecipeOptions):
    image: str = option("IMAGE", "container image with llmpq", REQUIRED, within=_A_WORD)
    claim: str = option(
        "NAME",
        "volume claim that all pods mount, with models, input and output",
        "llmpq",
        within=_A_WORD,
    )
    mount: str = option("FOLDER", "where the claim is mounted", "/data", within=_A_FOLDER)
    gpu_label: list[tuple[str, str]] | None = option(
        "TYPE=LABEL",
        "nvidia.com/gpu.product of the nodes of a GPU (default: the driver's name with dashes)",
        parse=gpu_label,
    )
